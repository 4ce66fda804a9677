// A block of the one-pass backward (backward.cuh): its sizes, shared memory, arguments, work and barriers.
#pragma once
#include "../backward_parts.cuh"
#include "backward_dq_sum.cuh"
#include "backward_plan.cuh"
#include "backward_scores.cuh"
#include "tile_counter.cuh"

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
  static constexpr int kResultBytes = OperandTile::bytes(kKeys);
  static_assert(kResultBytes <= 4 * kQueries * 64 * 2 && kResultBytes <= 4 * kQueries * kHeadDim,
                "dv and dk are staged where dS and dq were");
};

// A tile of keys: what a block does until the next one.
struct BackwardWork {
  int first_key;                            // < 0: there is no more work
  int batch, part, kv_head;                 // part: HeadParts
  int q_length, k_length;
  int group, first_head;                    // query heads of this key/value head, or of a part of them
  int first_tile, last_tile;                // of queries
  int statistics;                           // number of the first head's first tile; heads are queries.tiles apart
  RowCoordinates q_rows, k_rows;
  int64_t sums;                             // HeadParts::place
};

template <class Config> struct BackwardShared {
  using Element = typename Config::Element;
  static constexpr int kPanels = Config::kPanels, kPanelWidth = Config::kPanelWidth, kQueries = Config::kQueries;
  Element k[kPanels][Config::kKeys][kPanelWidth], v[kPanels][Config::kKeys][kPanelWidth];
  Element q[2][kPanels][kQueries][kPanelWidth], grad_out[2][kPanels][kQueries][kPanelWidth];
  Element ds[2][2][kQueries][64];           // [stage][warpgroup]: a second stage is worth 2 to 5 %
  float dq[kQueries * Config::kHeadDim];
  float lse[2][128], delta[2][128];         // [stage]; copies go to multiples of 128 bytes
  uint64_t kv_arrived, kv_released, q_arrived[2], q_released[2], grad_out_arrived[2], grad_out_released[2];
  uint64_t work_arrived[2], work_released[2], queries_loaded, results_stored;
  BackwardWork work[2];                     // this one and the next
};

struct BackwardArguments {
  CUtensorMap q, k, v, grad_out, grad_k, grad_v;
  CUtensorMap statistics;                   // rows of kQueries: LSE of every tile of queries, then delta
  Params p;
  TileGrid queries, keys;                   // keys: heads are parts of groups
  HeadParts parts;
  BackwardWorkspace workspace;
  ScoreConstants scores;
  RowLayout q_layout, k_layout;
  int copies;                               // Tile::load
  int counter;                              // TileCounter
};

// Named barriers. dq_free and dq_full: one per consumer warpgroup, shared with the warp that adds its part of dq.
// results: the consumers and the warp that stores dk and dv.
enum { kConsumersBarrier = 1, kDqFreeBarrier = 2, kDqFullBarrier = 4, kResultsBarrier = 6 };

}  // namespace hf_flash::hopper
