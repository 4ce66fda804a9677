// The warpgroup's asynchronous product: D (64 x N, fp32 registers) = A (64 x 16) * B (16 x N) + (accumulate ? D : 0).
// Accumulator d[i] of thread t is in row 16 * (t / 32) + t % 32 / 4 + 8 * (i / 2 % 2) and in column
// 8 * (i / 4) + 2 * (t % 4) + i % 2.
// Packed in pairs, d[8k .. 8k + 7] are the A registers of k-step k: a product feeds the next without shuffles.
#pragma once
#include "ptx.cuh"

#ifdef HF_FLASH_EMULATE
#include "emulated_hopper_ptx.cuh"
#else

namespace hf_flash::hopper {

// Before the first product, and after registers of one were written by other instructions.
HF_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
HF_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// At most kPending groups are still running. Until then neither D nor A registers may be touched.
template <int kPending> HF_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// After a wait: keeps the compiler from moving reads of the accumulators above it.
template <int n> HF_DEVICE void pin(float (&d)[n]) {
  HF_UNROLL
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Operands in shared memory are descriptors (tile.cuh): ss takes A row by row (K-major), sst transposed (MN-major),
// rs from registers. kTransposedB: B is MN-major, i.e. stored as 16 rows of N, not as N rows of 16.
template <class Element, int kN, bool kTransposedB> struct Wgmma;

#define HF_FLOATS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define HF_FLOATS_8(i) HF_FLOATS_4(i), HF_FLOATS_4(i + 4)
#define HF_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define HF_OUTPUTS_16 HF_FLOATS_8(0), HF_FLOATS_8(8)
#define HF_NAMES_20 HF_NAMES_16 ", %16, %17, %18, %19"
#define HF_OUTPUTS_20 HF_OUTPUTS_16, HF_FLOATS_4(16)
#define HF_NAMES_24 HF_NAMES_20 ", %20, %21, %22, %23"
#define HF_OUTPUTS_24 HF_OUTPUTS_20, HF_FLOATS_4(20)
#define HF_NAMES_32 HF_NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define HF_OUTPUTS_32 HF_OUTPUTS_24, HF_FLOATS_8(24)
#define HF_NAMES_40 HF_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define HF_OUTPUTS_40 HF_OUTPUTS_32, HF_FLOATS_8(32)
#define HF_NAMES_48 HF_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define HF_OUTPUTS_48 HF_OUTPUTS_40, HF_FLOATS_8(40)
#define HF_NAMES_56 HF_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define HF_OUTPUTS_56 HF_OUTPUTS_48, HF_FLOATS_8(48)
#define HF_NAMES_64 HF_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define HF_OUTPUTS_64 HF_OUTPUTS_56, HF_FLOATS_8(56)
#define HF_NAMES_72 HF_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define HF_OUTPUTS_72 HF_OUTPUTS_64, HF_FLOATS_8(64)
#define HF_NAMES_80 HF_NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define HF_OUTPUTS_80 HF_OUTPUTS_72, HF_FLOATS_8(72)
#define HF_NAMES_88 HF_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define HF_OUTPUTS_88 HF_OUTPUTS_80, HF_FLOATS_8(80)
#define HF_NAMES_96 HF_NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define HF_OUTPUTS_96 HF_OUTPUTS_88, HF_FLOATS_8(88)
#define HF_NAMES_128 \
  HF_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define HF_OUTPUTS_128 HF_OUTPUTS_96, HF_FLOATS_8(96), HF_FLOATS_8(104), HF_FLOATS_8(112), HF_FLOATS_8(120)

// n is N / 2, the accumulators of a thread; n0 .. n6 number the operands after them.
#define HF_WGMMA_SHARED(name, kTransposedA, type, N, n, n1, n2, n3, n4)                                            \
  static HF_DEVICE void name(float (&d)[n], uint64_t a, uint64_t b, int accumulate) {                              \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #n2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type \
                 "." type " {" HF_NAMES_##n "}, %" #n ", %" #n1 ", p, 1, 1, %" #n3 ", %" #n4 ";}"                  \
                 : HF_OUTPUTS_##n                                                                                  \
                 : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposedA), "n"(int(kTransposedB)));                    \
  }
#define HF_WGMMA_REGISTERS(type, N, n, n1, n2, n3, n4, n5, n6)                                                     \
  static HF_DEVICE void rs(float (&d)[n], const uint32_t* a, uint64_t b, int accumulate) {                         \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #n5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type \
                 "." type " {" HF_NAMES_##n "}, {%" #n ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4                    \
                 ", p, 1, 1, %" #n6 ";}"                                                                           \
                 : HF_OUTPUTS_##n                                                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(int(kTransposedB)));   \
  }
#define HF_WGMMA_TYPE(Element, type, N, n, n1, n2, n3, n4, n5, n6) \
  template <bool kTransposedB> struct Wgmma<Element, N, kTransposedB> { \
    HF_WGMMA_SHARED(ss, 0, type, N, n, n1, n2, n3, n4) \
    HF_WGMMA_SHARED(sst, 1, type, N, n, n1, n2, n3, n4) \
    HF_WGMMA_REGISTERS(type, N, n, n1, n2, n3, n4, n5, n6) \
  };
#define HF_WGMMA(...) HF_WGMMA_TYPE(bf16, "bf16", __VA_ARGS__) HF_WGMMA_TYPE(fp16, "f16", __VA_ARGS__)

HF_WGMMA(32, 16, 17, 18, 19, 20, 21, 22)
HF_WGMMA(40, 20, 21, 22, 23, 24, 25, 26)
HF_WGMMA(48, 24, 25, 26, 27, 28, 29, 30)
HF_WGMMA(64, 32, 33, 34, 35, 36, 37, 38)
HF_WGMMA(80, 40, 41, 42, 43, 44, 45, 46)
HF_WGMMA(96, 48, 49, 50, 51, 52, 53, 54)
HF_WGMMA(112, 56, 57, 58, 59, 60, 61, 62)
HF_WGMMA(128, 64, 65, 66, 67, 68, 69, 70)
HF_WGMMA(144, 72, 73, 74, 75, 76, 77, 78)
HF_WGMMA(160, 80, 81, 82, 83, 84, 85, 86)
HF_WGMMA(176, 88, 89, 90, 91, 92, 93, 94)
HF_WGMMA(192, 96, 97, 98, 99, 100, 101, 102)
HF_WGMMA(256, 128, 129, 130, 131, 132, 133, 134)

#undef HF_WGMMA
#undef HF_WGMMA_TYPE
#undef HF_WGMMA_REGISTERS
#undef HF_WGMMA_SHARED

}  // namespace hf_flash::hopper
#endif
