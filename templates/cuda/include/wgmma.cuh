// Matrix products of a warpgroup (PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate").
//
// D (64 x N, float32) = A (64 x K) * B (K x N), accumulated or not; K is 32 bytes of elements. A lies in shared memory (ss) or in registers (rs),
// B in shared memory, both described by 64-bit descriptors. A thread holds N / 2 values of D: element i of lane l of
// warp w is row 16w + l / 4 + 8 * (i / 2 % 2), column 8 * (i / 4) + 2 * (l % 4) + i % 2.
#pragma once

#include "types.cuh"

// Needed before the first wgmma, and after ordinary code wrote accumulators or A registers.
__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most `kPending` of the committed groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of an accumulator before its wait: it takes a wgmma for complete once issued.
template <int kCount>
__device__ __forceinline__ void fence_registers(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// A matrix in shared memory: where it starts, the distances in bytes between column boxes (leading) and between groups
// of 8 rows (stride), and the swizzle: 1 is 128 bytes, 2 is 64, 3 is 32. The descriptor counts in units of 16 bytes.
template <uint32_t kLeading, uint32_t kStride, uint32_t kSwizzle>
struct Matrix {
  uint32_t low;

  __device__ __forceinline__ explicit Matrix(uint32_t address) : low(address / 16 + (kLeading / 16 << 16)) {}

  // Descriptor of the part that begins `bytes` later.
  __device__ __forceinline__ uint64_t at(uint32_t bytes) const {
    constexpr uint64_t kHigh = kStride / 16 | kSwizzle << 30;
    return kHigh << 32 | (low + bytes / 16);
  }
};

// Product<Element, N>::ss and rs for each N, from macros: PTX needs every operand by its number. B may be of other 8 bits.

#define D1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define D2 D1 ", " "%8, %9, %10, %11, %12, %13, %14, %15"
#define D3 D2 ", " "%16, %17, %18, %19, %20, %21, %22, %23"
#define D4 D3 ", " "%24, %25, %26, %27, %28, %29, %30, %31"
#define D5 D4 ", " "%32, %33, %34, %35, %36, %37, %38, %39"
#define D6 D5 ", " "%40, %41, %42, %43, %44, %45, %46, %47"
#define D7 D6 ", " "%48, %49, %50, %51, %52, %53, %54, %55"
#define D8 D7 ", " "%56, %57, %58, %59, %60, %61, %62, %63"
#define D9 D8 ", " "%64, %65, %66, %67, %68, %69, %70, %71"
#define D10 D9 ", " "%72, %73, %74, %75, %76, %77, %78, %79"
#define D11 D10 ", " "%80, %81, %82, %83, %84, %85, %86, %87"
#define D12 D11 ", " "%88, %89, %90, %91, %92, %93, %94, %95"
#define D13 D12 ", " "%96, %97, %98, %99, %100, %101, %102, %103"
#define D14 D13 ", " "%104, %105, %106, %107, %108, %109, %110, %111"
#define D15 D14 ", " "%112, %113, %114, %115, %116, %117, %118, %119"
#define D16 D15 ", " "%120, %121, %122, %123, %124, %125, %126, %127"
#define OUT1(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define OUT2(d) OUT1(d), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define OUT3(d) OUT2(d), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define OUT4(d) OUT3(d), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define OUT5(d) OUT4(d), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define OUT6(d) OUT5(d), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define OUT7(d) OUT6(d), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define OUT8(d) OUT7(d), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define OUT9(d) OUT8(d), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define OUT10(d) OUT9(d), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define OUT11(d) OUT10(d), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define OUT12(d) OUT11(d), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define OUT13(d) OUT12(d), "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define OUT14(d) OUT13(d), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define OUT15(d) OUT14(d), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define OUT16(d) OUT15(d), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

template <typename Element, int kN, typename BElement = Element>
struct Product;

// kK is an enumerator, since NVRTC keeps a symbol for each constant, 9 KB of a cubin.
// X0 to X6 are the numbers of the operands that follow D.
#define DEFINE_PRODUCT(Element, TYPE, K, N, D, OUT, X0, X1, X2, X3, X4, X5, X6)                                   \
  template <>                                                                                                     \
  struct Product<Element, N> {                                                                                    \
    enum : int { kK = K };                                                                                        \
    template <int kTransposeB, int kTransposeA = 0>                                                               \
    static __device__ __forceinline__ void ss(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {        \
      asm volatile(                                                                                               \
          "{.reg .pred p; setp.ne.b32 p, " X2 ", 0;"                                                              \
          " wgmma.mma_async.sync.aligned.m64n" #N "k" #K ".f32." TYPE "." TYPE                                    \
          " {" D "}, " X0 ", " X1 ", p, 1, 1, " X4 ", " X3 ";}"                                                   \
          : OUT(d)                                                                                                \
          : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeB), "n"(kTransposeA));                                 \
    }                                                                                                             \
    template <int kTransposeB>                                                                                    \
    static __device__ __forceinline__ void rs(float (&d)[N / 2], const uint32_t* a, uint64_t b, int accumulate) { \
      asm volatile(                                                                                               \
          "{.reg .pred p; setp.ne.b32 p, " X5 ", 0;"                                                              \
          " wgmma.mma_async.sync.aligned.m64n" #N "k" #K ".f32." TYPE "." TYPE                                    \
          " {" D "}, {" X0 ", " X1 ", " X2 ", " X3 "}, " X4 ", p, 1, 1, " X6 ";}"                                 \
          : OUT(d)                                                                                                \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransposeB));               \
    }                                                                                                             \
  };
// The same of operands of 8 bits, which are K-major alone.
#define DEFINE_PRODUCT_OF_BYTES(Element, BElement, TYPE, N, D, OUT, X0, X1, X2, X3, X4, X5)                       \
  template <>                                                                                                     \
  struct Product<Element, N, BElement> {                                                                                    \
    enum : int { kK = 32 };                                                                                       \
    template <int kTransposeB, int kTransposeA = 0>                                                               \
    static __device__ __forceinline__ void ss(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {        \
      static_assert(kTransposeB == 0 && kTransposeA == 0);                                                        \
      asm volatile(                                                                                               \
          "{.reg .pred p; setp.ne.b32 p, " X2 ", 0;"                                                              \
          " wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." TYPE                                                 \
          " {" D "}, " X0 ", " X1 ", p, 1, 1;}"                                                                   \
          : OUT(d)                                                                                                \
          : "l"(a), "l"(b), "r"(accumulate));                                                                     \
    }                                                                                                             \
    template <int kTransposeB>                                                                                    \
    static __device__ __forceinline__ void rs(float (&d)[N / 2], const uint32_t* a, uint64_t b, int accumulate) { \
      static_assert(kTransposeB == 0);                                                                            \
      asm volatile(                                                                                               \
          "{.reg .pred p; setp.ne.b32 p, " X5 ", 0;"                                                              \
          " wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." TYPE                                                 \
          " {" D "}, {" X0 ", " X1 ", " X2 ", " X3 "}, " X4 ", p, 1, 1;}"                                         \
          : OUT(d)                                                                                                \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                                 \
    }                                                                                                             \
  };
#define DEFINE_PRODUCTS(N, D, OUT, X0, X1, X2, X3, X4, X5, X6) \
  DEFINE_PRODUCT(bf16, "bf16", 16, N, D, OUT, X0, X1, X2, X3, X4, X5, X6) \
  DEFINE_PRODUCT(fp16, "f16", 16, N, D, OUT, X0, X1, X2, X3, X4, X5, X6) \
  DEFINE_PRODUCT_OF_BYTES(e4m3, e4m3, "e4m3.e4m3", N, D, OUT, X0, X1, X2, X3, X4, X5) \
  DEFINE_PRODUCT_OF_BYTES(e4m3, e5m2, "e4m3.e5m2", N, D, OUT, X0, X1, X2, X3, X4, X5) \
  DEFINE_PRODUCT_OF_BYTES(e5m2, e4m3, "e5m2.e4m3", N, D, OUT, X0, X1, X2, X3, X4, X5) \
  DEFINE_PRODUCT_OF_BYTES(e5m2, e5m2, "e5m2.e5m2", N, D, OUT, X0, X1, X2, X3, X4, X5)

DEFINE_PRODUCTS(16, D1, OUT1, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
DEFINE_PRODUCTS(32, D2, OUT2, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
DEFINE_PRODUCTS(48, D3, OUT3, "%24", "%25", "%26", "%27", "%28", "%29", "%30")
DEFINE_PRODUCTS(64, D4, OUT4, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
DEFINE_PRODUCTS(80, D5, OUT5, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
DEFINE_PRODUCTS(96, D6, OUT6, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
DEFINE_PRODUCTS(112, D7, OUT7, "%56", "%57", "%58", "%59", "%60", "%61", "%62")
DEFINE_PRODUCTS(128, D8, OUT8, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
DEFINE_PRODUCTS(144, D9, OUT9, "%72", "%73", "%74", "%75", "%76", "%77", "%78")
DEFINE_PRODUCTS(160, D10, OUT10, "%80", "%81", "%82", "%83", "%84", "%85", "%86")
DEFINE_PRODUCTS(176, D11, OUT11, "%88", "%89", "%90", "%91", "%92", "%93", "%94")
DEFINE_PRODUCTS(192, D12, OUT12, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
DEFINE_PRODUCTS(208, D13, OUT13, "%104", "%105", "%106", "%107", "%108", "%109", "%110")
DEFINE_PRODUCTS(224, D14, OUT14, "%112", "%113", "%114", "%115", "%116", "%117", "%118")
DEFINE_PRODUCTS(240, D15, OUT15, "%120", "%121", "%122", "%123", "%124", "%125", "%126")
DEFINE_PRODUCTS(256, D16, OUT16, "%128", "%129", "%130", "%131", "%132", "%133", "%134")
