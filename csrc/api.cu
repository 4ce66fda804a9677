// The C ABI: checks what a kernel cannot, picks the kernel and its head-dim tile, nothing else.
#include <type_traits>

#include "launch.cuh"

namespace hf_flash {

#ifndef HF_FLASH_ARCHITECTURES
#define HF_FLASH_ARCHITECTURES "unknown"
#endif

// The head-dim tiles of each family, ascending; setup.py compiles one object per entry.
#define HF_FLASH_PORTABLE_TILES(X) X(32) X(64) X(80) X(96) X(128) X(160) X(192) X(256)
#define HF_FLASH_HOPPER_TILES(X) X(64) X(80) X(96) X(128) X(192) X(256)

// Calls call<tile>() with the smallest tile that holds head_dim.
#define HF_FLASH_CASE(tile) \
  if (head_dim <= tile) return call(std::integral_constant<int, tile>{});

template <class Call> int64_t for_portable_tile(int head_dim, Call call) {
  HF_FLASH_PORTABLE_TILES(HF_FLASH_CASE)
  return HF_FLASH_UNSUPPORTED;
}

#ifndef HF_FLASH_NO_HOPPER
template <class Call> int64_t for_hopper_tile(int head_dim, Call call) {
  HF_FLASH_HOPPER_TILES(HF_FLASH_CASE)
  return HF_FLASH_UNSUPPORTED;
}

// The Hopper kernels read keys in place through tensor maps, so page tables and left padding stay portable, as do
// gradients of partly used keys, and head dims up to 32, which have a tile of their own there and would fill half of
// one here.
static bool hopper_serves(int pass, const Params& p) {
  return pass != HF_FLASH_DECODE && device_facts().capability == 90 && p.head_dim > 32 && p.head_dim <= 256 &&
         !p.block_table && !p.leftpad_k && !p.cache_batch_idx && !(pass == HF_FLASH_BACKWARD && p.used_k);
}
#else
template <class Call> int64_t for_hopper_tile(int, Call) { return HF_FLASH_UNSUPPORTED; }
static bool hopper_serves(int, const Params&) { return false; }
#endif

static bool use_hopper(int pass, const Params& p) {
  return p.kernel != HF_FLASH_PORTABLE && hopper_serves(pass, p);
}

static int check(int pass, const Params& p) {
  if (device_facts().capability < 80) return HF_FLASH_NO_KERNEL_IMAGE;
  if (p.head_dim < 1 || p.head_dim > 256 || p.head_dim % 8 || p.heads % p.kv_heads) return HF_FLASH_UNSUPPORTED;
  if (p.kernel == HF_FLASH_HOPPER && !hopper_serves(pass, p)) return HF_FLASH_UNSUPPORTED;
  if (hf_flash_workspace_bytes(pass, &p) > p.workspace_bytes) return HF_FLASH_WORKSPACE_TOO_SMALL;
  return cudaSuccess;
}

}  // namespace hf_flash

using namespace hf_flash;

extern "C" {

int64_t hf_flash_params_size(void) { return sizeof(Params); }

int64_t hf_flash_workspace_bytes(int pass, const Params* p) {
  if (pass == HF_FLASH_DECODE)
    return for_portable_tile(p->head_dim, [&](auto tile) { return portable_decode_workspace<tile.value>(*p); });
  if (pass != HF_FLASH_BACKWARD) return 0;
#ifndef HF_FLASH_NO_HOPPER
  if (use_hopper(pass, *p))
    return for_hopper_tile(p->head_dim, [&](auto tile) { return hopper_backward_workspace<tile.value>(*p); });
#endif
  return for_portable_tile(p->head_dim, [&](auto tile) { return portable_backward_workspace<tile.value>(*p); });
}

int hf_flash_forward(const Params* p, void* stream) {
  if (int error = check(HF_FLASH_FORWARD, *p)) return error;
  const auto s = static_cast<cudaStream_t>(stream);
#ifndef HF_FLASH_NO_HOPPER
  if (use_hopper(HF_FLASH_FORWARD, *p))
    return for_hopper_tile(p->head_dim, [&](auto tile) { return hopper_forward<tile.value>(*p, s); });
#endif
  return for_portable_tile(p->head_dim, [&](auto tile) { return portable_forward<tile.value>(*p, s); });
}

int hf_flash_backward(const Params* p, void* stream) {
  if (int error = check(HF_FLASH_BACKWARD, *p)) return error;
  const auto s = static_cast<cudaStream_t>(stream);
#ifndef HF_FLASH_NO_HOPPER
  if (use_hopper(HF_FLASH_BACKWARD, *p))
    return for_hopper_tile(p->head_dim, [&](auto tile) { return hopper_backward<tile.value>(*p, s); });
#endif
  return for_portable_tile(p->head_dim, [&](auto tile) { return portable_backward<tile.value>(*p, s); });
}

int hf_flash_decode(const Params* p, void* stream) {
  if (int error = check(HF_FLASH_DECODE, *p)) return error;
  const auto s = static_cast<cudaStream_t>(stream);
  return for_portable_tile(p->head_dim, [&](auto tile) { return portable_decode<tile.value>(*p, s); });
}

#define HF_FLASH_NAME(tile) \
  if (p->head_dim <= tile) return HF_FLASH_FAMILY #tile;

const char* hf_flash_kernel_name(int pass, const Params* p) {
#define HF_FLASH_FAMILY "hopper/"
  if (use_hopper(pass, *p)) { HF_FLASH_HOPPER_TILES(HF_FLASH_NAME) }
#undef HF_FLASH_FAMILY
#define HF_FLASH_FAMILY "portable/"
  HF_FLASH_PORTABLE_TILES(HF_FLASH_NAME)
#undef HF_FLASH_FAMILY
  return "none";
}

const char* hf_flash_error(int code) {
  switch (code) {
    case HF_FLASH_UNSUPPORTED: return "this kernel does not serve these arguments";
    case HF_FLASH_NO_KERNEL_IMAGE: return "the GPU is older than compute capability 8.0";
    case HF_FLASH_NO_TENSOR_MAP: return "the driver could not describe a tensor to the copy engine";
    case HF_FLASH_WORKSPACE_TOO_SMALL: return "the workspace is smaller than hf_flash_workspace_bytes";
    default: return cudaGetErrorString(static_cast<cudaError_t>(code));
  }
}

const char* hf_flash_architectures(void) { return HF_FLASH_ARCHITECTURES; }

}  // extern "C"
