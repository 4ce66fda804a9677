// How a decode step is divided over blocks, and the kernel that combines the outputs of its splits.
#pragma once
#include "../softmax.cuh"
#include "cache.cuh"

namespace hf_flash {

struct DecodeSchedule {
  int rows, row_tiles, splits;   // rows of one tile; tiles of a kv head; splits that may be needed
  float *partial_out, *partial_lse;   // (batch, heads, seq_q, splits, head_dim) and (batch, heads, seq_q, splits), log2

  DecodeSchedule(const Params& p, int head_dim_tile) {
    const int all_rows = p.seq_q * (p.heads / p.kv_heads);
    rows = all_rows <= 16 || head_dim_tile > 128 ? 16 : 32;
    row_tiles = ceil_div(all_rows, rows);
    int64_t keys = p.seq_k;
    if (p.window_left >= 0 && p.window_right >= 0) {
      const int64_t visible = int64_t(p.window_left) + p.window_right + p.seq_q;
      keys = visible < keys ? visible : keys;
    }
    splits = Splits::most(int(keys), p.num_splits);
    partial_out = static_cast<float*>(p.workspace);
    partial_lse = partial_out + partial_rows(p) * p.head_dim;
  }
  int64_t partial_rows(const Params& p) const { return splits > 1 ? int64_t(p.batch) * p.heads * p.seq_q * splits : 0; }
  int64_t workspace_bytes(const Params& p) const { return partial_rows(p) * (p.head_dim + 1) * int64_t(sizeof(float)); }
  int64_t blocks(const Params& p) const { return int64_t(row_tiles) * p.kv_heads * p.batch * splits; }

  HF_DEVICE int64_t partial_row(const Params& p, int batch, int head, int query) const {
    return ((int64_t(batch) * p.heads + head) * p.seq_q + query) * splits;
  }
};

// One tile of rows: row r is query r / group of head kv_head * group + r % group.
struct RowTile {
  int group, first, last;

  HF_DEVICE RowTile(const Params& p, const DecodeSchedule& schedule, int q_length, int tile)
      : group(p.heads / p.kv_heads), first(tile * schedule.rows), last(min(first + schedule.rows, q_length * group)) {}
  HF_DEVICE int first_query() const { return first / group; }
  HF_DEVICE int last_query() const { return (last - 1) / group + 1; }
};

// One block per row of the output: (batch, heads, seq_q). Groups of kHeadDim / 4 threads each add every kParts-th
// split.
template <class Element, int kHeadDim>
__global__ void __launch_bounds__(128) decode_combine_kernel(const Params p, const DecodeSchedule schedule) {
  constexpr int kColumnThreads = kHeadDim / 4, kParts = 128 / kColumnThreads;
  HF_DYNAMIC_SHARED(shared);
  const int query = blockIdx.x % p.seq_q, head = blockIdx.x / p.seq_q % p.heads, batch = blockIdx.x / p.seq_q / p.heads;
  const Sequence sequence = decode_sequence(p, batch);
  const int group = p.heads / p.kv_heads;
  const RowTile tile(p, schedule, sequence.q_length, (query * group + head % group) / schedule.rows);
  const Mask mask(sequence.q_length, sequence.k_length, p.window_left, p.window_right);
  const int count = Splits(mask.keys(tile.first_query(), tile.last_query()), p.num_splits).count;
  if (count == 1) return;   // written already

  const int64_t first = schedule.partial_row(p, batch, head, query);
  const float* const lse = schedule.partial_lse + first;
  float maximum = kNegativeInfinity, sum = 0.f;
  for (int split = threadIdx.x % 32; split < count; split += 32) maximum = fmaxf(maximum, lse[split]);
  HF_UNROLL
  for (int i = 16; i; i /= 2) maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, i));
  if (maximum == kNegativeInfinity) maximum = 0.f;
  for (int split = threadIdx.x % 32; split < count; split += 32) sum += exp2_approx(lse[split] - maximum);
  HF_UNROLL
  for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);

  const int column = threadIdx.x % kColumnThreads * 4, part = threadIdx.x / kColumnThreads;
  float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
  if (part < kParts && column < p.head_dim) {
#pragma unroll 4
    for (int split = part; split < count; split += kParts) {
      const float weight = exp2_approx(lse[split] - maximum);
      const float4 y =
          *reinterpret_cast<const float4*>(schedule.partial_out + (first + split) * p.head_dim + column);
      x = make_float4(fmaf(weight, y.x, x.x), fmaf(weight, y.y, x.y), fmaf(weight, y.z, x.z), fmaf(weight, y.w, x.w));
    }
  }
  float4* const parts = reinterpret_cast<float4*>(shared);   // (128)
  parts[threadIdx.x] = x;
  __syncthreads();
  if (part > 0 || column >= p.head_dim) return;
  HF_UNROLL
  for (int other = 1; other < kParts; ++other) {
    const float4 y = parts[other * kColumnThreads + threadIdx.x];
    x = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
  }
  const float inverse = sum == 0.f ? 0.f : 1.f / sum;
  *reinterpret_cast<uint2*>(sequence.q_base<Element>(p.out, head) + query * p.out.row_stride + column) =
      make_uint2(pack<Element>(x.x * inverse, x.y * inverse), pack<Element>(x.z * inverse, x.w * inverse));
  if (column == 0 && p.lse)
    p.lse[sequence.lse_base(p, batch, head) + query] = sum == 0.f ? kNegativeInfinity : (log2f(sum) + maximum) * kLn2;
}

}  // namespace hf_flash
