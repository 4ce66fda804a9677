// The query gradient of the backward pass: every block adds its part to an fp32 buffer, which is scaled and converted
// at the end.
//
// The buffer is in the order of mma_m16n8k16's accumulators, so that a warp adds consecutive floats: for each 16 rows,
// for each 8 columns, the 128 floats of a fragment.
#pragma once
#include "backward_statistics.cuh"
#include "ptx.cuh"

namespace hf_flash {

constexpr int kFragmentFloats = 128;

// A lane's four values side by side where one instruction adds them, else one value of all lanes.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kVectorAdd = false;
#else
constexpr bool kVectorAdd = true;
#endif

HF_DEVICE int fragment_index(int lane, int e) { return kVectorAdd ? lane * 4 + e : e * 32 + lane; }

HF_DEVICE void add_fragment(float* fragment, int lane, const float (&x)[4]) {
  if (kVectorAdd) {
    atomic_add_float4(fragment + lane * 4, make_float4(x[0], x[1], x[2], x[3]));
  } else {
    HF_UNROLL
    for (int e = 0; e < 4; ++e) atomicAdd(fragment + fragment_index(lane, e), x[e]);
  }
}

// Deterministic mode: the blocks of a head's keys add to a tile of queries in ascending order. Called by whole blocks.
HF_DEVICE void wait_for_turn(int32_t* semaphore, int turn) {
  if (threadIdx.x == 0) {
    while (atomicAdd(semaphore, 0) != turn) __nanosleep(32);
    __threadfence();
  }
  __syncthreads();
}
HF_DEVICE void pass_turn(int32_t* semaphore) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(semaphore, 1);
}

constexpr int kConvertRows = 64, kConvertThreads = 256;

// dq (heads, rows, kHeadDim) fp32 in the order of fragments -> grad_q (batch, seq_q, heads, head_dim) = scale * dq.
// One block takes kConvertRows rows of a head; a thread the 8 columns of rows r and r + 8 of a fragment.
template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kConvertThreads)
    query_gradient_kernel(const Params p, const BackwardWorkspace workspace) {
  const int head = blockIdx.x % p.heads, batch = blockIdx.x / p.heads % p.batch;
  const int first = blockIdx.x / p.heads / p.batch * kConvertRows;
  const Sequence sequence(p, batch);
  if (first >= sequence.q_length) return;
  const float* const dq = workspace.dq + (workspace.first_row(p, sequence, batch, head) + first) * kHeadDim;
  Element* const grad_q = sequence.q_base<Element>(p.grad_q, head) + first * p.grad_q.row_stride;

  constexpr int kColumns = kHeadDim / 8;
  for (int i = threadIdx.x; i < kConvertRows / 2 * kColumns; i += kConvertThreads) {
    const int column = i % kColumns, row = i / kColumns % 8, block = i / kColumns / 8;
    const int row_of_tile = block * kRowPadding + row;
    if (first + row_of_tile >= sequence.q_length || column * 8 >= p.head_dim) continue;
    const float* const fragment = dq + (block * kColumns + column) * kFragmentFloats;
    float4 loaded[4];   // kVectorAdd: the four values of a lane; else one value of four lanes
    HF_UNROLL
    for (int j = 0; j < 4; ++j)
      loaded[j] = *reinterpret_cast<const float4*>(fragment + (kVectorAdd ? (row * 4 + j) * 4 : j * 32 + row * 4));
    const float* const x = &loaded[0].x;
    HF_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (first + row_of_tile + 8 * half >= sequence.q_length) continue;
      uint32_t packed[4];
      HF_UNROLL
      for (int j = 0; j < 4; ++j)   // lane 4 row + j
        packed[j] = kVectorAdd ? pack<Element>(p.scale * x[j * 4 + 2 * half], p.scale * x[j * 4 + 2 * half + 1])
                               : pack<Element>(p.scale * x[8 * half + j], p.scale * x[8 * half + 4 + j]);
      *reinterpret_cast<uint4*>(grad_q + (row_of_tile + 8 * half) * p.grad_q.row_stride + column * 8) =
          make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }
  }
}

template <int kHeadDim>
int launch_query_gradient(const Params& p, const BackwardWorkspace& workspace, cudaStream_t stream) {
  const int64_t blocks = int64_t(p.batch) * p.heads * ceil_div(p.seq_q, kConvertRows);
  if (p.dtype == HF_FLASH_BF16)
    return launch(query_gradient_kernel<bf16, kHeadDim>, blocks, kConvertThreads, 0, stream, p, workspace);
  return launch(query_gradient_kernel<fp16, kHeadDim>, blocks, kConvertThreads, 0, stream, p, workspace);
}

}  // namespace hf_flash
