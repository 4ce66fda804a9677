// How a decode step is divided over blocks, and how the outputs of its splits are combined.
#pragma once
#include "../launch.cuh"
#include "../launch_counters.cuh"
#include "../softmax.cuh"
#include "cache.cuh"

namespace hf_flash {

// Of every tile of rows: how many of its runs of splits are done.
using ArrivalCounters = LaunchCounters<64, 2048, 1 << 18>;
static __device__ int32_t arrivals[ArrivalCounters::kCount];

// Blocks come and go at the price of a pipeline that fills and drains, so each takes a run of consecutive splits where
// there are many. Runs change who computes a split, never what is computed: results do not depend on them.
struct DecodeSchedule {
  int rows, row_tiles, splits;   // rows of one tile; tiles of a kv head; splits that may be needed
  int runs;                      // blocks of a tile
  int keys;                      // the most that a row may see
  float *partial_out, *partial_lse;   // (batch, heads, seq_q, splits, head_dim) and (batch, heads, seq_q, splits), log2
  int32_t* own_arrivals;              // (batch, kv_heads, row_tiles), for a launch that gets no counters
  int first_arrivals = ArrivalCounters::kNone;

  DecodeSchedule(const Params& p, int head_dim_tile) {
    const int all_rows = p.seq_q * (p.heads / p.kv_heads);
    rows = all_rows <= 16 || head_dim_tile > 128 ? 16 : 32;
    row_tiles = ceil_div(all_rows, rows);
    keys = p.seq_k;
    if (p.window_left >= 0 && p.window_right >= 0) {
      const int64_t visible = int64_t(p.window_left) + p.window_right + p.seq_q;
      keys = visible < keys ? int(visible) : keys;
    }
    splits = Splits::most(keys, p.num_splits);
    runs = splits;
    partial_out = static_cast<float*>(p.workspace);
    partial_lse = partial_out + partial_rows(p) * p.head_dim;
    own_arrivals = reinterpret_cast<int32_t*>(partial_lse + partial_rows(p));
  }
  int64_t tiles(const Params& p) const { return int64_t(row_tiles) * p.kv_heads * p.batch; }
  int64_t partial_rows(const Params& p) const { return splits > 1 ? int64_t(p.batch) * p.heads * p.seq_q * splits : 0; }
  int64_t workspace_bytes(const Params& p) const {
    return splits > 1 ? (partial_rows(p) * (p.head_dim + 1) + tiles(p)) * int64_t(sizeof(float)) : 0;
  }
  int64_t blocks(const Params& p) const { return tiles(p) * runs; }

  // As few as leave the GPU nearly two waves of blocks (the second evens out what the first takes longer in some
  // places) and the last wave half of its blocks: fewer keep too little in flight. Of a long sequence among short ones,
  // whose lengths the host does not know, no block gets more than kMostKeys. per_sm: blocks a multiprocessor holds.
  void choose_runs(const Params& p, int per_sm) {
    constexpr int kMostKeys = 4096;
    const int64_t slots = int64_t(device_facts().sm_count) * max(per_sm, 1);
    for (int fewer = splits; fewer > 1;) {
      fewer = ceil_div(fewer, 2);
      const int64_t all = tiles(p) * fewer, last = (all - 1) % slots + 1;
      if (8 * all < 15 * slots || int64_t(fewer) * kMostKeys < keys) return;
      if (2 * last >= slots || all >= 8 * slots) runs = fewer;
    }
  }
  // Splits of one run of a tile that has `count`: a power of two, the least for which the blocks suffice.
  HF_DEVICE int run_length(int count) const {
    int length = 1;
    while (ceil_div(count, length) > runs) length *= 2;
    return length;
  }

  int choose_arrivals(const Params& p, cudaStream_t stream) {
    if (splits == 1) return cudaSuccess;
    const int error = choose_counters<ArrivalCounters>(stream, int(tiles(p)), &first_arrivals);
    if (error || first_arrivals != ArrivalCounters::kNone) return error;
    return cudaMemsetAsync(own_arrivals, 0, tiles(p) * sizeof(int32_t), stream);
  }
  HF_DEVICE int32_t* arrivals_of(int tile) const {
    return (first_arrivals == ArrivalCounters::kNone ? own_arrivals : arrivals + first_arrivals) + tile;
  }

  HF_DEVICE int64_t partial_row(const Params& p, int batch, int head, int query) const {
    return ((int64_t(batch) * p.heads + head) * p.seq_q + query) * splits;
  }
};

// What one block computes. Tiles and heads that read neighbouring memory run together; runs that short sequences lack
// come last.
struct DecodeWork {
  int row_tile, kv_head, batch, run, tile;   // tile: (batch, kv_heads, row_tiles)

  HF_DEVICE DecodeWork(const Params& p, const DecodeSchedule& schedule, int block) {
    row_tile = block % schedule.row_tiles;
    kv_head = block / schedule.row_tiles % p.kv_heads;
    batch = block / schedule.row_tiles / p.kv_heads % p.batch;
    run = block / schedule.row_tiles / p.kv_heads / p.batch;
    tile = (batch * p.kv_heads + kv_head) * schedule.row_tiles + row_tile;
  }
};

// One tile of rows: row r is query r / group of head kv_head * group + r % group.
struct RowTile {
  int group, first, last;

  HF_DEVICE RowTile(const Params& p, const DecodeSchedule& schedule, int q_length, int tile)
      : group(p.heads / p.kv_heads), first(tile * schedule.rows), last(min(first + schedule.rows, q_length * group)) {}
  HF_DEVICE int query(int row) const { return (first + row) / group; }   // row: of the tile
  HF_DEVICE int head(int row, int kv_head) const { return kv_head * group + (first + row) % group; }
  HF_DEVICE int first_query() const { return first / group; }
  HF_DEVICE int last_query() const { return (last - 1) / group + 1; }
};

// Whether this block is the last of `count` to come here: then what the others wrote before is visible, and the counter
// is zero again. Every thread calls it; flag: an int of shared memory that nobody else uses meanwhile.
HF_DEVICE bool is_last_arrival(int32_t* counter, int count, int* flag) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) *flag = atomicAdd(counter, 1) == count - 1;
  __syncthreads();
  if (!*flag) return false;
  if (threadIdx.x == 0) *counter = 0;
  __threadfence();
  return true;
}

// Combines the splits' outputs of one tile of rows. A thread takes 4 columns of a row, over every kParts-th split where
// rows are few; splits are read kBatch at a time, since each read is a trip to the L2 cache. The order of additions
// follows from the tile and the count alone. shared: kThreads * 32 bytes, on 16.
template <class Element, int kHeadDim, int kThreads>
HF_DEVICE void combine_splits(const Params& p, const DecodeSchedule& schedule, const DecodeWork& work,
                              const RowTile& tile, int count, char* shared) {
  constexpr int kColumnThreads = kHeadDim / 4, kBatch = 16;
  const Sequence queries(p, work.batch);
  const int items = (tile.last - tile.first) * kColumnThreads, parts = max(1, kThreads / items);
  float4* const outs = reinterpret_cast<float4*>(shared);                       // (kThreads)
  float2* const weights = reinterpret_cast<float2*>(shared + kThreads * 16);    // (kThreads): maximum, sum
  for (int first_item = 0; first_item < items; first_item += kThreads) {
    const int item = first_item + threadIdx.x % min(items, kThreads), part = threadIdx.x / min(items, kThreads);
    const int row = item / kColumnThreads, column = item % kColumnThreads * 4;
    const int query = tile.query(row), head = tile.head(row, work.kv_head);
    const int64_t first = schedule.partial_row(p, work.batch, head, query);
    const bool mine = item < items && part < parts && column < p.head_dim;

    float maximum = -3e38f, sum = 0.f;   // finite: a split without keys weighs exp2(-inf) = 0
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
    const auto add = [&](float weight, float other_sum, const float4& y) {
      sum = fmaf(weight, other_sum, sum);
      x = make_float4(fmaf(weight, y.x, x.x), fmaf(weight, y.y, x.y), fmaf(weight, y.z, x.z), fmaf(weight, y.w, x.w));
    };
    const auto raise = [&](float to) {
      const float factor = exp2_approx(maximum - to);
      maximum = to;
      sum *= factor;
      x = make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
    };
    for (int split = part; mine && split < count; split += kBatch * parts) {
      float lse[kBatch], highest = maximum;
      float4 y[kBatch];
      HF_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        const int64_t from = first + split + i * parts;
        const bool exists = split + i * parts < count;
        lse[i] = exists ? __ldcg(schedule.partial_lse + from) : kNegativeInfinity;
        y[i] = exists ? __ldcg(reinterpret_cast<const float4*>(schedule.partial_out + from * p.head_dim + column))
                      : make_float4(0.f, 0.f, 0.f, 0.f);
      }
      HF_UNROLL
      for (int i = 0; i < kBatch; ++i) highest = fmaxf(highest, lse[i]);
      raise(highest);
      HF_UNROLL
      for (int i = 0; i < kBatch; ++i) add(exp2_approx(lse[i] - maximum), 1.f, y[i]);
    }
    if (parts > 1) {
      outs[threadIdx.x] = x;
      weights[threadIdx.x] = make_float2(maximum, sum);
      __syncthreads();
      for (int other = 1; mine && part == 0 && other < parts; ++other) {
        const float2 theirs = weights[other * items + threadIdx.x];
        raise(fmaxf(maximum, theirs.x));
        add(exp2_approx(theirs.x - maximum), theirs.y, outs[other * items + threadIdx.x]);
      }
    }
    if (!mine || part > 0) continue;
    const float inverse = sum == 0.f ? 0.f : 1.f / sum;
    *reinterpret_cast<uint2*>(queries.q_base<Element>(p.out, head) + query * p.out.row_stride + column) =
        make_uint2(pack<Element>(x.x * inverse, x.y * inverse), pack<Element>(x.z * inverse, x.w * inverse));
    if (column == 0 && p.lse)
      p.lse[queries.lse_base(p, work.batch, head) + query] =
          sum == 0.f ? kNegativeInfinity : (log2f(sum) + maximum) * kLn2;
  }
}

}  // namespace hf_flash
