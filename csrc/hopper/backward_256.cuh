// What the two passes of the backward for head dims 192 and 256 share: sizes, arguments, products of 64-row tiles, the
// way out.
#pragma once
#include "../backward_parts.cuh"
#include "../mask.cuh"
#include "backward_plan.cuh"
#include "backward_scores.cuh"

namespace hf_flash::hopper {

template <class Element_, int kHeadDim_, Scores kScores_> struct WideConfig {
  using Element = Element_;
  using OperandTile = Tile<kHeadDim_, 64>;
  static constexpr int kHeadDim = kHeadDim_, kKeys = 64;
  static constexpr Scores kScores = kScores_;
  static constexpr bool kGeneral = kScores == Scores::kGeneral;
  static constexpr int kThreads = 384;                     // loads | scores and dv | dp and dk
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  // P is handed over as 2^15 P in fp16, whatever the element: bf16 costs 23 % in the error of dk, and P <= 1 fits.
  static constexpr int kExponent = 15;
  static constexpr float kUnit = 1.f / (1 << kExponent);
  static constexpr int kDqRows = 128;                      // queries of a block of the dq pass
  static constexpr int kStatisticsRows = kDqRows, kDqFloats = 0;   // BackwardWorkspace
};

struct WideArguments {
  CUtensorMap q, k, v, grad_out, grad_q, grad_k, grad_v;
  CUtensorMap statistics;          // rows of 64: LSE of every tile of queries, then delta
  Params p;
  TileGrid queries, keys;          // tiles of kDqRows queries and of kKeys keys, whose heads are parts of groups
  HeadParts parts;
  BackwardWorkspace workspace;
  ScoreConstants scores;
  RowLayout q_layout, k_layout;
  int copies;                      // Tile::load
};

// d = A B^T, both 64 x head_dim in shared memory. Starts and commits.
template <class Config> HF_DEVICE void multiply_rows(float (&d)[32], uint64_t a, uint64_t b) {
  using Product = Wgmma<typename Config::Element, 64, false>;
  using T = typename Config::OperandTile;
  wgmma_fence();
  HF_UNROLL
  for (int k = 0; k < Config::kHeadDim / 16; ++k)
    Product::ss(d, a + T::template k_step<64>(k), b + T::template k_step<64>(k), k > 0);
  wgmma_commit();
}
// sum += A B, where A is 64 x 64 in registers and B 64 x head_dim in shared memory. Starts and commits.
template <class Config>
HF_DEVICE void add_product(float (&sum)[Config::kHeadDim / 2], const uint32_t (&a)[16], uint64_t b) {
  using Product = Wgmma<typename Config::Element, Config::kHeadDim, true>;
  wgmma_fence();
  HF_UNROLL
  for (int k = 0; k < 4; ++k) Product::rs(sum, a + 4 * k, b + Config::OperandTile::row_step(k), 1);
  wgmma_commit();
}

// 64 x head_dim sums times factor, to shared memory and from there to global memory.
template <class Config>
HF_DEVICE void store_sums(const float (&sums)[Config::kHeadDim / 2], float factor, void* tile, const CUtensorMap* map,
                          bool wanted, int copies, int row, int head, int outer, int barrier) {
  using Element = typename Config::Element;
  using T = typename Config::OperandTile;
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
  HF_UNROLL
  for (int i = 0; i < Config::kHeadDim / 16; ++i) {
    const float* const x = sums + 8 * i;
    store_matrix_x4(shared_address(tile) + T::template chunk_offset<64>(warp * 16 + lane % 16, 2 * i + lane / 16),
                    pack<Element>(x[0] * factor, x[1] * factor), pack<Element>(x[2] * factor, x[3] * factor),
                    pack<Element>(x[4] * factor, x[5] * factor), pack<Element>(x[6] * factor, x[7] * factor));
  }
  fence_async_shared();
  barrier_sync(barrier, 128);
  if (thread == 0 && wanted) {
    T::template store<64>(map, tile, copies, row, head, outer);
    bulk_commit();
    bulk_wait_read<0>();
  }
}

}  // namespace hf_flash::hopper
