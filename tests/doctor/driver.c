// A driver's library of two devices, as NVML's bindings see it: what to answer comes from the environment.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct memory {
  unsigned long long total, free, used;
};
struct pci {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char bus_id[32];
};
enum { OK = 0, NOT_SUPPORTED = 3, LOST = 15 };

static int number(void *device) { return (int)(long)device - 1; }
static int is(const char *state) {
  const char *asked = getenv("DRIVER");
  return asked != NULL && strcmp(asked, state) == 0;
}

int nvmlInitWithFlags(unsigned flags) { return OK; }
int nvmlInit_v2(void) { return OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : "Not Supported"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { return snprintf(text, size, "595.84") < 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { return *count = 2, OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  *device = (void *)(long)(index + 1);
  return is("lost") && index == 1 ? LOST : OK;
}
int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
  return snprintf(text, size, "GPU-%d", number(device)) < 0;
}
int nvmlDeviceGetName(void *device, char *text, unsigned size) {
  return snprintf(text, size, "Card %d", number(device)) < 0;
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) { return *major = 12, *minor = 0, OK; }
int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory) {
  *memory = (struct memory){32ull << 30, 31ull << 30, 1ull << 30};
  return is("unified") ? NOT_SUPPORTED : OK;
}
int nvmlDeviceGetMaxPcieLinkGeneration(void *device, unsigned *found) { return *found = 5, OK; }
int nvmlDeviceGetMaxPcieLinkWidth(void *device, unsigned *found) { return *found = 16, OK; }
int nvmlDeviceGetCurrPcieLinkGeneration(void *device, unsigned *found) { return NOT_SUPPORTED; }
int nvmlDeviceGetCurrPcieLinkWidth(void *device, unsigned *found) { return *found = number(device) ? 4 : 16, OK; }
int nvmlDeviceGetPciInfo_v3(void *device, struct pci *pci) {
  memset(pci, 0, sizeof *pci);
  return snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", 0x6A + number(device)) < 0;
}
int nvmlDeviceGetP2PStatus(void *from, void *to, unsigned what, unsigned *status) {
  *status = number(from); // the second reads nothing of the first
  return what == 0 ? OK : NOT_SUPPORTED;
}
