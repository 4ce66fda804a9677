// How a tile of rows lies in shared memory, and how wgmma and the copy engine address it.
#pragma once
#include "wgmma.cuh"

namespace hf_flash::hopper {

// A tile of rows x kHeadDim is kPanels panels [rows][kPanelWidth], swizzled over a panel row: width 64 is SWIZZLE_128B,
// 32 SWIZZLE_64B, 16 SWIZZLE_32B. All are free of bank conflicts, K-major and MN-major alike. If the width does not
// divide kHeadDim, the copy engine zero-fills the end of the last panel, and k-loops and N stop at kHeadDim: N may end
// inside a panel, but an MN-major operand may not start inside one. Tiles start on 1024 bytes.
template <int kHeadDim_, int kPanelWidth_> struct Tile {
  static constexpr int kHeadDim = kHeadDim_, kPanelWidth = kPanelWidth_;
  static_assert(kPanelWidth == 64 || kPanelWidth == 32 || kPanelWidth == 16, "a panel row is one swizzle span");
  static_assert(kHeadDim % 16 == 0, "wgmma takes 16 columns a step");
  static constexpr int kPanels = ceil_div(kHeadDim, kPanelWidth);
  static constexpr int kRowBytes = 2 * kPanelWidth;
  static constexpr int kChunks = kPanelWidth / 8;   // of 16 bytes, in a panel row

  static HF_HOST_DEVICE constexpr int bytes(int rows) { return kPanels * rows * kRowBytes; }

  // Descriptors: address, stride between panels (used MN-major only), stride between groups of 8 rows, swizzle mode.
  static HF_DEVICE uint64_t descriptor(const void* panel, uint32_t panel_stride) {
    constexpr uint64_t kSwizzle = kPanelWidth == 64 ? 1 : kPanelWidth == 32 ? 2 : 3;
    return uint64_t((shared_address(panel) & 0x3FFFF) >> 4) | uint64_t(panel_stride >> 4) << 16 |
           uint64_t(8 * kRowBytes >> 4) << 32 | kSwizzle << 62;
  }
  // K-major: rows are M or N, columns are K. Step k of 16 columns: add k_step<rows of the tile>(k).
  static HF_DEVICE uint64_t k_major(const void* panel) { return descriptor(panel, 16); }
  template <int kRows> static HF_HOST_DEVICE constexpr int k_step(int k) {
    return k / (kPanelWidth / 16) * (kRows * kRowBytes / 16) + k % (kPanelWidth / 16) * 2;
  }
  // MN-major: rows are K, columns are M or N. Step k of 16 rows: add row_step(k).
  template <int kRows> static HF_DEVICE uint64_t mn_major(const void* panel) {
    return descriptor(panel, kRows * kRowBytes);
  }
  static HF_HOST_DEVICE constexpr int row_step(int k) { return k * kRowBytes; }

  // Byte offset of the 16-byte chunk `chunk` (8 columns) of a row.
  template <int kRows> static HF_HOST_DEVICE constexpr int chunk_offset(int row, int chunk) {
    return chunk / kChunks * (kRows * kRowBytes) + row * kRowBytes +
           (chunk % kChunks ^ row / (64 / kPanelWidth) % kChunks) * 16;
  }

  // Whole tiles through a map of tensor_map.cuh. `copies` is copies_per_tile of the head dim: one instruction brings
  // all panels if each is full, else each takes its own.
  template <int kRows>
  static HF_DEVICE void load(void* tile, const CUtensorMap* map, uint64_t* barrier, int copies, int row, int head,
                             int outer) {
    HF_NO_UNROLL
    for (int i = 0; i < copies; ++i)
      tma_load_5d(static_cast<char*>(tile) + i * kRows * kRowBytes, map, barrier, i * kPanelWidth, row, 0, head, outer);
  }
  template <int kRows>
  static HF_DEVICE void store(const CUtensorMap* map, const void* tile, int copies, int row, int head, int outer) {
    HF_NO_UNROLL
    for (int i = 0; i < copies; ++i)
      tma_store_5d(map, static_cast<const char*>(tile) + i * kRows * kRowBytes, i * kPanelWidth, row, 0, head, outer);
  }
};

}  // namespace hf_flash::hopper
