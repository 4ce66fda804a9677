// Forward attention for Hopper: the producer warpgroup. One warp finds the tiles, a thread each loads keys and queries.
#pragma once
#include "forward.cuh"

namespace hf_flash::hopper {

// Finds the sequence that a tile belongs to. Tiles are numbered sequence by sequence, in classes of falling key count,
// so that what remains for the end is short. Called by a whole warp with rising tiles, it resumes where it stopped.
template <int kTileQ> struct RaggedCursor {
  static constexpr int kClasses = 6;   // class c: keys in (seq_k / 2^(c+1), seq_k / 2^c]; the last has all shorter ones
  int size_class = 0, first_batch = 0, tiles_before = 0;

  // On success batch is set and tile counts from its first one.
  HF_DEVICE bool find(const Params& p, int lane, int& tile, int& batch) {
    HF_NO_UNROLL
    while (size_class < kClasses) {
      int tiles = 0;
      if (first_batch + lane < p.batch) {
        const Sequence s(p, first_batch + lane);
        const bool not_longer = size_class == 0 || s.k_length <= p.seq_k >> size_class;
        const bool not_shorter = size_class == kClasses - 1 || s.k_length > p.seq_k >> (size_class + 1);
        if (not_longer && not_shorter) tiles = ceil_div(s.q_length, kTileQ) * p.heads;
      }
      int end = tiles;                 // inclusive prefix sum over the warp
      HF_UNROLL
      for (int i = 1; i < 32; i *= 2) {
        const int other = __shfl_up_sync(~0u, end, i);
        if (lane >= i) end += other;
      }
      const uint32_t behind = __ballot_sync(~0u, tiles_before + end > tile);
      if (behind != 0) {
        const int owner = __ffs(behind) - 1;
        batch = first_batch + owner;
        tile -= tiles_before + __shfl_sync(~0u, end - tiles, owner);
        return true;
      }
      tiles_before += __shfl_sync(~0u, end, 31);
      first_batch += 32;
      if (first_batch >= p.batch) {
        first_batch = 0;
        ++size_class;
      }
    }
    return false;
  }
};

// Tile number -> query tile and head, among `heads` heads of `query_tiles` tiles each.
struct TilePosition {
  int query_tile, head;
  HF_DEVICE TilePosition(const ForwardArguments& a, int tile, int query_tiles, int heads) {
    if (a.longest_first) {             // within a section of heads; every head's last tile before any other
      const int section = tile / (query_tiles * a.section_heads) * a.section_heads;
      const int section_heads = min(a.section_heads, heads - section);
      tile -= section * query_tiles;
      query_tile = query_tiles - 1 - tile / section_heads;
      head = section + tile % section_heads;
    } else {
      query_tile = tile % query_tiles;
      head = tile / query_tiles;
    }
  }
};

// Fills in which tile of queries comes next. position counts tiles of sequence `batch` if lengths are ragged, else all.
template <class C> HF_DEVICE void describe_work(Work& w, const ForwardArguments& a, int position, int batch) {
  const Params& p = a.p;
  if (a.ragged) {
    const TilePosition at(a, position, ceil_div(Sequence(p, batch).q_length, C::kTileQ), p.heads);
    w.head = at.head;
    w.first_row = at.query_tile * C::kTileQ;
  } else {
    const TilePosition at(a, position, a.query_tiles, p.heads * p.batch);
    batch = at.head / p.heads;
    w.head = at.head % p.heads;
    w.first_row = at.query_tile * C::kTileQ;
  }
  const Sequence s(p, batch);
  w.batch = batch;
  w.kv_head = w.head / (p.heads / p.kv_heads);
  w.q_length = s.q_length;
  w.k_length = s.k_length;
  w.lse_offset = s.lse_base(p, batch, w.head);
  w.q = a.q_rows.sequence(batch, s.q_row, s.q_length);
  w.k = a.k_rows.sequence(batch, s.k_row, s.k_length);
  w.v = a.v_rows.sequence(batch, s.k_row, s.k_length);
  const Mask mask(s.q_length, s.k_length, p.window_left, p.window_right);
  const int last_row = min(w.first_row + C::kTileQ, s.q_length);
  const Range keys = mask.keys(w.first_row, last_row), seen_by_all = mask.keys_seen_by_all(w.first_row, last_row);
  w.key_tiles = {keys.begin / C::kTileK, keys.empty() ? keys.begin / C::kTileK : ceil_div(keys.end, C::kTileK)};
  w.unmasked_tiles = {ceil_div(seen_by_all.begin, C::kTileK), seen_by_all.end / C::kTileK};
}

// Warp 0 of the producer: which tile comes next. It is taken when keys_loaded_soon says that the current tile is nearly
// loaded: early enough to hide the time it takes, late enough that CTAs end together.
template <class C> HF_DEVICE void schedule(const ForwardArguments& a, ForwardShared<C>& s, int lane) {
  const Params& p = a.p;
  const TileCounter counter(a.counter);
  RaggedCursor<C::kTileQ> cursor;
  HF_NO_UNROLL
  for (int tile = blockIdx.x, count = 0;; ++count) {
    if (count > 0) {
      if (lane == 0) mbarrier_wait(&s.keys_loaded_soon, (count & 1) ^ 1);
      tile = counter.next(gridDim.x, lane);
    }
    int position = tile, batch = 0;
    const bool found = tile != kNoTile && (a.ragged ? cursor.find(p, lane, position, batch)
                                                    : position < a.query_tiles * p.heads * p.batch);
    if (lane == 0) {
      mbarrier_wait(&s.work_released[count & 1], (count >> 1 & 1) ^ 1);
      if (found)
        describe_work<C>(s.work[count & 1], a, position, batch);
      else
        s.work[count & 1].first_row = kNoTile;
      mbarrier_arrive(&s.work_arrived[count & 1]);
    }
    if (!found) break;
  }
  if (lane == 0) counter.finish();
}

// One thread of warp 1: loads K and V, from the last key tile to the first, K one step ahead of V.
template <class C> HF_DEVICE void load_keys(const ForwardArguments& a, ForwardShared<C>& s) {
  using Tile = typename C::Tile;
  Ring<C::kStages> k, v;
  HF_NO_UNROLL
  for (int count = 0;; ++count) {
    mbarrier_wait(&s.work_arrived[count & 1], count >> 1 & 1);
    const Work& w = s.work[count & 1];
    if (w.first_row < 0) break;
    const int begin = w.key_tiles.begin, end = w.key_tiles.end;
    HF_NO_UNROLL
    for (int j = end - 1; j >= begin - 1; --j) {
      if (j == min(end - 1, begin)) mbarrier_arrive(&s.keys_loaded_soon);
      if (j >= begin) {
        mbarrier_wait(&s.k_released[k.stage], k.phase ^ 1);
        mbarrier_expect_bytes(&s.k_arrived[k.stage], Tile::bytes(C::kTileK));
        Tile::template load<C::kTileK>(s.k[k.stage], &a.k, &s.k_arrived[k.stage], a.copies, w.k.row + j * C::kTileK,
                                       w.kv_head, w.k.outer);
        k.advance();
      }
      if (j < end - 1) {
        mbarrier_wait(&s.v_released[v.stage], v.phase ^ 1);
        mbarrier_expect_bytes(&s.v_arrived[v.stage], Tile::bytes(C::kTileK));
        Tile::template load<C::kTileK>(s.v[v.stage], &a.v, &s.v_arrived[v.stage], a.copies,
                                       w.v.row + (j + 1) * C::kTileK, w.kv_head, w.v.outer);
        v.advance();
      }
    }
    mbarrier_arrive(&s.work_released[count & 1]);
  }
}

// One thread of warp 2: loads Q, each consumer warpgroup's rows as soon as their buffer is free.
template <class C> HF_DEVICE void load_queries(const ForwardArguments& a, ForwardShared<C>& s) {
  HF_NO_UNROLL
  for (int count = 0;; ++count) {
    mbarrier_wait(&s.work_arrived[count & 1], count >> 1 & 1);
    const Work& w = s.work[count & 1];
    if (w.first_row < 0) break;
    HF_NO_UNROLL
    for (int group = 0; group < C::kConsumers; ++group) {
      mbarrier_wait(&s.q_released[group], (count & 1) ^ 1);
      const int row = w.first_row + group * 64;
      if (row < w.q_length) {
        mbarrier_expect_bytes(&s.q_arrived[group], C::Tile::bytes(64));
        C::Tile::template load<64>(s.q[group], &a.q, &s.q_arrived[group], a.copies, w.q.row + row, w.head, w.q.outer);
      } else {
        mbarrier_arrive(&s.q_arrived[group]);   // no rows: whatever Q holds, nothing of it is stored
      }
    }
    mbarrier_arrive(&s.work_released[count & 1]);
  }
}

}  // namespace hf_flash::hopper
