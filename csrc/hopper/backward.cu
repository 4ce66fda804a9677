// Launches the backward pass on Hopper: prepare, then either one pass and a conversion of dq (head dims up to 128) or a
// pass for dk and dv and one for dq (192, 256). Compiled once per head-dim tile.
#include "backward.cuh"

namespace hf_flash {
namespace hopper {

template <class Call> int64_t for_element(const Params& p, Call call) {
  return p.dtype == HF_FLASH_BF16 ? call(bf16{}) : call(fp16{});
}

// ---- One pass.

// Calls call(Config{}) with the tile that serves p best. Smaller query tiles waste less of short and causal loops.
template <int kHeadDim, class Element, class Call> int64_t for_config(const Params& p, Call call) {
  const bool general = needs_general_scores(p), causal = p.window_right >= 0;
  if constexpr (kHeadDim == 64) {
    if (general) return call(BackwardConfig<Element, 64, 64, 32, true>{});
    return call(BackwardConfig<Element, 64, 128, 64, false>{});
  } else if constexpr (kHeadDim == 80) {
    if (general) return call(BackwardConfig<Element, 80, 64, 16, true>{});
    return call(BackwardConfig<Element, 80, 128, 16, false>{});
  } else if constexpr (kHeadDim == 96) {
    if (general) return call(BackwardConfig<Element, 96, 64, 16, true>{});
    if (p.seq_q <= (causal ? 2048 : 512)) return call(BackwardConfig<Element, 96, 64, 16, false>{});
    return call(BackwardConfig<Element, 96, 96, 32, false>{});
  } else {
    if (general) return call(BackwardConfig<Element, 128, 64, 64, true>{});
    if (causal && p.seq_q <= 4096) return call(BackwardConfig<Element, 128, 64, 64, false>{});
    return call(BackwardConfig<Element, 128, 80, 64, false>{});
  }
}

TileGrid query_grid(const Params& p, int rows) {
  return TileGrid::make(p.cu_seqlens_q, rows, p.heads, p.batch, p.seq_q, p.total_q);
}
TileGrid key_grid(const Params& p, int rows) {
  return TileGrid::make(p.cu_seqlens_k, rows, p.kv_heads, p.batch, p.seq_k, p.total_k);
}

template <class Config> int launch_one_pass(const Params& p, cudaStream_t stream) {
  using Element = typename Config::Element;
  using OperandTile = typename Config::OperandTile;
  constexpr int kHeadDim = Config::kHeadDim;
  const bool with_dq = p.grad_q.data != nullptr, with_turns = with_dq && p.deterministic;
  BackwardArguments a;
  a.p = p;
  a.queries = query_grid(p, Config::kQueries);
  a.keys = key_grid(p, Config::kKeys);
  a.workspace = BackwardWorkspace::make(p.workspace, a.queries, kHeadDim, with_dq, with_turns);
  a.scores = ScoreConstants::make(p);
  a.q_layout = query_rows(p), a.k_layout = key_rows(p, p.k);
  a.copies = copies_per_tile<OperandTile>(p.head_dim);
  // Ascending key tiles are longest first under a causal mask, and what deterministic sums wait for.
  if (!p.cu_seqlens_k && (p.window_right >= 0 || p.deterministic))
    a.keys.interleave(int64_t(p.seq_q) * kHeadDim * 8 * (p.heads / p.kv_heads));

  if (int error = launch(backward_prepare_kernel<Element, kHeadDim>, a.queries.all_tiles(), 256, 0, stream,
                         PrepareArguments{p, a.queries, a.workspace}))
    return error;
  int error = 0;
  const auto query_map = [&](CUtensorMap* map, const Tensor& t) {
    if (!error && t.data)
      error = make_tensor_map<Element, OperandTile>(map, t, a.q_layout, p.heads, p.head_dim, Config::kQueries);
  };
  const auto key_map = [&](CUtensorMap* map, const Tensor& t) {
    if (!error && t.data)
      error = make_tensor_map<Element, OperandTile>(map, t, a.k_layout, p.kv_heads, p.head_dim, Config::kKeys);
  };
  query_map(&a.q, p.q), query_map(&a.grad_out, p.grad_out);
  key_map(&a.k, p.k), key_map(&a.v, p.v), key_map(&a.grad_k, p.grad_k), key_map(&a.grad_v, p.grad_v);
  if (!error)
    error = launch(backward_kernel<Config>, a.keys.all_tiles(), Config::kThreads, sizeof(BackwardShared<Config>),
                   stream, a);
  if (!error && with_dq)
    error = launch(backward_convert_kernel<Config>, a.queries.all_tiles(), 256,
                   Config::kQueries * (kHeadDim + 8) * sizeof(Element), stream,
                   ConvertArguments{p, a.queries, a.workspace});
  return error;
}

}  // namespace hopper

template <int kHeadDim> int64_t hopper_backward_workspace(const Params& p) {
  return hopper::for_element(p, [&](auto element) {
    using Element = decltype(element);
    return hopper::for_config<kHeadDim, Element>(p, [&](auto config) -> int64_t {
      using Config = decltype(config);
      return hopper::BackwardWorkspace::bytes(hopper::query_grid(p, Config::kQueries), kHeadDim,
                                              p.grad_q.data != nullptr, p.deterministic);
    });
  });
}

template <int kHeadDim> int hopper_backward(const Params& p, cudaStream_t stream) {
  return int(hopper::for_element(p, [&](auto element) {
    return hopper::for_config<kHeadDim, decltype(element)>(
        p, [&](auto config) -> int64_t { return hopper::launch_one_pass<decltype(config)>(p, stream); });
  }));
}

template int64_t hopper_backward_workspace<HF_FLASH_HEAD_DIM>(const Params& p);
template int hopper_backward<HF_FLASH_HEAD_DIM>(const Params& p, cudaStream_t stream);

}  // namespace hf_flash
