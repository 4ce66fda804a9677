// The instructions of sm_90a that CUDA C++ does not spell: mbarriers, TMA, named barriers, register counts, stmatrix;
// wgmma is in wgmma.cuh. No other file of hopper/ holds inline PTX: tests/emulator replaces these functions.
#pragma once
#include <cuda.h>

#include "../common.cuh"

#ifdef HF_FLASH_EMULATE
#include "emulated_hopper_ptx.cuh"
#else

namespace hf_flash::hopper {

// Address inside the CTA's shared memory.
HF_DEVICE uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

// ---- mbarriers. A phase completes when `count` arrivals and all announced bytes have come in; waits name its parity.

HF_DEVICE void mbarrier_init(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
// Makes initialised barriers visible to the copy engine; a CTA barrier must follow.
HF_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrives once and announces bytes that copies will bring.
HF_DEVICE void mbarrier_expect_bytes(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
HF_DEVICE void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Returns once the phase of this parity has completed. A fresh barrier counts as having completed parity 1.
HF_DEVICE void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\nbra again;\nfinished:\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// ---- Copies by the TMA engine, issued by one thread. Elements outside the map's bounds load as zero, and are not
// stored; the bytes of the whole box count either way.

HF_DEVICE void tma_load_5d(void* destination, const CUtensorMap* map, uint64_t* barrier, int c0, int c1, int c2, int c3,
                           int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, "
      "%7}], [%2];" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
HF_DEVICE void tma_store_5d(const CUtensorMap* map, const void* source, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
      "r"(shared_address(source)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
// destination[i] += source[i] for contiguous fp32 in global memory, in no particular order; addresses and size are
// multiples of 16 bytes.
HF_DEVICE void bulk_reduce_add(float* destination, const void* source, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(destination),
               "r"(shared_address(source)), "r"(bytes)
               : "memory");
}
// Stores and reductions of this thread since the last commit form a group.
HF_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// At most kPending groups have yet to read their source (wait_read), or to become visible in global memory (wait).
template <int kPending> HF_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending> HF_DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
// Orders this thread's plain accesses to shared memory before later ones of TMA and wgmma (a barrier must follow).
HF_DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same for global memory: what this thread has seen there is seen by its later copies.
HF_DEVICE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- Warpgroups.

// Takes or gives back registers, so that each thread of this warpgroup has kRegisters. The sum over the CTA may not
// exceed what the launch allotted, or growing waits for ever.
template <int kRegisters> HF_DEVICE void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters> HF_DEVICE void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// Named barriers, 0 to 15: `threads` counts those that sync and those that only arrive. Barrier 0 is __syncthreads.
HF_DEVICE void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
HF_DEVICE void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- Kernels that overlap (launch<true>).

// Lets the next kernel of the stream start where there is room, once every CTA of this one has called it or ended.
HF_DEVICE void grid_dependency_release() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Returns when the kernel before has ended and its results are visible.
HF_DEVICE void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- Fragments.

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
HF_DEVICE void store_matrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}
HF_DEVICE void store_matrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0),
               "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}
// The same value, of which the compiler knows nothing: what is computed from it stays where it is written, instead of
// being kept in registers across a loop.
HF_DEVICE int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
// 2^x in one instruction; exp2f takes several for the sake of denormals.
HF_DEVICE float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace hf_flash::hopper
#endif
