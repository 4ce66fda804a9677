// Forward attention for Hopper, after FlashAttention-3 (Shah et al., 2024, arXiv 2407.08608): a producer warpgroup
// copies tiles by TMA, consumer warpgroups of 64 query rows each run softmax(Q K^T) V with S and P in registers.
//   q (batch, seq_q, heads, head_dim)   k, v (batch, seq_k, kv_heads, head_dim), or packed by cu_seqlens
//   out like q                          lse (batch, heads, seq_q) or (heads, total_q), fp32
#include "forward_producer.cuh"

namespace hf_flash {
namespace hopper {

// Named barriers, one per consumer warpgroup from each of these on; 0 is __syncthreads.
constexpr int kGroupBarrier = 1, kTurnBarrier = 4;

// A warpgroup's rows of O go out through shared memory: from Q's rows once all four warps are done with them, or from a
// buffer of their own once the previous tile's store has left it.
template <class C>
HF_DEVICE void store_out(const ForwardArguments& a, ForwardShared<C>& s, const Work& w,
                         const float (&out)[C::kHeadDim / 2], const float (&factor)[2], int group, int warp, int lane) {
  using Tile = typename C::Tile;
  const bool leader = threadIdx.x % 128 == 0;
  char* const staged = C::kOutputInQ ? s.q[group] : s.out[group];
  const int store_lane = opaque(lane), store_row = warp % 4 * 16 + store_lane % 16;
  if (!C::kOutputInQ && leader) bulk_wait_read<0>();
  barrier_sync(kGroupBarrier + group, 128);
  HF_UNROLL
  for (int i = 0; i < C::kHeadDim / 16; ++i) {
    uint32_t x[4];
    HF_UNROLL
    for (int e = 0; e < 4; ++e)
      x[e] = pack<typename C::Element>(out[8 * i + 2 * e] * factor[e % 2], out[8 * i + 2 * e + 1] * factor[e % 2]);
    const int offset = Tile::template chunk_offset<64>(store_row, 2 * i + store_lane / 16);
    store_matrix_x4(shared_address(staged) + offset, x[0], x[1], x[2], x[3]);
  }
  fence_async_shared();
  barrier_sync(kGroupBarrier + group, 128);
  if (leader) {
    const int row = w.first_row + group * 64;
    if (row < w.q_length) Tile::template store<64>(&a.out, staged, a.copies, w.q.row + row, w.head, w.q.outer);
    bulk_commit();
    if (C::kOutputInQ) {
      bulk_wait_read<0>();
      mbarrier_arrive(&s.q_released[group]);
    }
  }
}

// A consumer warpgroup: each step issues S = Q K^T of tile j and then O += P V of tile j + 1, so that the softmax of
// tile j runs under the latter.
template <class C> HF_DEVICE void consume(const ForwardArguments& a, ForwardShared<C>& s, int group, int warp) {
  using Element = typename C::Element;
  using Tile = typename C::Tile;
  constexpr int kTileK = C::kTileK, kHeadDim = C::kHeadDim;
  using Scores = float[kTileK / 2];
  constexpr bool kDropout = C::kVariant == Variant::kDropout, kGeneral = kDropout || C::kVariant == Variant::kGeneral;
  constexpr bool kReleaseLate = !C::kOutputInQ && !C::kQueriesInRegisters;
  const Params& p = a.p;
  const int lane = threadIdx.x % 32;
  const bool leader = threadIdx.x % 128 == 0;
  const int tile_row = group * 64 + warp % 4 * 16 + lane / 4, tile_column = 2 * (lane % 4);
  // The general kernel may turn scores into log2 units itself; softmax then has nothing to scale.
  const bool transforms = kGeneral && (p.softcap > 0.f || p.alibi_slopes != nullptr || p.scale <= 0.f);
  const float scale = transforms ? 1.f : p.scale * kLog2e;
  const uint64_t q_descriptor = Tile::k_major(s.q[group]);

  Ring<C::kStages> ring;               // of K and V alike: both have as many tiles
  if (C::kPingPong && group == C::kConsumers - 1) barrier_arrive(kTurnBarrier, 256);   // warpgroup 0 goes first
  HF_NO_UNROLL
  for (int count = 0;; ++count) {
    mbarrier_wait(&s.work_arrived[count & 1], count >> 1 & 1);
    const Work& w = s.work[count & 1];
    if (w.first_row < 0) break;
    const int row = w.first_row + tile_row, begin = w.key_tiles.begin, end = w.key_tiles.end;
    float out[kHeadDim / 2];
    uint32_t probabilities[kTileK / 4], queries[C::kQueriesInRegisters ? kHeadDim / 4 : 1];
    OnlineSoftmax<C::kLazyRescale> softmax;
    HF_UNROLL
    for (int i = 0; i < kHeadDim / 2; ++i) out[i] = 0.f;

    auto multiply_qk = [&](Scores& scores) {
      const uint64_t k_descriptor = Tile::k_major(s.k[ring.stage]);
      wgmma_fence();
      HF_UNROLL
      for (int k = 0; k < kHeadDim / 16; ++k)
        if constexpr (C::kQueriesInRegisters)
          Wgmma<Element, kTileK, false>::rs(scores, queries + 4 * k, k_descriptor + Tile::template k_step<kTileK>(k),
                                            k > 0);
        else
          Wgmma<Element, kTileK, false>::ss(scores, q_descriptor + Tile::template k_step<64>(k),
                                            k_descriptor + Tile::template k_step<kTileK>(k), k > 0);
      wgmma_commit();
    };
    auto multiply_pv = [&](int stage) {
      const uint64_t v_descriptor = Tile::template mn_major<kTileK>(s.v[stage]);
      wgmma_fence();
      HF_UNROLL
      for (int k = 0; k < kTileK / 16; ++k)
        Wgmma<Element, kHeadDim, true>::rs(out, probabilities + 4 * k, v_descriptor + Tile::row_step(k), 1);
      wgmma_commit();
    };
    auto to_probabilities = [&](Scores& scores) {
      HF_UNROLL
      for (int i = 0; i < kTileK / 4; ++i) probabilities[i] = pack<Element>(scores[2 * i], scores[2 * i + 1]);
    };
    // What the scores of key tile j still need before softmax.
    auto prepare = [&](Scores& scores, int j) {
      const int column = j * kTileK + tile_column;
      if constexpr (kGeneral) {
        if (transforms) transform_scores(scores, p, w, row, column);
        if (j < w.unmasked_tiles.begin || j >= w.unmasked_tiles.end) {
          const Mask mask(w.q_length, w.k_length, p.window_left, p.window_right);
          HF_UNROLL
          for (int r = 0; r < 2; ++r) {
            const Range keys = mask.keys(row + 8 * r);
            mask_row(scores, r, keys.begin - column, keys.end - column);
          }
        }
      } else {
        HF_UNROLL
        for (int r = 0; r < 2; ++r) {
          int keys_end = w.k_length - column;
          if (C::kVariant == Variant::kCausal)
            keys_end = min(keys_end, row + 8 * r + 1 + w.k_length - w.q_length - column);
          mask_row_end(scores, r, keys_end);
        }
      }
    };

    const auto release_queries = [&] {
      if (leader) mbarrier_arrive(&s.q_released[group]);
    };
    mbarrier_wait(&s.q_arrived[group], count & 1);
    if constexpr (C::kQueriesInRegisters) {
      HF_UNROLL
      for (int i = 0; i < kHeadDim / 4; ++i)   // fragments of wgmma's A: rows r and r + 8, chunks of 8 columns
        queries[i] = *reinterpret_cast<const uint32_t*>(
            s.q[group] + Tile::template chunk_offset<64>(warp % 4 * 16 + lane / 4 + i % 2 * 8, i / 2) + lane % 4 * 4);
      barrier_sync(kGroupBarrier + group, 128);
      release_queries();
    }
    if (begin < end) {
      int j = end - 1;
      {
        Scores scores;
        mbarrier_wait(&s.k_arrived[ring.stage], ring.phase);
        multiply_qk(scores);
        wgmma_wait<0>();
        pin(scores);
        if (leader) mbarrier_arrive(&s.k_released[ring.stage]);
        prepare(scores, j);
        softmax.template update<true, true>(scores, scale);
        if constexpr (kDropout) drop(scores, p, w, row, j * kTileK + tile_column);
        to_probabilities(scores);
      }
      auto step = [&](int j, auto masked) {
        constexpr bool kMasked = decltype(masked)::value;
        Scores scores;
        const Ring<C::kStages> previous = ring;
        ring.advance();
        if (group == 0 || !C::kPingPong) mbarrier_wait(&s.k_arrived[ring.stage], ring.phase);
        if (C::kPingPong) barrier_sync(kTurnBarrier + group, 256);
        multiply_qk(scores);
        if (C::kRescaleFirst) softmax.rescale(out);
        if (group == 0 || !C::kPingPong) mbarrier_wait(&s.v_arrived[previous.stage], previous.phase);
        multiply_pv(previous.stage);
        if (C::kPingPong) barrier_arrive(kTurnBarrier + (group + 1) % C::kConsumers, 256);
        wgmma_wait<1>();
        pin(scores);
        if (leader) mbarrier_arrive(&s.k_released[ring.stage]);
        if (kMasked) prepare(scores, j);
        softmax.template update<false, kMasked>(scores, scale);
        wgmma_wait<0>();
        pin(out);
        if (leader) mbarrier_arrive(&s.v_released[previous.stage]);
        if constexpr (kDropout) drop(scores, p, w, row, j * kTileK + tile_column);
        to_probabilities(scores);
        if (!C::kRescaleFirst) softmax.rescale(out);
      };
      --j;
      if (C::kVariant != Variant::kFull) {
        const int last_masked = kGeneral ? begin : max(begin, w.unmasked_tiles.end);
        HF_NO_UNROLL
        for (; j >= last_masked; --j) step(j, std::true_type{});
      }
      if (!kGeneral) {
        HF_NO_UNROLL
        for (; j >= begin; --j) step(j, std::false_type{});
      }
      if (kReleaseLate) release_queries();   // the next Q loads under this tile's end
      if (C::kRescaleFirst) softmax.rescale(out);
      mbarrier_wait(&s.v_arrived[ring.stage], ring.phase);
      multiply_pv(ring.stage);
    }

    softmax.finish();
    float factor[2];
    HF_UNROLL
    for (int r = 0; r < 2; ++r) factor[r] = softmax.sum[r] == 0.f ? 0.f : 1.f / softmax.sum[r];
    if (kDropout) {
      factor[0] *= 1.f / (1.f - p.dropout_p);
      factor[1] *= 1.f / (1.f - p.dropout_p);
    }
    wgmma_wait<0>();
    pin(out);
    if (begin < end) {
      if (leader) mbarrier_arrive(&s.v_released[ring.stage]);
      ring.advance();
    } else if (kReleaseLate) {
      release_queries();
    }
    if (p.lse != nullptr && lane % 4 == 0) {
      float* const lse = p.lse + w.lse_offset;
      HF_UNROLL
      for (int r = 0; r < 2; ++r)
        if (row + 8 * r < w.q_length) lse[row + 8 * r] = softmax.lse(r, scale);
    }
    store_out<C>(a, s, w, out, factor, group, warp, lane);
    if (leader) mbarrier_arrive(&s.work_released[count & 1]);
  }
  if (leader) bulk_wait_read<0>();     // shared memory must outlive the last store
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) forward_kernel(const __grid_constant__ ForwardArguments a) {
  HF_DYNAMIC_SHARED(memory);
  ForwardShared<C>& s = *reinterpret_cast<ForwardShared<C>*>(memory);
  // Through a shuffle, so that the compiler knows them to be uniform in a warp.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kConsumers; ++i) {
      mbarrier_init(&s.q_arrived[i], 1);
      mbarrier_init(&s.q_released[i], 1);
    }
    for (int i = 0; i < C::kStages; ++i) {
      mbarrier_init(&s.k_arrived[i], 1);
      mbarrier_init(&s.v_arrived[i], 1);
      mbarrier_init(&s.k_released[i], C::kConsumers);
      mbarrier_init(&s.v_released[i], C::kConsumers);
    }
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(&s.work_arrived[i], 1);
      mbarrier_init(&s.work_released[i], C::kConsumers + 2);   // the warpgroups, load_keys and load_queries
    }
    mbarrier_init(&s.keys_loaded_soon, 1);
    fence_mbarrier_init();
  }
  zero_unowned_output<typename C::Element>(a.p);
  __syncthreads();
  if (group == 0) {
    registers_shrink<C::kProducerRegisters>();
    if (warp == 0) schedule<C>(a, s, threadIdx.x % 32);
    if (threadIdx.x == 32) load_keys<C>(a, s);
    if (threadIdx.x == 64) load_queries<C>(a, s);
  } else {
    registers_grow<C::kConsumerRegisters>();
    consume<C>(a, s, group - 1, warp);
  }
}

// ---- Launchers.

struct ForwardShape {
  int tile_q, tile_k, panel_width;
  bool ping_pong;
};

// 192 rows read K and V less often; 128 waste less of short sequences and leave the general kernel the registers it
// needs. Drawing the dropout mask takes registers from the key tile where O is large.
constexpr ForwardShape forward_shape(int head_dim, Variant variant, bool small_tile) {
  const bool causal = variant == Variant::kCausal, dropout = variant == Variant::kDropout;
  const bool general = dropout || variant == Variant::kGeneral;
  switch (head_dim) {
    case 64: return small_tile || general ? ForwardShape{128, 128, 64, causal} : ForwardShape{192, 128, 64, causal};
    case 80:
      if (small_tile || general) return {128, 128, variant == Variant::kFull ? 32 : 16, false};
      return causal ? ForwardShape{192, 96, 16, false} : ForwardShape{192, 112, 32, false};
    case 96:
      return small_tile || general ? ForwardShape{128, 128, 32, false} : ForwardShape{192, 112, 32, causal};
    case 128: return {128, 128, 64, false};
    case 192: return {128, dropout ? 96 : 112, 64, false};
    default: return {128, dropout ? 48 : 80, 64, false};
  }
}

template <class C> int launch_forward(const Params& p, cudaStream_t stream) {
  using Tile = typename C::Tile;
  using Element = typename C::Element;
  if (!keys_are_addressable(p, p.k) || !keys_are_addressable(p, p.v)) return HF_FLASH_NO_TENSOR_MAP;
  ForwardArguments a;
  a.p = p;
  a.q_rows = query_rows(p);
  a.k_rows = key_rows(p, p.k);
  a.v_rows = key_rows(p, p.v);
  a.copies = copies_per_tile<Tile>(p.head_dim);
  // Without keys K and V may have no address; then nothing reads through their maps.
  const Tensor& k = p.seq_k == 0 ? p.q : p.k;
  const Tensor& v = p.seq_k == 0 ? p.q : p.v;
  for (int error : {make_tensor_map<Element, Tile>(&a.q, p.q, a.q_rows, p.heads, p.head_dim, 64),
                    make_tensor_map<Element, Tile>(&a.out, p.out, a.q_rows, p.heads, p.head_dim, 64),
                    make_tensor_map<Element, Tile>(&a.k, k, a.k_rows, p.kv_heads, p.head_dim, C::kTileK),
                    make_tensor_map<Element, Tile>(&a.v, v, a.v_rows, p.kv_heads, p.head_dim, C::kTileK)})
    if (error) return error;

  a.ragged = p.cu_seqlens_q || p.cu_seqlens_k || p.used_k;
  a.longest_first = p.window_right >= 0;
  a.query_tiles = ceil_div(p.seq_q, C::kTileQ);
  const int64_t key_bytes = int64_t(p.seq_k) * p.head_dim * 4 * p.kv_heads / p.heads;   // K and V, for one query head
  const int64_t all_heads = int64_t(p.heads) * p.batch;
  a.section_heads = 1;
  while (a.section_heads < all_heads && a.section_heads * 2 * key_bytes <= (32 << 20)) a.section_heads *= 2;

  // With packed queries this bounds the number of tiles: each sequence ends with at most one partial tile.
  const int64_t tiles = p.cu_seqlens_q ? (p.total_q / C::kTileQ + p.batch) * p.heads : a.query_tiles * all_heads;
  int64_t ctas = 0;
  if (const int error = share_tiles(tiles, stream, &a.counter, &ctas)) return error;
  return launch(forward_kernel<C>, ctas, C::kThreads, sizeof(ForwardShared<C>), stream, a);
}

// Whether tiles of 128 query rows end sooner than tiles of 192: by the rows in whole waves of tiles and, causal, by the
// keys that the diagonal wastes, at 7 % more time per row.
inline bool small_tile_is_faster(const Params& p, bool causal) {
  const int64_t sequences = int64_t(p.batch) * p.heads, sm_count = device_facts().sm_count;
  const int64_t rows = p.cu_seqlens_q ? p.total_q / (p.batch > 0 ? p.batch : 1) : p.seq_q;
  const auto cost = [&](int64_t tile_q) {
    const int64_t waves = ((rows + tile_q - 1) / tile_q * sequences + sm_count - 1) / sm_count;
    return double(waves * tile_q) * double(causal ? p.seq_k + tile_q : p.seq_k);
  };
  return 1.07 * cost(128) < cost(192);
}

template <class Element, int kHeadDim, Variant kVariant> int launch_variant(const Params& p, cudaStream_t stream) {
  constexpr ForwardShape kShape = forward_shape(kHeadDim, kVariant, false);
  if constexpr (kShape.tile_q > 128) {
    constexpr ForwardShape kSmall = forward_shape(kHeadDim, kVariant, true);
    if (small_tile_is_faster(p, kVariant == Variant::kCausal))
      return launch_forward<ForwardConfig<Element, kHeadDim, kSmall.tile_q, kSmall.tile_k, kSmall.panel_width,
                                          kVariant, kSmall.ping_pong>>(p, stream);
  }
  return launch_forward<ForwardConfig<Element, kHeadDim, kShape.tile_q, kShape.tile_k, kShape.panel_width, kVariant,
                                      kShape.ping_pong>>(p, stream);
}

template <class Element, int kHeadDim> int launch_element(Params p, cudaStream_t stream) {
  // Limits that no sequence can reach are none: one query is never causal.
  if (p.window_left >= p.seq_k - 1) p.window_left = -1;
  if (p.window_right >= p.seq_q - 1) p.window_right = -1;
  if (p.dropout_p > 0.f) return launch_variant<Element, kHeadDim, Variant::kDropout>(p, stream);
  const bool plain = p.softcap == 0.f && !p.alibi_slopes && p.scale > 0.f && p.window_left < 0;
  if (plain && p.window_right < 0) return launch_variant<Element, kHeadDim, Variant::kFull>(p, stream);
  if (plain && p.window_right == 0) return launch_variant<Element, kHeadDim, Variant::kCausal>(p, stream);
  return launch_variant<Element, kHeadDim, Variant::kGeneral>(p, stream);
}

}  // namespace hopper

template <int kHeadDim> int hopper_forward(const Params& p, cudaStream_t stream) {
  return p.dtype == HF_FLASH_BF16 ? hopper::launch_element<bf16, kHeadDim>(p, stream)
                                  : hopper::launch_element<fp16, kHeadDim>(p, stream);
}
template int hopper_forward<HF_FLASH_HEAD_DIM>(const Params&, cudaStream_t);

}  // namespace hf_flash
