// A block of the one-pass backward (backward.cuh): its sizes, shared memory, arguments, work and barriers.
#pragma once
#include "backward_dq_sum.cuh"
#include "backward_plan.cuh"
#include "backward_scores.cuh"

namespace hf_flash::hopper {

template <class Element_, int kHeadDim_, int kQueries_, int kPanelWidth_, Scores kScores_> struct BackwardConfig {
  using Element = Element_;
  using OperandTile = Tile<kHeadDim_, kPanelWidth_>;
  static constexpr int kHeadDim = kHeadDim_, kQueries = kQueries_, kKeys = 128, kPanelWidth = kPanelWidth_;
  static constexpr Scores kScores = kScores_;
  static constexpr bool kGeneral = kScores == Scores::kGeneral;
  static constexpr int kStatisticsRows = kQueries, kDqFloats = kHeadDim;   // BackwardWorkspace
  static constexpr int kThreads = 384;             // loads and dq's sums | keys 0 to 63 | keys 64 to 127

  // The launch allots 168 registers a thread, 504 for three; the sum may not be exceeded (32 + 2 * 240 hangs).
  static constexpr bool kTight = kHeadDim + kQueries >= (kGeneral ? 192 : 208);
  static constexpr int kProducerRegisters = kTight ? 24 : 40, kConsumerRegisters = kTight ? 240 : 232;
  static constexpr bool kPackLate = !kGeneral && kTight && kQueries == 128;   // P as late as dS: fewer registers live

  static constexpr int kPanels = OperandTile::kPanels;
  static_assert(kHeadDim % 16 == 0 && kQueries % 16 == 0 && kQueries <= 128, "wgmma takes 16 rows or columns a step");
  static_assert(!kGeneral || kQueries == 64, "ScoreTransform works on 32 accumulators");
};

template <class Config> struct BackwardShared {
  using Element = typename Config::Element;
  static constexpr int kPanels = Config::kPanels, kPanelWidth = Config::kPanelWidth, kQueries = Config::kQueries;
  Element k[kPanels][Config::kKeys][kPanelWidth], v[kPanels][Config::kKeys][kPanelWidth];
  Element q[2][kPanels][kQueries][kPanelWidth], grad_out[2][kPanels][kQueries][kPanelWidth];
  Element ds[2][2][kQueries][64];           // [stage][warpgroup]: a second stage is worth 2 to 5 %
  float dq[kQueries * Config::kHeadDim];
  float lse[2][128], delta[2][128];         // [stage]; copies go to multiples of 128 bytes
  int batch, first_head;                    // of BackwardWork: here they cost the consumers no registers
  int64_t first_tile;                       // the first head's first tile among all; heads are queries.tiles apart
  uint64_t kv_arrived, q_arrived[2], q_released[2], grad_out_arrived[2], grad_out_released[2];
};

struct BackwardArguments {
  CUtensorMap q, k, v, grad_out, grad_k, grad_v;
  CUtensorMap statistics;                   // rows of kQueries: LSE of every tile of queries, then delta
  Params p;
  TileGrid queries, keys;
  BackwardWorkspace workspace;
  ScoreConstants scores;
  RowLayout q_layout, k_layout;
  int copies;                               // Tile::load
};

// What one block does.
struct BackwardWork {
  int kv_head, batch, first_key;
  int group, first_head;                    // query heads of this key/value head
  int first_tile, last_tile;                // of queries
  RowCoordinates q_rows, k_rows;
};

// Named barriers. dq_free and dq_full: one per consumer warpgroup, shared with the warp that adds its part of dq.
enum { kConsumersBarrier = 1, kDqFreeBarrier = 2, kDqFullBarrier = 4 };

}  // namespace hf_flash::hopper
