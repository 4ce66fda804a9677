// Online softmax over score fragments of mma_m16n8k16 (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention-2's
// single division at the end, arXiv 2307.08691).
//
// A fragment scores[m][n][e] of a warp holds rows 16m + lane / 4 + 8(e / 2), columns 8n + 2(lane % 4) + e % 2; four
// lanes share a row. Everything is in units of log2: p = exp2(score * scale_log2 - reference).
#pragma once
#include "mask.cuh"
#include "philox.cuh"
#include "portable/ptx.cuh"

namespace hf_flash {

constexpr float kNegativeInfinity = -__builtin_huge_valf();

// tanh to 1e-6: tanh.approx is off by up to 2^-11 of the cap.
HF_DEVICE float tanh_of(float x) { return 1.f - 2.f * reciprocal_approx(1.f + exp2_approx(x * (2.f * kLog2e))); }

template <int kRowBlocks> struct OnlineSoftmax {
  // p stays below 2^kSlack: the reference of a row follows its maximum only when it must, because moving it costs a
  // multiplication of the whole output row. bf16 and fp16 round p relatively, so a lagging reference costs no accuracy.
  static constexpr float kSlack = 8.f;
  static constexpr float kNoKeyYet = 3e38f;   // finite, so that a masked score still gives exp2(-inf) = 0

  float minus_reference[kRowBlocks][2], sum[kRowBlocks][2];   // sum: of this lane's columns until finish()

  HF_DEVICE OnlineSoftmax() {
    HF_UNROLL
    for (int m = 0; m < kRowBlocks; ++m)
      HF_UNROLL
      for (int half = 0; half < 2; ++half) {
        minus_reference[m][half] = kNoKeyYet;
        sum[m][half] = 0.f;
      }
  }

  // Moves the references above the new scores where they must be, and rescales sums and output with them.
  template <int kScoreBlocks, int kOutBlocks>
  HF_DEVICE void follow_maximum(const float (&scores)[kRowBlocks][kScoreBlocks][4],
                                float (&out)[kRowBlocks][kOutBlocks][4], float scale_log2) {
    float maximum[kRowBlocks][2];
    bool grows = false;
    HF_UNROLL
    for (int m = 0; m < kRowBlocks; ++m)
      HF_UNROLL
      for (int half = 0; half < 2; ++half) {
        float x = fmaxf(scores[m][0][2 * half], scores[m][0][2 * half + 1]);
        HF_UNROLL
        for (int n = 1; n < kScoreBlocks; ++n)
          x = fmaxf(x, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
        maximum[m][half] = x;
        grows |= fmaf(x, scale_log2, minus_reference[m][half]) > kSlack;
      }
    if (!__any_sync(0xffffffffu, grows)) return;
    HF_UNROLL
    for (int m = 0; m < kRowBlocks; ++m)
      HF_UNROLL
      for (int half = 0; half < 2; ++half) {
        float x = maximum[m][half];
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
        const float before = minus_reference[m][half];
        if (fmaf(x, scale_log2, before) > 0.f) minus_reference[m][half] = -x * scale_log2;
        const float factor = exp2_approx(minus_reference[m][half] - before);
        sum[m][half] *= factor;
        HF_UNROLL
        for (int n = 0; n < kOutBlocks; ++n) {
          out[m][n][2 * half] *= factor;
          out[m][n][2 * half + 1] *= factor;
        }
      }
  }

  // scores -> p for the two column blocks of one k-step of p v, and their sums.
  template <int kScoreBlocks>
  HF_DEVICE void exponentiate(float (&scores)[kRowBlocks][kScoreBlocks][4], int step, float scale_log2) {
    HF_UNROLL
    for (int m = 0; m < kRowBlocks; ++m)
      HF_UNROLL
      for (int n = 2 * step; n < 2 * step + 2; ++n)
        HF_UNROLL
        for (int e = 0; e < 4; ++e) {
          scores[m][n][e] = exp2_approx(fmaf(scores[m][n][e], scale_log2, minus_reference[m][e / 2]));
          sum[m][e / 2] += scores[m][n][e];
        }
  }

  // Once, after the last tile: sums of whole rows.
  HF_DEVICE void finish() {
    HF_UNROLL
    for (int m = 0; m < kRowBlocks; ++m)
      HF_UNROLL
      for (int half = 0; half < 2; ++half) {
        sum[m][half] += __shfl_xor_sync(0xffffffffu, sum[m][half], 1);
        sum[m][half] += __shfl_xor_sync(0xffffffffu, sum[m][half], 2);
      }
  }

  // A row without keys has output 0 and log-sum-exp -inf. NaN stays NaN.
  HF_DEVICE float inverse_sum(int m, int half) const { return sum[m][half] == 0.f ? 0.f : 1.f / sum[m][half]; }
  HF_DEVICE float log_sum_exp(int m, int half) const {
    return sum[m][half] == 0.f ? kNegativeInfinity : (log2f(sum[m][half]) - minus_reference[m][half]) * kLn2;
  }
};

// How many of a lane's columns 0, 1, 8, 9, 16, ... of a row lie below `column`, as that many low bits.
HF_DEVICE uint32_t columns_below(int column) {
  const int count = column <= 0 ? 0 : min(column / 8 * 2 + min(column % 8, 2), 31);
  return (1u << count) - 1u;
}

// -inf where a query does not see a key. row, key: of this lane's first element.
template <int kRowBlocks, int kScoreBlocks>
HF_DEVICE void mask_scores(float (&scores)[kRowBlocks][kScoreBlocks][4], const Mask& mask, int row, int key) {
  static_assert(kScoreBlocks <= 15, "a row's columns are bits of a word");
  constexpr int kFar = 1 << 30;   // farther than any tile; two of them do not overflow
  const int64_t position = int64_t(row) + mask.diagonal - key;
  const int begin = mask.left < 0 ? -kFar : int(max(int64_t(-kFar), min(int64_t(kFar), position - mask.left)));
  const int end = mask.right < 0 ? kFar : int(max(int64_t(-kFar), min(int64_t(kFar), position + mask.right + 1)));
  HF_UNROLL
  for (int m = 0; m < kRowBlocks; ++m)
    HF_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int down = 16 * m + 8 * half;
      const uint32_t seen = columns_below(min(end + down, mask.k_length - key)) & ~columns_below(begin + down);
      HF_UNROLL
      for (int n = 0; n < kScoreBlocks; ++n)
        HF_UNROLL
        for (int e = 0; e < 2; ++e)
          if (!(seen & (1u << (2 * n + e)))) scores[m][n][2 * half + e] = kNegativeInfinity;
    }
}

// What lies between q k^T and the softmax besides the mask.
struct ScoreTransform {
  float scale, softcap, slope;
  int diagonal;

  HF_DEVICE ScoreTransform(const Params& p, int batch, int head, int diagonal)
      : scale(p.scale), softcap(p.softcap), diagonal(diagonal),
        slope(p.alibi_slopes ? p.alibi_slopes[batch * p.alibi_batch_stride + head] * kLog2e : 0.f) {}

  // q k^T -> scaled, capped, biased scores in units of log2.
  template <int kRowBlocks, int kScoreBlocks>
  HF_DEVICE void apply(float (&scores)[kRowBlocks][kScoreBlocks][4], int row, int key) const {
    const float to_log2 = softcap > 0.f ? softcap * kLog2e : scale * kLog2e;
    const float into_cap = softcap > 0.f ? scale / softcap : 0.f;
    HF_UNROLL
    for (int m = 0; m < kRowBlocks; ++m)
      HF_UNROLL
      for (int n = 0; n < kScoreBlocks; ++n)
        HF_UNROLL
        for (int e = 0; e < 4; ++e) {
          float x = scores[m][n][e];
          if (softcap > 0.f) x = tanh_of(x * into_cap);
          const int distance = row + 16 * m + 8 * (e / 2) + diagonal - (key + 8 * n + e % 2);
          scores[m][n][e] = x * to_log2 - slope * fabsf(float(distance));
        }
  }
};

// Zeroes the dropped p of one k-step (columns 16 step ..); the kept ones are scaled once, with the output.
template <int kRowBlocks, int kScoreBlocks>
HF_DEVICE void drop(float (&scores)[kRowBlocks][kScoreBlocks][4], int step, const Dropout& dropout, int row, int key) {
  HF_UNROLL
  for (int m = 0; m < kRowBlocks; ++m)
    HF_UNROLL
    for (int e = 0; e < 2; ++e) {
      const uint4 words = dropout.draw(row + 16 * m, key + 16 * step + e);
      float(&low)[4] = scores[m][2 * step], (&high)[4] = scores[m][2 * step + 1];
      if (!dropout.keeps(words.x)) low[e] = 0.f;
      if (!dropout.keeps(words.y)) high[e] = 0.f;
      if (!dropout.keeps(words.z)) low[2 + e] = 0.f;
      if (!dropout.keeps(words.w)) high[2 + e] = 0.f;
    }
}

}  // namespace hf_flash
