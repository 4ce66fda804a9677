// Where the keys of a decode step lie in the cache, and into which parts (splits) they are divided.
#pragma once
#include "../mask.cuh"
#include "../sequence.cuh"

namespace hf_flash {

// Rows of the cache in use before new keys are appended, left padding included.
HF_DEVICE int cached_keys(const Params& p, int batch) {
  return p.used_k ? min(max(p.used_k[batch], 0), p.seq_k) : p.seq_k;
}

// The sequence with the appended keys; those beyond the cache's capacity do not exist.
HF_DEVICE Sequence decode_sequence(const Params& p, int batch) {
  Sequence sequence(p, batch);
  if (p.new_k.data) sequence.k_length = max(0, min(cached_keys(p, batch) + p.seq_new, p.seq_k) - int(sequence.k_row));
  return sequence;
}

// Row `row` of a sequence's cache, left padding included.
struct CacheRow {
  int64_t page;             // index along batch_stride: a page, or the whole row of the batch
  int slot;

  HF_DEVICE CacheRow(const Params& p, int batch, int row) {
    if (p.block_table) {
      const int index = row / p.page_size;
      page = p.block_table[batch * p.block_table_stride + index];
      slot = row - index * p.page_size;
    } else {
      page = p.cache_batch_idx ? p.cache_batch_idx[batch] : batch;
      slot = row;
    }
  }
  HF_DEVICE int64_t offset(const Tensor& t) const { return page * t.batch_stride + slot * t.row_stride; }
};

// The keys that a tile of queries sees, in parts of equal length. The length depends on the number of these keys alone,
// never on the batch or the cache's capacity, so that a sequence gives the same bits whatever it is batched with. Short
// sequences are cut finely, to occupy the GPU with one of them; long ones coarsely, to write few partial results.
struct Splits {
  Range keys;
  int length, count;        // count is at least one: a tile without keys still writes its output

  static constexpr int kShortest = 256, kKeysOfShortest = 4096;   // each doubling of the length serves 4 times the keys

  static HF_HOST_DEVICE int split_length(int keys, int num_splits) {
    if (num_splits > 0) return keys > 0 ? round_up(ceil_div(keys, num_splits), 16) : 16;
    int length = kShortest;
    for (int64_t served = kKeysOfShortest; served < keys; served *= 4) length *= 2;
    return length;
  }
  HF_HOST_DEVICE Splits(Range keys, int num_splits) : keys(keys) {
    const int total = keys.empty() ? 0 : keys.end - keys.begin;
    length = split_length(total, num_splits);
    count = total > length ? ceil_div(total, length) : 1;
  }
  HF_HOST_DEVICE Range part(int split) const {
    const int64_t begin = keys.begin + int64_t(split) * length, end = begin + length;
    return {int(begin < keys.end ? begin : keys.end), int(end < keys.end ? end : keys.end)};
  }

  // The largest count that any number of keys up to `keys` may have: what the host, which knows no lengths, launches.
  static HF_HOST_DEVICE int most(int keys, int num_splits) {
    if (num_splits > 0) return num_splits;
    const int length = split_length(keys, 0), count = keys > length ? ceil_div(keys, length) : 1;
    const int before = length / kShortest * (kKeysOfShortest / kShortest / 2);   // just before the length last doubled
    return length > kShortest && before > count ? before : count;
  }
};

}  // namespace hf_flash
