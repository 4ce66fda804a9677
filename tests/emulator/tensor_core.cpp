// mma.sync, ldmatrix, stmatrix and wgmma, on the fragments' documented layouts. The shared-memory window starts at
// address kSharedStart, so that address 0 is never valid.
#include <string.h>

#include "state.h"

namespace hf_emulator {

namespace {

constexpr uint32_t kSharedStart = 1024;

struct FloatTables {
  float bf16[65536], fp16[65536];
  FloatTables() {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const uint32_t wide = bits << 16;
      memcpy(&bf16[bits], &wide, 4);
      __half_raw raw;
      raw.x = uint16_t(bits);
      fp16[bits] = __half2float(__half(raw));
    }
  }
};
const FloatTables tables;

const float* table(bool half) { return half ? tables.fp16 : tables.bf16; }

// Element (row, k) of an operand of 16 k: [rows][16] floats.
void unpack_a(float* out, const uint32_t* a, int lane, bool half) {
  const float* t = table(half);
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + 8 * (i % 2), k = 2 * (lane % 4) + 8 * (i / 2);
    out[row * 16 + k] = t[a[i] & 0xffff];
    out[row * 16 + k + 1] = t[a[i] >> 16];
  }
}

}  // namespace

uint32_t shared_address(const void* p) {
  check_shared(p, 1, 1, "shared_address");
  return uint32_t(static_cast<const char*>(p) - shared_memory) + kSharedStart;
}

char* shared_pointer(uint32_t address, size_t bytes, const char* what) {
  char* p = shared_memory + (int64_t(address) - kSharedStart);
  check_shared(p, bytes, 1, what);
  return p;
}

void check_shared(const void* p, size_t bytes, size_t alignment, const char* what) {
  const int64_t offset = static_cast<const char*>(p) - shared_memory;
  if (offset < 0 || offset + int64_t(bytes) > int64_t(shared_size))
    fail("%s: %zu bytes at offset %lld, outside %zu bytes of shared memory", what, bytes, (long long)offset,
         shared_size);
  if (offset % alignment) fail("%s: offset %lld is not on %zu bytes", what, (long long)offset, alignment);
}

void mma(float* acc, const uint32_t* a, uint32_t b0, uint32_t b1, bool half) {
  struct Payload { float* acc; const uint32_t* a; uint32_t b[2]; bool half; } payload{acc, a, {b0, b1}, half};
  collective(~0u, "mma", &payload, [](void** lanes, unsigned) {
    float a[16 * 16], b[16][8], d[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const Payload& p = *static_cast<Payload*>(lanes[lane]);
      const float* t = table(p.half);
      unpack_a(a, p.a, lane, p.half);
      for (int i = 0; i < 2; ++i) {
        const int k = 2 * (lane % 4) + 8 * i, n = lane / 4;
        b[k][n] = t[p.b[i] & 0xffff];
        b[k + 1][n] = t[p.b[i] >> 16];
      }
      for (int i = 0; i < 4; ++i) d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2] = p.acc[i];
    }
    for (int row = 0; row < 16; ++row)
      for (int k = 0; k < 16; ++k)
        for (int n = 0; n < 8; ++n) d[row][n] += a[row * 16 + k] * b[k][n];
    for (int lane = 0; lane < 32; ++lane) {
      float* acc = static_cast<Payload*>(lanes[lane])->acc;
      for (int i = 0; i < 4; ++i) acc[i] = d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
    }
  });
}

void load_matrix(uint32_t* registers, int count, const void* row, bool transposed) {
  struct Payload { uint32_t* registers; const char* row; int count; bool transposed; };
  Payload payload{registers, static_cast<const char*>(row), count, transposed};
  if (current->lane < 8 * count) check_shared(row, 16, 16, "ldmatrix");
  collective(~0u, "ldmatrix", &payload, [](void** lanes, unsigned) {
    const Payload& first = *static_cast<Payload*>(lanes[0]);
    for (int matrix = 0; matrix < first.count; ++matrix) {
      uint16_t m[8][8];
      for (int row = 0; row < 8; ++row) memcpy(m[row], static_cast<Payload*>(lanes[8 * matrix + row])->row, 16);
      for (int lane = 0; lane < 32; ++lane) {
        const int row = lane / 4, column = 2 * (lane % 4);
        const uint16_t low = first.transposed ? m[column][row] : m[row][column];
        const uint16_t high = first.transposed ? m[column + 1][row] : m[row][column + 1];
        static_cast<Payload*>(lanes[lane])->registers[matrix] = low | uint32_t(high) << 16;
      }
    }
  });
}

void store_matrix(void* row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3, bool transposed) {
  struct Payload { char* row; uint32_t registers[4]; bool transposed; };
  Payload payload{static_cast<char*>(row), {r0, r1, r2, r3}, transposed};
  check_shared(row, 16, 16, "stmatrix");
  collective(~0u, "stmatrix", &payload, [](void** lanes, unsigned) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint16_t m[8][8];
      for (int lane = 0; lane < 32; ++lane) {
        const Payload& p = *static_cast<Payload*>(lanes[lane]);
        for (int e = 0; e < 2; ++e) {
          const uint16_t x = uint16_t(p.registers[matrix] >> 16 * e);
          if (p.transposed) m[2 * (lane % 4) + e][lane / 4] = x;
          else m[lane / 4][2 * (lane % 4) + e] = x;
        }
      }
      for (int row = 0; row < 8; ++row) memcpy(static_cast<Payload*>(lanes[8 * matrix + row])->row, m[row], 16);
    }
  });
}

// ---- wgmma

namespace {

// Reads an operand of `rows` (M or N) x 16 (K) through its descriptor. Swizzle of span S bytes: 16-byte chunks of a row
// of S bytes are permuted by the row's index inside 8 rows, taken from the address.
//   K-major:  8 rows of S bytes per group; groups of 8 rows lie SBO apart, a step of 16 K stays inside a row.
//   MN-major: a row of S bytes holds S / 2 of M or N for one k; 8 k per group, groups SBO apart, the next S / 2 LBO on.
//   Without swizzle, 8 x 16 byte matrices: LBO apart along K and SBO along M or N.
void read_operand(float* out, int rows, uint64_t descriptor, bool mn_major, bool half) {
  static const int kSpans[4] = {16, 128, 64, 32};
  const int mode = int(descriptor >> 62), span = kSpans[mode], mask = span / 16 - 1;
  const uint32_t start = uint32_t(descriptor & 0x3fff) << 4, leading = uint32_t(descriptor >> 16 & 0x3fff) << 4,
                 stride = uint32_t(descriptor >> 32 & 0x3fff) << 4;
  if (descriptor >> 49 & 7) fail("wgmma: descriptor with a base offset");
  const float* t = table(half);
  for (int row = 0; row < rows; ++row)
    for (int k = 0; k < 16; k += mn_major ? 1 : 8) {
      uint32_t address = start;
      if (!mn_major && mode) address += row / 8 * stride + row % 8 * span + 2 * k;
      else if (!mn_major) address += row / 8 * stride + row % 8 * 16 + k / 8 * leading;
      else if (mode) address += row / (span / 2) * leading + row % (span / 2) * 2 + k / 8 * stride + k % 8 * span;
      else address += row / 8 * stride + row % 8 * 2 + k / 8 * leading + k % 8 * 16;
      if (mode) address ^= (address >> 7 & mask) << 4;
      const int count = mn_major ? 1 : 8;
      const char* p = shared_pointer(address, 2 * count, "wgmma operand");
      uint16_t bits[8];
      memcpy(bits, p, 2 * count);
      for (int i = 0; i < count; ++i) out[row * 16 + k + i] = t[bits[i]];
    }
}

struct WgmmaPayload {
  float* d;
  const uint32_t* a_registers;
  uint64_t a, b;
  int n;
  bool accumulate, half, transposed_a, transposed_b;
  Fiber* fiber;
};

void run_wgmma(void** lanes, unsigned) {
  const WgmmaPayload& first = *static_cast<WgmmaPayload*>(lanes[0]);
  const int n = first.n;
  static float a[64 * 16], b[256 * 16], b_by_k[16][256], d[64][256];
  if (first.a_registers)
    for (int thread = 0; thread < 128; ++thread)
      unpack_a(a + thread / 32 * 256, static_cast<WgmmaPayload*>(lanes[thread])->a_registers, thread % 32, first.half);
  else
    read_operand(a, 64, first.a, first.transposed_a, first.half);
  read_operand(b, n, first.b, first.transposed_b, first.half);
  for (int k = 0; k < 16; ++k)
    for (int column = 0; column < n; ++column) b_by_k[k][column] = b[column * 16 + k];
  float* values[128];
  for (int thread = 0; thread < 128; ++thread) {
    const WgmmaPayload& p = *static_cast<WgmmaPayload*>(lanes[thread]);
    if (p.n != n || p.b != first.b || p.accumulate != first.accumulate || (!p.a_registers && p.a != first.a))
      fail("wgmma: the threads of a warpgroup disagree");
    PendingMatmul* pending = nullptr;
    for (PendingMatmul& m : p.fiber->matmuls)
      if (m.d == p.d) pending = &m;
    if (!pending) {
      p.fiber->matmuls.push_back({p.d, std::vector<float>(p.d, p.d + n / 2), 0});
      pending = &p.fiber->matmuls.back();
    }
    if (int(pending->values.size()) != n / 2) fail("wgmma: accumulators in flight with another N");
    pending->group = p.fiber->matmul_group;
    values[thread] = pending->values.data();
    memset(p.d, 0xff, n / 2 * sizeof(float));
    const int row = thread / 32 * 16 + thread % 32 / 4, column = 2 * (thread % 4);
    for (int i = 0; i < n / 2; ++i)
      d[row + 8 * (i / 2 % 2)][column + 8 * (i / 4) + i % 2] = first.accumulate ? values[thread][i] : 0.f;
  }
  for (int row = 0; row < 64; ++row)
    for (int k = 0; k < 16; ++k) {
      const float x = a[row * 16 + k];
      for (int column = 0; column < n; ++column) d[row][column] += x * b_by_k[k][column];
    }
  for (int thread = 0; thread < 128; ++thread) {
    const int row = thread / 32 * 16 + thread % 32 / 4, column = 2 * (thread % 4);
    for (int i = 0; i < n / 2; ++i) values[thread][i] = d[row + 8 * (i / 2 % 2)][column + 8 * (i / 4) + i % 2];
  }
}

}  // namespace

void wgmma(float* d, int n, const uint32_t* a_registers, uint64_t a, uint64_t b, bool accumulate, bool half,
           bool transposed_a, bool transposed_b) {
  if (n % 8 || n > 256) fail("wgmma: N = %d", n);
  WgmmaPayload payload{d, a_registers, a, b, n, accumulate, half, transposed_a, transposed_b, &running()};
  group_collective("wgmma", &payload, run_wgmma);
}

void wgmma_commit() { ++running().matmul_group; }

void wgmma_wait(int pending) {
  Fiber& f = running();
  for (size_t i = 0; i < f.matmuls.size();) {
    PendingMatmul& m = f.matmuls[i];
    if (m.group >= f.matmul_group - pending) { ++i; continue; }
    memcpy(m.d, m.values.data(), m.values.size() * sizeof(float));
    f.matmuls.erase(f.matmuls.begin() + i);
  }
}

}  // namespace hf_emulator
