// csrc/mask.cuh, csrc/philox.cuh and csrc/launch_counters.cuh as host functions for tests/test_index_arithmetic.py.
#include "launch_counters.cuh"
#include "mask.cuh"
#include "philox.cuh"

using namespace hf_flash;
extern "C" {

// which: 0 keys, 1 keys_seen_by_all, 2 queries. range: {begin, end}.
void mask_range(int which, int q_length, int k_length, int left, int right, int first, int last, int* range) {
  const Mask mask(q_length, k_length, left, right);
  const Range r = which == 0   ? mask.keys(first, last)
                  : which == 1 ? mask.keys_seen_by_all(first, last)
                               : mask.queries(first, last);
  range[0] = r.begin;
  range[1] = r.end;
}

// A fresh set of counters gives these launches, each a stream, whether it is captured, and how many it asks for, these.
void launch_counters(int launches, const uint64_t* streams, const uint8_t* captured, const int* asked, int* numbers,
                     int* count) {
  LaunchCounters<1000, 7, 5000> counters;
  for (int i = 0; i < launches; ++i)
    numbers[i] = counters.choose(reinterpret_cast<cudaStream_t>(streams[i]), captured[i], asked[i]);
  *count = counters.kCount;
}

void philox_words(const uint32_t* key, const uint32_t* counter, uint32_t* words) {
  const uint4 x = philox(make_uint2(key[0], key[1]), make_uint4(counter[0], counter[1], counter[2], counter[3]));
  words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
}

// kept (queries, keys) of one head: 1 where the element survives dropout.
void dropout_mask(int64_t seed, int64_t offset, float p, int heads, int batch, int head, int queries, int keys,
                  uint8_t* kept) {
  const int64_t state[2] = {seed, offset};
  Params params{};
  params.rng_state = state;
  params.dropout_p = p;
  params.heads = heads;
  const Dropout dropout(params, batch, head);
  for (int i = 0; i < queries; ++i)
    for (int j = 0; j < keys; ++j) {
      const uint4 words = dropout.draw(i, j);
      const uint32_t word = i & 8 ? (j & 8 ? words.w : words.z) : j & 8 ? words.y : words.x;
      kept[int64_t(i) * keys + j] = dropout.keeps(word);
    }
}
}
