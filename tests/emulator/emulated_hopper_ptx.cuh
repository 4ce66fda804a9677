// Stands in for csrc/hopper/ptx.cuh on the host: the same names and signatures, run by the emulator.
// TMA copies land late (when no thread can run, or at their wait), wgmma results at wgmma_wait: until then their
// destinations hold NaN. mbarriers count arrivals and bytes; descriptors are decoded as the hardware would.
#pragma once
#include "common.cuh"

namespace hf_flash::hopper {

inline uint32_t shared_address(const void* p) { return hf_emulator::shared_address(p); }
inline float ex2(float x) { return exp2f(x); }
inline int opaque(int x) { return x; }
inline void grid_dependency_release() {}   // kernels run one after another
inline void grid_dependency_wait() {}

// mbarriers
inline void mbarrier_init(uint64_t* barrier, int arrivals) { hf_emulator::mbarrier_init(barrier, arrivals); }
inline void mbarrier_expect_bytes(uint64_t* barrier, uint32_t bytes) { hf_emulator::mbarrier_arrive(barrier, bytes); }
inline void mbarrier_arrive(uint64_t* barrier) { hf_emulator::mbarrier_arrive(barrier, 0); }
inline void mbarrier_wait(uint64_t* barrier, uint32_t parity) { hf_emulator::mbarrier_wait(barrier, parity); }
inline void fence_mbarrier_init() {}
inline void fence_async_shared() {}
inline void fence_async_global() {}

// Tensor copies: coordinates in elements, innermost first.
inline void tma_load_3d(void* shared, const CUtensorMap* map, uint64_t* barrier, int c0, int c1, int c2) {
  hf_emulator::tma_load(shared, map, barrier, {c0, c1, c2});
}
inline void tma_load_4d(void* shared, const CUtensorMap* map, uint64_t* barrier, int c0, int c1, int c2, int c3) {
  hf_emulator::tma_load(shared, map, barrier, {c0, c1, c2, c3});
}
inline void tma_load_5d(void* shared, const CUtensorMap* map, uint64_t* barrier, int c0, int c1, int c2, int c3,
                        int c4) {
  hf_emulator::tma_load(shared, map, barrier, {c0, c1, c2, c3, c4});
}
inline void tma_store_3d(const CUtensorMap* map, const void* shared, int c0, int c1, int c2) {
  hf_emulator::tma_store(map, shared, {c0, c1, c2});
}
inline void tma_store_4d(const CUtensorMap* map, const void* shared, int c0, int c1, int c2, int c3) {
  hf_emulator::tma_store(map, shared, {c0, c1, c2, c3});
}
inline void tma_store_5d(const CUtensorMap* map, const void* shared, int c0, int c1, int c2, int c3, int c4) {
  hf_emulator::tma_store(map, shared, {c0, c1, c2, c3, c4});
}

// Bulk reductions and the groups of bulk stores.
inline void bulk_reduce_add(float* global, const void* shared, uint32_t bytes) {
  hf_emulator::bulk_reduce_add(global, shared, bytes);
}
inline void bulk_commit() { hf_emulator::bulk_commit(); }
template <int kPending> inline void bulk_wait_read() { hf_emulator::bulk_wait(kPending); }
template <int kPending> inline void bulk_wait() { hf_emulator::bulk_wait(kPending); }

// Warpgroups
template <int kRegisters> inline void registers_grow() {}
template <int kRegisters> inline void registers_shrink() {}
inline void barrier_sync(int id, int threads) { hf_emulator::barrier_sync(id, threads); }
inline void barrier_arrive(int id, int threads) { hf_emulator::barrier_arrive(id, threads); }
inline bool elect_one() { return hf_emulator::current->thread.x % 32 == 0; }

inline void wgmma_fence() {}
inline void wgmma_commit() { hf_emulator::wgmma_commit(); }
template <int kPending> inline void wgmma_wait() { hf_emulator::wgmma_wait(kPending); }
template <int kCount> inline void pin(float (&)[kCount]) {}

// d (64 x N) = a (64 x 16) * b (16 x N) [+ d]. ss: both from shared memory, a K-major; sst: a MN-major; rs: a in
// registers. b is K-major, or MN-major when kTransposedB.
template <class Element, int kN, bool kTransposedB> struct Wgmma {
  static constexpr bool kHalf = std::is_same<Element, fp16>::value;
  static void ss(float (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate) {
    hf_emulator::wgmma(d, kN, nullptr, a, b, accumulate, kHalf, false, kTransposedB);
  }
  static void sst(float (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate) {
    hf_emulator::wgmma(d, kN, nullptr, a, b, accumulate, kHalf, true, kTransposedB);
  }
  static void rs(float (&d)[kN / 2], const uint32_t* a, uint64_t b, int accumulate) {
    hf_emulator::wgmma(d, kN, a, 0, b, accumulate, kHalf, false, kTransposedB);
  }
};

// Lane i gives the address of row i % 8 of 8 x 8 matrix i / 8.
inline void store_matrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  hf_emulator::store_matrix(hf_emulator::shared_pointer(address, 16, "stmatrix"), r0, r1, r2, r3, false);
}
inline void store_matrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  hf_emulator::store_matrix(hf_emulator::shared_pointer(address, 16, "stmatrix"), r0, r1, r2, r3, true);
}

}  // namespace hf_flash::hopper
