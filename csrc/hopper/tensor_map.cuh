// Host side of the copy engine: describes a tensor (batch, rows, heads, head_dim), or (total, heads, head_dim), so that
// one instruction moves a tile of rows of one head, clipped at the end of its sequence.
#pragma once
#include <type_traits>

#include "../launch.cuh"
#include "tile.cuh"

namespace hf_flash::hopper {

// How rows of a tensor are addressed. Coordinates of a tile are {column, row, panel, head, outer} (Tile::load):
// - plain: row counts from the start of the sequence, outer is the batch; clipped at `rows`.
// - ragged, for sequences whose ends only the device knows: outer steps by one row as well, and the map begins
//   `rows` rows before the tensor. Row r of n in a sequence starting at row s is {row = rows - n + r, outer = s + n},
//   the row s + r of the tensor; r >= n is outside the map, so that loads give zero and stores do nothing.
//   A copy must hold one row of the sequence at least: the engine translates the map's first address for a box that is
//   wholly outside, and that address, before the tensor, need not be mapped (cudaErrorIllegalAddress).
struct RowCoordinates {
  int row, outer;          // of the sequence's first row: add the row inside the sequence to `row`
};
struct RowLayout {
  bool ragged;
  int64_t rows;            // extent of the row dimension: plain, a sequence; ragged, no less than the longest
  int64_t outer;           // extent of the outer dimension: plain, the batch; ragged, every row, plus one
  int64_t batch_rows;      // ragged: rows from one batch entry to the next, 0 when packed

  // packed_row: q_row or k_row of Sequence.
  HF_HOST_DEVICE RowCoordinates sequence(int batch, int64_t packed_row, int length) const {
    if (!ragged) return {0, batch};
    return {int(rows) - length, int(packed_row + batch * batch_rows) + length};
  }
};

// Rows of q, out and their gradients.
inline RowLayout query_rows(const Params& p) {
  if (p.cu_seqlens_q) return {true, p.total_q, p.total_q + 1, 0};
  return {false, p.seq_q, p.batch, 0};
}
// Rows of k, v or their gradients. Dense keys in partial use are ragged, if the batch stride counts whole rows.
inline bool keys_are_addressable(const Params& p, const Tensor& t) {
  return p.cu_seqlens_k || !p.used_k || (t.row_stride != 0 && t.batch_stride % t.row_stride == 0);
}
inline RowLayout key_rows(const Params& p, const Tensor& t) {
  if (p.cu_seqlens_k) return {true, p.total_k, p.total_k + 1, 0};
  if (!p.used_k) return {false, p.seq_k, p.batch, 0};
  const int64_t batch_rows = t.batch_stride / t.row_stride;
  return {true, p.seq_k, (p.batch - 1) * batch_rows + p.seq_k + 1, batch_rows};
}

// How many copies move a tile of a tensor with head_dim columns: all panels at once only if each is full.
template <class Tile> int copies_per_tile(int head_dim) {
  return head_dim % Tile::kPanelWidth == 0 ? 1 : Tile::kPanels;
}

#ifndef HF_FLASH_EMULATE
// cuTensorMapEncodeTiled, fetched from the driver at run time: the library links no libcuda.
template <class... Arguments> int encode_tensor_map(CUtensorMap* map, Arguments... arguments) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    cudaDriverEntryPointQueryResult found;
    void* function = nullptr;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  return encode && encode(map, arguments...) == CUDA_SUCCESS ? 0 : int(HF_FLASH_NO_TENSOR_MAP);
}
#endif

// A map whose box is `box_rows` rows (at most 256) of one head, laid out as Tile is.
template <class Element, class Tile>
int make_tensor_map(CUtensorMap* map, const Tensor& t, const RowLayout& layout, int heads, int head_dim, int box_rows) {
  static_assert(sizeof(Element) == 2, "panels are measured in 16-bit elements");
  if (layout.rows > INT32_MAX || layout.outer > INT32_MAX) return HF_FLASH_NO_TENSOR_MAP;   // coordinates are 32 bits
  const bool whole = head_dim % Tile::kPanelWidth == 0;
  const auto at_least_one = [](int64_t extent) { return cuuint64_t(extent > 1 ? extent : 1); };
  // The stride along a dimension of one is never used, and may be anything in the caller's tensor.
  const auto bytes = [](int64_t extent, int64_t stride) { return cuuint64_t(extent > 1 ? 2 * stride : 16); };

  const cuuint64_t extents[5] = {cuuint64_t(whole ? Tile::kPanelWidth : head_dim), at_least_one(layout.rows),
                                 cuuint64_t(whole ? head_dim / Tile::kPanelWidth : 1), cuuint64_t(heads),
                                 at_least_one(layout.outer)};
  const cuuint64_t strides[4] = {bytes(layout.rows, t.row_stride), 2 * Tile::kPanelWidth, bytes(heads, t.head_stride),
                                 bytes(layout.outer, layout.ragged ? t.row_stride : t.batch_stride)};
  const cuuint32_t box[5] = {Tile::kPanelWidth, cuuint32_t(box_rows),
                             cuuint32_t(whole ? Tile::kPanels : 1), 1, 1};
  const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
  char* base = static_cast<char*>(t.data);
  if (layout.ragged) base -= 2 * layout.rows * t.row_stride;
  return encode_tensor_map(
      map, std::is_same<Element, bf16>::value ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 5u,
      static_cast<void*>(base), extents, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
      Tile::kPanelWidth == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
      : Tile::kPanelWidth == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                          : CU_TENSOR_MAP_SWIZZLE_32B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// A map of fp32 values, `columns` of them in a row: one copy brings one row. racecheck follows it, unlike a copy
// without a map.
inline int make_row_map(CUtensorMap* map, const float* values, int64_t rows, int columns) {
  if (rows > INT32_MAX) return HF_FLASH_NO_TENSOR_MAP;
  const cuuint64_t extents[5] = {cuuint64_t(columns), cuuint64_t(rows > 1 ? rows : 1), 1, 1, 1};
  const cuuint64_t strides[4] = {4 * cuuint64_t(columns), 16, 16, 16};
  const cuuint32_t box[5] = {cuuint32_t(columns), 1, 1, 1, 1}, element_strides[5] = {1, 1, 1, 1, 1};
  return encode_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 5u,
                           static_cast<void*>(const_cast<float*>(values)), extents, strides, box, element_strides,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

}  // namespace hf_flash::hopper
