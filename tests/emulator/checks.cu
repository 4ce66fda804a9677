// Small kernels, one per group of primitives, that tests/test_emulator.py runs.
#include "hopper/ptx.cuh"
#include "hopper/tile.cuh"
#include "hopper/wgmma.cuh"
#include "launch.cuh"
#include "portable/ptx.cuh"
#include "portable/tile.cuh"

namespace hf_flash {

// out (32 x 16) = a (32 x 64) * b (16 x 64)^T, or with `transposed` a * b (64 x 16). Two warps of 16 rows.
// wait == 0 leaves out the wait for cp.async.
template <class Element>
__global__ void matmul_kernel(float* out, const Element* a, const Element* b, bool transposed, bool wait) {
  HF_DYNAMIC_SHARED(shared);
  char* const shared_b = shared + TileLayout<64>::bytes(32);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  copy_tile_async<32, 64, 64>(shared, a, 64, 32, 64);
  if (transposed) copy_tile_async<64, 16, 64>(shared_b, b, 16, 64, 16);
  else copy_tile_async<16, 64, 64>(shared_b, b, 64, 16, 64);
  copy_async_commit();
  if (wait) copy_async_wait<0>();
  __syncthreads();
  float acc[2][4] = {};
  for (int k = 0; k < 64; k += 16) {
    uint32_t fa[4], fb[4];
    load_a<64>(fa, shared, 16 * warp, k);
    if (transposed) load_b_transposed<16>(fb, shared_b, k, 0);
    else load_b<64>(fb, shared_b, 0, k);
    mma_m16n8k16<Element>(acc[0], fa, fb[0], fb[1]);
    mma_m16n8k16<Element>(acc[1], fa, fb[2], fb[3]);
  }
  for (int half = 0; half < 2; ++half)
    for (int i = 0; i < 4; ++i)
      out[(16 * warp + lane / 4 + 8 * (i / 2)) * 16 + 8 * half + 2 * (lane % 4) + i % 2] = acc[half][i];
}

struct TensorCoreArguments {
  CUtensorMap a, b, out;
  int form;            // 0 ss, 1 ss with MN-major b, 2 sst (both MN-major), 3 rs
  bool wait;
};

// out (64 x kN, through stmatrix and a TMA store) = a * b over k = 64. Stored as (rows, columns): a is (64, k) or
// (k, 64), b is (kN, k) or (k, kN). A producer warp loads, a warpgroup multiplies.
template <class Element, int kN, int kPanelWidth>
__global__ void tensor_core_kernel(const __grid_constant__ TensorCoreArguments arguments) {
  using namespace hopper;
  using A = Tile<64, kPanelWidth>;
  using BRows = Tile<64, kPanelWidth>;    // (kN, 64)
  using BColumns = Tile<kN, kPanelWidth>; // (64, kN)
  HF_DYNAMIC_SHARED(shared);
  char* const shared_b = shared + A::bytes(64);
  char* const shared_out = shared_b + round_up(max(BRows::bytes(kN), BColumns::bytes(64)), 1024);
  uint64_t* const loaded = reinterpret_cast<uint64_t*>(shared_out + BColumns::bytes(64));
  const bool transposed_b = arguments.form == 1 || arguments.form == 2;
  if (threadIdx.x == 0) {
    mbarrier_init(loaded, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == 4) {
    if (lane == 0) {
      mbarrier_expect_bytes(loaded, A::bytes(64) + (transposed_b ? BColumns::bytes(64) : BRows::bytes(kN)));
      tma_load_5d(shared, &arguments.a, loaded, 0, 0, 0, 0, 0);
      tma_load_5d(shared_b, &arguments.b, loaded, 0, 0, 0, 0, 0);
    }
    return;
  }
  mbarrier_wait(loaded, 0);
  float d[kN / 2];
  uint32_t a_registers[4];
  wgmma_fence();
  for (int k = 0; k < 4; ++k) {
    const uint64_t b = transposed_b ? BColumns::template mn_major<64>(shared_b) + BColumns::row_step(k)
                                    : BRows::k_major(shared_b) + BRows::template k_step<kN>(k);
    const uint64_t a = A::k_major(shared) + A::template k_step<64>(k);
    if (arguments.form == 0) Wgmma<Element, kN, false>::ss(d, a, b, k > 0);
    if (arguments.form == 1) Wgmma<Element, kN, true>::ss(d, a, b, k > 0);
    const uint64_t a_transposed = A::template mn_major<64>(shared) + A::row_step(k);
    if (arguments.form == 2) Wgmma<Element, kN, true>::sst(d, a_transposed, b, k > 0);
    if (arguments.form == 3) {
      for (int i = 0; i < 4; ++i)
        a_registers[i] = *reinterpret_cast<const uint32_t*>(
            shared + A::template chunk_offset<64>(16 * warp + lane / 4 + 8 * (i % 2), 2 * k + i / 2) + 4 * (lane % 4));
      Wgmma<Element, kN, false>::rs(d, a_registers, b, k > 0);
    }
  }
  wgmma_commit();
  if (arguments.wait) wgmma_wait<0>();
  pin(d);
  for (int i = 0; i < kN / 16; ++i)
    store_matrix_x4(hopper::shared_address(shared_out) +
                        BColumns::template chunk_offset<64>(16 * warp + lane % 16, 2 * i + lane / 16),
                    pack<Element>(d[8 * i], d[8 * i + 1]), pack<Element>(d[8 * i + 2], d[8 * i + 3]),
                    pack<Element>(d[8 * i + 4], d[8 * i + 5]), pack<Element>(d[8 * i + 6], d[8 * i + 7]));
  fence_async_shared();
  barrier_sync(1, 128);
  if (threadIdx.x == 0) {
    tma_store_5d(&arguments.out, shared_out, 0, 0, 0, 0, 0);
    bulk_commit();
    bulk_wait<0>();
  }
}

// Warp w of two: lane sums, votes and shuffles; the warps meet at a named barrier. out (2, 32).
__global__ void warp_kernel(int* out) {
  HF_DYNAMIC_SHARED(shared);
  int* const values = reinterpret_cast<int*>(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int sum = lane + 1;
  for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
  values[threadIdx.x] = sum + __shfl_sync(~0u, lane, 5) + __shfl_up_sync(~0u, lane, 1) + __shfl_down_sync(~0u, lane, 1);
  if (lane % 2) values[threadIdx.x] += int(__ballot_sync(0xaaaaaaaau, lane < 4));   // lanes 1 and 3: 10
  __syncwarp();
  hopper::barrier_sync(3, 64);
  out[threadIdx.x] = values[(warp ^ 1) * 32 + lane] + __any_sync(~0u, lane == 7);
}

__global__ void faulty_kernel(int fault) {
  HF_DYNAMIC_SHARED(shared);
  uint64_t* const barrier = reinterpret_cast<uint64_t*>(shared);
  if (threadIdx.x == 0) hopper::mbarrier_init(barrier, 2);
  __syncthreads();
  if (fault == 0 && threadIdx.x == 0) hopper::mbarrier_arrive(barrier);
  if (fault == 0) hopper::mbarrier_wait(barrier, 0);                  // one arrival short
  if (fault == 1) shared[1024 + threadIdx.x] = 1;                     // past the end
  uint32_t r[4];
  if (fault == 2) ldmatrix_x4(r, shared + 1024);
  if (fault == 3 && threadIdx.x < 16) __shfl_sync(~0u, 1, 0);         // half of the lanes never come
}

}  // namespace hf_flash

using namespace hf_flash;
extern "C" {

int run_matmul(float* out, const void* a, const void* b, int half, int transposed, int wait) {
  const auto run = [&](auto kernel, auto* element) {
    using Element = std::remove_pointer_t<decltype(element)>;
    return launch(kernel, 1, 64, 6144, 0, out, static_cast<const Element*>(a), static_cast<const Element*>(b),
                  transposed != 0, wait != 0);
  };
  return half ? run(matmul_kernel<fp16>, (fp16*)nullptr) : run(matmul_kernel<bf16>, (bf16*)nullptr);
}

int run_warp(int* out) { return launch(warp_kernel, 1, 64, 256, 0, out); }
int run_faulty(int fault) { return launch(faulty_kernel, 1, 32, 1024, 0, fault); }
}

// A row-major (rows, columns) matrix as panels of kPanelWidth columns.
template <int kPanelWidth> static int encode(CUtensorMap* map, void* data, int rows, int columns) {
  const cuuint32_t panels = columns / kPanelWidth, ones[5] = {1, 1, 1, 1, 1};
  const cuuint64_t sizes[5] = {kPanelWidth, cuuint64_t(rows), panels, 1, 1};
  const cuuint64_t strides[4] = {2 * cuuint64_t(columns), 2 * kPanelWidth, 16, 16};
  const cuuint32_t box[5] = {kPanelWidth, cuuint32_t(rows), panels, 1, 1};
  return encode_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, data, sizes, strides, box, ones,
                           CU_TENSOR_MAP_INTERLEAVE_NONE,
                           kPanelWidth == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                           : kPanelWidth == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                               : CU_TENSOR_MAP_SWIZZLE_32B,
                           CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

template <int kN, int kPanelWidth> static int tensor_core(void* out, void* a, void* b, int form, int wait) {
  TensorCoreArguments arguments{};
  arguments.form = form;
  arguments.wait = wait != 0;
  const bool transposed_b = form == 1 || form == 2;
  int error = encode<kPanelWidth>(&arguments.a, a, 64, 64);
  if (!error) error = encode<kPanelWidth>(&arguments.b, b, transposed_b ? 64 : kN, transposed_b ? kN : 64);
  if (!error) error = encode<kPanelWidth>(&arguments.out, out, 64, kN);
  return error ? error : launch(tensor_core_kernel<bf16, kN, kPanelWidth>, 1, 160, 64 << 10, 0, arguments);
}

extern "C" int run_tensor_core(void* out, void* a, void* b, int form, int panel_width, int wait) {
  if (panel_width == 64) return tensor_core<128, 64>(out, a, b, form, wait);
  if (panel_width == 32) return tensor_core<96, 32>(out, a, b, form, wait);
  return tensor_core<80, 16>(out, a, b, form, wait);
}
