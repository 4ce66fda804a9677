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
  int left, right;             // limits of the window, far away where there are none
  uint32_t drop_below;
  float keep_scale;            // 1 without dropout
  bool dropped;                // some are

  static ScoreConstants make(const Params& p) {
    constexpr int kFar = 1 << 29;
    const auto limit = [](int window) { return window < 0 || window > kFar ? kFar : window; };
    return {p.scale * kLog2e, p.softcap * kLog2e, p.softcap > 0.f ? 2.f * kLog2e * p.scale / p.softcap : 0.f,
            limit(p.window_left), limit(p.window_right), Dropout::threshold(p.dropout_p), 1.f / (1.f - p.dropout_p),
            p.dropout_p > 0.f};
  }
};

// Made anew for each tile: what it reads from memory meanwhile costs no registers between tiles. kTransposed:
// accumulator rows are keys and columns queries, else the other way round. A thread holds columns 16i + 8j + e (i < 4,
// j and e < 2) of the two rows 8r, counted from its first element: accumulator 8i + 4j + 2r + e.
template <class Element, bool kTransposed> struct ScoreTransform {
  const ScoreConstants& constants;
  const Params& p;
  int k_length, diagonal, batch, head;
  int query, key;              // of this thread's first element

  // Which accumulators dropout drops: bit 8i + 4e + 2(row of queries) + (row of keys), as words of a draw come. Needs
  // no scores, so it runs under their product.
  HF_DEVICE uint32_t dropped() const {
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
  // lse(c): transposed, of columns c and c + 1; else lse(0), of the two rows.
  template <int kExponent, class Lse>
  HF_DEVICE void weigh(float (&x)[32], uint32_t (&kept)[16], uint32_t dropped, Lse lse) const {
    if (constants.softcap_log2 > 0.f) weigh<kExponent, true, true, true>(x, kept, dropped, lse);
    else if (p.alibi_slopes) weigh<kExponent, false, true, true>(x, kept, dropped, lse);
    else if (constants.dropped) weigh<kExponent, false, false, true>(x, kept, dropped, lse);
    else weigh<kExponent, false, false, false>(x, kept, dropped, lse);
  }

 private:
  // What to do is known when this is compiled: asking for each element costs more than all the rest.
  template <int kExponent, bool kCapped, bool kBiased, bool kDropped, class Lse>
  HF_DEVICE void weigh(float (&x)[32], uint32_t (&kept)[16], uint32_t dropped, Lse lse) const {
    const float slope_log2 =
        kBiased && p.alibi_slopes ? p.alibi_slopes[batch * p.alibi_batch_stride + head] * kLog2e : 0.f;
    const float distance = float(key - query - diagonal);
    int first[2];                // columns that row r sees: [first, first + count)
    unsigned count[2];
    HF_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int position = kTransposed ? key + 8 * r - diagonal - query : query + 8 * r + diagonal - key;
      first[r] = position - (kTransposed ? constants.right : constants.left);
      const int end = position + (kTransposed ? constants.left : constants.right) + 1;
      if (kTransposed) count[r] = key + 8 * r < k_length ? end - first[r] : 0;
      else count[r] = max(0, min(end, k_length - key) - first[r]);
    }
    HF_UNROLL
    for (int c = 0; c < 64; c += 8) {
      const float2 l = lse(kTransposed ? c : 0);
      HF_UNROLL
      for (int r = 0; r < 2; ++r) {
        float probability[2];
        HF_UNROLL
        for (int e = 0; e < 2; ++e) {
          float& weight = x[c / 2 + 2 * r + e];
          const float lse_e = (kTransposed ? e : r) ? l.y : l.x, minus_lse = kExponent ? kExponent - lse_e : -lse_e;
          float score, derivative = 1.f;
          if (kCapped) {         // with u = 2 / (1 + e^2y): tanh(y) = 1 - u, 1 - tanh(y)^2 = u * (2 - u)
            const float u = __fdividef(2.f, 1.f + ex2(weight * constants.two_over_softcap));
            score = constants.softcap_log2 * (1.f - u) + minus_lse;
            derivative = u * (2.f - u);
          } else {
            score = fmaf(weight, constants.scale_log2, minus_lse);
          }
          if (kBiased) score -= slope_log2 * fabsf(distance + (kTransposed ? 8 * r - (c + e) : c + e - 8 * r));
          probability[e] = ex2(unsigned(c + e - first[r]) < count[r] ? score : -INFINITY);
          weight = kCapped ? probability[e] * derivative : probability[e];
          const int half = c / 8 % 2, corner = kTransposed ? 2 * half + r : 2 * r + half;
          if (kDropped && (dropped >> (c / 16 * 8 + 4 * e + corner) & 1)) {
            probability[e] = 0.f;
            weight = -weight;
          }
        }
        kept[c / 4 + r] = pack<Element>(probability[0], probability[1]);
      }
    }
  }
};

// The gradient of a score, for a weight as above.
HF_DEVICE float score_gradient(float weight, float dp, float delta) {
  return fabsf(weight) * ((__float_as_int(weight) < 0 ? 0.f : dp) - delta);
}

}  // namespace hf_flash::hopper
