// P and dS of a warp's part of a tile, from s = q k^T and dp = grad_out v^T.
//
// scores[m][2i + h][e] of a lane is query row + 16 m + 8 (e / 2), key key + kKeyStep i + 8 h + e % 2.
#pragma once
#include "../softmax.cuh"

namespace hf_flash {

// s -> p = exp2(score - lse), negated where dropout drops it, and dp -> what times |p| is dS: (dp - delta), with
// dropout's mask on dp and the derivative of the softcap. delta includes -grad_lse.
struct ScoreGradient {
  float scale_log2;
  // General only: score = cap * tanh(s * into_cap) - slope * distance, in units of log2; into_cap 0: no cap.
  float into_cap, cap, slope, keep_scale;
  int diagonal;
  bool drops;

  HF_DEVICE ScoreGradient(const Params& p, int batch, int head, int diagonal)
      : scale_log2(p.scale * kLog2e), into_cap(p.softcap > 0.f ? p.scale / p.softcap : 0.f), cap(p.softcap * kLog2e),
        slope(p.alibi_slopes ? p.alibi_slopes[batch * p.alibi_batch_stride + head] * kLog2e : 0.f),
        keep_scale(p.dropout_p > 0.f ? 1.f / (1.f - p.dropout_p) : 1.f), diagonal(diagonal), drops(p.dropout_p > 0.f) {}

  template <bool kPlain, int kKeyStep, int kRows, int kColumns>
  HF_DEVICE void apply(float (&scores)[kRows][kColumns][4], float (&dp)[kRows][kColumns][4],
                       const float (&lse_log2)[kRows][2], const float (&delta)[kRows][2], const Params& p, int batch,
                       int head, int row, int key) const {
    const auto for_each = [&](auto visit) {
      HF_UNROLL
      for (int m = 0; m < kRows; ++m)
        HF_UNROLL
        for (int n = 0; n < kColumns; ++n)
          HF_UNROLL
          for (int e = 0; e < 4; ++e) visit(scores[m][n][e], dp[m][n][e], m, n, e);
    };
    if constexpr (kPlain) {
      for_each([&](float& x, float& y, int m, int, int e) {
        x = exp2_approx(fmaf(x, scale_log2, -lse_log2[m][e / 2]));
        y -= delta[m][e / 2];
      });
    } else {
      // Each feature is a loop of its own, so that a branch is taken once a tile.
      uint32_t dropped[ceil_div(kRows * kColumns * 4, 32)] = {};   // a bit for each element
      const auto bit = [](int m, int n, int e) { return (m * kColumns + n) * 4 + e; };
      const auto is_dropped = [&](int m, int n, int e) { return dropped[bit(m, n, e) / 32] >> bit(m, n, e) % 32 & 1; };
      if (drops) {
        const Dropout dropout(p, batch, head);
        HF_UNROLL
        for (int m = 0; m < kRows; ++m)
          HF_UNROLL
          for (int n = 0; n < kColumns; n += 2)
            HF_UNROLL
            for (int e = 0; e < 2; ++e) {
              const uint4 words = dropout.draw(row + 16 * m, key + kKeyStep * (n / 2) + e);
              const auto note = [&](uint32_t word, int n, int e) {
                dropped[bit(m, n, e) / 32] |= uint32_t(!dropout.keeps(word)) << bit(m, n, e) % 32;
              };
              note(words.x, n, e);
              note(words.y, n + 1, e);
              note(words.z, n, e + 2);
              note(words.w, n + 1, e + 2);
            }
        for_each([&](float&, float& y, int m, int n, int e) { y = is_dropped(m, n, e) ? 0.f : y * keep_scale; });
      }
      for_each([&](float&, float& y, int m, int, int e) { y -= delta[m][e / 2]; });
      if (into_cap != 0.f) {
        for_each([&](float& x, float& y, int, int, int) {
          const float t = tanh_of(x * into_cap);
          x = t * cap;
          y *= fmaf(-t, t, 1.f);
        });
      } else {
        for_each([&](float& x, float&, int, int, int) { x *= scale_log2; });
      }
      if (slope != 0.f)
        for_each([&](float& x, float&, int m, int n, int e) {
          const int distance = row + 16 * m + 8 * (e / 2) + diagonal - (key + kKeyStep * (n / 2) + n % 2 * 8 + e % 2);
          x -= slope * fabsf(float(distance));
        });
      for_each([&](float& x, float&, int m, int, int e) { x = exp2_approx(x - lse_log2[m][e / 2]); });
      if (drops)
        for_each([&](float& x, float&, int m, int n, int e) { x = is_dropped(m, n, e) ? -x : x; });
    }
  }
};

// p = 0 where a query does not see a key, and in rows past the sequence's end.
template <int kKeyStep, int kRows, int kColumns>
HF_DEVICE void hide(float (&p)[kRows][kColumns][4], const Mask& mask, int row, int key) {
  HF_UNROLL
  for (int m = 0; m < kRows; ++m)
    HF_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int query = row + 16 * m + 8 * half;
      const Range seen = query < mask.q_length ? mask.keys(query) : Range{0, 0};
      const int begin = seen.begin - key, end = seen.end - key;
      HF_UNROLL
      for (int n = 0; n < kColumns; ++n)
        HF_UNROLL
        for (int e = 0; e < 2; ++e) {
          const int offset = kKeyStep * (n / 2) + n % 2 * 8 + e;
          if (offset < begin || offset >= end) p[m][n][2 * half + e] = 0.f;
        }
    }
}

}  // namespace hf_flash
