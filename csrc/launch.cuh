// The host side every launcher shares: device facts, kernel launch, and the kernels that api.cu chooses from.
// A launcher neither allocates nor synchronises; it returns cudaError_t or a code of hf_flash.h.
#pragma once
#include "common.cuh"

namespace hf_flash {

struct DeviceFacts {
  int sm_count = 0, capability = 0, shared_memory_per_block = 0;   // capability: 10 * major + minor
};

inline const DeviceFacts& device_facts() {
  static DeviceFacts facts[64];
  int device = 0;
  cudaGetDevice(&device);
  DeviceFacts& f = facts[device & 63];
  if (f.sm_count == 0) {
    int major = 0, minor = 0, sm_count = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    cudaDeviceGetAttribute(&f.shared_memory_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
    f.capability = 10 * major + minor;
    f.sm_count = sm_count;
  }
  return f;
}

#ifndef HF_FLASH_EMULATE
// kEarly: the kernel may start while the one before it on the stream still runs; it calls grid_dependency_wait().
template <bool kEarly = false, class Kernel, class... Arguments>
int launch(Kernel kernel, int64_t blocks, int threads, size_t shared_bytes, cudaStream_t stream,
           const Arguments&... arguments) {
  if (blocks <= 0) return cudaSuccess;
  if (shared_bytes > 48 * 1024) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {dim3(unsigned(blocks)), dim3(threads), shared_bytes, stream, &early, kEarly ? 1u : 0u};
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}
#else
template <bool kEarly = false, class Kernel, class... Arguments>
int launch(Kernel kernel, int64_t blocks, int threads, size_t shared_bytes, cudaStream_t,
           const Arguments&... arguments) {
  return emulate(kernel, blocks, threads, shared_bytes, arguments...);
}
#endif

// Each is instantiated for one head dim per compilation: setup.py compiles the file once per tile with
// -DHF_FLASH_HEAD_DIM=n. A head dim between two tiles runs on the next larger one, padded inside the kernel.
template <int kHeadDim> int portable_forward(const Params& p, cudaStream_t stream);
template <int kHeadDim> int portable_backward(const Params& p, cudaStream_t stream);
template <int kHeadDim> int64_t portable_backward_workspace(const Params& p);
template <int kHeadDim> int portable_decode(const Params& p, cudaStream_t stream);
template <int kHeadDim> int64_t portable_decode_workspace(const Params& p);
template <int kHeadDim> int hopper_forward(const Params& p, cudaStream_t stream);
template <int kHeadDim> int hopper_backward(const Params& p, cudaStream_t stream);
template <int kHeadDim> int64_t hopper_backward_workspace(const Params& p);

}  // namespace hf_flash
