// What the backward kernels share on both sides of the launch: how tiles are numbered, where their row statistics
// lie, and the pass that prepares these.
#pragma once
#include "../sequence.cuh"
#include "tensor_map.cuh"

namespace hf_flash::hopper {

struct TilePlace {
  int tile, head, batch;       // tile inside its sequence
};

// A value that is the same in the whole warp, told to the compiler: branches and descriptors that depend on it then
// use uniform registers.
HF_DEVICE int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// Tiles of `rows` rows over all heads and sequences of a tensor, as a one-dimensional grid. Packed sequences:
// sequence b owns the tiles from cu_seqlens[b] / rows + b on, so that no tile spans two sequences, each leaves at
// most one tile idle, and a block finds its sequence without a prefix sum.
struct TileGrid {
  const int32_t* cu_seqlens;   // NULL: dense
  int rows, heads, batch;
  int tiles;                   // of one head: dense, of one sequence; packed, of all of them
  int section;                 // so many heads advance together, tile by tile; 1: head after head

  static TileGrid make(const int32_t* cu_seqlens, int rows, int heads, int batch, int length, int64_t total) {
    return {cu_seqlens, rows, heads, batch, cu_seqlens ? int(total / rows) + batch : ceil_div(length, rows), 1};
  }
  HF_HOST_DEVICE int lanes() const { return cu_seqlens ? heads : heads * batch; }   // rows of tiles
  HF_HOST_DEVICE int64_t all_tiles() const { return int64_t(tiles) * lanes(); }

  // Lets heads share the L2 cache: as many advance together as have `head_bytes` of loop operands within 32 MB. Then
  // the tiles with most work, numbered first, start first over the whole section.
  void interleave(int64_t head_bytes) {
    while (2 * section * head_bytes <= 32 << 20 && section < lanes()) section *= 2;
  }

  HF_DEVICE TilePlace place(unsigned block) const {
    const unsigned per_section = unsigned(tiles) * section, first_lane = block / per_section * section;
    const unsigned inside = block % per_section, width = min(unsigned(section), lanes() - first_lane);
    const int tile = inside / width, lane = first_lane + inside % width;
    if (cu_seqlens == nullptr) return {tile, lane % heads, lane / heads};
    const int sequence = sequence_of(tile);
    return {tile - first_packed(sequence), lane, sequence};
  }
  // Number of the first tile of a sequence, over the whole grid.
  HF_DEVICE int64_t first_tile(int sequence, int head) const {
    return cu_seqlens ? int64_t(head) * tiles + first_packed(sequence) : (int64_t(sequence) * heads + head) * tiles;
  }

 private:
  HF_DEVICE int first_packed(int sequence) const { return cu_seqlens[sequence] / rows + sequence; }
  // The last sequence that starts at or before a tile: a search by the whole warp, 32 candidates a step.
  HF_DEVICE int sequence_of(int tile) const {
    int first = 0, last = batch;
    while (last - first > 1) {
      const int step = ceil_div(last - first, 32), candidate = first + int(threadIdx.x % 32) * step;
      const unsigned before = __ballot_sync(~0u, candidate < last && first_packed(candidate) <= tile);
      first += (31 - __clz(int(before))) * step;
      last = min(last, first + step);
    }
    return uniform(first);
  }
};

// Row statistics of query tiles, each padded to a whole tile; dq in fp32 and, deterministic, two turns per tile
// (backward_dq_sum.cuh).
struct BackwardWorkspace {
  float *lse_log2, *delta, *dq;
  int32_t* turns;

  // dq_floats: a row of dq, 0 where dq is summed in registers.
  static int64_t bytes(const TileGrid& queries, int dq_floats, const Params& p) {
    const int64_t tiles = queries.all_tiles(), rows = tiles * queries.rows;
    return 4 * (2 * rows + (sums_dq(dq_floats, p) ? rows * dq_floats + (p.deterministic ? 2 * tiles : 0) : 0));
  }
  static BackwardWorkspace make(void* memory, const TileGrid& queries, int dq_floats, const Params& p) {
    const int64_t rows = queries.all_tiles() * queries.rows;
    float* const lse_log2 = static_cast<float*>(memory);
    float* const dq = lse_log2 + 2 * rows;
    BackwardWorkspace w{lse_log2, lse_log2 + rows, nullptr, nullptr};
    if (sums_dq(dq_floats, p)) {
      w.dq = dq;
      if (p.deterministic) w.turns = reinterpret_cast<int32_t*>(dq + rows * dq_floats);
    }
    return w;
  }

 private:
  static bool sums_dq(int dq_floats, const Params& p) { return dq_floats > 0 && p.grad_q.data != nullptr; }
};

struct PrepareArguments {
  Params p;
  TileGrid queries;
  BackwardWorkspace workspace;
};

// Prepares the rows of queries: delta = rowsum(grad_out * out) - grad_lse; LSE in units of log2, +inf where a row has
// no keys or does not exist, so that its probabilities are 0; zeros for dq and turns. Also zeroes the gradients of
// rows that belong to no sequence. Bound by memory: a block takes only as many rows as its threads load at once, so
// that many blocks are under way.
template <int kHeadDim> struct PrepareConfig {
  static constexpr int kThreads = 256;
  static constexpr int kLanes = kHeadDim <= 64 ? 8 : kHeadDim <= 128 ? 16 : 32;   // of a row, 8 columns each
  static constexpr int kRows = kThreads / kLanes;                                 // divides every tile of queries
};

template <class Element, int kHeadDim>
__global__ void __launch_bounds__(256, 6) backward_prepare_kernel(const __grid_constant__ PrepareArguments a) {
  using Config = PrepareConfig<kHeadDim>;
  constexpr int kLanes = Config::kLanes, kRows = Config::kRows;
  const Params& p = a.p;
  grid_dependency_release();
  zero_unowned_rows<Element>(p.grad_q, p.cu_seqlens_q, p.batch, p.total_q, p.heads, p.head_dim);
  zero_unowned_rows<Element>(p.grad_k, p.cu_seqlens_k, p.batch, p.total_k, p.kv_heads, p.head_dim);
  zero_unowned_rows<Element>(p.grad_v, p.cu_seqlens_k, p.batch, p.total_k, p.kv_heads, p.head_dim);

  // From the last tile to the first, so that those which the next kernel takes first are in the L2 cache.
  const unsigned parts = a.queries.rows / kRows, block = gridDim.x - 1 - blockIdx.x;
  const TilePlace place = a.queries.place(block / parts);
  const Sequence sequence(p, place.batch);
  if (place.tile * a.queries.rows >= sequence.q_length) return;
  const int inside = block % parts * kRows + threadIdx.x / kLanes, row = place.tile * a.queries.rows + inside;
  const int column = threadIdx.x % kLanes * 8;
  const int64_t tile = a.queries.first_tile(place.batch, place.head) + place.tile;
  const bool exists = row < sequence.q_length;

  uint4 out = make_uint4(0, 0, 0, 0), grad_out = out;
  if (exists && column < p.head_dim) {
    out = *reinterpret_cast<const uint4*>(sequence.q_base<Element>(p.out, place.head) + row * p.out.row_stride +
                                          column);
    grad_out = *reinterpret_cast<const uint4*>(sequence.q_base<Element>(p.grad_out, place.head) +
                                               row * p.grad_out.row_stride + column);
  }
  if (a.workspace.turns && block % parts == 0 && threadIdx.x < 2) a.workspace.turns[2 * tile + threadIdx.x] = 0;
  if (a.workspace.dq) {
    auto* const dq = reinterpret_cast<float4*>(
        a.workspace.dq + (tile * a.queries.rows + block % parts * kRows) * kHeadDim);
    HF_UNROLL
    for (int i = 0; i < ceil_div(kRows * kHeadDim, 4 * Config::kThreads); ++i)
      if (i * Config::kThreads + threadIdx.x < kRows * kHeadDim / 4)
        dq[i * Config::kThreads + threadIdx.x] = make_float4(0, 0, 0, 0);
  }

  const uint32_t x[4] = {out.x, out.y, out.z, out.w}, y[4] = {grad_out.x, grad_out.y, grad_out.z, grad_out.w};
  float sum = 0.f;
  HF_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float2 f = unpack<Element>(x[i]), g = unpack<Element>(y[i]);
    sum += f.x * g.x + f.y * g.y;
  }
  HF_UNROLL
  for (int lane = kLanes / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
  if (column != 0) return;
  const int64_t lse_row = sequence.lse_base(p, place.batch, place.head) + row;
  const float lse = exists ? p.lse[lse_row] : -INFINITY;
  if (exists && p.grad_lse) sum -= p.grad_lse[lse_row];
  a.workspace.lse_log2[tile * a.queries.rows + inside] = lse == -INFINITY ? INFINITY : lse * kLog2e;
  a.workspace.delta[tile * a.queries.rows + inside] = lse == -INFINITY ? 0.f : sum;
}

}  // namespace hf_flash::hopper
