// Rotary embedding as rows are read (Su et al., arXiv 2104.09864), and the append of new keys and values to a cache.
#pragma once
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

// The row of the angles' tables for a batch's new token, which goes to row `position` of the cache.
HF_DEVICE int angles_row(const Params& p, int batch, int token, int position) {
  return p.rotary_per_token ? batch * p.seq_new + token : position;
}

// Rows `rows` of new_k and new_v (batch, seq_new, kv_heads, head_dim), as far as they exist, of one kv head -> rows
// used_k + 0 .. seq_new - 1 of the cache, keys turned by the angles of angles_row. Rows past the cache's capacity are
// dropped. The threads of one block call it; blocks that read the same new rows all write them, the same bits, and each
// reads what it wrote itself.
template <class Element> HF_DEVICE void append(const Params& p, int batch, int kv_head, Range rows) {
  const int cached = cached_keys(p, batch), chunks = p.head_dim / 8;
  const int begin = max(rows.begin, 0), end = min(rows.end, min(p.seq_new, p.seq_k - cached));
  const auto source = [&](const Tensor& t, int row) {
    return static_cast<const Element*>(t.data) + batch * t.batch_stride + row * t.row_stride + kv_head * t.head_stride;
  };
  if (begin >= end) return;
  for (int i = threadIdx.x; i < (end - begin) * chunks; i += blockDim.x) {
    const int row = begin + i / chunks, column = i % chunks * 8;
    const CacheRow at(p, batch, cached + row);
    const auto target = [&](const Tensor& t) {
      return reinterpret_cast<uint4*>(static_cast<Element*>(t.data) + at.offset(t) + kv_head * t.head_stride + column);
    };
    *target(p.k) = rotated_chunk(p, source(p.new_k, row), column, angles_row(p, batch, row, cached + row));
    *target(p.v) = *reinterpret_cast<const uint4*>(source(p.new_v, row) + column);
  }
  __syncthreads();
}

}  // namespace hf_flash
