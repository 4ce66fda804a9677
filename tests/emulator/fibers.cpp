// The scheduler: one fiber per CUDA thread, barriers and warp collectives, and the report of a deadlock.
// A thread runs until it must wait. HF_FLASH_EMULATED_ORDER varies who runs when, so that a missing barrier shows in
// some order: 0 ascending (the default), -1 descending, a positive seed at random, and pausing where it need not wait.
// HF_FLASH_EMULATED_BLOCKS: -1 runs the blocks of a grid from the last to the first.
#include "state.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <random>
#include <string>

#ifndef __x86_64__
#include <ucontext.h>
#endif

extern "C" int64_t hf_emulated_launches;
int64_t hf_emulated_launches = 0;   // kernels launched so far, for tests

namespace hf_emulator {

Thread* current;
uint3 block_index, block_size, grid_size;
char* shared_memory;
size_t shared_size;

namespace {

constexpr size_t kStackBytes = 256 << 10, kSharedCapacity = 256 << 10, kCanaryBytes = 4096;
constexpr int kSpinRounds = 100000;   // rounds in which threads only yielded before a block counts as stuck

struct Collective {
  unsigned mask = 0, arrived = 0;
  uint64_t generation = 0;
  const char* kind = nullptr;
  void* payloads[32];
};
struct GroupCollective {
  int arrived = 0;
  uint64_t generation = 0;
  const char* kind = nullptr;
  void* payloads[128];
};
struct Barrier {
  int arrived = 0, threads = 0;
  uint64_t generation = 0;
};

std::vector<Fiber> fibers;
std::vector<int> order;       // in which the fibers get their turn
std::minstd_rand generator;
int order_setting;
std::vector<std::vector<Collective>> warp_collectives;
std::vector<GroupCollective> group_collectives;
Barrier barriers[16];
int live_threads;
void (*kernel_body)(void*);
void* kernel_context;

#ifdef __x86_64__
// Saves the callee-saved registers and the stack pointer in *from, continues at `to`.
extern "C" void hf_emulator_switch(void** from, void* to);
asm(R"(
.text
.globl hf_emulator_switch
.type hf_emulator_switch, @function
hf_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size hf_emulator_switch, .-hf_emulator_switch
)");
void* scheduler_stack;
void enter(Fiber& f) { hf_emulator_switch(&scheduler_stack, f.stack_pointer); }
void leave(Fiber& f) { hf_emulator_switch(&f.stack_pointer, scheduler_stack); }
#else
ucontext_t scheduler_context;
void enter(Fiber& f) { swapcontext(&scheduler_context, &f.context); }
void leave(Fiber& f) { swapcontext(&f.context, &scheduler_context); }
#endif

void release_if_complete(Barrier& b, int needed) {
  if (b.arrived == 0 || b.arrived < needed) return;
  b.arrived = b.threads = 0;
  ++b.generation;
}

void fiber_main() {
  kernel_body(kernel_context);
  Fiber& f = running();
  f.done = true;
  --live_threads;
  release_if_complete(barriers[0], live_threads);
  leave(f);
  abort();
}

void start(Fiber& f) {
  if (!f.stack) {
    f.stack = static_cast<char*>(mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    mprotect(f.stack, 4096, PROT_NONE);   // an overflow faults
  }
#ifdef __x86_64__
  void** top = reinterpret_cast<void**>(f.stack + kStackBytes) - 3;
  *--top = reinterpret_cast<void*>(fiber_main);   // entered by ret with the stack 8 off 16, as after a call
  top -= 6;
  f.stack_pointer = top;
#else
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = f.stack;
  f.context.uc_stack.ss_size = kStackBytes;
  makecontext(&f.context, fiber_main, 0);
#endif
}

void print_waits() {
  for (size_t first = 0; first < fibers.size(); first += 32) {
    std::map<std::string, std::string> lanes;
    for (size_t i = first; i < fibers.size() && i < first + 32; ++i) {
      char text[160];
      const Fiber& f = fibers[i];
      if (f.done) snprintf(text, sizeof text, "returned");
      else snprintf(text, sizeof text, "%s at shared+%ld (%lld)", f.reason ? f.reason : "running",
                    f.object ? long(static_cast<const char*>(f.object) - shared_memory) : -1L, f.detail);
      lanes[text] += " " + std::to_string(i - first);
    }
    for (const auto& entry : lanes)
      fprintf(stderr, "  warp %2zu: %s: lanes%s\n", first / 32, entry.first.c_str(), entry.second.c_str());
  }
}

// One block, until every thread has returned.
void run_block(int threads) {
  for (Barrier& b : barriers) b = {};
  for (auto& w : warp_collectives) w.clear();
  for (GroupCollective& g : group_collectives) g = {};
  live_threads = threads;
  for (int i = 0; i < threads; ++i) {
    Fiber& f = fibers[i];
    f.reset();
    start(f);
  }
  int idle_rounds = 0;
  while (live_threads > 0) {
    bool progress = false, yielded = false;
    if (order_setting > 0) std::shuffle(order.begin(), order.end(), generator);
    for (int i : order) {
      Fiber& f = fibers[i];
      if (f.done || (f.ready && !f.ready(f.context_of_ready))) continue;
      if (f.yielding) yielded = true;
      else progress = true;
      f.ready = nullptr;
      f.yielding = false;
      f.reason = nullptr;
      current = &f;
      enter(f);
    }
    if (progress || land_copies()) {
      idle_rounds = 0;
      continue;
    }
    if (live_threads > 0 && (!yielded || ++idle_rounds > kSpinRounds)) fail("deadlock");
  }
  while (land_copies()) {}
  check_block_end();
}

}  // namespace

Fiber& running() { return *static_cast<Fiber*>(current); }

void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fprintf(stderr, "emulator: block %u of %u, thread %d: ", block_index.x, grid_size.x, current ? current->index : -1);
  vfprintf(stderr, format, arguments);
  fprintf(stderr, "\n");
  va_end(arguments);
  print_waits();
  abort();
}

void wait_until(bool (*ready)(void*), void* context, const char* reason, const void* object, long long detail) {
  Fiber& f = running();
  if (ready(context) && !(order_setting > 0 && generator() % 4 == 0)) return;
  f.ready = ready;
  f.context_of_ready = context;
  f.reason = reason;
  f.object = object;
  f.detail = detail;
  leave(f);
}

void yield() {
  Fiber& f = running();
  f.yielding = true;
  f.reason = "yielding";
  leave(f);
}

unsigned active_lanes() {
  unsigned mask = 0;
  const size_t first = current->index & ~31;
  for (size_t lane = 0; lane < 32 && first + lane < fibers.size(); ++lane)
    mask |= unsigned(!fibers[first + lane].done) << lane;
  return mask;
}

void collective(unsigned mask, const char* kind, void* payload, Run run) {
  const int lane = current->lane;
  if (!(mask >> lane & 1)) fail("%s: lane %d is not in its own mask %08x", kind, lane, mask);
  auto& list = warp_collectives[current->warp];
  size_t slot = 0;
  while (slot < list.size() && list[slot].mask != mask) ++slot;
  if (slot == list.size()) {
    if (slot == 0) list.reserve(64);      // waiting threads point into the list
    if (slot == 64) fail("more than 64 masks in one warp");
    list.emplace_back();
    list.back().mask = mask;
  }
  Collective& c = list[slot];
  if (c.arrived && strcmp(c.kind, kind)) fail("lane %d at %s while others wait at %s", lane, kind, c.kind);
  c.kind = kind;
  c.payloads[lane] = payload;
  c.arrived |= 1u << lane;
  if (c.arrived == mask) {
    run(c.payloads, mask);
    c.arrived = 0;
    ++c.generation;
    return;
  }
  struct Wait { Collective* c; uint64_t generation; } wait{&c, c.generation};
  wait_until([](void* p) { auto* w = static_cast<Wait*>(p); return w->c->generation != w->generation; }, &wait, kind,
             nullptr, mask);
}

void group_collective(const char* kind, void* payload, Run run) {
  GroupCollective& g = group_collectives[current->index / 128];
  if (g.arrived && strcmp(g.kind, kind)) fail("%s while others of the warpgroup wait at %s", kind, g.kind);
  g.kind = kind;
  g.payloads[current->index % 128] = payload;
  if (++g.arrived == 128) {
    run(g.payloads, ~0u);
    g.arrived = 0;
    ++g.generation;
    return;
  }
  struct Wait { GroupCollective* g; uint64_t generation; } wait{&g, g.generation};
  wait_until([](void* p) { auto* w = static_cast<Wait*>(p); return w->g->generation != w->generation; }, &wait, kind,
             nullptr, 128);
}

static uint64_t arrive(int id, int threads) {
  if (id < 0 || id > 15) fail("barrier %d", id);
  if (threads % 32) fail("barrier %d for %d threads, not a multiple of 32", id, threads);
  Barrier& b = barriers[id];
  if (b.arrived && b.threads != threads) fail("barrier %d for %d threads, others use %d", id, threads, b.threads);
  b.threads = threads;
  const uint64_t generation = b.generation;
  ++b.arrived;
  release_if_complete(b, threads ? threads : live_threads);
  return generation;
}

void barrier_sync(int id, int threads) {
  const uint64_t generation = arrive(id, threads);
  struct Wait { Barrier* b; uint64_t generation; } wait{&barriers[id], generation};
  wait_until([](void* p) { auto* w = static_cast<Wait*>(p); return w->b->generation != w->generation; }, &wait,
             "barrier", nullptr, id * 10000 + threads);
}

void barrier_arrive(int id, int threads) { arrive(id, threads); }

int run_grid(void (*body)(void*), void* context, int64_t blocks, int threads, size_t shared_bytes) {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  static char* arena = nullptr;
  if (!arena) {
    arena = static_cast<char*>(mmap(nullptr, kSharedCapacity + 2 * kCanaryBytes, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(arena + kSharedCapacity + kCanaryBytes, kCanaryBytes, PROT_NONE);
  }
  if (blocks <= 0) return 0;
  if (threads < 1 || threads > 1024 || shared_bytes > 227 << 10 || blocks > 0x7fffffff) return cudaErrorInvalidValue;
  shared_memory = arena;
  shared_size = shared_bytes;
  kernel_body = body;
  kernel_context = context;
  block_size = {unsigned(threads), 1, 1};
  grid_size = {unsigned(blocks), 1, 1};
  if (int(fibers.size()) != threads) {
    for (size_t i = threads; i < fibers.size(); ++i)
      if (fibers[i].stack) munmap(fibers[i].stack, kStackBytes);
    fibers.resize(threads);
  }
  for (int i = 0; i < threads; ++i) {
    fibers[i].thread = {unsigned(i), 0, 0};
    fibers[i].index = i, fibers[i].warp = i / 32, fibers[i].lane = i % 32;
  }
  ++hf_emulated_launches;
  const char* const direction = getenv("HF_FLASH_EMULATED_BLOCKS");
  const bool descending = direction && atoi(direction) < 0;
  const char* const setting = getenv("HF_FLASH_EMULATED_ORDER");
  order_setting = setting ? atoi(setting) : 0;
  generator.seed(order_setting > 0 ? order_setting : 1);
  order.resize(threads);
  for (int i = 0; i < threads; ++i) order[i] = order_setting < 0 ? threads - 1 - i : i;
  warp_collectives.resize((threads + 31) / 32);
  group_collectives.resize((threads + 127) / 128);
  for (int64_t block = 0; block < blocks; ++block) {
    block_index = {unsigned(descending ? blocks - 1 - block : block), 0, 0};
    memset(arena, 0xff, shared_bytes);                    // NaN in every float type
    memset(arena + shared_bytes, 0x5c, kCanaryBytes);
    current = nullptr;
    run_block(threads);
    for (size_t i = 0; i < kCanaryBytes; ++i)
      if (arena[shared_bytes + i] != 0x5c) fail("a write %zu bytes past the end of shared memory", i);
  }
  current = nullptr;
  return 0;
}

}  // namespace hf_emulator
