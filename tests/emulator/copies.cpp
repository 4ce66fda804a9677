// Copies that run beside the threads: cp.async, TMA and bulk copies, and the mbarriers that count them.
// A cp.async lands at its thread's wait. TMA and bulk copies land when no thread can run: as late as can be.
#include <string.h>

#include <functional>

#include "../../csrc/hf_flash.h"
#include "state.h"

namespace hf_emulator {

// ---- cp.async

void copy_async(void* shared, const void* global, int bytes, int valid_bytes) {
  check_shared(shared, bytes, bytes, "cp.async");
  if (valid_bytes && reinterpret_cast<uintptr_t>(global) % bytes)
    fail("cp.async from %p, not on %d bytes", global, bytes);
  Fiber& f = running();
  PendingCopy copy{static_cast<char*>(shared), {}, bytes, f.copy_group};
  memcpy(copy.bytes, global, valid_bytes);
  memset(shared, 0xff, bytes);
  f.copies.push_back(copy);
}

void copy_async_commit() { ++running().copy_group; }

void copy_async_wait(int pending) {
  Fiber& f = running();
  while (!f.copies.empty() && f.copies.front().group < f.copy_group - pending) {
    memcpy(f.copies.front().shared, f.copies.front().bytes, f.copies.front().size);
    f.copies.pop_front();
  }
}

// ---- mbarriers

namespace {

struct Mbarrier {             // 8 bytes of shared memory
  int64_t bytes : 32;         // announced and not yet here; negative when copies are ahead
  uint64_t expected : 12, pending : 12, phase : 1, magic : 7;
};
static_assert(sizeof(Mbarrier) == 8, "");
constexpr uint64_t kMagic = 0x2a;

Mbarrier& barrier_at(uint64_t* barrier) {
  check_shared(barrier, 8, 8, "mbarrier");
  Mbarrier& b = *reinterpret_cast<Mbarrier*>(barrier);
  if (b.magic != kMagic) fail("mbarrier at shared+%ld was not initialised", long((char*)barrier - shared_memory));
  return b;
}

void complete_phase(Mbarrier& b) {
  if (b.pending || b.bytes) return;
  b.phase ^= 1;
  b.pending = b.expected;
}

struct CopyInFlight {
  Fiber* fiber;
  long long group;            // of the fiber's bulk groups; -1 for loads
  std::function<void()> run;
};
std::deque<CopyInFlight> in_flight;

void load(uint64_t* barrier, std::function<int()> copy) {
  barrier_at(barrier);
  in_flight.push_back({&running(), -1, [=] {
    const int bytes = copy();
    Mbarrier& b = barrier_at(barrier);
    b.bytes -= bytes;
    complete_phase(b);
  }});
}

void store(std::function<void()> copy) {
  Fiber& f = running();
  in_flight.push_back({&f, f.bulk_group, std::move(copy)});
}

}  // namespace

void mbarrier_init(uint64_t* barrier, int arrivals) {
  check_shared(barrier, 8, 8, "mbarrier.init");
  if (arrivals < 1 || arrivals > 1024) fail("mbarrier.init with %d arrivals", arrivals);
  Mbarrier b{};
  b.expected = b.pending = arrivals;
  b.magic = kMagic;
  memcpy(barrier, &b, 8);
}

void mbarrier_expect(uint64_t* barrier, uint32_t bytes) { barrier_at(barrier).bytes += bytes; }

void mbarrier_arrive(uint64_t* barrier, uint32_t expected_bytes, int arrivals) {
  Mbarrier& b = barrier_at(barrier);
  if (int(b.pending) < arrivals)
    fail("mbarrier at shared+%ld: more arrivals than it expects", long((char*)barrier - shared_memory));
  b.bytes += expected_bytes;
  b.pending -= arrivals;
  complete_phase(b);
}

bool mbarrier_test(uint64_t* barrier, uint32_t parity) { return barrier_at(barrier).phase != (parity & 1); }

void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  struct Wait { uint64_t* barrier; uint32_t parity; } wait{barrier, parity};
  barrier_at(barrier);
  wait_until([](void* p) { auto* w = static_cast<Wait*>(p); return mbarrier_test(w->barrier, w->parity); }, &wait,
             "mbarrier", barrier, parity);
}

bool land_copies() {
  if (in_flight.empty()) return false;
  CopyInFlight copy = std::move(in_flight.front());
  in_flight.pop_front();
  copy.run();
  return true;
}

void check_block_end() { in_flight.clear(); }

// ---- Tensor maps

namespace {

struct TensorMap {            // what a CUtensorMap holds here
  char* data;
  uint64_t sizes[5], strides[5];   // strides in bytes, [0] the element
  uint32_t box[5];
  uint8_t rank, span, is_float, magic;
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap), "");

// Calls visit(shared pointer, global pointer or NULL where the element lies outside) per element of the box.
template <class Visit> int for_each_element(const TensorMap& m, char* shared, const int* coordinates, Visit visit) {
  const int size = int(m.strides[0]);
  const int64_t total = int64_t(m.box[0]) * m.box[1] * m.box[2] * m.box[3] * m.box[4];
  uint32_t index[5] = {};
  for (int64_t i = 0; i < total; ++i) {
    char* global = m.data;
    bool inside = true;
    for (int d = 0; d < m.rank; ++d) {
      const int64_t c = int64_t(coordinates[d]) + index[d];
      inside &= c >= 0 && uint64_t(c) < m.sizes[d];
      global += c * int64_t(m.strides[d]);
    }
    uint32_t offset = uint32_t(shared - shared_memory) + uint32_t(i * size);
    offset ^= (offset >> 7 & (m.span / 16 - 1)) << 4;
    visit(shared_memory + offset, inside ? global : nullptr);
    for (int d = 0; d < 5 && ++index[d] == m.box[d]; ++d) index[d] = 0;
  }
  return int(total * size);
}

TensorMap decode(const CUtensorMap* map, const void* shared, std::initializer_list<int> coordinates, int* c) {
  TensorMap m;
  memcpy(&m, map, sizeof m);
  if (m.magic != 0xa5) fail("TMA through something that is no tensor map");
  if (int(coordinates.size()) != m.rank)
    fail("TMA with %zu coordinates on a map of rank %d", coordinates.size(), m.rank);
  int i = 0;
  for (int x : coordinates) c[i++] = x;
  // The copy engine translates the map's first address for such a box; where that is not mapped, the access is illegal.
  for (i = 0; i < m.rank; ++i)
    if (c[i] >= int64_t(m.sizes[i]) || c[i] + int64_t(m.box[i]) <= 0)
      fail("TMA of a box wholly outside its map: dimension %d, coordinate %d of %lld", i, c[i], (long long)m.sizes[i]);
  const size_t bytes = size_t(m.strides[0]) * m.box[0] * m.box[1] * m.box[2] * m.box[3] * m.box[4];
  check_shared(shared, bytes, m.span > 16 ? 8 * m.span : 128, "TMA");
  return m;
}

struct Coordinates { int c[5]; };

}  // namespace

int encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data, const cuuint64_t* sizes,
                      const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* element_strides,
                      CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                      CUtensorMapFloatOOBfill) {
  TensorMap m{};
  m.is_float = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  const int size = m.is_float ? 4 : 2;
  m.span = swizzle == CU_TENSOR_MAP_SWIZZLE_128B  ? 128
           : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64
           : swizzle == CU_TENSOR_MAP_SWIZZLE_32B ? 32
                                                  : 16;
  bool valid = rank >= 1 && rank <= 5 && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE &&
               reinterpret_cast<uintptr_t>(data) % 16 == 0 && (m.span == 16 || int(box[0]) * size <= m.span) &&
               box[0] * size % 16 == 0;
  for (uint32_t d = 0; valid && d < rank; ++d) {
    valid = box[d] >= 1 && box[d] <= 256 && sizes[d] >= 1 && sizes[d] <= 1ull << 32 && element_strides[d] == 1 &&
            (d == 0 || (strides[d - 1] % 16 == 0 && strides[d - 1] < 1ull << 40));
    m.sizes[d] = sizes[d];
    m.strides[d] = d ? strides[d - 1] : size;
    m.box[d] = box[d];
  }
  for (int d = int(rank); d < 5; ++d) m.box[d] = 1;
  if (!valid) return HF_FLASH_NO_TENSOR_MAP;
  m.data = static_cast<char*>(data);
  m.rank = uint8_t(rank);
  m.magic = 0xa5;
  memcpy(map, &m, sizeof m);
  return cudaSuccess;
}

void tma_load(void* shared, const CUtensorMap* map, uint64_t* barrier, std::initializer_list<int> coordinates) {
  Coordinates c;
  const TensorMap m = decode(map, shared, coordinates, c.c);
  const int size = int(m.strides[0]);
  for_each_element(m, static_cast<char*>(shared), c.c, [&](char* to, char*) { memset(to, 0xff, size); });
  load(barrier, [=] {
    return for_each_element(m, static_cast<char*>(shared), c.c, [&](char* to, char* from) {
      if (from) memcpy(to, from, size);
      else memset(to, 0, size);
    });
  });
}

void tma_store(const CUtensorMap* map, const void* shared, std::initializer_list<int> coordinates) {
  Coordinates c;
  const TensorMap m = decode(map, shared, coordinates, c.c);
  const int size = int(m.strides[0]);
  store([=] {
    for_each_element(m, static_cast<char*>(const_cast<void*>(shared)), c.c, [&](char* from, char* to) {
      if (to) memcpy(to, from, size);
    });
  });
}

void tma_reduce_add(const CUtensorMap* map, const void* shared, std::initializer_list<int> coordinates) {
  Coordinates c;
  const TensorMap m = decode(map, shared, coordinates, c.c);
  if (!m.is_float) fail("TMA reduction of a type other than float");
  store([=] {
    for_each_element(m, static_cast<char*>(const_cast<void*>(shared)), c.c, [&](char* from, char* to) {
      if (to) *reinterpret_cast<float*>(to) += *reinterpret_cast<float*>(from);
    });
  });
}

// ---- One-dimensional bulk copies

static void check_bulk(const void* shared, const void* global, uint32_t bytes) {
  check_shared(shared, bytes, 16, "bulk copy");
  if (bytes % 16 || reinterpret_cast<uintptr_t>(global) % 16) fail("bulk copy of %u bytes at %p", bytes, global);
}

void bulk_reduce_add(float* global, const void* shared, uint32_t bytes) {
  check_bulk(shared, global, bytes);
  store([=] {
    for (uint32_t i = 0; i < bytes / 4; ++i) global[i] += static_cast<const float*>(shared)[i];
  });
}

void bulk_commit() { ++running().bulk_group; }

void bulk_wait(int pending) {
  struct Wait { Fiber* fiber; long long first; } wait{&running(), running().bulk_group - pending};
  wait_until([](void* p) {
    auto* w = static_cast<Wait*>(p);
    for (const CopyInFlight& copy : in_flight)
      if (copy.fiber == w->fiber && copy.group >= 0 && copy.group < w->first) return false;
    return true;
  }, &wait, "bulk store", nullptr, pending);
}

}  // namespace hf_emulator
