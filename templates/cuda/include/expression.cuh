// Helpers of the expressions of masks and scores. Semantics are those of Python and torch: // and % round down,
// min and max pass NaN on.
#pragma once

#define kInfinity __int_as_float(0x7f800000)

template <typename Int>
__device__ __forceinline__ Int floor_div(Int a, Int b) {
  const Int quotient = a / b;  // rounds toward zero
  return quotient - ((a % b != 0 && (a < 0) != (b < 0)) ? 1 : 0);
}

template <typename Int>
__device__ __forceinline__ Int floor_mod(Int a, Int b) {
  const Int remainder = a % b;  // has the sign of a
  return (remainder != 0 && (remainder < 0) != (b < 0)) ? remainder + b : remainder;
}

// One of two values, both of which are computed. A branch around a costly one would come between matrix products.
__device__ __forceinline__ float choose(bool condition, float yes, float no) {
#ifdef __CUDA_ARCH__
  float chosen;
  asm("{ .reg .pred p; setp.ne.s32 p, %1, 0; selp.f32 %0, %2, %3, p; }"
      : "=f"(chosen)
      : "r"(int(condition)), "f"(yes), "f"(no));
  return chosen;
#else
  return condition ? yes : no;
#endif
}

// min(a, b) and max(a, b) drop a NaN; torch.minimum and torch.maximum do not.
__device__ __forceinline__ float nan_min(float a, float b) {
#ifdef __CUDA_ARCH__
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
  return least;
#else
  return a < b || a != a ? a : b;
#endif
}

__device__ __forceinline__ float nan_max(float a, float b) {
#ifdef __CUDA_ARCH__
  float greatest;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(greatest) : "f"(a), "f"(b));
  return greatest;
#else
  return a > b || a != a ? a : b;
#endif
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

#ifdef __CUDA_ARCH__
// The same number, hidden from the compiler, so that it does not split a condition by elements of a thread.
__device__ __forceinline__ int any_number(int number) {
  asm("" : "+r"(number));
  return number;
}

// One instruction, relative error 2^-11 (PTX ISA, tanh.approx.f32).
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two instructions, two units in the last place (PTX ISA, div.approx.f32); 0 for divisors beyond 2^126.
__device__ __forceinline__ float divide_approx(float a, float b) {
  float quotient;
  asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
  return quotient;
}

// Relative error 2^-22 (PTX ISA, sqrt.approx.f32).
__device__ __forceinline__ float sqrt_approx(float x) {
  float root;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
}

// One instruction, relative error 2^-22 (PTX ISA, ex2.approx.f32); results below 2^-126 are 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// sigmoid(x) = (1 + tanh(x / 2)) / 2, absolute error 2^-12.
__device__ __forceinline__ float sigmoid_approx(float x) { return fmaf(0.5f, tanh_approx(0.5f * x), 0.5f); }

// x sigmoid(x) = y + y tanh(y) with y = x / 2, absolute error |x| 2^-12.
__device__ __forceinline__ float silu_approx(float x) {
  const float y = 0.5f * x;
  return fmaf(y, tanh_approx(y), y);
}
#else
__device__ __forceinline__ float divide_approx(float a, float b) { return a / b; }

__device__ __forceinline__ float sqrt_approx(float x) { return sqrtf(x); }
#endif
