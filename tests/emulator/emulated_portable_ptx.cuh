// Stands in for csrc/portable/ptx.cuh on the host: the same names and signatures, run by the emulator.
// mma.sync and ldmatrix are warp collectives; a cp.async poisons its destination and lands at the wait, so that a
// missing wait shows as NaN.
#pragma once
#include "common.cuh"

namespace hf_flash {

// acc (16 x 8) += a (16 x 16) * b (16 x 8), fp32 accumulators.
template <class Element>
inline void mma_m16n8k16(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  hf_emulator::mma(acc, a, b0, b1, std::is_same<Element, fp16>::value);
}

// Lane i gives the address of row i % 8 of 8 x 8 matrix i / 8.
inline void ldmatrix_x4(uint32_t (&r)[4], const void* shared) { hf_emulator::load_matrix(r, 4, shared, false); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* shared) { hf_emulator::load_matrix(r, 4, shared, true); }
inline void ldmatrix_x2(uint32_t (&r)[2], const void* shared) { hf_emulator::load_matrix(r, 2, shared, false); }
inline void ldmatrix_x2_trans(uint32_t (&r)[2], const void* shared) { hf_emulator::load_matrix(r, 2, shared, true); }

// valid == false writes zeros and reads nothing.
inline void copy_async_16(void* shared, const void* global, bool valid = true) {
  hf_emulator::copy_async(shared, global, 16, valid ? 16 : 0);
}
inline void copy_async_8(void* shared, const void* global, bool valid = true) {
  hf_emulator::copy_async(shared, global, 8, valid ? 8 : 0);
}
inline void copy_async_commit() { hf_emulator::copy_async_commit(); }
template <int kPending> inline void copy_async_wait() { hf_emulator::copy_async_wait(kPending); }

inline uint32_t shared_address(const void* p) { return hf_emulator::shared_address(p); }
inline float reciprocal_approx(float x) { return 1.f / x; }
inline int opaque(int x) { return x; }
inline int volatile_opaque(int x) { return x; }

inline float exp2_approx(float x) { return exp2f(x); }

inline void atomic_add_float4(float* target, float a, float b, float c, float d) {
  target[0] += a, target[1] += b, target[2] += c, target[3] += d;
}
inline void atomic_add_float4(float* target, float4 x) { atomic_add_float4(target, x.x, x.y, x.z, x.w); }

}  // namespace hf_flash
