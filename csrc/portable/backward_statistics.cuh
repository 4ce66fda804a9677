// What the backward pass needs of each query row before its main kernel, and where it lies in the workspace.
//
// Rows are padded per sequence to a multiple of kRowPadding, an mma block, so that statistics start aligned and no
// block of the fp32 query gradient holds rows of two sequences. Row r of a head is at first_row() + r.
#pragma once
#include "../launch.cuh"
#include "../sequence.cuh"

namespace hf_flash {

constexpr int kRowPadding = 16;

struct BackwardWorkspace {
  float *lse_log2, *delta;      // (heads, rows): +inf and 0 where a row has no keys or lies past its sequence's end
  int32_t* semaphores;          // (heads, rows / kRowPadding): zero
  float* dq;                    // (heads, rows, columns): zero; NULL where the query gradient is not wanted
  int64_t rows, bytes;

  // columns: fp32 values per row of dq.
  static BackwardWorkspace of(const Params& p, int columns) {
    BackwardWorkspace w;
    w.rows = p.cu_seqlens_q ? (p.total_q / kRowPadding + p.batch) * kRowPadding
                            : int64_t(p.batch) * round_up(p.seq_q, kRowPadding);
    char* next = static_cast<char*>(p.workspace);
    const auto take = [&](int64_t bytes) {
      char* const start = next;
      next += (bytes + 255) / 256 * 256;
      return start;
    };
    const int64_t rows = w.rows * p.heads;
    w.lse_log2 = reinterpret_cast<float*>(take(rows * 4));
    w.delta = reinterpret_cast<float*>(take(rows * 4));
    w.semaphores = reinterpret_cast<int32_t*>(take(rows / kRowPadding * 4));
    w.dq = p.grad_q.data ? reinterpret_cast<float*>(take(rows * columns * 4)) : nullptr;
    w.bytes = next - static_cast<char*>(p.workspace);
    return w;
  }

  // Row 0 of a sequence: packed ones start at most kRowPadding - 1 rows after the end of the one before, padded.
  HF_DEVICE int64_t first_row(const Params& p, const Sequence& sequence, int batch, int head) const {
    const int64_t first = p.cu_seqlens_q ? (sequence.q_row / kRowPadding + batch) * kRowPadding
                                         : int64_t(batch) * round_up(p.seq_q, kRowPadding);
    return head * rows + first;
  }
};

constexpr int kStatisticsRows = 64, kStatisticsThreads = 256;

// out, grad_out (batch, seq_q, heads, head_dim), lse, grad_lse (batch, heads, seq_q)
//   -> lse_log2 = lse / ln 2, delta = rowsum(grad_out * out) - grad_lse; dq and semaphores zeroed;
// and the rows of packed gradients that belong to no sequence zeroed. One block takes kStatisticsRows rows of a head.
template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kStatisticsThreads)
    backward_statistics_kernel(const Params p, const BackwardWorkspace workspace) {
  zero_unowned_rows<Element>(p.grad_q, p.cu_seqlens_q, p.batch, p.total_q, p.heads, p.head_dim);
  zero_unowned_rows<Element>(p.grad_k, p.cu_seqlens_k, p.batch, p.total_k, p.kv_heads, p.head_dim);
  zero_unowned_rows<Element>(p.grad_v, p.cu_seqlens_k, p.batch, p.total_k, p.kv_heads, p.head_dim);

  const int head = blockIdx.x % p.heads, batch = blockIdx.x / p.heads % p.batch;
  const int first = blockIdx.x / p.heads / p.batch * kStatisticsRows;
  const Sequence sequence(p, batch);
  const int end = min(round_up(sequence.q_length, kRowPadding), first + kStatisticsRows);
  if (first >= end) return;
  const int64_t base = workspace.first_row(p, sequence, batch, head);

  if (workspace.dq) {
    float4* const dq = reinterpret_cast<float4*>(workspace.dq + (base + first) * kHeadDim);
    for (int i = threadIdx.x; i < (end - first) * kHeadDim / 4; i += kStatisticsThreads)
      dq[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  for (int row = first + threadIdx.x; row < end; row += kStatisticsThreads)
    if (row % kRowPadding == 0) workspace.semaphores[(base + row) / kRowPadding] = 0;

  // Lanes of a row, 16 bytes each.
  constexpr int kLanes = kHeadDim <= 32 ? 4 : kHeadDim <= 64 ? 8 : kHeadDim <= 128 ? 16 : 32;
  constexpr int kStep = kStatisticsThreads / kLanes;
  const int lane_row = threadIdx.x / kLanes, column = threadIdx.x % kLanes * 8;
  const Element* const out = sequence.q_base<const Element>(p.out, head) + column;
  const Element* const grad_out = sequence.q_base<const Element>(p.grad_out, head) + column;
  const int64_t lse_base = sequence.lse_base(p, batch, head);
  HF_UNROLL
  for (int i = 0; i < kStatisticsRows / kStep; ++i) {
    const int row = first + i * kStep + lane_row;
    float sum = 0.f;
    if (row < sequence.q_length && column < p.head_dim) {
      const uint4 a = *reinterpret_cast<const uint4*>(out + row * p.out.row_stride);
      const uint4 b = *reinterpret_cast<const uint4*>(grad_out + row * p.grad_out.row_stride);
      const uint32_t as[4] = {a.x, a.y, a.z, a.w}, bs[4] = {b.x, b.y, b.z, b.w};
      HF_UNROLL
      for (int j = 0; j < 4; ++j) {
        const float2 x = unpack<Element>(as[j]), y = unpack<Element>(bs[j]);
        sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
      }
    }
    HF_UNROLL
    for (int bits = kLanes / 2; bits > 0; bits /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bits);
    if (column == 0 && row < end) {
      const float lse = row < sequence.q_length ? p.lse[lse_base + row] : -INFINITY;
      const bool empty = lse == -INFINITY;   // of keys
      workspace.lse_log2[base + row] = empty ? INFINITY : lse * kLog2e;
      workspace.delta[base + row] = empty ? 0.f : sum - (p.grad_lse ? p.grad_lse[lse_base + row] : 0.f);
    }
  }
}

// Runs at least one block wherever there is a row to zero.
template <int kHeadDim>
int launch_backward_statistics(const Params& p, const BackwardWorkspace& workspace, cudaStream_t stream) {
  const int tiles = ceil_div(round_up(p.seq_q, kRowPadding), kStatisticsRows);
  const int64_t blocks = int64_t(p.batch) * p.heads * (tiles > 0 ? tiles : 1);
  if (p.dtype == HF_FLASH_BF16)
    return launch(backward_statistics_kernel<bf16, kHeadDim>, blocks, kStatisticsThreads, 0, stream, p, workspace);
  return launch(backward_statistics_kernel<fp16, kHeadDim>, blocks, kStatisticsThreads, 0, stream, p, workspace);
}

}  // namespace hf_flash
