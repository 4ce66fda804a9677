// Tiles of 16-bit elements in shared memory: swizzled layout, copies from and to global memory, mma fragments.
//
// A tile is (rows, kColumns), row-major, kColumns a multiple of 16, on 16 bytes. Chunks of 16 bytes are permuted
// within a row so that the eight rows that one ldmatrix phase reads at equal columns lie in eight different groups of
// four banks: chunk c of row r is stored at c ^ swizzle(r). Rows of 8n chunks permute eight chunks by r % 8; rows of
// 8n + 4 or 8n + 2 chunks already fall on two or four bank groups and permute only four or two.
#pragma once
#include <type_traits>

#include "ptx.cuh"

namespace hf_flash {

template <int kColumns> struct TileLayout {
  static_assert(kColumns % 16 == 0, "an mma step is 16 columns");
  static constexpr int kChunks = kColumns / 8;
  static constexpr int kPermuted = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;   // chunks permuted together
  static constexpr int kRowShift = kPermuted == 8 ? 0 : kPermuted == 4 ? 1 : 2;       // log2(8 / kPermuted)
  static constexpr int kRowBytes = kColumns * 2;
  static constexpr int bytes(int rows) { return rows * kRowBytes; }

  static HF_DEVICE int swizzle(int row) { return (row >> kRowShift) & (kPermuted - 1); }

  // Byte offset of 16-byte chunk `chunk` of row `row`.
  static HF_DEVICE int chunk_offset(int row, int chunk) { return row * kRowBytes + (chunk ^ swizzle(row)) * 16; }

  // Byte offset of one element: for fragment stores of pairs (column even) and single reads.
  static HF_DEVICE int offset(int row, int column) { return chunk_offset(row, column / 8) + column % 8 * 2; }

  // chunk_offset(row + lane_row, column / 8 + lane_chunk) for row % 8 == 0, column % 16 == 0, lane_chunk in {0, 1},
  // written so that a few values a lane and immediates are all it takes.
  static HF_DEVICE int block_offset(int row, int column, int lane_row, int lane_chunk) {
    static_assert(kRowBytes % (16 * kPermuted) == 0, "a permutation must not reach into the row's bits");
    const int chunk = column / 8, low = chunk & (kPermuted - 1);
    return opaque(chunk_offset(lane_row, lane_chunk) ^ (low * 16)) + row * kRowBytes + (chunk - low) * 16;
  }
};

// ---- Fragments of one warp for mma_m16n8k16. row % 8 == 0, column % 16 == 0; each reads a 16 x 16 block.

// A (16 rows, 16 k) of a tile (rows, k).
template <int kColumns> HF_DEVICE void load_a(uint32_t (&a)[4], const char* tile, int row, int column) {
  const int lane = threadIdx.x % 32;
  ldmatrix_x4(a, tile + TileLayout<kColumns>::block_offset(row, column, lane % 16, lane / 16));
}

// Two B (16 k, 8 n), n = tile rows, of a tile (n, k), as in q k^T: b[0], b[1] for rows row + 0..7, b[2], b[3] for
// rows row + 8..15.
template <int kColumns> HF_DEVICE void load_b(uint32_t (&b)[4], const char* tile, int row, int column) {
  const int lane = threadIdx.x % 32;
  ldmatrix_x4(b, tile + TileLayout<kColumns>::block_offset(row, column, lane % 8 + lane / 16 * 8, lane / 8 % 2));
}

// Two B (16 k, 8 n), n = tile columns, of a tile (k, n), as in p v: b[0], b[1] for columns column + 0..7, b[2], b[3]
// for columns column + 8..15.
template <int kColumns> HF_DEVICE void load_b_transposed(uint32_t (&b)[4], const char* tile, int row, int column) {
  const int lane = threadIdx.x % 32;
  ldmatrix_x4_trans(b, tile + TileLayout<kColumns>::block_offset(row, column, lane % 16, lane / 16));
}

// ---- Accumulators: fragments acc[m][n] of blocks of 16 rows and 8 columns.

template <int kRows, int kColumns> HF_DEVICE void clear(float (&acc)[kRows][kColumns][4]) {
  HF_UNROLL
  for (int m = 0; m < kRows; ++m)
    HF_UNROLL
    for (int n = 0; n < kColumns; ++n)
      HF_UNROLL
      for (int e = 0; e < 4; ++e) acc[m][n][e] = 0.f;
}

// Columns 16 step .. 16 step + 15 as the A operand of another product.
template <class Element, int kRows, int kColumns>
HF_DEVICE void pack_a(uint32_t (&a)[kRows][4], const float (&acc)[kRows][kColumns][4], int step) {
  HF_UNROLL
  for (int m = 0; m < kRows; ++m)
    HF_UNROLL
    for (int i = 0; i < 4; ++i)
      a[m][i] = pack<Element>(acc[m][2 * step + i / 2][i % 2 * 2], acc[m][2 * step + i / 2][i % 2 * 2 + 1]);
}

// ---- Copies. A row is cut into panels of 8, then 4 or 2 chunks; kThreads threads take a panel's chunks side by side
// (128-byte transactions where the row allows), so that a thread's swizzle and column stay fixed.

// Calls visit(group, row, chunk, width, panels) for each panel width: this thread visits rows row,
// row + kThreads / width, ... and in each the chunks chunk, chunk + width, ... of `panels` panels.
template <int kColumns, int kThreads, int kFirstChunk = 0, int kGroup = 0, class Visit>
HF_DEVICE void for_each_panel(Visit visit) {
  constexpr int kLeft = TileLayout<kColumns>::kChunks - kFirstChunk;
  if constexpr (kLeft > 0) {
    constexpr int kWidth = kLeft >= 8 ? 8 : kLeft >= 4 ? 4 : 2, kPanels = kLeft / kWidth;
    static_assert(kThreads % (kWidth * 8) == 0, "a thread's rows must share one swizzle: the step is a multiple of 8");
    const int thread = volatile_opaque(threadIdx.x) % kThreads;
    visit(std::integral_constant<int, kGroup>{}, thread / kWidth, kFirstChunk + thread % kWidth,
          std::integral_constant<int, kWidth>{}, std::integral_constant<int, kPanels>{});
    for_each_panel<kColumns, kThreads, kFirstChunk + kPanels * kWidth, kGroup + 1>(visit);
  }
}

// Where this thread's copies start in a tile of global memory, kept so that a walk over tiles only adds to it.
template <int kColumns, int kThreads> struct TileSource {
  static constexpr int kChunks = TileLayout<kColumns>::kChunks;
  static constexpr int kGroups = (kChunks >= 8) + (kChunks % 8 >= 4) + (kChunks % 4 >= 2);
  const char* start[kGroups];

  template <class Element> HF_DEVICE TileSource(const Element* source, int64_t row_stride) {
    for_each_panel<kColumns, kThreads>([&](auto group, int row, int chunk, auto, auto) {
      start[group.value] = reinterpret_cast<const char*>(source + row * row_stride + chunk * 8);
    });
  }
  HF_DEVICE void move(int64_t elements) {
    HF_UNROLL
    for (int i = 0; i < kGroups; ++i) start[i] += elements * 2;
  }
};

// Starts the copy of rows [0, kRows) of source into a tile. Rows from `rows` on and columns from `columns` on are
// zeroed without being read. The caller commits and waits. Threads: kThreads, numbered by threadIdx.x % kThreads.
template <int kRows, int kColumns, int kThreads>
HF_DEVICE void copy_tile_async(char* tile, const TileSource<kColumns, kThreads>& source, int64_t row_stride, int rows,
                               int columns) {
  for_each_panel<kColumns, kThreads>([&](auto group, int row, int chunk, auto width, auto panels) {
    constexpr int kStep = kThreads / width.value;
    const char* from = source.start[group.value];
    char* const to = tile + opaque(TileLayout<kColumns>::chunk_offset(row, chunk));
    HF_UNROLL
    for (int i = 0; i < ceil_div(kRows, kStep); ++i) {
      const bool row_valid = row + i * kStep < rows;
      HF_UNROLL
      for (int panel = 0; panel < panels.value; ++panel) {
        const int skip = panel * width.value;
        if (kRows % kStep == 0 || row + i * kStep < kRows)
          copy_async_16(to + i * kStep * TileLayout<kColumns>::kRowBytes + skip * 16, from + skip * 16,
                        row_valid && (chunk + skip) * 8 < columns);
      }
      from += kStep * row_stride * 2;
    }
  });
}
template <int kRows, int kColumns, int kThreads, class Element>
HF_DEVICE void copy_tile_async(char* tile, const Element* source, int64_t row_stride, int rows, int columns) {
  copy_tile_async<kRows>(tile, TileSource<kColumns, kThreads>(source, row_stride), row_stride, rows, columns);
}

// The same where the place of a row is looked up: row_source(row) -> const Element* is called for valid rows only.
template <int kRows, int kColumns, int kThreads, class RowSource>
HF_DEVICE void copy_rows_async(char* tile, RowSource row_source, int rows, int columns) {
  for_each_panel<kColumns, kThreads>([&](auto, int row, int chunk, auto width, auto panels) {
    constexpr int kStep = kThreads / width.value;
    HF_NO_UNROLL
    for (; row < kRows; row += kStep) {
      const auto* from = row_source(row < rows ? row : 0) + chunk * 8;
      char* const to = tile + TileLayout<kColumns>::chunk_offset(row, chunk);
      HF_UNROLL
      for (int panel = 0; panel < panels.value; ++panel) {
        const int skip = panel * width.value;
        copy_async_16(to + skip * 16, from + skip * 8, row < rows && (chunk + skip) * 8 < columns);
      }
    }
  });
}

// Writes a tile's first `rows` rows and `columns` columns to global memory, 16 bytes at a time.
template <int kRows, int kColumns, int kThreads, class Element>
HF_DEVICE void store_tile(Element* destination, int64_t row_stride, const char* tile, int rows, int columns) {
  for_each_panel<kColumns, kThreads>([&](auto, int row, int chunk, auto width, auto panels) {
    constexpr int kStep = kThreads / width.value;
    char* to = reinterpret_cast<char*>(destination + row * row_stride + chunk * 8);
    const char* const from = tile + opaque(TileLayout<kColumns>::chunk_offset(row, chunk));
    HF_UNROLL
    for (int i = 0; i < ceil_div(kRows, kStep); ++i) {
      HF_UNROLL
      for (int panel = 0; panel < panels.value; ++panel) {
        const int skip = panel * width.value;
        if (row + i * kStep < (kRows < rows ? kRows : rows) && (chunk + skip) * 8 < columns)
          *reinterpret_cast<uint4*>(to + skip * 16) = *reinterpret_cast<const uint4*>(
              from + i * kStep * TileLayout<kColumns>::kRowBytes + skip * 16);
      }
      to += kStep * row_stride * int(sizeof(Element));
    }
  });
}

}  // namespace hf_flash
