// From scores to probabilities and their gradients, in accumulator fragments: the general form, with windows on both
// sides, softcap, ALiBi and dropout. The plain kernels inline what little they need.
#pragma once
#include "../mask.cuh"
#include "../philox.cuh"
#include "ptx.cuh"

namespace hf_flash::hopper {

// What a kernel does to scores beyond the scale and the end of the keys: nothing; a limit to the right, as under a
// causal mask; everything, as it turns out at run time.
enum class Scores { kFull, kRight, kGeneral };
inline Scores scores_of(const Params& p) {
  if (p.window_left >= 0 || p.softcap > 0.f || p.alibi_slopes || p.dropout_p > 0.f) return Scores::kGeneral;
  return p.window_right >= 0 ? Scores::kRight : Scores::kFull;
}

// The right-hand limit: queries before this do not see a key.
HF_DEVICE int first_query_that_sees(int key, int k_length, int diagonal, int right) {
  constexpr int kFar = 1 << 29;
  if (key >= k_length) return kFar;
  const int64_t first = int64_t(key) - diagonal - right;
  return int(first < -kFar ? -kFar : first > kFar ? kFar : first);
}

// And the other way round: this key and later ones are not seen.
HF_DEVICE int first_unseen_key(int query, int k_length, int diagonal, int right) {
  const int64_t end = int64_t(query) + diagonal + right + 1;
  return int(end < 0 ? 0 : end > k_length ? k_length : end);
}

// What the launcher knows of it. Kernels read these as constants, which cost no registers.
struct ScoreConstants {
  float scale_log2, softcap_log2, two_over_softcap;   // softcap_log2 0: none
  int lowest, extent;          // a key is seen iff 0 <= key - query - diagonal - lowest <= extent, unsigned
  uint32_t drop_below;
  float keep_scale;            // 1 without dropout
  bool dropped;                // some are

  static ScoreConstants make(const Params& p) {
    constexpr int kFar = 1 << 30;
    const auto limit = [](int window) { return window < 0 || window > kFar - 1 ? kFar - 1 : window; };
    const int left = limit(p.window_left), right = limit(p.window_right);
    return {p.scale * kLog2e, p.softcap * kLog2e, p.softcap > 0.f ? 2.f * kLog2e * p.scale / p.softcap : 0.f, -left,
            left + right, Dropout::threshold(p.dropout_p), 1.f / (1.f - p.dropout_p), p.dropout_p > 0.f};
  }
};

// Made anew for each tile: what it reads from memory meanwhile costs no registers between tiles.
struct ScoreTransform {
  const ScoreConstants& constants;
  const Params& p;
  int k_length, diagonal, batch, head;

  // Which of 32 accumulators dropout drops: bit 8i + 4e + corner, as below. Needs no scores, so it runs under their
  // product.
  template <bool kTransposed> HF_DEVICE uint32_t dropped(int query, int key) const {
    uint32_t bits = 0;
    if (!constants.dropped) return bits;
    const Dropout dropout(p, batch, head);
    HF_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int along = 16 * (i / 2) + i % 2;
      const uint4 words = dropout.draw(query + (kTransposed ? along : 0), key + (kTransposed ? 0 : along));
      bits |= (uint32_t(words.x < constants.drop_below) | uint32_t(words.y < constants.drop_below) << 1 |
               uint32_t(words.z < constants.drop_below) << 2 | uint32_t(words.w < constants.drop_below) << 3)
              << 4 * i;
    }
    return bits;
  }

  // Scores (raw products) become weights: the probability times softcap's derivative, negative where dropout drops
  // it. kept: the probabilities without the dropped ones, packed. Probabilities are times 2^kExponent throughout.
  // kTransposed: accumulator rows are keys. query, key: of this thread's first element. lse(i): of that query, where
  // i counts accumulator columns (transposed) or rows from the thread's first.
  template <class Element, bool kTransposed, int kExponent, class Lse>
  HF_DEVICE void weigh(float (&x)[32], uint32_t (&kept)[16], uint32_t dropped, int query, int key, Lse lse) const {
    const float slope_log2 = p.alibi_slopes ? p.alibi_slopes[batch * p.alibi_batch_stride + head] * kLog2e : 0.f;
    HF_UNROLL
    for (int i = 0; i < 4; ++i) {
      HF_UNROLL
      for (int corner = 0; corner < 4; ++corner) {   // which of {i, i + 8} x {j, j + 8}
        const int dq = corner / 2, dk = corner % 2;
        const int index = 4 * (2 * i + (kTransposed ? dq : dk)) + 2 * (kTransposed ? dk : dq);
        float probability[2];
        HF_UNROLL
        for (int e = 0; e < 2; ++e) {
          const int row = 8 * dq + (kTransposed ? 16 * i + e : 0), column = 8 * dk + (kTransposed ? 0 : 16 * i + e);
          const int distance = key + column - (query + row) - diagonal;
          float score = x[index + e] * constants.scale_log2, derivative = 1.f;
          if (constants.softcap_log2 > 0.f) {   // with u = 2 / (1 + e^2y): tanh(y) = 1 - u, 1 - tanh(y)^2 = u * (2 - u)
            const float u = __fdividef(2.f, 1.f + ex2(x[index + e] * constants.two_over_softcap));
            score = constants.softcap_log2 * (1.f - u);
            derivative = u * (2.f - u);
          }
          score -= slope_log2 * fabsf(float(distance));
          const bool seen =
              key + column < k_length && unsigned(distance - constants.lowest) <= unsigned(constants.extent);
          probability[e] = seen ? ex2(score - lse(row) + kExponent) : 0.f;
          x[index + e] = probability[e] * derivative;
          if (dropped >> (8 * i + 4 * e + corner) & 1) {
            probability[e] = 0.f;
            x[index + e] = -x[index + e];
          }
        }
        kept[index / 2] = pack<Element>(probability[0], probability[1]);
      }
    }
  }
};

// The gradient of a score, for a weight as above.
HF_DEVICE float score_gradient(float weight, float dp, float delta) {
  return fabsf(weight) * ((__float_as_int(weight) < 0 ? 0.f : dp) - delta);
}

}  // namespace hf_flash::hopper
