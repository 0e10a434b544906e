// The CPU's end of the mailbox (protocol.h): a thread that waits for the device's requests, has the experts computed
// and answers.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "core/experts.h"
#include "core/records.h"
#include "protocol.h"

namespace moetier {

// The arrays beside the box, all in pinned memory. Pairs are numbered token * top_k + position.
struct Mail {
  Box *box;
  const std::int32_t *ids; // [pairs], -1 where the pair is not the CPU's
  const float *weights;    // [pairs]
  const std::uint16_t *x;  // bf16 [tokens][hidden], filled in for tokens with a pair of the CPU
  float *rows;             // [pairs][hidden]: the answer
  std::size_t hidden;
};

class Mailbox {
public:
  // Computes one step: Experts::rows with whatever guards it. False where it could not be done.
  using Compute = std::function<bool(const StepInput &, std::span<const std::uint64_t>, float *)>;
  struct Counts {
    std::uint64_t calls, nanoseconds, helps, alone;
  };
  // What the mailbox needs to answer without help: a request that gets none within `stuck` is computed from the disk
  // alone, one record after the other. Whoever helps is Python, and must wait while another thread is inside a call of
  // CUDA that keeps Python's lock and waits for the device, which waits for the answer.
  struct Alone {
    RecordFiles records;
    std::chrono::milliseconds stuck;
  };

  // tables: of each layer, where its experts' records lie, 0 where one is not in DRAM. They may change between
  // requests, and while `help` is under way. The thread runs on `cpus`; an empty list leaves its affinity alone.
  // Throws std::runtime_error where the pool was made before a fork; so do wake, await_help, answer and refuse.
  Mailbox(const Mail &mail, std::size_t top_k, std::size_t experts, std::vector<std::uint64_t *> tables,
          ThreadPool &pool, Compute compute, const std::vector<int> &cpus, std::unique_ptr<Alone> alone = nullptr);
  ~Mailbox();
  Mailbox(const Mailbox &) = delete;
  Mailbox &operator=(const Mailbox &) = delete;

  // A step is about to begin: be awake for its requests.
  void wake();
  // Waits for a request that needs a record which is not in DRAM; its number, or 0 after `timeout` or the end. Whoever
  // takes it computes its rows somewhere else, then calls `answer` or `refuse`. False: the request was answered without
  // help meanwhile; the rows are not used.
  std::uint32_t await_help(std::chrono::milliseconds timeout);
  bool answer(std::uint32_t request, const float *rows);
  bool refuse(std::uint32_t request);
  // For whoever helps, before it overwrites the record of an expert in DRAM: from now on nobody reads it there. False
  // where the request is no longer open: then others may be reading it.
  bool forget(std::uint32_t request, std::size_t expert);
  // Whoever helps is at work: the request does not lack help.
  void progress();
  Counts counts() const;
  std::uint64_t nanoseconds(std::size_t layer) const { return layer_nanoseconds_[layer].load(); }
  // Ends the thread; a request under way is finished first. Nobody may be waiting in await_help afterwards. Nothing to
  // do in a forked child, which has no such thread.
  void close();

private:
  static constexpr std::chrono::milliseconds kAwake{
      20}; // that it looks for requests without a pause after the last one
  static constexpr std::chrono::milliseconds kNap{2};

  // What the thread and its callers wait by. In a forked child a lock may be held, and a condition waited on, by a
  // thread that is not there, so that even to destroy it could wait for ever.
  struct Meeting {
    std::mutex mutex;
    std::condition_variable changed;
    bool awake = false;      // under mutex, as all below: someone called wake
    std::uint32_t help = 0;  // the request that needs help, as long as it may be answered with it
    std::uint32_t taken = 0; // the last one that was taken
    bool helping = false;    // whoever took it is still at work, though it may be too late
    std::uint64_t steps = 0; // of progress
    std::thread thread;      // under no lock
  };

  Meeting &meeting() const; // throws in a forked child
  void work();
  void serve(std::uint32_t request);
  bool all_here(std::span<const std::uint64_t> addresses, std::size_t pairs) const;
  bool helped(std::uint32_t request, unsigned &word, const float *rows);
  bool helper_is_late() const;
  bool wait_for_help(std::uint32_t request);
  bool compute_alone(std::size_t layer, std::size_t tokens);

  Mail mail_;
  std::size_t top_k_;
  std::size_t experts_;
  std::vector<std::uint64_t *> tables_;
  ThreadPool &pool_;
  Compute compute_;
  std::atomic<bool> stop_{false};
  std::atomic<std::uint64_t> calls_{0};
  std::atomic<std::uint64_t> nanoseconds_{0};
  std::atomic<std::uint64_t> helps_{0};
  std::atomic<std::uint64_t> answered_alone_{0};
  std::unique_ptr<Alone> alone_;
  std::vector<std::uint8_t> room_; // of one record, and a page more
  std::vector<std::atomic<std::uint64_t>> layer_nanoseconds_;
  std::unique_ptr<Meeting> meeting_;
};

} // namespace moetier
