// What the device's kernels, the CPU's mailbox and the host must agree on. NVRTC compiles it into the kernels, the C++ compiler
// into native/core/mailbox.cpp, and native/python/protocol.cpp tells Python where each field lies: nobody counts words.
#pragma once

constexpr int MAX_PAIRS = 128;     // pairs of a call that the decode kernels take, at most
constexpr int MAX_STAGED = 64;     // records that one call can stream, at most
constexpr int STEP_THREADS = 256;  // threads of a block that plans a step
constexpr int STREAM_BLOCKS = 32;  // thread blocks that read records over the link: enough loads in flight to fill it

// The mailbox between a device and the CPU's kernels, in pinned memory that both see. The device posts one request at a
// time and waits for its answer before it posts the next.
struct Box {
  // Written by the device; `posted` last, when all of the request is in memory.
  unsigned posted; // number of the last request, from 1
  int layer;
  int tokens;
  int streamed; // how many entries of the array of streamed experts are of this request
  unsigned late; // a request whose answer did not come in time: the device has stopped
  unsigned char device_pad[44];
  // Written by the CPU. Both in one aligned 8-byte word, so that the device polls once.
  unsigned answered; // number of the last request whose rows are written
  unsigned refused;  // number of a request that cannot be answered: the device stops
  unsigned char cpu_pad[56];
};

// What a layer counts, from its start: places in an array of 64-bit words.
enum Count { CALLS, CALLS_MISSED, HITS, MISSES, STREAMED, PAIRS_CPU, WAITED_NS, COUNTS };

// What a step is planned by, in nanoseconds.
struct Costs {
  float cpu_call;
  float cpu_expert;        // the least that an expert takes the CPU: its bytes
  float cpu_pair;          // a pair there: its arithmetic
  float stream_expert;     // an expert over the link
  float cpu_expert_beside; // as cpu_expert, while the link reads the same DRAM
  float device_pair;       // a pair on the device, which begins when all that is streamed is there
};

// The state of a hybrid step on the device. A table follows it, int [experts]: the slot of each routed expert in this call,
// or -1: the CPU's.
struct Step {
  unsigned sequence; // of the last request
  unsigned awaited;  // the request whose answer this call needs, if `pending`
  unsigned released; // the last request whose answer was seen, for blocks that do not poll
  int pending;       // this call posted a request
  int planned;       // 1 + the number of records to stream, until all blocks that wait for it have streamed
  int left;          // blocks that have seen it and done their part
  int pad[2];
  unsigned long long from[MAX_STAGED]; // records to stream, and the slot of each
  int to[MAX_STAGED];
};

// What the kernels of a hybrid step are given beside the call. All null where the step is not hybrid.
struct HybridStep {
  const int *live; // tokens that are real; what follows is padding
  Step *step;
  Box *box;
  unsigned long long *counts;   // of the layer, by Count
  unsigned long long patience;  // nanoseconds that the device waits for the CPU
  const Costs *costs;
  unsigned *heat;                    // pairs of each expert so far
  const unsigned long long *records; // pinned: where each expert's record lies in DRAM, or 0
  unsigned long long record_bytes;
  int layer;
  int staging_first, staging; // staging slots
  int streams;                // blocks that stream
  int *step_ids;              // of the call: ids, -1 where there is nothing to compute
  // The request's arrays in the mailbox, and the rows of its answer.
  int *box_ids;
  float *box_weights;
  unsigned short *box_x;
  int *box_streamed;
  const float *box_rows;
};
