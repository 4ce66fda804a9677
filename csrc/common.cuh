// What every kernel shares: parameter and element types, conversions, the shared-memory declaration.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "hf_flash.h"

namespace hf_flash {

#define HF_DEVICE __device__ __forceinline__
#define HF_HOST_DEVICE __host__ __device__ __forceinline__
#ifndef HF_UNROLL                       // the host emulator (tests/emulator) defines these otherwise
#define HF_UNROLL _Pragma("unroll")
#define HF_NO_UNROLL _Pragma("unroll 1")
#define HF_DYNAMIC_SHARED(name) extern __shared__ __align__(1024) char name[]
#endif

using Params = HfFlashParams;
using Tensor = HfFlashTensor;
using bf16 = __nv_bfloat16;
using fp16 = __half;

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

HF_HOST_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
HF_HOST_DEVICE constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

// Two floats as one register of bf16 or fp16, the first in the low half.
template <class Element> HF_DEVICE uint32_t pack(float low, float high);
template <> HF_DEVICE uint32_t pack<bf16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <> HF_DEVICE uint32_t pack<fp16>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <class Element> HF_DEVICE float2 unpack(uint32_t pair);
template <> HF_DEVICE float2 unpack<bf16>(uint32_t pair) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
}
template <> HF_DEVICE float2 unpack<fp16>(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

}  // namespace hf_flash
