// What the emulator's own files share.
#pragma once
#include "emulator.h"

#include <deque>
#include <vector>
#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace hf_emulator {

struct PendingCopy {           // a cp.async
  char* shared;
  unsigned char bytes[16];
  int size;
  long long group;
};
struct PendingMatmul {         // accumulators of wgmmas not yet waited for
  float* d;
  std::vector<float> values;
  long long group;
};

struct Fiber : Thread {
  char* stack = nullptr;
#ifdef __x86_64__
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
  bool done = false, yielding = false;
  bool (*ready)(void*) = nullptr;
  void* context_of_ready = nullptr;
  const char* reason = nullptr;
  const void* object = nullptr;
  long long detail = 0;

  std::deque<PendingCopy> copies;
  long long copy_group = 0;
  std::vector<PendingMatmul> matmuls;
  long long matmul_group = 0;
  long long bulk_group = 0, bulk_uncommitted = 0;

  void reset() {
    done = yielding = false;
    ready = nullptr;
    reason = nullptr;
    copies.clear();
    matmuls.clear();
    copy_group = matmul_group = bulk_group = bulk_uncommitted = 0;
  }
};

Fiber& running();
extern size_t shared_size;

void check_shared(const void* p, size_t bytes, size_t alignment, const char* what);
bool land_copies();            // runs the oldest TMA or bulk copy in flight, false when there is none
void check_block_end();
float to_float(uint16_t bits, bool half);

}  // namespace hf_emulator
