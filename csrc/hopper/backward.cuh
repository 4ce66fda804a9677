// Backward attention for Hopper, head dims up to 128. A block owns 128 keys of one key/value head (two consumer
// warpgroups, 64 each), loops over the queries that see them, of every query head of the group or of a part of it
// (backward_parts.cuh), and keeps dk and dv in registers.
//   q, out, grad_out, grad_q (batch, seq_q, heads, head_dim)    k, v, grad_k, grad_v (batch, seq_k, kv_heads, head_dim)
// Scores and dp are computed transposed (rows are keys), so that P and dS are in registers the A operands of dv and
// dk. dS also goes to shared memory for dq, which is added to an fp32 buffer in global memory in the order of
// fragments.
#pragma once
#include "backward_producer.cuh"

namespace hf_flash::hopper {

// One tile of keys. tiles_done counts tiles of queries from the first tile of keys on.
template <class Config>
HF_DEVICE void consume(const BackwardArguments& a, const BackwardWork& w, BackwardShared<Config>& s, int warpgroup,
                       int parity, int& tiles_done) {
  using Element = typename Config::Element;
  using T = typename Config::OperandTile;
  using ScoreTile = Tile<Config::kKeys, 64>;
  using Split = DqSplit<Config>;
  constexpr int kHeadDim = Config::kHeadDim, kQueries = Config::kQueries, kKeys = Config::kKeys;
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0) % 4;
  const bool leader = thread == 0;
  float dk[kHeadDim / 2], dv[kHeadDim / 2];
  HF_UNROLL
  for (int i = 0; i < kHeadDim / 2; ++i) dk[i] = dv[i] = 0.f;

  const uint64_t k_rows = T::k_major(&s.k[0][warpgroup * 64][0]), v_rows = T::k_major(&s.v[0][warpgroup * 64][0]);
  const int key = w.first_key + warpgroup * 64 + warp * 16 + lane / 4;   // of accumulator rows 0; 8 more: rows 1
  const bool hidden[2] = {key >= w.k_length, key + 8 >= w.k_length};
  int unseen[2];                            // queries before this do not see the key, from this thread's first column
  if (Config::kScores == Scores::kRight)
    HF_UNROLL
    for (int r = 0; r < 2; ++r)
      unseen[r] = first_query_that_sees(key + 8 * r, w.k_length, w.k_length - w.q_length, a.scores.right) -
                  2 * (lane % 4);
  const int last_tile = uniform(w.last_tile);
  mbarrier_wait(&s.kv_arrived, parity);
  mbarrier_wait(&s.results_stored, parity ^ 1);   // of the tile before: dS and dq take their place
  HF_NO_UNROLL
  for (int head = 0; head < w.group; ++head) {
    HF_NO_UNROLL
    for (int tile = uniform(w.first_tile); tile < last_tile; ++tile, ++tiles_done) {
      const int stage = tiles_done & 1, phase = tiles_done >> 1 & 1;
      float scores[kQueries / 2], dp[kQueries / 2];
      const uint64_t q_rows = T::k_major(s.q[stage]), grad_out_rows = T::k_major(s.grad_out[stage]);
      mbarrier_wait(&s.q_arrived[stage], phase);
      wgmma_fence();
      HF_UNROLL
      for (int k = 0; k < kHeadDim / 16; ++k)
        Wgmma<Element, kQueries, false>::ss(scores, k_rows + T::template k_step<kKeys>(k),
                                            q_rows + T::template k_step<kQueries>(k), k > 0);
      wgmma_commit();
      mbarrier_wait(&s.grad_out_arrived[stage], phase);
      wgmma_fence();
      HF_UNROLL
      for (int k = 0; k < kHeadDim / 16; ++k)
        Wgmma<Element, kQueries, false>::ss(dp, v_rows + T::template k_step<kKeys>(k),
                                            grad_out_rows + T::template k_step<kQueries>(k), k > 0);
      wgmma_commit();
      const int query = tile * kQueries + 2 * (lane % 4);
      uint32_t dropped = 0;
      const ScoreTransform<Element, true> transform{
          a.scores, a.p, w.k_length, w.k_length - w.q_length, w.batch, w.first_head + head, query, key};
      if constexpr (Config::kGeneral) dropped = transform.dropped();
      wgmma_wait<1>();
      pin(scores);

      uint32_t p_packed[kQueries / 4], ds_packed[kQueries / 4];
      const float* const lse = s.lse[stage] + 2 * (lane % 4);
      const float* const delta = s.delta[stage] + 2 * (lane % 4);
      if constexpr (Config::kGeneral) {
        transform.template weigh<0>(scores, p_packed, dropped,
                                    [&](int c) { return *reinterpret_cast<const float2*>(lse + c); });
      } else {
        // Masking every tile measures faster than separate loops with and without masks, and than no masks at all.
        HF_UNROLL
        for (int r = 0; r < 2; ++r) {
          const int begin = Config::kScores == Scores::kRight ? unseen[r] - tile * kQueries : hidden[r] ? kQueries : 0;
          HF_UNROLL
          for (int i = 0; i < kQueries / 8; ++i) {
            if (8 * i < begin) scores[4 * i + 2 * r] = -INFINITY;
            if (8 * i + 1 < begin) scores[4 * i + 2 * r + 1] = -INFINITY;
          }
        }
        HF_UNROLL
        for (int i = 0; i < kQueries / 8; ++i) {
          const float2 l = *reinterpret_cast<const float2*>(lse + 8 * i);
          HF_UNROLL
          for (int e = 0; e < 4; ++e) {
            float& x = scores[4 * i + e];
            x = ex2(fmaf(x, a.scores.scale_log2, -(e & 1 ? l.y : l.x)));
          }
        }
        if (!Config::kPackLate)
          HF_UNROLL
          for (int i = 0; i < kQueries / 4; ++i) p_packed[i] = pack<Element>(scores[2 * i], scores[2 * i + 1]);
      }
      wgmma_wait<0>();
      pin(dp);
      HF_UNROLL
      for (int i = 0; i < kQueries / 8; ++i) {
        const float2 d = *reinterpret_cast<const float2*>(delta + 8 * i);
        HF_UNROLL
        for (int e = 0; e < 4; ++e) {
          const float delta_e = e & 1 ? d.y : d.x;
          if (Config::kGeneral)
            dp[4 * i + e] = score_gradient(scores[4 * i + e], dp[4 * i + e] * a.scores.keep_scale, delta_e);
          else
            dp[4 * i + e] = scores[4 * i + e] * (dp[4 * i + e] - delta_e);
        }
        if (Config::kPackLate)
          HF_UNROLL
          for (int e = 0; e < 2; ++e) {
            p_packed[2 * i + e] = pack<Element>(scores[4 * i + 2 * e], scores[4 * i + 2 * e + 1]);
            ds_packed[2 * i + e] = pack<Element>(dp[4 * i + 2 * e], dp[4 * i + 2 * e + 1]);
          }
      }
      if (!Config::kPackLate)
        HF_UNROLL
        for (int i = 0; i < kQueries / 4; ++i) ds_packed[i] = pack<Element>(dp[2 * i], dp[2 * i + 1]);

      HF_UNROLL
      for (int i = 0; i < kQueries / 16; ++i) {   // fragments of dS^T -> ds[query][key], 16 keys a warp
        const int row = 16 * i + lane / 16 * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
        store_matrix_x4_trans(shared_address(&s.ds[stage][warpgroup][0][0]) + row * 128 + (chunk ^ (row & 7)) * 16,
                              ds_packed[4 * i], ds_packed[4 * i + 1], ds_packed[4 * i + 2], ds_packed[4 * i + 3]);
      }
      wgmma_fence();
      HF_UNROLL
      for (int k = 0; k < kQueries / 16; ++k)
        Wgmma<Element, kHeadDim, true>::rs(dv, p_packed + 4 * k,
                                           T::template mn_major<kQueries>(s.grad_out[stage]) + T::row_step(k), 1);
      wgmma_commit();
      fence_async_shared();
      barrier_sync(kConsumersBarrier, 256);   // both halves of dS are there

      float dq[4 * Split::kVectors];
      const auto ds_rows = [&](int first, int k) {
        return ScoreTile::k_major(&s.ds[stage][0][first][0]) + ScoreTile::template k_step<kQueries>(k);
      };
      const int part = Config::kGeneral ? opaque(warpgroup) : warpgroup;   // fewer registers between tiles
      const uint64_t k_columns = T::template mn_major<kKeys>(s.k[Split::first_panel(part)]);
      wgmma_fence();
      HF_UNROLL
      for (int k = 0; k < kKeys / 16; ++k) {
        if constexpr (Split::kTransposed)
          Wgmma<Element, kQueries, false>::sst(dq, k_columns + T::row_step(k), ds_rows(0, k), k > 0);
        else if constexpr (Split::kByColumns)
          Wgmma<Element, Split::kColumns, true>::ss(dq, ds_rows(0, k), k_columns + T::row_step(k), k > 0);
        else
          Wgmma<Element, kHeadDim, true>::ss(dq, ds_rows(warpgroup * 64, k), k_columns + T::row_step(k), k > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();
      pin(dv);
      if (leader) mbarrier_arrive(&s.grad_out_released[stage]);
      wgmma_fence();
      HF_UNROLL
      for (int k = 0; k < kQueries / 16; ++k)
        Wgmma<Element, kHeadDim, true>::rs(dk, ds_packed + 4 * k,
                                           T::template mn_major<kQueries>(s.q[stage]) + T::row_step(k), 1);
      wgmma_commit();
      wgmma_wait<1>();
      pin(dq);
      barrier_sync(kDqFreeBarrier + warpgroup, 160);
      HF_UNROLL
      for (int i = 0; i < Split::kVectors; ++i)
        if (Split::owns(warpgroup, thread, i))
          *reinterpret_cast<float4*>(s.dq + Split::offset(warpgroup, thread, i)) =
              make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
      fence_async_shared();
      barrier_arrive(kDqFullBarrier + warpgroup, 160);
      wgmma_wait<0>();
      pin(dk);
      if (leader) mbarrier_arrive(&s.q_released[stage]);
    }
  }

  barrier_sync(kDqFreeBarrier + warpgroup, 160);
  barrier_sync(kConsumersBarrier, 256);     // the block is done with k, v, dS and dq
  if (leader && warpgroup == 0) mbarrier_arrive(&s.kv_released);
  if (a.parts.sums) {
    if (w.first_key + warpgroup * 64 + warp * 16 < w.k_length) {
      float4* const to = a.parts.sums + w.sums + (warpgroup * 4 + warp) * (kHeadDim / 8 * 32) + lane;
      if (a.p.grad_k.data) HeadParts::store(to, dk);
      if (a.p.grad_v.data) HeadParts::store(to + a.parts.to_dv, dv);
    }
    barrier_arrive(kResultsBarrier, 288);
    return;
  }
  HF_UNROLL
  for (int which = 0; which < 2; ++which) {
    const float factor = which ? a.p.scale : a.scores.keep_scale;
    const uint32_t staged = which ? shared_address(s.dq) : shared_address(s.ds);
    HF_UNROLL
    for (int i = 0; i < kHeadDim / 16; ++i) {
      const float* const x = (which ? dk : dv) + 8 * i;
      const int row = warpgroup * 64 + warp * 16 + lane % 16;
      store_matrix_x4(staged + T::template chunk_offset<kKeys>(row, 2 * i + lane / 16),
                      pack<Element>(x[0] * factor, x[1] * factor), pack<Element>(x[2] * factor, x[3] * factor),
                      pack<Element>(x[4] * factor, x[5] * factor), pack<Element>(x[6] * factor, x[7] * factor));
    }
  }
  fence_async_shared();
  barrier_arrive(kResultsBarrier, 288);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) backward_kernel(const __grid_constant__ BackwardArguments a) {
  HF_DYNAMIC_SHARED(memory);
  auto& s = *reinterpret_cast<BackwardShared<Config>*>(memory);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    mbarrier_init(&s.kv_arrived, 1);
    mbarrier_init(&s.kv_released, 1);
    mbarrier_init(&s.queries_loaded, 1);
    mbarrier_init(&s.results_stored, 1);
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(&s.q_arrived[i], 1);
      mbarrier_init(&s.q_released[i], 2);
      mbarrier_init(&s.grad_out_arrived[i], 1);
      mbarrier_init(&s.grad_out_released[i], 2);
      mbarrier_init(&s.work_arrived[i], 1);
      mbarrier_init(&s.work_released[i], 4);   // by what loads, by both that add dq, by the consumers
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  grid_dependency_release();

  if (warpgroup == 0) {
    registers_shrink<Config::kProducerRegisters>();
    if (threadIdx.x == 0) load<Config>(a, s);
    if (warp == 1 || warp == 2) add_dq<Config>(a, s, warp - 1);
    if (warp == 3) schedule<Config>(a, s, threadIdx.x % 32);
    return;
  }
  registers_grow<Config::kConsumerRegisters>();
  int tiles_done = 0;
  HF_NO_UNROLL
  for (int count = 0;; ++count) {
    mbarrier_wait(&s.work_arrived[count & 1], count >> 1 & 1);
    const BackwardWork& w = s.work[count & 1];
    if (w.first_key < 0) break;
    consume<Config>(a, w, s, warpgroup - 1, count & 1, tiles_done);
    if (threadIdx.x == 128) mbarrier_arrive(&s.work_released[count & 1]);
  }
}

}  // namespace hf_flash::hopper
