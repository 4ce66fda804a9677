// Forward attention for Hopper: its configuration, shared memory, softmax and what is done to scores.
#pragma once
#include "../mask.cuh"
#include "../philox.cuh"
#include "../sequence.cuh"
#include "tensor_map.cuh"
#include "tile_counter.cuh"

namespace hf_flash::hopper {

// kGeneral tests for windows, softcap and ALiBi at run time, tile by tile; kDropout drops besides. The first two carry
// no trace of these.
enum class Variant { kFull, kCausal, kGeneral, kDropout };

template <class Element_, int kHeadDim_, int kTileQ_, int kTileK_, int kPanelWidth_, Variant kVariant_,
          bool kPingPong_ = false>
struct ForwardConfig {
  using Element = Element_;
  using Tile = hopper::Tile<kHeadDim_, kPanelWidth_>;
  static constexpr int kHeadDim = kHeadDim_, kTileQ = kTileQ_, kTileK = kTileK_;
  static constexpr Variant kVariant = kVariant_;
  static constexpr bool kPingPong = kPingPong_;      // consumer warpgroups take turns at the tensor cores
  static constexpr int kConsumers = kTileQ / 64;     // warpgroups with 64 query rows each
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kStages = 2;
  // The launch allots 168 (or 128) registers to each thread; what the producer gives back goes to the consumers.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;
  // O is stored from its own buffer, so that the next Q loads early; from Q's where there is no room.
  static constexpr bool kOutputInQ = kHeadDim >= 192;
  // Q as the operand in registers: shared memory serves K alone, and the next Q loads a whole tile earlier. Measured to
  // pay in these; causal loses 2 % at head dim 128.
  static constexpr bool kQueriesInRegisters =
      kConsumers == 2 && ((kVariant == Variant::kFull && (kHeadDim == 64 || kHeadDim == 128)) ||
                          (kVariant == Variant::kCausal && kHeadDim == 64));
  // Rescale O before its next product is issued: fewer live registers.
  static constexpr bool kRescaleFirst = kHeadDim == 256;
  // Rescale O only when a row's maximum grew by more than 2^8. Worth it where O is large beside S.
  static constexpr bool kLazyRescale = kHeadDim != 64 && kHeadDim != 128;

  static_assert(kConsumers == 2 || kConsumers == 3, "the register split is made for 384 or 512 threads");
  static_assert(kTileK % 16 == 0, "P feeds the second product in k-steps of 16; dropout draws for 16 keys");
  static_assert(kHeadDim / 2 + kTileK / 2 + kTileK / 4 <= kConsumerRegisters - 24, "O, S and P live in registers");
};

// What the producer tells the consumers: one tile of queries of one head.
struct Work {
  int batch, head, kv_head;
  int first_row;                      // of the tile, inside its sequence; -1: no more work
  int q_length, k_length;
  Range key_tiles, unmasked_tiles;    // visited from the last to the first
  RowCoordinates q, k, v;
  int64_t lse_offset;                 // of the sequence's first row
};

template <class C> struct ForwardShared {
  char q[C::kConsumers][C::Tile::bytes(64)];
  char k[C::kStages][C::Tile::bytes(C::kTileK)];
  char v[C::kStages][C::Tile::bytes(C::kTileK)];
  char out[C::kOutputInQ ? 1 : C::kConsumers][C::kOutputInQ ? 16 : C::Tile::bytes(64)];
  uint64_t q_arrived[C::kConsumers], q_released[C::kConsumers];
  uint64_t k_arrived[C::kStages], k_released[C::kStages], v_arrived[C::kStages], v_released[C::kStages];
  uint64_t work_arrived[2], work_released[2], keys_loaded_soon;
  Work work[2];
};

struct ForwardArguments {
  CUtensorMap q, k, v, out;
  Params p;
  RowLayout q_rows, k_rows, v_rows;
  int copies;                         // per tile (copies_per_tile)
  int query_tiles;                    // per head; ragged: of the longest sequence
  int section_heads;                  // heads whose keys and values stay in L2 together
  bool ragged;                        // lengths are read from device memory
  bool longest_first;                 // later query tiles see more keys: start them first
  int counter;                        // TileCounter
};

// A position in a ring of kStages buffers.
template <int kStages> struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  HF_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// The running softmax of two rows of a thread: rows r and r + 8, their columns spread over four lanes.
template <bool kLazy> struct OnlineSoftmax {
  float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};   // sum: of this thread's columns
  float correction[2] = {1.f, 1.f};                                 // what O is still to be multiplied by

  // Scores to 2^(scale * (score - maximum)). kChecked: rows may be wholly masked (-inf) so far.
  template <bool kFirst, bool kChecked, int n> HF_DEVICE void update(float (&scores)[n], float scale) {
    HF_UNROLL
    for (int r = 0; r < 2; ++r) {
      const float before = maximum[r];
      float m = kFirst ? -INFINITY : before;
      HF_UNROLL
      for (int i = 0; i < n / 4; ++i) {
        m = fmaxf(m, scores[4 * i + 2 * r]);
        m = fmaxf(m, scores[4 * i + 2 * r + 1]);
      }
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
      if (kLazy && !kFirst && (m - before) * scale <= 8.f) m = before;
      maximum[r] = m;
      const float offset = (kChecked && m == -INFINITY ? 0.f : m) * scale;
      correction[r] = kFirst || (kLazy && m == before) ? 1.f : ex2(fmaf(before, scale, -offset));
      sum[r] *= correction[r];
      float added = 0.f;
      HF_UNROLL
      for (int i = 0; i < n / 4; ++i) {
        float& x = scores[4 * i + 2 * r];
        float& y = scores[4 * i + 2 * r + 1];
        x = ex2(fmaf(x, scale, -offset));
        y = ex2(fmaf(y, scale, -offset));
        added += x + y;
      }
      sum[r] += added;
    }
  }
  template <int n> HF_DEVICE void rescale(float (&out)[n]) const {
    if (kLazy && !__any_sync(~0u, correction[0] != 1.f || correction[1] != 1.f)) return;
    HF_UNROLL
    for (int i = 0; i < n; ++i) out[i] *= correction[i / 2 % 2];
  }
  // After the last tile: the sum of the whole row.
  HF_DEVICE void finish() {
    HF_UNROLL
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    }
  }
  HF_DEVICE float lse(int r, float scale) const {
    return sum[r] == 0.f ? -INFINITY : maximum[r] * scale * kLn2 + __logf(sum[r]);
  }
};

// Fragments of scores: score[i] of a thread is query row + 8 * (i / 2 % 2), key column + 8 * (i / 4) + i % 2 of the
// sequence.

// -inf to the columns outside [begin, end).
template <int n> HF_DEVICE void mask_row(float (&scores)[n], int r, int begin, int end) {
  HF_UNROLL
  for (int i = 0; i < n / 4; ++i)
    HF_UNROLL
    for (int e = 0; e < 2; ++e)
      if (8 * i + e < begin || 8 * i + e >= end) scores[4 * i + 2 * r + e] = -INFINITY;
}
template <int n> HF_DEVICE void mask_row_end(float (&scores)[n], int r, int end) {
  HF_UNROLL
  for (int i = 0; i < n / 4; ++i) {
    if (8 * i >= end) scores[4 * i + 2 * r] = -INFINITY;
    if (8 * i + 1 >= end) scores[4 * i + 2 * r + 1] = -INFINITY;
  }
}

// q.k to the logits in units of log2: scale, softcap, ALiBi.
template <int n>
HF_DEVICE void transform_scores(float (&scores)[n], const Params& p, const Work& w, int row, int column) {
  if (p.softcap > 0.f) {               // softcap * tanh(x) with tanh(x) = 1 - 2 / (1 + e^2x)
    const float inner = 2.f * kLog2e * p.scale / p.softcap, outer = p.softcap * kLog2e;
    HF_UNROLL
    for (int i = 0; i < n; ++i) scores[i] = outer - __fdividef(2.f * outer, 1.f + ex2(scores[i] * inner));
  } else {
    HF_UNROLL
    for (int i = 0; i < n; ++i) scores[i] *= p.scale * kLog2e;
  }
  if (p.alibi_slopes != nullptr) {
    const float slope = p.alibi_slopes[w.batch * p.alibi_batch_stride + w.head] * kLog2e;
    HF_UNROLL
    for (int r = 0; r < 2; ++r) {
      const float distance = float(row + 8 * r + w.k_length - w.q_length - column);
      HF_UNROLL
      for (int i = 0; i < n / 4; ++i)
        HF_UNROLL
        for (int e = 0; e < 2; ++e) {
          float& x = scores[4 * i + 2 * r + e];
          x = fmaf(-slope, fabsf(distance - float(8 * i + e)), x);
        }
    }
  }
}

// Zeroes what dropout drops; the survivors' factor 1 / (1 - p) is left to the end.
template <int n> HF_DEVICE void drop(float (&probabilities)[n], const Params& p, const Work& w, int row, int column) {
  Dropout dropout(p, w.batch, w.head);
  HF_UNROLL
  for (int i = 0; i < n / 8; ++i) {
    dropout.key = make_uint2(opaque(dropout.key.x), opaque(dropout.key.y));   // no round keys kept between draws
    HF_UNROLL
    for (int e = 0; e < 2; ++e) {
      const uint4 words = dropout.draw(row, column + 16 * i + e);
      float* x = &probabilities[8 * i + e];
      if (!dropout.keeps(words.x)) x[0] = 0.f;
      if (!dropout.keeps(words.y)) x[4] = 0.f;
      if (!dropout.keeps(words.z)) x[2] = 0.f;
      if (!dropout.keeps(words.w)) x[6] = 0.f;
    }
  }
}

}  // namespace hf_flash::hopper
