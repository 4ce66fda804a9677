// How the backward kernel divides its work: tiles and warps for each head dim, and which block owns which keys.
#pragma once
#include "../launch.cuh"
#include "tile.cuh"

namespace hf_flash {

// Warps share each product as a grid, in blocks of 16 dealt in turn. S and dP (kTileQ, kTileK): kScoreWarps along
// the queries; dk and dv (kTileK, kHeadDim): kKeyWarps along the keys; dq (kTileQ, kHeadDim): kQueryWarps along the
// queries. The squarer a warp's part the less it reads from shared memory, which bounds this kernel. kPasses: S and dP
// are computed in so many parts of the keys, where a whole one and dk, dv would not fit the registers; in two at least
// where scores need more than scaling.
template <int kHeadDim_, int kTileQ_, int kTileK_, int kWarps_, int kScoreWarps_, int kKeyWarps_, int kQueryWarps_,
          int kStages_, int kPasses_>
struct BackwardShape {
  static constexpr int kHeadDim = kHeadDim_, kTileQ = kTileQ_, kTileK = kTileK_, kWarps = kWarps_;
  static constexpr int kThreads = 32 * kWarps, kStages = kStages_;
  static constexpr int kScoreWarps = kScoreWarps_, kScoreKeyWarps = kWarps / kScoreWarps;
  static constexpr int kKeyWarps = kKeyWarps_, kKeyColumnWarps = kWarps / kKeyWarps;
  static constexpr int kQueryWarps = kQueryWarps_, kQueryColumnWarps = kWarps / kQueryWarps;

  static constexpr int kScoreRows = kTileQ / 16 / kScoreWarps;                     // of a warp, blocks of 16 queries
  static constexpr int kScoreKeys = kTileK / 16 / kScoreKeyWarps;                  // and of 16 keys
  static constexpr int kPlainPasses = kPasses_, kGeneralPasses = kPasses_ == 1 && kScoreKeys % 2 == 0 ? 2 : kPasses_;
  static constexpr int kGradKeys = kTileK / 16 / kKeyWarps, kGradColumns = kHeadDim / 8 / kKeyColumnWarps;
  static constexpr int kQueryRows = kTileQ / 16 / kQueryWarps, kQueryColumns = kHeadDim / 8 / kQueryColumnWarps;
  static_assert(kScoreRows * kScoreWarps * 16 == kTileQ && kQueryRows * kQueryWarps * 16 == kTileQ &&
                kScoreKeys * kScoreKeyWarps * 16 == kTileK && kScoreKeys % kPasses_ == 0 &&
                kGradKeys * kKeyWarps * 16 == kTileK &&
                kGradColumns * kKeyColumnWarps * 8 == kHeadDim && kQueryColumns * kQueryColumnWarps * 8 == kHeadDim,
                "every warp has an equal part");

  // Shared memory: k, v, then q and grad_out of each stage, P, dS, row statistics of each stage. dk and dv leave
  // through k and v.
  static constexpr int kKeyBytes = TileLayout<kHeadDim>::bytes(kTileK);
  static constexpr int kQueryBytes = TileLayout<kHeadDim>::bytes(kTileQ);
  static constexpr int kScoreBytes = TileLayout<kTileK>::bytes(kTileQ);
  static constexpr int kV = kKeyBytes, kQ = 2 * kKeyBytes, kGradOut = kQ + kStages * kQueryBytes;
  static constexpr int kP = kGradOut + kStages * kQueryBytes, kDs = kP + kScoreBytes, kStatistics = kDs + kScoreBytes;
  static constexpr int kStatisticsBytes = 2 * kTileQ * 4;
  static constexpr int kSharedBytes = kStatistics + kStages * kStatisticsBytes;
};

// Large: one block of 8 warps on an SM with up to 227 KB (sm_90), most shapes up to 163 KB (sm_80).
// Small: 99 KB, all that a block has on sm_86, sm_89 and sm_120.
//                                                         q    k  warps score key query stages passes
template <int kHeadDim> struct LargeBackward;
template <> struct LargeBackward<32> : BackwardShape<32, 128, 128, 8, 4, 4, 4, 2, 1> {};
template <> struct LargeBackward<64> : BackwardShape<64, 128, 128, 8, 4, 4, 4, 2, 1> {};
template <> struct LargeBackward<80> : BackwardShape<80, 128, 128, 8, 4, 4, 4, 2, 2> {};
template <> struct LargeBackward<96> : BackwardShape<96, 128, 128, 8, 4, 4, 4, 2, 2> {};
template <> struct LargeBackward<128> : BackwardShape<128, 64, 128, 8, 2, 2, 2, 2, 1> {};
template <> struct LargeBackward<160> : BackwardShape<160, 64, 96, 8, 4, 2, 2, 2, 1> {};
template <> struct LargeBackward<192> : BackwardShape<192, 64, 96, 8, 4, 2, 2, 2, 1> {};
template <> struct LargeBackward<256> : BackwardShape<256, 64, 64, 8, 4, 2, 2, 2, 1> {};
template <int kHeadDim> struct SmallBackward;
template <> struct SmallBackward<32> : BackwardShape<32, 64, 64, 4, 2, 2, 2, 2, 1> {};
template <> struct SmallBackward<64> : BackwardShape<64, 64, 64, 4, 2, 2, 2, 2, 1> {};
template <> struct SmallBackward<80> : BackwardShape<80, 64, 64, 4, 2, 2, 2, 2, 1> {};
template <> struct SmallBackward<96> : BackwardShape<96, 64, 64, 4, 2, 2, 2, 2, 1> {};
template <> struct SmallBackward<128> : BackwardShape<128, 64, 64, 4, 2, 2, 2, 1, 1> {};
template <> struct SmallBackward<160> : BackwardShape<160, 32, 64, 8, 2, 2, 2, 2, 1> {};
template <> struct SmallBackward<192> : BackwardShape<192, 32, 64, 8, 2, 2, 2, 1, 1> {};
template <> struct SmallBackward<256> : BackwardShape<256, 32, 32, 4, 2, 2, 2, 1, 1> {};

// Which keys of which key/value head a block owns. The first keys, which a causal mask shows to most queries, come
// first, so that the grid ends evenly, and because the deterministic mode waits for the tiles before. Heads are taken
// in sections whose queries, output gradients and fp32 query gradients stay in the L2 cache meanwhile.
struct BackwardSchedule {
  int key_tiles, section;   // section: (batch, key/value head) pairs

  BackwardSchedule(const Params& p, int tile_k) : key_tiles(ceil_div(p.seq_k, tile_k)) {
    constexpr int64_t kCacheBytes = 24 << 20;
    const int64_t bytes_per_pair = int64_t(p.seq_q) * p.head_dim * 8 * (p.heads / p.kv_heads) + 1;
    const int64_t fitting = kCacheBytes / bytes_per_pair, all = int64_t(p.batch) * p.kv_heads;
    section = int(fitting < 1 ? 1 : fitting > all ? all : fitting);
  }
  int64_t blocks(const Params& p) const { return int64_t(key_tiles) * p.batch * p.kv_heads; }

  HF_DEVICE void locate(const Params& p, int block, int* key_tile, int* batch, int* kv_head) const {
    const int first = int(block / (int64_t(key_tiles) * section)) * section;
    const int size = min(section, p.batch * p.kv_heads - first);
    const int rest = int(block - int64_t(first) * key_tiles);
    const int pair = first + rest % size;
    *key_tile = rest / size;
    *batch = pair / p.kv_heads;
    *kv_head = pair % p.kv_heads;
  }
};

}  // namespace hf_flash
