// Which keys a query sees: sequence end, causal and sliding windows, aligned bottom-right.
// Query i sees key j iff 0 <= j < k_length and -left <= j - (i + diagonal) <= right, where -1 lifts a limit.
// Pure index arithmetic, shared by every kernel; tests run it on the host.
#pragma once
#include "common.cuh"

namespace hf_flash {

struct Range {
  int begin, end;           // half open
  HF_HOST_DEVICE bool empty() const { return begin >= end; }
};

struct Mask {
  int q_length, k_length, diagonal, left, right;

  HF_HOST_DEVICE Mask(int q_length, int k_length, int left, int right)
      : q_length(q_length), k_length(k_length), diagonal(k_length - q_length), left(left), right(right) {}

  // Keys that row sees.
  HF_HOST_DEVICE Range keys(int row) const { return keys(row, row + 1); }

  // Keys that some row of [first, last) sees: what a tile of queries must visit.
  HF_HOST_DEVICE Range keys(int first, int last) const {
    const int64_t end = right < 0 ? k_length : int64_t(last) + diagonal + right;
    const int64_t begin = left < 0 ? 0 : int64_t(first) + diagonal - left;
    return {int(begin < 0 ? 0 : begin > k_length ? k_length : begin),
            int(end < 0 ? 0 : end > k_length ? k_length : end)};
  }

  // Keys that every row of [first, last) sees: tiles inside need no mask.
  HF_HOST_DEVICE Range keys_seen_by_all(int first, int last) const {
    const Range a = keys(first), b = keys(last - 1);
    return {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
  }

  // Queries that see some key of [first, last): what a tile of keys must visit. Rows past q_length are never included.
  HF_HOST_DEVICE Range queries(int first, int last) const {
    if (last > k_length) last = k_length;
    const int64_t begin = right < 0 ? 0 : int64_t(first) - diagonal - right;
    const int64_t end = left < 0 ? q_length : int64_t(last) - diagonal + left;
    if (first >= last) return {0, 0};
    return {int(begin < 0 ? 0 : begin > q_length ? q_length : begin),
            int(end < 0 ? 0 : end > q_length ? q_length : end)};
  }
};

}  // namespace hf_flash
