// Every PTX instruction of the portable kernels (sm_80 and later), one small function each.
#pragma once
#include "../common.cuh"

#ifdef HF_FLASH_EMULATE
#include "emulated_portable_ptx.cuh"
#else

namespace hf_flash {

HF_DEVICE uint32_t shared_address(const void* smem) { return static_cast<uint32_t>(__cvta_generic_to_shared(smem)); }

// x, of which the compiler knows nothing: keeps it from turning the addition of constants to an address, which the
// memory instructions do for free, into bit operations of its own.
HF_DEVICE int opaque(int x) {
  int y;
  asm("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// x, as if it changed between calls: what follows from it is computed at each place, not kept in registers.
HF_DEVICE int volatile_opaque(int x) {
  int y;
  asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// acc (16, 8) += a (16, 16) * b (16, 8), of one warp. With g = lane / 4 and t = lane % 4 a lane holds
//   acc: rows {g, g, g + 8, g + 8}, columns 2t + {0, 1, 0, 1};
//   a:   pairs of columns 2t + {0, 1} at (row g), (row g + 8), (row g, columns + 8), (row g + 8, columns + 8);
//   b0, b1: pairs of rows 2t + {0, 1} and 8 + 2t + {0, 1} of column g.
template <class Element>
HF_DEVICE void mma_m16n8k16(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <> HF_DEVICE void mma_m16n8k16<bf16>(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> HF_DEVICE void mma_m16n8k16<fp16>(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8x8 matrices of 16-bit elements; lanes 8i..8i+7 give the addresses of the eight rows (16 bytes) of matrix i.
// r[i] of a lane: row lane / 4, columns 2(lane % 4) + {0, 1} of matrix i; trans: of its transpose.
HF_DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(smem)) : "memory");
}
HF_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], const void* smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(smem)) : "memory");
}

// 16 bytes from global to shared memory in the background; zeros, and no read, where !valid.
HF_DEVICE void copy_async_16(void* smem, const void* gmem, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :: "r"(shared_address(smem)), "l"(gmem), "r"(valid ? 16 : 0) : "memory");
}
HF_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's committed groups are under way.
template <int kPending> HF_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(kPending) : "memory");
}

HF_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
HF_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// One atomic addition of 16 or 8 aligned bytes where the hardware has it (sm_90), else one per float.
HF_DEVICE void atomic_add_float4(float* address, float4 value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1,%2,%3,%4};"
               :: "l"(__cvta_generic_to_global(address)), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
#else
  atomicAdd(address, value.x);
  atomicAdd(address + 1, value.y);
  atomicAdd(address + 2, value.z);
  atomicAdd(address + 3, value.w);
#endif
}

}  // namespace hf_flash

#endif
