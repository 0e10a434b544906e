// Faults below us: a library to preload that makes the next matching system call fail, come up short or lie.
// fault_arm(call, kind, skip, times, part of the path): after `skip` matching calls, the next `times` have the fault.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NONE, READ, WRITE, SYNC, RENAME, ALLOCATE };
enum { SHORT = -1, FLIP = -2 };  // any other kind is an errno

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int armed, kind, skip, times, hits;
static char part[256];

void fault_arm(int call, int fault, int after, int count, const char *path) {
  pthread_mutex_lock(&lock);
  armed = call, kind = fault, skip = after, times = count, hits = 0;
  snprintf(part, sizeof part, "%s", path);
  pthread_mutex_unlock(&lock);
}

int fault_hits(void) { return hits; }

static int due(int call, const char *path) {
  pthread_mutex_lock(&lock);
  int fault = 0;
  if (armed == call && strstr(path, part)) {
    if (skip > 0) skip--;
    else if (times > 0) times--, hits++, fault = kind;
  }
  pthread_mutex_unlock(&lock);
  return fault;
}

static int due_fd(int call, int fd) {
  if (armed != call) return 0;
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n < 0) return 0;
  path[n] = 0;
  return due(call, path);
}

#define REAL(type, name, ...) static type (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, name)

static ssize_t after_read(int fault, ssize_t done, const struct iovec *v) {
  if (fault == FLIP && done > 0) ((unsigned char *)v[0].iov_base)[(size_t)done / 2 % v[0].iov_len] ^= 0x10;
  return done;
}

ssize_t preadv64v2(int fd, const struct iovec *v, int n, off64_t at, int flags) {
  REAL(ssize_t, "preadv64v2", int, const struct iovec *, int, off64_t, int);
  int fault = due_fd(READ, fd);
  if (fault > 0) return errno = fault, -1;
  struct iovec one = {v[0].iov_base, v[0].iov_len / 2};
  if (fault == SHORT && one.iov_len) return real(fd, &one, 1, at, flags);
  return after_read(fault, real(fd, v, n, at, flags), v);
}

ssize_t preadv64(int fd, const struct iovec *v, int n, off64_t at) { return preadv64v2(fd, v, n, at, 0); }

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
  REAL(ssize_t, "pwrite64", int, const void *, size_t, off64_t);
  int fault = due_fd(WRITE, fd);
  if (fault > 0) return errno = fault, -1;
  return real(fd, data, fault == SHORT && size > 1 ? size / 2 : size, at);
}

int fsync(int fd) {
  REAL(int, "fsync", int);
  int fault = due_fd(SYNC, fd);
  return fault > 0 ? (errno = fault, -1) : real(fd);
}

int fdatasync(int fd) {
  REAL(int, "fdatasync", int);
  int fault = due_fd(SYNC, fd);
  return fault > 0 ? (errno = fault, -1) : real(fd);
}

int rename(const char *from, const char *to) {
  REAL(int, "rename", const char *, const char *);
  int fault = due(RENAME, to);
  return fault > 0 ? (errno = fault, -1) : real(from, to);
}

int posix_fallocate64(int fd, off64_t at, off64_t size) {
  REAL(int, "posix_fallocate64", int, off64_t, off64_t);
  int fault = due_fd(ALLOCATE, fd);
  return fault > 0 ? fault : real(fd, at, size);
}
