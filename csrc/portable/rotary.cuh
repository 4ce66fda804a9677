// Rotary embedding as rows are read (Su et al., arXiv 2104.09864), and the append of new keys and values to a cache.
#pragma once
#include "../launch.cuh"
#include "cache.cuh"

namespace hf_flash {

// Columns column .. column + 7 of a row, the first rotary_dim columns turned by the angles of a position. Pairs are (0,
// 1), (2, 3), ... when interleaved, else the two halves of rotary_dim. The sum is rounded as a separate product and
// addition.
template <class Element>
HF_DEVICE uint4 rotated_chunk(const Params& p, const Element* row, int column, int64_t position) {
  if (p.rotary_cos == nullptr || column >= p.rotary_dim) return *reinterpret_cast<const uint4*>(row + column);
  const int half = p.rotary_dim / 2;
  const Element* const cos = static_cast<const Element*>(p.rotary_cos) + position * half;
  const Element* const sin = static_cast<const Element*>(p.rotary_sin) + position * half;
  float turned[8];
  HF_UNROLL
  for (int e = 0; e < 8; ++e) {
    const int c = column + e;
    const bool first = p.rotary_interleaved ? c % 2 == 0 : c < half;
    const int pair = p.rotary_interleaved ? c / 2 : first ? c : c - half;
    const int partner = p.rotary_interleaved ? c ^ 1 : first ? c + half : c - half;
    const float x = float(row[c]);
    if (c >= p.rotary_dim) {
      turned[e] = x;
      continue;
    }
    const float y = __fmul_rn(float(row[partner]), float(sin[pair]));
    turned[e] = __fadd_rn(__fmul_rn(x, float(cos[pair])), first ? -y : y);
  }
  return make_uint4(pack<Element>(turned[0], turned[1]), pack<Element>(turned[2], turned[3]),
                    pack<Element>(turned[4], turned[5]), pack<Element>(turned[6], turned[7]));
}

// new_k, new_v (batch, seq_new, kv_heads, head_dim) -> rows used_k + 0 .. seq_new - 1 of the cache, keys turned by the
// angles of those rows. One thread moves 16 bytes of each. Rows past the cache's capacity are dropped.
template <class Element> __global__ void __launch_bounds__(256) append_kernel(const Params p) {
  const int chunks = p.head_dim / 8;
  const int64_t index = int64_t(blockIdx.x) * 256 + threadIdx.x;
  const int64_t new_row = index / chunks;            // (batch, seq_new, kv_heads)
  if (new_row >= int64_t(p.batch) * p.seq_new * p.kv_heads) return;
  const int column = int(index % chunks) * 8, head = int(new_row % p.kv_heads);
  const int i = int(new_row / p.kv_heads % p.seq_new), batch = int(new_row / p.kv_heads / p.seq_new);
  const int row = cached_keys(p, batch) + i;
  if (row >= p.seq_k) return;
  const CacheRow at(p, batch, row);
  const auto source = [&](const Tensor& t) {
    return static_cast<const Element*>(t.data) + batch * t.batch_stride + i * t.row_stride + head * t.head_stride;
  };
  const auto target = [&](const Tensor& t) {
    return reinterpret_cast<uint4*>(static_cast<Element*>(t.data) + at.offset(t) + head * t.head_stride + column);
  };
  *target(p.k) = rotated_chunk(p, source(p.new_k), column, row);
  *target(p.v) = *reinterpret_cast<const uint4*>(source(p.new_v) + column);
}

template <class Element> int append(const Params& p, cudaStream_t stream) {
  const int64_t threads = int64_t(p.batch) * p.seq_new * p.kv_heads * (p.head_dim / 8);
  return launch(append_kernel<Element>, (threads + 255) / 256, 256, 0, stream, p);
}

}  // namespace hf_flash
