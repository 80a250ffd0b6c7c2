// As many numbers at a time as the processor's vectors hold, sixteen at most, and e^x of them.

#ifndef DPI_VECTORS_H
#define DPI_VECTORS_H

#include <stdint.h>

#if defined(__AVX512F__)
#include <immintrin.h>
enum { LANES = 16 };
#elif defined(__AVX2__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline Floats load(const float *p) { return *(const Floats *)p; }

static inline Floats chosen(Words mask, Floats yes, Floats no) {
    return (Floats)(((Words)yes & mask) | ((Words)no & ~mask));
}

// x from -bound to bound. NaN stays NaN.
static inline Floats held(Floats x, float bound) {
    const Floats most = (Floats){0} + bound;
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)-most, _mm512_min_ps((__m512)most, (__m512)x));
#else
    return chosen((Words)(x > most), most, chosen((Words)(x < -most), -most, x));
#endif
}

// over / under, off by three of its last bits at most, for an `under` from 2^-125 to 2^125. A division takes sixteen cycles.
static inline Floats quotient(Floats over, Floats under) {
#if defined(__AVX512F__)
    const Floats near = (Floats)_mm512_rcp14_ps((__m512)under);
    return over * (near + near * (1 - under * near));
#else
    return over / under;
#endif
}

// e^x, to some 2^-23 of it, for x from -bound to bound, to which it is held: 2^n e^r by the series, |r| <= ln(2) / 2. NaN stays NaN.
static inline Floats exponential_within(Floats x, float bound) {
    x = held(x, bound);
    const Floats shifted = x * 1.44269504f + 12582912.0f;          // so much that no fraction is left: n in the last bits
    const Floats n = shifted - 12582912.0f;
    const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln(2) in two parts, the first exact in 9 digits
    Floats sum = (Floats){0} + 1.0f / 5040;
    sum = sum * r + 1.0f / 720;
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 0.5f;
    sum = sum * r * r + r + 1.0f;
    return sum * (Floats)(((Words)shifted << 23) + (127 << 23));
}

static inline Floats exponential(Floats x) { return exponential_within(x, 87); }

#endif
