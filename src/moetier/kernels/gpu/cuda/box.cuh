// The mailbox between a device and the CPU's kernels, in pinned memory that both see. The device posts one request at a
// time and waits for its answer before it posts the next. Read by NVRTC and by native/core/mailbox.cpp alike.
#pragma once

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
