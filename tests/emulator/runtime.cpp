// The few functions of the CUDA runtime that the library's host side calls.
#include <cuda_runtime.h>
#include <stdlib.h>
#include <string.h>

static int setting(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text ? atoi(text) : otherwise;
}

extern "C" {

cudaError_t CUDARTAPI cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute, int) {
  const int capability = setting("HF_FLASH_EMULATED_CAPABILITY", 90);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = capability / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = capability % 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = (capability == 80 ? 163 : capability / 10 == 8 || capability / 10 == 12 ? 99 : 227) << 10;
      break;
    case cudaDevAttrMultiProcessorCount: *value = setting("HF_FLASH_EMULATED_SM_COUNT", 4); break;
    default: return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

const char* CUDARTAPI cudaGetErrorString(cudaError_t error) { return error ? "emulated CUDA error" : "no error"; }
cudaError_t CUDARTAPI cudaGetLastError(void) { return cudaSuccess; }
cudaError_t CUDARTAPI cudaPeekAtLastError(void) { return cudaSuccess; }
cudaError_t CUDARTAPI cudaFuncSetAttribute(const void*, enum cudaFuncAttribute, int) { return cudaSuccess; }

cudaError_t CUDARTAPI cudaStreamIsCapturing(cudaStream_t, enum cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
  memset(data, value, bytes);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMemcpyAsync(void* to, const void* from, size_t bytes, enum cudaMemcpyKind, cudaStream_t) {
  memcpy(to, from, bytes);
  return cudaSuccess;
}

}  // extern "C"
