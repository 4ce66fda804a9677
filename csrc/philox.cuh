// The dropout mask: a pure function of (seed, offset, batch, head, query, key), so that every kernel and tiling, and
// the recomputed backward, draws the same. Philox4x32 with 7 rounds (Salmon et al., SC 2011,
// doi 10.1145/2063384.2063405). hf_flash/reference.py has the same function in Python.
#pragma once
#include "common.cuh"

namespace hf_flash {

HF_HOST_DEVICE uint4 philox(uint2 key, uint4 counter) {
  for (int round = 0; round < 7; ++round) {
    const uint64_t a = uint64_t(0xD2511F53u) * counter.x, b = uint64_t(0xCD9E8D57u) * counter.z;
    counter = make_uint4(uint32_t(b >> 32) ^ counter.y ^ key.x, uint32_t(b), uint32_t(a >> 32) ^ counter.w ^ key.y,
                         uint32_t(a));
    key.x += 0x9E3779B9u;
    key.y += 0xBB67AE85u;
  }
  return counter;
}

// One draw serves four elements: queries {i, i + 8} x keys {j, j + 8}, where bit 3 of i and j is clear. An accumulator
// fragment of mma and wgmma holds exactly such quadruples, for S and for its transpose alike.
struct Dropout {
  uint2 key;
  uint32_t offset, batch_head, drop_below;   // an element is dropped iff its 32 random bits are below drop_below
  float keep_scale;                          // 1 / (1 - p)

  HF_DEVICE Dropout(const Params& p, int batch, int head) {
    const uint64_t seed = p.rng_state[0];
    key = make_uint2(uint32_t(seed), uint32_t(seed >> 32));
    offset = uint32_t(p.rng_state[1]);
    batch_head = uint32_t(batch) * p.heads + head;
    drop_below = threshold(p.dropout_p);
    keep_scale = 1.f / (1.f - p.dropout_p);
  }
  static HF_HOST_DEVICE uint32_t threshold(float p) { return uint32_t(double(p) * 4294967296.0); }

  // Words x, y, z, w: (i, j), (i, j + 8), (i + 8, j), (i + 8, j + 8).
  HF_DEVICE uint4 draw(int query, int key_index) const {
    return philox(key, make_uint4(uint32_t(query) & ~8u, uint32_t(key_index) & ~8u, batch_head, offset));
  }
  HF_DEVICE bool keeps(uint32_t word) const { return word >= drop_below; }
};

}  // namespace hf_flash
