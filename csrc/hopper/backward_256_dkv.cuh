// Backward attention for Hopper, head dims 192 and 256, first of two passes: dk and dv. dq has a pass of its own
// (backward_256_dq.cuh), which computes the scores again: 7 products instead of 5, but no fp32 sums through memory,
// and the same bits in every run.
//   q, grad_out (batch, seq_q, heads, head_dim)    k, v, grad_k, grad_v (batch, seq_k, kv_heads, head_dim)
// A block owns 64 keys of one key/value head and loops over tiles of 64 queries, of every query head of the group or of
// a part of it (backward_parts.cuh).
// One warpgroup computes scores, P and dv, the other dp, dS and dk: each keeps one 64 x head_dim sum in registers,
// and P passes from the first to the second through shared memory, in the order of fragments.
#pragma once
#include "backward_256.cuh"

namespace hf_flash::hopper {

// What one block does. Roles read it from shared memory: the few registers of the loading warps could not hold it.
struct DkvWork {
  int kv_head, batch, group, first_head, first_key;
  int first_tile, last_tile;       // of 64 queries
  int k_length, diagonal;
  RowCoordinates q_rows, k_rows;
  int statistics;                  // row of the first head's first 64 queries in the map of that name
  int64_t sums;                    // HeadParts::place
};

template <class Config> struct DkvShared {
  using Element = typename Config::Element;
  static constexpr int kPanels = Config::OperandTile::kPanels;
  Element k[kPanels][64][64], v[kPanels][64][64], q[2][kPanels][64][64], grad_out[2][kPanels][64][64];
  uint4 p[2][4][128];              // [stage][fragment][thread]
  float2 row_values[2][2][32];     // [LSE, delta][stage]
  DkvWork work;
  uint64_t k_arrived, v_arrived, q_arrived[2], q_released[2], grad_out_arrived[2], grad_out_released[2];
};

// Named barriers: one per warpgroup for its epilogue, two per stage of p.
enum { kScoresBarrier = 1, kGradientsBarrier = 2, kProbabilitiesFull = 8, kProbabilitiesFree = 10 };

// Releases a stage on behalf of one warp: each has read its own part of the stage by plain loads too.
HF_DEVICE void arrive_of_warp(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

template <class Config> HF_DEVICE void load_dkv_keys(const WideArguments& a, DkvShared<Config>& s, int which) {
  using T = typename Config::OperandTile;
  const DkvWork& w = s.work;
  uint64_t* const arrived = which ? &s.v_arrived : &s.k_arrived;
  mbarrier_expect_bytes(arrived, T::bytes(64));
  T::template load<64>(which ? static_cast<void*>(s.v) : s.k, which ? &a.v : &a.k, arrived, a.copies,
                       w.k_rows.row + w.first_key, w.kv_head, w.k_rows.outer);
}
// One thread brings q and the LSE (which = 0), another grad_out and delta (1).
template <class Config>
HF_DEVICE void load_dkv_queries(const WideArguments& a, DkvShared<Config>& s, int which) {
  const DkvWork& w = s.work;
  using T = typename Config::OperandTile;
  uint64_t* const arrived = which ? s.grad_out_arrived : s.q_arrived;
  uint64_t* const released = which ? s.grad_out_released : s.q_released;
  const CUtensorMap* const map = which ? &a.grad_out : &a.q;
  char* const tiles = reinterpret_cast<char*>(which ? s.grad_out : s.q);
  constexpr int kRows = Config::kDqRows / 64;      // of the map of statistics, a tile
  int stage = 0, phase = 0;
  HF_NO_UNROLL
  for (int head = 0; head < w.group; ++head) {
    const int statistics = w.statistics + (head * a.queries.tiles + (which ? int(a.queries.all_tiles()) : 0)) * kRows;
    HF_NO_UNROLL
    for (int tile = w.first_tile; tile < w.last_tile; ++tile) {
      mbarrier_wait(&released[stage], phase ^ 1);
      mbarrier_expect_bytes(&arrived[stage], T::bytes(64) + 256);
      T::template load<64>(tiles + stage * T::bytes(64), map, &arrived[stage], a.copies, w.q_rows.row + tile * 64,
                           w.first_head + head, w.q_rows.outer);
      tma_load_5d(s.row_values[which][stage], &a.statistics, &arrived[stage], 0, statistics + tile, 0, 0, 0);
      if (++stage == 2) stage = 0, phase ^= 1;
    }
  }
}

// The sums of one warpgroup of a block that has a part of the heads, to HeadParts' sums of dk or dv.
template <class Config>
HF_DEVICE void store_part(float4* to, const DkvWork& w, const float (&sums)[Config::kHeadDim / 2]) {
  const int thread = threadIdx.x % 128, warp = thread / 32;
  if (w.first_key + warp * 16 < w.k_length)
    HeadParts::store(to + w.sums + warp * (Config::kHeadDim / 8 * 32) + thread % 32, sums);
}

// The loops below issue the last product of a step before the first of the next: the stage that it frees is then
// refilled under the next scores (15 to 20 % of the pass).
template <class Config>
HF_DEVICE void accumulate_dv(const WideArguments& a, DkvShared<Config>& s) {
  const DkvWork& w = s.work;
  using Element = typename Config::Element;
  using T = typename Config::OperandTile;
  constexpr int kHeadDim = Config::kHeadDim;
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0) % 4;
  const int steps = uniform(w.group * (w.last_tile - w.first_tile));
  float dv[kHeadDim / 2];
  uint32_t p_packed[16];
  HF_UNROLL
  for (int i = 0; i < kHeadDim / 2; ++i) dv[i] = 0.f;
  const uint64_t k_rows = T::k_major(s.k);
  const int key = w.first_key + warp * 16 + lane / 4;   // of accumulator rows 0; 8 more: rows 1
  const bool hidden[2] = {key >= w.k_length, key + 8 >= w.k_length};
  int unseen[2];                   // queries before this do not see the key, from this thread's first column
  if (Config::kScores == Scores::kRight)
    HF_UNROLL
    for (int r = 0; r < 2; ++r)
      unseen[r] = first_query_that_sees(key + 8 * r, w.k_length, w.diagonal, a.p.window_right) - 2 * (lane % 4);
  const int first_tile = w.first_tile, last_tile = w.last_tile;
  int tile = first_tile, head = w.first_head;

  const auto multiply_scores = [&](float (&scores)[32], int stage) {
    multiply_rows<Config>(scores, k_rows, T::k_major(s.q[stage]));
  };
  const auto multiply_dv = [&](int stage) {
    add_product<Config>(dv, p_packed, T::template mn_major<64>(s.grad_out[stage]));
  };
  const auto general_weights = [&](float (&scores)[32], int stage) {
    const ScoreTransform<Element, true> transform{
        a.scores, a.p, w.k_length, w.diagonal, w.batch, head, tile * 64 + 2 * (lane % 4), key};
    transform.template weigh<Config::kExponent>(scores, p_packed, transform.dropped(),
                                                [&](int c) { return s.row_values[0][stage][c / 2 + lane % 4]; });
  };
  const auto plain_weights = [&](float (&scores)[32], int stage) {
    HF_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int begin = Config::kScores == Scores::kRight ? unseen[r] - tile * 64 : hidden[r] ? 64 : 0;
      HF_UNROLL
      for (int i = 0; i < 8; ++i) {
        if (8 * i < begin) scores[4 * i + 2 * r] = -INFINITY;
        if (8 * i + 1 < begin) scores[4 * i + 2 * r + 1] = -INFINITY;
      }
    }
    HF_UNROLL
    for (int i = 0; i < 8; ++i) {
      const float2 l = s.row_values[0][stage][4 * i + lane % 4];
      HF_UNROLL
      for (int e = 0; e < 4; ++e)
        scores[4 * i + e] = ex2(fmaf(scores[4 * i + e], a.scores.scale_log2, Config::kExponent - (e & 1 ? l.y : l.x)));
    }
  };
  // From scores to P, here as the operand of dv, there for the other warpgroup.
  const auto hand_over = [&](float (&scores)[32], int stage) {
    if constexpr (Config::kGeneral) general_weights(scores, stage);
    else plain_weights(scores, stage);
    if (++tile == last_tile) tile = first_tile, ++head;
    arrive_of_warp(&s.q_released[stage]);
    if constexpr (!Config::kGeneral)
      HF_UNROLL
      for (int i = 0; i < 16; ++i) p_packed[i] = pack<Element>(scores[2 * i], scores[2 * i + 1]);
    barrier_sync(kProbabilitiesFree + stage, 256);
    HF_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float* const x = scores + 8 * i;
      s.p[stage][i][thread] = make_uint4(pack<fp16>(x[0], x[1]), pack<fp16>(x[2], x[3]), pack<fp16>(x[4], x[5]),
                                         pack<fp16>(x[6], x[7]));
    }
    barrier_arrive(kProbabilitiesFull + stage, 256);
  };

  mbarrier_wait(&s.k_arrived, 0);
  if (steps > 0) {
    {
      float scores[32];
      mbarrier_wait(&s.q_arrived[0], 0);
      multiply_scores(scores, 0);
      wgmma_wait<0>();
      pin(scores);
      hand_over(scores, 0);
    }
    int stage = 0, phase = 0;
    HF_NO_UNROLL
    for (int step = 1; step < steps; ++step) {
      const int previous = stage;
      mbarrier_wait(&s.grad_out_arrived[previous], phase);
      multiply_dv(previous);
      if (++stage == 2) stage = 0, phase ^= 1;
      float scores[32];
      mbarrier_wait(&s.q_arrived[stage], phase);
      multiply_scores(scores, stage);
      wgmma_wait<1>();
      pin(dv);
      arrive_of_warp(&s.grad_out_released[previous]);
      wgmma_wait<0>();
      pin(scores);
      hand_over(scores, stage);
    }
    mbarrier_wait(&s.grad_out_arrived[stage], phase);
    multiply_dv(stage);
    wgmma_wait<0>();
    pin(dv);
    arrive_of_warp(&s.grad_out_released[stage]);
  }
  if (a.parts.sums) {
    if (a.p.grad_v.data) store_part<Config>(a.parts.sums + a.parts.to_dv, w, dv);
    return;
  }
  barrier_sync(kScoresBarrier, 128);   // this warpgroup is done with k, whose place the result takes
  store_sums<Config>(dv, Config::kGeneral ? Config::kUnit * a.scores.keep_scale : Config::kUnit, s.k, &a.grad_v,
                     a.p.grad_v.data != nullptr, a.copies, w.k_rows.row + w.first_key, w.kv_head, w.k_rows.outer,
                     kScoresBarrier);
}

template <class Config> HF_DEVICE void accumulate_dk(const WideArguments& a, DkvShared<Config>& s) {
  const DkvWork& w = s.work;
  using Element = typename Config::Element;
  using T = typename Config::OperandTile;
  constexpr int kHeadDim = Config::kHeadDim;
  constexpr float kUnit = Config::kUnit;
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int steps = uniform(w.group * (w.last_tile - w.first_tile));
  float dk[kHeadDim / 2];
  uint32_t ds_packed[16];
  HF_UNROLL
  for (int i = 0; i < kHeadDim / 2; ++i) dk[i] = 0.f;
  const uint64_t v_rows = T::k_major(s.v);

  const auto multiply_dp = [&](float (&dp)[32], int stage) {
    multiply_rows<Config>(dp, v_rows, T::k_major(s.grad_out[stage]));
  };
  const auto multiply_dk = [&](int stage) {
    add_product<Config>(dk, ds_packed, T::template mn_major<64>(s.q[stage]));
  };
  const auto take_over = [&](float (&dp)[32], int stage) {
    float2 delta[8];
    HF_UNROLL
    for (int i = 0; i < 8; ++i) {
      delta[i] = s.row_values[1][stage][4 * i + lane % 4];
      if (!Config::kGeneral)
        HF_UNROLL
        for (int e = 0; e < 4; ++e)
          dp[4 * i + e] = fmaf(dp[4 * i + e], kUnit, (e & 1 ? delta[i].y : delta[i].x) * -kUnit);
    }
    arrive_of_warp(&s.grad_out_released[stage]);
    barrier_sync(kProbabilitiesFull + stage, 256);
    HF_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint4 packed = s.p[stage][i][thread];
      const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
      HF_UNROLL
      for (int j = 0; j < 4; ++j) {
        const float2 weight = unpack<fp16>(words[j]);
        float* const x = dp + 8 * i + 2 * j;
        if constexpr (Config::kGeneral) {
          const float2 d = delta[2 * i + j / 2];
          x[0] = score_gradient(weight.x, x[0] * a.scores.keep_scale, d.x) * kUnit;
          x[1] = score_gradient(weight.y, x[1] * a.scores.keep_scale, d.y) * kUnit;
        } else {
          x[0] *= weight.x;
          x[1] *= weight.y;
        }
        ds_packed[4 * i + j] = pack<Element>(x[0], x[1]);
      }
    }
    barrier_arrive(kProbabilitiesFree + stage, 256);
  };

  barrier_arrive(kProbabilitiesFree, 256);
  barrier_arrive(kProbabilitiesFree + 1, 256);
  mbarrier_wait(&s.v_arrived, 0);
  if (steps > 0) {
    {
      float dp[32];
      mbarrier_wait(&s.grad_out_arrived[0], 0);
      multiply_dp(dp, 0);
      wgmma_wait<0>();
      pin(dp);
      take_over(dp, 0);
    }
    int stage = 0, phase = 0;
    HF_NO_UNROLL
    for (int step = 1; step < steps; ++step) {
      const int previous = stage;
      mbarrier_wait(&s.q_arrived[previous], phase);
      multiply_dk(previous);
      if (++stage == 2) stage = 0, phase ^= 1;
      float dp[32];
      mbarrier_wait(&s.grad_out_arrived[stage], phase);
      multiply_dp(dp, stage);
      wgmma_wait<1>();
      pin(dk);
      arrive_of_warp(&s.q_released[previous]);
      wgmma_wait<0>();
      pin(dp);
      take_over(dp, stage);
    }
    mbarrier_wait(&s.q_arrived[stage], phase);
    multiply_dk(stage);
    wgmma_wait<0>();
    pin(dk);
    arrive_of_warp(&s.q_released[stage]);
  }
  if (a.parts.sums) {
    if (a.p.grad_k.data) store_part<Config>(a.parts.sums, w, dk);
    return;
  }
  barrier_sync(kGradientsBarrier, 128);   // this warpgroup is done with v, whose place the result takes
  store_sums<Config>(dk, a.p.scale, s.v, &a.grad_k, a.p.grad_k.data != nullptr, a.copies, w.k_rows.row + w.first_key,
                     w.kv_head, w.k_rows.outer, kGradientsBarrier);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) backward_dkv_kernel(const __grid_constant__ WideArguments a) {
  HF_DYNAMIC_SHARED(memory);
  auto& s = *reinterpret_cast<DkvShared<Config>*>(memory);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const TilePlace place = a.keys.place(blockIdx.x);
  const Sequence sequence(a.p, place.batch);
  const Mask mask(sequence.q_length, sequence.k_length, a.p.window_left, a.p.window_right);
  const int first_key = place.tile * Config::kKeys;
  if (first_key >= sequence.k_length) return;
  if (threadIdx.x == 0) {
    const Range queries = mask.queries(first_key, first_key + Config::kKeys);
    DkvWork& w = s.work;
    w.kv_head = place.head / a.parts.parts, w.batch = place.batch, w.first_key = first_key;
    w.first_head = a.parts.first_head(a.p, place.head);
    w.group = a.parts.first_head(a.p, place.head + 1) - w.first_head;
    w.first_tile = queries.empty() ? 0 : queries.begin / 64;
    w.last_tile = queries.empty() ? 0 : ceil_div(queries.end, 64);
    w.k_length = sequence.k_length, w.diagonal = mask.diagonal;
    w.q_rows = a.q_layout.sequence(place.batch, sequence.q_row, sequence.q_length);
    w.k_rows = a.k_layout.sequence(place.batch, sequence.k_row, sequence.k_length);
    w.sums = a.parts.place(a.p, sequence, place.batch, place.head, first_key, Config::kHeadDim);
    w.statistics = int(a.queries.first_tile(place.batch, w.first_head)) * (Config::kDqRows / 64);

    mbarrier_init(&s.k_arrived, 1);
    mbarrier_init(&s.v_arrived, 1);
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(&s.q_arrived[i], 1);
      mbarrier_init(&s.q_released[i], 8);
      mbarrier_init(&s.grad_out_arrived[i], 1);
      mbarrier_init(&s.grad_out_released[i], 8);
    }
    fence_mbarrier_init();
    fence_async_shared();             // and visible to this thread's own copies, which come before the CTA barrier
    load_dkv_keys<Config>(a, s, 0);
    load_dkv_keys<Config>(a, s, 1);
  }
  __syncthreads();

  if (warpgroup == 0) {
    registers_shrink<Config::kProducerRegisters>();
    if (threadIdx.x == 0 || threadIdx.x == 32) load_dkv_queries<Config>(a, s, threadIdx.x / 32);
  } else if (warpgroup == 1) {
    registers_grow<Config::kConsumerRegisters>();
    accumulate_dv<Config>(a, s);
  } else {
    registers_grow<Config::kConsumerRegisters>();
    accumulate_dk<Config>(a, s);
  }
}

}  // namespace hf_flash::hopper
