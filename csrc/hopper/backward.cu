// Launches the backward pass on Hopper: a pass that prepares row statistics, then either one pass and a conversion of
// dq (head dims up to 128) or one pass for dk and dv and one for dq (192, 256). Compiled once per head-dim tile.
#include "backward.cuh"
#include "backward_256_dkv.cuh"
#include "backward_256_dq.cuh"

namespace hf_flash {
namespace hopper {

// Calls call(Config{}) with the kernel that serves p best. Smaller query tiles waste less of short and causal loops.
template <int kHeadDim, class Element, class Call> int64_t for_config(const Params& p, Call call) {
  constexpr Scores kFull = Scores::kFull, kRight = Scores::kRight, kGeneral = Scores::kGeneral;
  const Scores scores = scores_of(p);
  if constexpr (kHeadDim == 64) {
    if (scores == kGeneral) return call(BackwardConfig<Element, 64, 64, 32, kGeneral>{});
    if (scores == kRight) return call(BackwardConfig<Element, 64, 128, 64, kRight>{});
    return call(BackwardConfig<Element, 64, 128, 64, kFull>{});
  } else if constexpr (kHeadDim == 80) {
    if (scores == kGeneral) return call(BackwardConfig<Element, 80, 64, 16, kGeneral>{});
    if (scores == kRight) return call(BackwardConfig<Element, 80, 128, 16, kRight>{});
    return call(BackwardConfig<Element, 80, 128, 16, kFull>{});
  } else if constexpr (kHeadDim == 96) {
    if (scores == kGeneral) return call(BackwardConfig<Element, 96, 64, 16, kGeneral>{});
    if (scores == kRight && p.seq_q <= 2048) return call(BackwardConfig<Element, 96, 64, 16, kRight>{});
    if (scores == kRight) return call(BackwardConfig<Element, 96, 96, 32, kRight>{});
    return call(BackwardConfig<Element, 96, 96, 32, kFull>{});
  } else if constexpr (kHeadDim == 128) {
    if (scores == kGeneral) return call(BackwardConfig<Element, 128, 64, 64, kGeneral>{});
    if (scores == kRight && p.seq_q <= 4096) return call(BackwardConfig<Element, 128, 64, 64, kRight>{});
    if (scores == kRight) return call(BackwardConfig<Element, 128, 80, 64, kRight>{});
    return call(BackwardConfig<Element, 128, 80, 64, kFull>{});
  } else {
    if (scores == kGeneral) return call(WideConfig<Element, kHeadDim, kGeneral>{});
    if (scores == kRight) return call(WideConfig<Element, kHeadDim, kRight>{});
    return call(WideConfig<Element, kHeadDim, kFull>{});
  }
}

template <int kHeadDim, class Call> int64_t for_config(const Params& p, Call call) {
  return p.dtype == HF_FLASH_BF16 ? for_config<kHeadDim, bf16>(p, call) : for_config<kHeadDim, fp16>(p, call);
}

template <class Config> TileGrid query_tiles(const Params& p) {
  return TileGrid::make(p.cu_seqlens_q, Config::kStatisticsRows, p.heads, p.batch, p.seq_q, p.total_q);
}
template <class Config> TileGrid key_tiles(const Params& p, int parts) {
  return TileGrid::make(p.cu_seqlens_k, Config::kKeys, p.kv_heads * parts, p.batch, p.seq_k, p.total_k);
}
template <class Config> HeadParts head_parts(const Params& p) {
  return HeadParts::make(p, key_tiles<Config>(p, 1).all_tiles(), Config::kHeadDim,
                         BackwardWorkspace::bytes(query_tiles<Config>(p), Config::kDqFloats, p));
}

// What both forms of a pass are given; Arguments is BackwardArguments or WideArguments.
template <class Config, class Arguments> void fill(Arguments& a, const Params& p) {
  a.p = p;
  a.queries = query_tiles<Config>(p);
  a.parts = head_parts<Config>(p);
  a.keys = key_tiles<Config>(p, a.parts.parts);
  a.workspace = BackwardWorkspace::make(p.workspace, a.queries, Config::kDqFloats, p);
  a.scores = ScoreConstants::make(p);
  a.q_layout = query_rows(p), a.k_layout = key_rows(p, p.k);
  a.copies = copies_per_tile<typename Config::OperandTile>(p.head_dim);
}

// Key tiles in ascending order are longest first under a mask. Heads advance together: as many as share the L2 cache,
// or all of them where blocks are few, so that these come out even. row_bytes: of a query in the loop.
template <class Arguments> void order_keys(Arguments& a, int64_t row_bytes) {
  if (a.parts.parts > 1 || a.keys.all_tiles() < 4 * device_facts().sm_count) a.keys.section = a.keys.lanes();
  else if (!a.p.cu_seqlens_k) a.keys.interleave(a.p.seq_q * row_bytes * (a.p.heads / a.p.kv_heads));
}

template <class Config, class Arguments> int prepare(const Arguments& a, cudaStream_t stream) {
  const auto kernel = backward_prepare_kernel<typename Config::Element, Config::kHeadDim>;
  using Prepare = PrepareConfig<Config::kHeadDim>;
  static_assert(Config::kStatisticsRows % Prepare::kRows == 0, "a tile is a whole number of blocks");
  const int64_t blocks = a.queries.all_tiles() * (Config::kStatisticsRows / Prepare::kRows);
  return launch(kernel, blocks, Prepare::kThreads, 0, stream, PrepareArguments{a.p, a.queries, a.workspace});
}

template <class Config>
int make_map(CUtensorMap* map, const Tensor& t, const RowLayout& layout, int heads, const Params& p, int rows) {
  if (t.data == nullptr) return cudaSuccess;   // not wanted, or empty: never used
  using T = typename Config::OperandTile;
  return make_tensor_map<typename Config::Element, T>(map, t, layout, heads, p.head_dim, rows);
}
template <class Config, class Arguments> int make_maps(Arguments& a, int query_rows) {
  const Params& p = a.p;
  int error = 0;
  const auto queries = [&](CUtensorMap* map, const Tensor& t) {
    if (!error) error = make_map<Config>(map, t, a.q_layout, p.heads, p, query_rows);
  };
  const auto keys = [&](CUtensorMap* map, const Tensor& t) {
    if (!error) error = make_map<Config>(map, t, a.k_layout, p.kv_heads, p, Config::kKeys);
  };
  queries(&a.q, p.q), queries(&a.grad_out, p.grad_out);
  keys(&a.k, p.k), keys(&a.v, p.v), keys(&a.grad_k, p.grad_k), keys(&a.grad_v, p.grad_v);
  const int64_t rows = a.queries.all_tiles() * a.queries.rows / query_rows;
  if (!error && rows > 0) error = make_row_map(&a.statistics, a.workspace.lse_log2, 2 * rows, query_rows);
  return error;
}

template <class Element, int kHeadDim, int kQueries, int kPanelWidth, Scores kScores>
int run(BackwardConfig<Element, kHeadDim, kQueries, kPanelWidth, kScores>, const Params& p, cudaStream_t stream) {
  using Config = BackwardConfig<Element, kHeadDim, kQueries, kPanelWidth, kScores>;
  BackwardArguments a;
  fill<Config>(a, p);
  if (p.window_right >= 0 || p.deterministic) order_keys(a, kHeadDim * 8);   // deterministic, the kernel turns it round
  int error = make_maps<Config>(a, kQueries);
  if (!error) error = prepare<Config>(a, stream);
  int64_t ctas = 0;
  if (!error) error = share_tiles(a.keys.all_tiles(), stream, &a.counter, &ctas);
  if (!error)
    error = launch<true>(backward_kernel<Config>, ctas, Config::kThreads, sizeof(BackwardShared<Config>), stream, a);
  if (!error) error = launch_sum_parts<Element, kHeadDim>(p, a.parts, p.scale, a.scores.keep_scale, stream);
  if (!error && p.grad_q.data)
    error = launch<true>(backward_convert_kernel<Config>, a.queries.all_tiles(), 256,
                         kQueries * (kHeadDim + 8) * sizeof(Element), stream,
                         ConvertArguments{p, a.queries, a.workspace});
  return error;
}

template <class Element, int kHeadDim, Scores kScores>
int run(WideConfig<Element, kHeadDim, kScores>, const Params& p, cudaStream_t stream) {
  using Config = WideConfig<Element, kHeadDim, kScores>;
  WideArguments a;
  fill<Config>(a, p);
  if (p.window_right >= 0) order_keys(a, kHeadDim * 4);
  if (p.window_right >= 0 && !p.cu_seqlens_q)
    a.queries.interleave(max(int64_t(1), int64_t(p.seq_k) * kHeadDim * 4 * p.kv_heads / p.heads));
  int error = make_maps<Config>(a, 64);
  if (!error) error = make_map<Config>(&a.grad_q, p.grad_q, a.q_layout, p.heads, p, 64);
  if (!error) error = prepare<Config>(a, stream);
  if (!error && (p.grad_k.data || p.grad_v.data))
    error = launch(backward_dkv_kernel<Config>, a.keys.all_tiles(), Config::kThreads, sizeof(DkvShared<Config>),
                   stream, a);
  if (!error)
    error = launch_sum_parts<Element, kHeadDim>(p, a.parts, p.scale, Config::kUnit * a.scores.keep_scale, stream);
  if (!error && p.grad_q.data)
    error = launch(backward_dq_kernel<Config>, a.queries.all_tiles(), Config::kThreads, sizeof(DqShared<Config>),
                   stream, a);
  return error;
}

}  // namespace hopper

template <int kHeadDim> int64_t hopper_backward_workspace(const Params& p) {
  return hopper::for_config<kHeadDim>(
      p, [&](auto config) { return hopper::head_parts<decltype(config)>(p).workspace_bytes; });
}

template <int kHeadDim> int hopper_backward(const Params& p, cudaStream_t stream) {
  return int(hopper::for_config<kHeadDim>(p, [&](auto config) { return int64_t(hopper::run(config, p, stream)); }));
}

template int64_t hopper_backward_workspace<HF_FLASH_HEAD_DIM>(const Params& p);
template int hopper_backward<HF_FLASH_HEAD_DIM>(const Params& p, cudaStream_t stream);

}  // namespace hf_flash
