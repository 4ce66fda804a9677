// Included before every kernel file (g++ -include): CUDA's device language on the host. A block's threads are fibers
// of one OS thread; blocks run one after another, in order. What a thread waits for is a predicate, so that a block in
// which nobody can go on is recognised and reported (fibers.cpp).
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <initializer_list>
#include <type_traits>

#undef __forceinline__
#define __forceinline__ inline
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __shared__
#define __shared__ static
#define HF_UNROLL
#define HF_NO_UNROLL
#define HF_DYNAMIC_SHARED(name) char* const name = hf_emulator::shared_memory
#define HF_STATIC_SHARED(type, name) static type name

namespace hf_emulator {

struct Thread {
  uint3 thread;              // threadIdx
  int index, warp, lane;
};

extern Thread* current;      // the running thread
extern uint3 block_index, block_size, grid_size;
extern char* shared_memory;  // the block's dynamic shared memory, on 1024 bytes

// Fibers
void wait_until(bool (*ready)(void*), void* context, const char* reason, const void* object, long long detail);
void yield();
[[noreturn]] void fail(const char* format, ...);
int run_grid(void (*body)(void*), void* context, int64_t blocks, int threads, size_t shared_bytes);

// Every lane of mask calls with the same kind; the last to arrive runs run(payloads), where payloads[lane] is what
// that lane passed, and all go on. group_collective: the 128 threads of a warpgroup.
using Run = void (*)(void** payloads, unsigned mask);
void collective(unsigned mask, const char* kind, void* payload, Run run);
void group_collective(const char* kind, void* payload, Run run);
unsigned active_lanes();

void barrier_sync(int id, int threads);   // threads 0: all threads that have not returned
void barrier_arrive(int id, int threads);

// Shared memory and tensor cores
uint32_t shared_address(const void* p);
char* shared_pointer(uint32_t address, size_t bytes, const char* what);
void mma(float* acc, const uint32_t* a, uint32_t b0, uint32_t b1, bool half);
void load_matrix(uint32_t* registers, int count, const void* row, bool transposed);
void store_matrix(void* row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3, bool transposed);
void wgmma(float* d, int n, const uint32_t* a_registers, uint64_t a, uint64_t b, bool accumulate, bool half,
           bool transposed_a, bool transposed_b);
void wgmma_commit();
void wgmma_wait(int pending);

// Copies
void copy_async(void* shared, const void* global, int bytes, int valid_bytes);
void copy_async_commit();
void copy_async_wait(int pending);
void mbarrier_init(uint64_t* barrier, int arrivals);
void mbarrier_arrive(uint64_t* barrier, uint32_t expected_bytes, int arrivals = 1);
void mbarrier_expect(uint64_t* barrier, uint32_t expected_bytes);
bool mbarrier_test(uint64_t* barrier, uint32_t parity);
void mbarrier_wait(uint64_t* barrier, uint32_t parity);
void tma_load(void* shared, const CUtensorMap* map, uint64_t* barrier, std::initializer_list<int> coordinates);
void tma_store(const CUtensorMap* map, const void* shared, std::initializer_list<int> coordinates);
void tma_reduce_add(const CUtensorMap* map, const void* shared, std::initializer_list<int> coordinates);
void bulk_reduce_add(float* global, const void* shared, uint32_t bytes);
void bulk_commit();
void bulk_wait(int pending);

// cuTensorMapEncodeTiled's arguments, kept as they are in the map's 128 bytes. HF_FLASH_NO_TENSOR_MAP for what the
// driver would refuse.
int encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                           const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                           const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                           CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Shuffles: value of lane `source`; lanes whose source is out of range keep their own.
template <class T> T shuffle(unsigned mask, T value, int source) {
  struct Payload { T value, result; int source; } payload{value, value, source};
  static_assert(std::is_trivially_copyable<T>::value && sizeof(T) <= 8, "");
  collective(mask, "shuffle", &payload, [](void** lanes, unsigned mask) {
    for (int lane = 0; lane < 32; ++lane)
      if (mask >> lane & 1) {
        Payload& p = *static_cast<Payload*>(lanes[lane]);
        if (p.source < 0) continue;
        if (!(mask >> p.source & 1)) fail("shuffle from lane %d, which is not in mask %08x", p.source, mask);
        p.result = static_cast<Payload*>(lanes[p.source])->value;
      }
  });
  return payload.result;
}

inline unsigned vote(unsigned mask, bool predicate) {
  struct Payload { bool predicate; unsigned result; } payload{predicate, 0};
  collective(mask, "vote", &payload, [](void** lanes, unsigned mask) {
    unsigned result = 0;
    for (int lane = 0; lane < 32; ++lane)
      if (mask >> lane & 1) result |= unsigned(static_cast<Payload*>(lanes[lane])->predicate) << lane;
    for (int lane = 0; lane < 32; ++lane)
      if (mask >> lane & 1) static_cast<Payload*>(lanes[lane])->result = result;
  });
  return payload.result;
}

template <class... Parameters, class... Arguments>
int emulate(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared_bytes,
            const Arguments&... arguments) {
  auto body = [&] { kernel(arguments...); };
  return run_grid([](void* context) { (*static_cast<decltype(body)*>(context))(); }, &body, blocks, threads,
                  shared_bytes);
}

}  // namespace hf_emulator

namespace hf_flash {
using hf_emulator::emulate;
using hf_emulator::encode_tensor_map;
}  // namespace hf_flash

#define threadIdx (hf_emulator::current->thread)
#define blockIdx (hf_emulator::block_index)
#define blockDim (hf_emulator::block_size)
#define gridDim (hf_emulator::grid_size)

inline void __syncthreads() { hf_emulator::barrier_sync(0, 0); }
inline void __syncwarp(unsigned mask = ~0u) {
  hf_emulator::collective(mask, "syncwarp", nullptr, [](void**, unsigned) {});
}
inline unsigned __activemask() { return hf_emulator::active_lanes(); }
inline unsigned __ballot_sync(unsigned mask, int predicate) { return hf_emulator::vote(mask, predicate != 0); }
inline int __any_sync(unsigned mask, int predicate) { return hf_emulator::vote(mask, predicate != 0) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return hf_emulator::vote(mask, predicate == 0) == 0; }
template <class T> T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return hf_emulator::shuffle(mask, value, (hf_emulator::current->lane & ~(width - 1)) + (source & (width - 1)));
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const int lane = hf_emulator::current->lane, source = lane ^ bits;
  return hf_emulator::shuffle(mask, value, source < (lane & ~(width - 1)) + width ? source : -1);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, int delta, int width = 32) {
  const int lane = hf_emulator::current->lane;
  return hf_emulator::shuffle(mask, value, (lane & (width - 1)) >= delta ? lane - delta : -1);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, int delta, int width = 32) {
  const int lane = hf_emulator::current->lane;
  return hf_emulator::shuffle(mask, value, (lane & (width - 1)) + delta < width ? lane + delta : -1);
}

// A fiber gives way only where it waits, so plain reads and writes are atomic.
template <class T, class U> T atomicAdd(T* target, U value) {
  const T old = *target;
  *target = old + T(value);
  return old;
}
template <class T, class U> T atomicMax(T* target, U value) {
  const T old = *target;
  if (T(value) > old) *target = T(value);
  return old;
}
template <class T, class U> T atomicMin(T* target, U value) {
  const T old = *target;
  if (T(value) < old) *target = T(value);
  return old;
}
template <class T, class U> T atomicExch(T* target, U value) {
  const T old = *target;
  *target = T(value);
  return old;
}
template <class T> T atomicCAS(T* target, T compare, T value) {
  const T old = *target;
  if (old == compare) *target = value;
  return old;
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) { hf_emulator::yield(); }
[[noreturn]] inline void __trap() { hf_emulator::fail("__trap()"); }

template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
inline size_t __cvta_generic_to_shared(const void* p) { return hf_emulator::shared_address(p); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fmul_rn(float a, float b) {
  volatile float product = a * b;   // never fused with an addition
  return product;
}
inline float __fadd_rn(float a, float b) {
  volatile float sum = a + b;
  return sum;
}
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline int __float_as_int(float x) { int y; __builtin_memcpy(&y, &x, 4); return y; }
inline unsigned __float_as_uint(float x) { unsigned y; __builtin_memcpy(&y, &x, 4); return y; }
inline float __int_as_float(int x) { float y; __builtin_memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(unsigned x) { float y; __builtin_memcpy(&y, &x, 4); return y; }
template <class A, class B> constexpr auto max(A a, B b) -> decltype(a + b) { return a < b ? b : a; }
template <class A, class B> constexpr auto min(A a, B b) -> decltype(a + b) { return b < a ? b : a; }
