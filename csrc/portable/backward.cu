// Backward attention on sm_80 and later with mma.sync, ldmatrix and cp.async (FlashAttention-2, arXiv 2307.08691).
//
// q, out, grad_out, grad_q (batch, seq_q, heads, head_dim); k, v, grad_k, grad_v (batch, seq_k, kv_heads, head_dim);
// lse, grad_lse (batch, heads, seq_q); or packed. One block owns kTileK keys of one key/value head. It walks the query
// tiles that see them, of every query head of the group, recomputes P and dS, keeps dk and dv in registers and adds its
// part of dq to an fp32 buffer (query_gradient.cuh). Every feature is a branch at run time; kPlain says only that no
// score needs more than scaling and masking.
#include "backward_shape.cuh"
#include "query_gradient.cuh"
#include "score_gradient.cuh"

namespace hf_flash {

// TileLayout's offset moved by rows and columns, multiples of 8: immediates and at most one xor. The chunks that
// `columns` adds must set no bit, of those permuted together, that the offset's own chunk has set.
template <int kColumns> HF_DEVICE int advance(int offset, int rows, int columns) {
  using Layout = TileLayout<kColumns>;
  const int chunk = columns / 8, low = chunk & (Layout::kPermuted - 1);
  return (offset ^ (low * 16)) + rows * Layout::kRowBytes + (chunk - low) * 16;
}

// The columns of a (rows, kHeadDim) product that one of kWarps warps computes, in blocks of 8: pairs dealt in turn and,
// where the count is odd, half of a pair that two warps share.
template <int kHeadDim, int kWarps> struct WarpColumns {
  static constexpr int kBlocks = kHeadDim / 8 / kWarps, kPairs = kBlocks / 2;
  int warp, pair, half;   // offsets in a tile (k, kHeadDim) of the B operands: of pair 0 at step 0, of the half

  HF_DEVICE WarpColumns(int warp) : warp(warp) {
    const int lane = threadIdx.x % 32;
    pair = TileLayout<kHeadDim>::block_offset(0, warp * 16, lane % 16, lane / 16);
    half = TileLayout<kHeadDim>::block_offset(0, (kPairs * kWarps + warp / 2) * 16, lane, warp % 2);
  }
  // Which 8 columns of the product a block is.
  HF_DEVICE int column_block(int block) const {
    return block < 2 * kPairs ? warp * 2 + (block / 2 * kWarps * 2 + block % 2) : warp + kPairs * kWarps * 2;
  }
  // b of blocks 2 index and 2 index + 1; of the half, for this step and the next.
  HF_DEVICE void load(uint32_t (&b)[4], const char* shared, int tile, int step, int index) const {
    ldmatrix_x4_trans(b, shared + (index < kPairs ? advance<kHeadDim>(tile + pair, 16 * step, 16 * kWarps * index)
                                                  : advance<kHeadDim>(tile + half, 16 * step, 0)));
  }
};

// acc += a * b over kSteps steps of 16. load_a(a, step, m), load_b(b, step, n / 2); the operands of a step are on
// their way while the step before is multiplied. An odd last block of b comes with steps 0, 2, .. for two.
template <class Element, int kSteps, int kRows, int kColumns, class LoadA, class LoadB>
HF_DEVICE void multiply(float (&acc)[kRows][kColumns][4], LoadA load_a, LoadB load_b) {
  constexpr int kPairs = kColumns / 2, kLoads = (kColumns + 1) / 2;
  static_assert(kColumns % 2 == 0 || kSteps % 2 == 0, "an odd block is loaded for two steps");
  uint32_t a[2][kRows][4], b[2][kLoads][4];
  const auto load = [&](int step) {
    HF_UNROLL
    for (int m = 0; m < kRows; ++m) load_a(a[step % 2][m], step, m);
    HF_UNROLL
    for (int n = 0; n < kPairs; ++n) load_b(b[step % 2][n], step, n);
    if (kColumns % 2 && step % 2 == 0) load_b(b[step / 2 % 2][kPairs], step, kPairs);
  };
  load(0);
  HF_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    if (step + 1 < kSteps) load(step + 1);
    HF_UNROLL
    for (int m = 0; m < kRows; ++m)
      HF_UNROLL
      for (int n = 0; n < kColumns; ++n) {
        const bool odd = n >= 2 * kPairs;
        const auto& from = b[odd ? step / 2 % 2 : step % 2][n / 2];
        const int first = odd ? step % 2 * 2 : n % 2 * 2;
        mma_m16n8k16<Element>(acc[m][n], a[step % 2][m], from[first], from[first + 1]);
      }
  }
}

template <class Element, class Shape, bool kPlain>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    portable_backward_kernel(const Params p, const BackwardWorkspace workspace, const BackwardSchedule schedule) {
  constexpr int kHeadDim = Shape::kHeadDim, kTileQ = Shape::kTileQ, kTileK = Shape::kTileK;
  constexpr int kThreads = Shape::kThreads, kStages = Shape::kStages;
  constexpr int kPasses = kPlain ? Shape::kPlainPasses : Shape::kGeneralPasses;
  constexpr int kScoreRows = Shape::kScoreRows, kScoreKeys = Shape::kScoreKeys / kPasses;
  constexpr int kKeyStep = 16 * Shape::kScoreKeyWarps;   // between the blocks of keys of a warp
  using Layout = TileLayout<kHeadDim>;
  using ScoreLayout = TileLayout<kTileK>;
  HF_DYNAMIC_SHARED(shared);

  int key_tile, batch, kv_head;
  schedule.locate(p, blockIdx.x, &key_tile, &batch, &kv_head);
  const Sequence sequence(p, batch);
  const int first_key = key_tile * kTileK;
  const int key_rows = p.cu_seqlens_k ? p.cu_seqlens_k[batch + 1] - p.cu_seqlens_k[batch] : p.seq_k;   // used or not
  if (first_key >= key_rows) return;
  const Mask mask(sequence.q_length, sequence.k_length, p.window_left, p.window_right);
  const Range queries = mask.queries(first_key, first_key + kTileK);
  const int first_tile = queries.begin / kTileQ;
  const int tiles = queries.empty() ? 0 : ceil_div(queries.end, kTileQ) - first_tile;
  const int group = p.heads / p.kv_heads, steps = group * tiles;
  // Blocks of one head start at different tiles, or they would all add to the same rows of dq at once.
  const int rotation = p.deterministic || steps == 0 || p.window_right >= 0 ? 0 : key_tile * kTileK / kTileQ % tiles;
  const auto query_tile = [&](int index) {
    const int tile = index + rotation;
    return first_tile + (tile < tiles ? tile : tile - tiles);
  };

  const auto load_keys = [&](const Tensor& t, int to) {
    copy_tile_async<kTileK, kHeadDim, kThreads>(
        shared + to, sequence.k_base<const Element>(t, kv_head) + first_key * t.row_stride, t.row_stride,
        sequence.k_length - first_key, p.head_dim);
  };
  const auto load_queries = [&](int stage, int head, int tile) {
    const int first = tile * kTileQ, rows = sequence.q_length - first;
    copy_tile_async<kTileQ, kHeadDim, kThreads>(
        shared + Shape::kQ + stage * Shape::kQueryBytes,
        sequence.q_base<const Element>(p.q, head) + first * p.q.row_stride, p.q.row_stride, rows, p.head_dim);
    copy_tile_async<kTileQ, kHeadDim, kThreads>(
        shared + Shape::kGradOut + stage * Shape::kQueryBytes,
        sequence.q_base<const Element>(p.grad_out, head) + first * p.grad_out.row_stride, p.grad_out.row_stride, rows,
        p.head_dim);
    // A whole 16 rows of statistics are there wherever one row is.
    if (threadIdx.x < kTileQ / 2) {
      const int which = threadIdx.x / (kTileQ / 4), row = threadIdx.x % (kTileQ / 4) * 4;
      const float* const from = (which ? workspace.delta : workspace.lse_log2) +
                                workspace.first_row(p, sequence, batch, head) + first + row;
      copy_async_16(shared + Shape::kStatistics + stage * Shape::kStatisticsBytes + threadIdx.x * 16, from, row < rows);
    }
    copy_async_commit();
  };

  int head = kv_head * group, index = 0;
  if (steps > 0) {
    load_keys(p.k, 0);
    load_keys(p.v, Shape::kV);
    load_queries(0, head, query_tile(0));
  }

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int score_row = warp % Shape::kScoreWarps * (16 * kScoreRows) + lane / 4;    // of this lane's first element
  const int score_warp = warp / Shape::kScoreWarps, score_key = score_warp * 16 + lane % 4 * 2;
  const int key_warp = warp % Shape::kKeyWarps, query_row = warp % Shape::kQueryWarps * (16 * Shape::kQueryRows);
  const WarpColumns<kHeadDim, Shape::kKeyColumnWarps> key_columns(warp / Shape::kKeyWarps);
  const WarpColumns<kHeadDim, Shape::kQueryColumnWarps> query_columns(warp / Shape::kQueryWarps);
  const int transposed_row = lane % 8 + lane / 16 * 8, transposed_chunk = lane / 8 % 2;
  // Offsets of this lane in a tile, at step 0 of each product.
  const int a_of_scores = Layout::block_offset(warp % Shape::kScoreWarps * (16 * kScoreRows), 0, lane % 16, lane / 16);
  const int b_of_scores = Layout::block_offset(score_warp * 16, 0, transposed_row, transposed_chunk);
  const int a_of_keys = ScoreLayout::block_offset(0, key_warp * 16, transposed_row, transposed_chunk);
  const int a_of_queries = ScoreLayout::block_offset(query_row, 0, lane % 16, lane / 16);
  const int element_of_scores = ScoreLayout::offset(score_row, score_key);

  float dk[Shape::kGradKeys][Shape::kGradColumns][4], dv[Shape::kGradKeys][Shape::kGradColumns][4];
  clear(dk);
  clear(dv);

  HF_NO_UNROLL
  for (int step = 0; step < steps; ++step) {
    const int stage = kStages == 2 ? step % 2 : 0;
    const int q_tile = Shape::kQ + stage * Shape::kQueryBytes, grad_out_tile = q_tile + Shape::kGradOut - Shape::kQ;
    const float* const statistics =
        reinterpret_cast<const float*>(shared + Shape::kStatistics + stage * Shape::kStatisticsBytes);
    const int first_query = query_tile(index) * kTileQ, last_query = min(first_query + kTileQ, sequence.q_length);
    int next_head = head, next_index = index + 1;
    if (next_index == tiles) next_index = 0, ++next_head;

    copy_async_wait<0>();
    __syncthreads();   // this stage has arrived; P, dS and the other stage are no longer read
    if (kStages == 2 && step + 1 < steps) load_queries(stage ^ 1, next_head, query_tile(next_index));

    const ScoreGradient gradient(p, batch, head, mask.diagonal);
    const Range unmasked = mask.keys_seen_by_all(first_query, last_query);
    const bool masked = first_key < unmasked.begin || first_key + kTileK > unmasked.end ||
                        first_query + kTileQ > sequence.q_length;
    HF_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      const int first_block = pass * kScoreKeys;
      const auto load_a_of = [&](int tile) {
        return [=](uint32_t(&a)[4], int step, int m) {
          ldmatrix_x4(a, shared + advance<kHeadDim>(tile + a_of_scores, 16 * m, 16 * step));
        };
      };
      const auto load_b_of = [&](int tile) {
        return [=](uint32_t(&b)[4], int step, int n) {
          ldmatrix_x4(b, shared + advance<kHeadDim>(tile + b_of_scores, (first_block + n) * kKeyStep, 16 * step));
        };
      };
      float scores[kScoreRows][2 * kScoreKeys][4], dp[kScoreRows][2 * kScoreKeys][4];
      clear(scores);
      multiply<Element, kHeadDim / 16>(scores, load_a_of(q_tile), load_b_of(0));
      clear(dp);
      multiply<Element, kHeadDim / 16>(dp, load_a_of(grad_out_tile), load_b_of(Shape::kV));

      float lse_log2[kScoreRows][2], delta[kScoreRows][2];
      HF_UNROLL
      for (int m = 0; m < kScoreRows; ++m)
        HF_UNROLL
        for (int half = 0; half < 2; ++half) {
          lse_log2[m][half] = statistics[score_row + 16 * m + 8 * half];
          delta[m][half] = statistics[kTileQ + score_row + 16 * m + 8 * half];
        }
      const int row = first_query + score_row, key = first_key + score_key + first_block * kKeyStep;
      gradient.template apply<kPlain, kKeyStep>(scores, dp, lse_log2, delta, p, batch, head, row, key);
      if (masked) hide<kKeyStep>(scores, mask, row, key);
      HF_UNROLL
      for (int m = 0; m < kScoreRows; ++m)
        HF_UNROLL
        for (int n = 0; n < 2 * kScoreKeys; ++n)
          HF_UNROLL
          for (int half = 0; half < 2; ++half) {
            const float a = scores[m][n][2 * half], b = scores[m][n][2 * half + 1];
            const int offset =
                advance<kTileK>(element_of_scores, 16 * m + 8 * half, (first_block + n / 2) * kKeyStep + n % 2 * 8);
            *reinterpret_cast<uint32_t*>(shared + Shape::kP + offset) =
                kPlain ? pack<Element>(a, b)
                       : pack<Element>(fmaxf(a, 0.f) * gradient.keep_scale, fmaxf(b, 0.f) * gradient.keep_scale);
            *reinterpret_cast<uint32_t*>(shared + Shape::kDs + offset) =
                pack<Element>((kPlain ? a : fabsf(a)) * dp[m][n][2 * half],
                              (kPlain ? b : fabsf(b)) * dp[m][n][2 * half + 1]);
          }
    }
    __syncthreads();   // P and dS are written

    const auto load_transposed = [&](int tile) {
      return [=](uint32_t(&a)[4], int step, int m) {
        ldmatrix_x4_trans(a, shared + advance<kTileK>(tile + a_of_keys, 16 * step, 16 * Shape::kKeyWarps * m));
      };
    };
    const auto load_columns = [&](const auto& columns, int tile) {
      return [=](uint32_t(&b)[4], int step, int n) { columns.load(b, shared, tile, step, n); };
    };
    if (p.grad_v.data)
      multiply<Element, kTileQ / 16>(dv, load_transposed(Shape::kP), load_columns(key_columns, grad_out_tile));

    if (workspace.dq) {
      float dq[Shape::kQueryRows][Shape::kQueryColumns][4];
      clear(dq);
      multiply<Element, kTileK / 16>(
          dq,
          [=](uint32_t(&a)[4], int step, int m) {
            ldmatrix_x4(a, shared + advance<kTileK>(Shape::kDs + a_of_queries, 16 * m, 16 * step));
          },
          load_columns(query_columns, 0));

      const int64_t padded_row = workspace.first_row(p, sequence, batch, head) + first_query;
      float* const rows = workspace.dq + (padded_row + query_row) * kHeadDim;
      int32_t* const semaphore = workspace.semaphores + padded_row / kRowPadding;
      if (p.deterministic) wait_for_turn(semaphore, key_tile - mask.keys(first_query, last_query).begin / kTileK);
      HF_UNROLL
      for (int m = 0; m < Shape::kQueryRows; ++m)
        if (first_query + query_row + 16 * m < sequence.q_length) {
          HF_UNROLL
          for (int n = 0; n < Shape::kQueryColumns; ++n)
            add_fragment(rows + 16 * m * kHeadDim + query_columns.column_block(n) * kFragmentFloats, lane, dq[m][n]);
        }
      if (p.deterministic) pass_turn(semaphore);
    }

    if (p.grad_k.data)
      multiply<Element, kTileQ / 16>(dk, load_transposed(Shape::kDs), load_columns(key_columns, q_tile));
    if (kStages == 1 && step + 1 < steps) {
      __syncthreads();   // the only stage is no longer read
      load_queries(0, next_head, query_tile(next_index));
    }
    head = next_head;
    index = next_index;
  }

  // dk and dv leave through the tiles of k and v.
  __syncthreads();
  const auto store = [&](const float(&acc)[Shape::kGradKeys][Shape::kGradColumns][4], const Tensor& t, int tile,
                         float scale) {
    HF_UNROLL
    for (int m = 0; m < Shape::kGradKeys; ++m)
      HF_UNROLL
      for (int n = 0; n < Shape::kGradColumns; ++n)
        HF_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int row = (m * Shape::kKeyWarps + key_warp) * 16 + 8 * half + lane / 4;
          const int column = key_columns.column_block(n) * 8 + lane % 4 * 2;
          *reinterpret_cast<uint32_t*>(shared + tile + Layout::offset(row, column)) =
              pack<Element>(acc[m][n][2 * half] * scale, acc[m][n][2 * half + 1] * scale);
        }
  };
  store(dk, p.grad_k, 0, p.scale);
  store(dv, p.grad_v, Shape::kV, 1.f);
  __syncthreads();
  for (const int tile : {0, Shape::kV}) {
    const Tensor& t = tile ? p.grad_v : p.grad_k;
    if (t.data)
      store_tile<kTileK, kHeadDim, kThreads>(sequence.k_base<Element>(t, kv_head) + first_key * t.row_stride,
                                             t.row_stride, shared + tile, key_rows - first_key, p.head_dim);
  }
}

template <class Shape, bool kPlain>
int launch_backward(const Params& p, const BackwardWorkspace& workspace, cudaStream_t stream) {
  const BackwardSchedule schedule(p, Shape::kTileK);
  const auto run = [&](auto kernel) {
    return launch(kernel, schedule.blocks(p), Shape::kThreads, Shape::kSharedBytes, stream, p, workspace, schedule);
  };
  return p.dtype == HF_FLASH_BF16 ? run(portable_backward_kernel<bf16, Shape, kPlain>)
                                  : run(portable_backward_kernel<fp16, Shape, kPlain>);
}

template <int kHeadDim> int portable_backward(const Params& p, cudaStream_t stream) {
  using Large = LargeBackward<kHeadDim>;
  using Small = SmallBackward<kHeadDim>;
  static_assert(Large::kSharedBytes <= 227 * 1024, "sm_90 gives a block 227 KB");
  static_assert(Small::kSharedBytes <= 99 * 1024, "sm_86, sm_89 and sm_120 give a block 99 KB");
  if (p.block_table || p.leftpad_k || p.cache_batch_idx) return HF_FLASH_UNSUPPORTED;
  const BackwardWorkspace workspace = BackwardWorkspace::of(p, kHeadDim);
  if (int error = launch_backward_statistics<kHeadDim>(p, workspace, stream)) return error;
  const bool plain = p.softcap <= 0.f && p.alibi_slopes == nullptr && p.dropout_p <= 0.f;
  const bool large = device_facts().shared_memory_per_block >= Large::kSharedBytes;
  if (int error = !large ? launch_backward<Small, false>(p, workspace, stream)   // one kernel for all, to compile less
                  : plain ? launch_backward<Large, true>(p, workspace, stream)
                          : launch_backward<Large, false>(p, workspace, stream))
    return error;
  return workspace.dq ? launch_query_gradient<kHeadDim>(p, workspace, stream) : cudaSuccess;
}

template <int kHeadDim> int64_t portable_backward_workspace(const Params& p) {
  return BackwardWorkspace::of(p, kHeadDim).bytes;
}

template int portable_backward<HF_FLASH_HEAD_DIM>(const Params& p, cudaStream_t stream);
template int64_t portable_backward_workspace<HF_FLASH_HEAD_DIM>(const Params& p);

}  // namespace hf_flash
