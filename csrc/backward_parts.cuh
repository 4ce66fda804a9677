// The query heads of one key/value head shared by several blocks of a backward kernel, where one block each would leave
// multiprocessors idle: a large group has few key/value heads, and under a causal mask its first block has twice the
// mean to do. Each block writes its sums of dk and dv in fp32 to a place of its own, in the order of accumulator
// fragments, and a kernel adds these up in order: the same bits in every run, and nothing to clear before.
#pragma once
#include "launch.cuh"
#include "sequence.cuh"

namespace hf_flash {

struct HeadParts {
  int parts;                   // blocks that share a group
  float4* sums;                // NULL: a block writes its gradients itself
  int64_t row_blocks;          // of 16 keys, padded per sequence, of one part
  int64_t to_dv;               // sums: dk (kv_heads, parts, row_blocks, columns / 8, 32 lanes), so much further on dv
  int64_t workspace_bytes;     // what lies before and the sums

  // blocks: of the kernel, one for each group. columns: of its tiles. before: bytes of the workspace that others use.
  static HeadParts make(const Params& p, int64_t blocks, int columns, int64_t before) {
    HeadParts h{choose(p, blocks), nullptr, 0, 0, before};
    const int wanted = (p.grad_k.data != nullptr) + (p.grad_v.data != nullptr);
    if (h.parts == 1 || wanted == 0) return h;
    h.row_blocks = p.cu_seqlens_k ? p.total_k / 16 + p.batch : int64_t(p.batch) * ceil_div(p.seq_k, 16);
    const int64_t gradient = p.kv_heads * h.parts * h.row_blocks * (columns / 8 * 32);
    const int64_t start = (before + 255) / 256 * 256;
    h.sums = reinterpret_cast<float4*>(static_cast<char*>(p.workspace) + start);
    h.to_dv = p.grad_k.data ? gradient : 0;
    h.workspace_bytes = start + wanted * gradient * int64_t(sizeof(float4));
    return h;
  }

  // The first query head of a part. Parts are numbered through all groups: the next one's is where this one ends.
  HF_DEVICE int first_head(const Params& p, int part) const {
    const int group = p.heads / p.kv_heads;
    return part / parts * group + part % parts * group / parts;
  }

  // Where in sums a part's dk of the 16 keys from first_key on lies, a multiple of 16 inside the sequence. Element e of
  // lane l of a fragment of 16 keys and 8 columns is of key l / 4 + 8 (e / 2) and column 2 (l % 4) + e % 2.
  HF_DEVICE int64_t place(const Params& p, const Sequence& sequence, int batch, int part, int first_key,
                          int columns) const {
    const int64_t row_block = p.cu_seqlens_k ? sequence.k_row / 16 + batch : int64_t(batch) * ceil_div(p.seq_k, 16);
    return (part * row_blocks + row_block + first_key / 16) * (columns / 8 * 32);
  }

  // 16 keys of one warp: fragments side by side. to: of this lane.
  template <int kFloats> static HF_DEVICE void store(float4* to, const float (&x)[kFloats]) {
    HF_UNROLL
    for (int i = 0; i < kFloats / 4; ++i) to[32 * i] = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
  }

 private:
  // Blocks alike fill whole waves, but for a tenth. Under a mask two a multiprocessor come out even, the longest first,
  // and more only cost traffic. Packed sequences take turns, each with its own longest first.
  static int choose(const Params& p, int64_t blocks) {
    const int group = p.heads / p.kv_heads, sm_count = device_facts().sm_count;
    const bool alike = p.window_left < 0 && p.window_right < 0 && !p.used_k;
    for (int parts = 1; parts < group; ++parts) {
      const int64_t all = blocks * parts, waves = (all + sm_count - 1) / sm_count;
      const int64_t tenths = p.cu_seqlens_k || waves > 4 ? 38 : alike ? 9 * waves : 19;   // of a wave that are enough
      const bool fair = 10 * parts * ceil_div(group, parts) <= 11 * group;   // the largest part is near the mean
      if (fair && 10 * all >= tenths * sm_count) return parts;
    }
    return group;
  }
};

constexpr int kSumThreads = 128, kSumRows = 32;

// sums -> grad_k, grad_v (batch, seq_k, kv_heads, head_dim), times a factor. One block takes kSumRows rows of one.
template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kSumThreads)
    sum_parts_kernel(const Params p, const HeadParts parts, const float factor_k, const float factor_v) {
  const bool of_v = blockIdx.x % 2;
  const int head = blockIdx.x / 2 % p.kv_heads, batch = blockIdx.x / 2 / p.kv_heads % p.batch;
  const int first = blockIdx.x / 2 / p.kv_heads / p.batch * kSumRows;
  const Tensor& t = of_v ? p.grad_v : p.grad_k;
  const Sequence sequence(p, batch);
  const int rows = p.cu_seqlens_k ? p.cu_seqlens_k[batch + 1] - p.cu_seqlens_k[batch] : p.seq_k;   // used or not
  if (t.data == nullptr || first >= rows) return;
  constexpr int kColumns = kHeadDim / 8;
  const int64_t next_part = parts.row_blocks * (kColumns * 32);
  const float4* const sums =
      parts.sums + parts.place(p, sequence, batch, head * parts.parts, first, kHeadDim) + (of_v ? parts.to_dv : 0);
  const float factor = of_v ? factor_v : factor_k;
  Element* const grad = sequence.k_base<Element>(t, head) + first * t.row_stride;

  for (int i = threadIdx.x; i < kSumRows / 16 * kHeadDim; i += kSumThreads) {
    const int column = i % kColumns, block = i / kHeadDim, row = block * 16 + i / kColumns % 8;
    if (first + row >= rows || column * 8 >= p.head_dim) continue;
    const float4* from = sums + (block * kColumns + column) * 32 + row % 16 * 4;   // four lanes: 8 columns of two rows
    float4 sum[4];
    HF_UNROLL
    for (int j = 0; j < 4; ++j) sum[j] = from[j];
    for (int part = 1; part < parts.parts; ++part) {
      from += next_part;
      HF_UNROLL
      for (int j = 0; j < 4; ++j) {
        const float4 x = from[j];
        sum[j].x += x.x, sum[j].y += x.y, sum[j].z += x.z, sum[j].w += x.w;
      }
    }
    uint32_t packed[2][4];
    HF_UNROLL
    for (int j = 0; j < 4; ++j) {
      packed[0][j] = pack<Element>(factor * sum[j].x, factor * sum[j].y);
      packed[1][j] = pack<Element>(factor * sum[j].z, factor * sum[j].w);
    }
    HF_UNROLL
    for (int half = 0; half < 2; ++half)
      if (first + row + 8 * half < rows)
        *reinterpret_cast<uint4*>(grad + (row + 8 * half) * t.row_stride + column * 8) =
            make_uint4(packed[half][0], packed[half][1], packed[half][2], packed[half][3]);
  }
}

template <class Element, int kHeadDim>
int launch_sum_parts(const Params& p, const HeadParts& parts, float factor_k, float factor_v, cudaStream_t stream) {
  if (parts.sums == nullptr) return cudaSuccess;
  const int64_t blocks = 2 * int64_t(p.batch) * p.kv_heads * ceil_div(p.seq_k, kSumRows);
  return launch(sum_parts_kernel<Element, kHeadDim>, blocks, kSumThreads, 0, stream, p, parts, factor_k, factor_v);
}

}  // namespace hf_flash
