// Keys and queries as words of the tensor cores' factors, and sums as factors again. The including file defines the sizes.
#pragma once
#include "dense/mma.cuh"

struct Lane { int group, member; };  // the row of a factor, and which of its four threads
__device__ __forceinline__ Lane own_lane() { return {(int)(threadIdx.x & 31) >> 2, (int)threadIdx.x & 3}; }

__device__ __forceinline__ unsigned word_of(const float* x, int column, int columns) {
    return column < columns ? __float_as_uint(x[column]) : 0u;
}
__device__ __forceinline__ unsigned word_of(const bf16* x, int column, int columns) {
    const unsigned low = column < columns ? x[column] : 0, high = column + 1 < columns ? x[column + 1] : 0;
    return low | high << 16;
}

// A thread's words of a key or a query whose parts begin at at(p), two a step; of aligned parts four at once, for two steps.
template <int P = 0, typename At>
__device__ __forceinline__ void load_words(unsigned* w, At at, bool there) {
    if constexpr (P < PARTS) {
        constexpr int FIRST = 2 * steps_before(P), N = part_steps(P), PAIRED = aligned[P] ? N / 2 * 2 : 0;
        const int member = own_lane().member;
        const X* from = at(P);
#pragma unroll
        for (int s = 0; s < N; ++s) {
            unsigned* to = w + FIRST + 2 * s;
            if (s < PAIRED) {
                if (s % 2) continue;
                const uint4 v = there ? *reinterpret_cast<const uint4*>(from + (s * 8 + member * 4) * EACH) : make_uint4(0, 0, 0, 0);
                to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
            } else if (aligned[P]) {
                const uint2 v = there ? *reinterpret_cast<const uint2*>(from + (s * 8 + member * 2) * EACH) : make_uint2(0, 0);
                to[0] = v.x, to[1] = v.y;
            } else {
                for (int j = 0; j < 2; ++j)
                    to[j] = there ? word_of(from, (s * 8 + member * 2 + j) * EACH, dims[P]) : 0u;
            }
        }
        load_words<P + 1>(w, at, there);
    }
}
// Where the sum of column e of the keys lies in a group's: [word][column of the word][member].
__device__ __forceinline__ int place_of(int e) {
    int first = 0;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        if (e < dims[p]) {
            const int paired = aligned[p] ? part_steps(p) / 2 * 16 : 0, w = e / EACH, v = w - paired;
            const int word = v < 0 ? w / 16 * 4 + w % 4 : paired / 4 + v / 8 * 2 + v % 2, member = v < 0 ? w % 16 / 4 : v % 8 / 2;
            return ((first + word) * EACH + e % EACH) * 4 + member;
        }
        e -= dims[p], first += 2 * part_steps(p);
    }
    return 0;
}
__device__ __forceinline__ int out_column(int e) {
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        if (e < dims[p]) return pooled[p] + e;
        e -= dims[p];
    }
    return 0;
}

// key + product * q, of one word.
__device__ __forceinline__ unsigned formed(unsigned key, unsigned product, unsigned q, const float*) {
    return __float_as_uint(fmaf(__uint_as_float(product), __uint_as_float(q), __uint_as_float(key)));
}
__device__ __forceinline__ unsigned formed(unsigned key, unsigned product, unsigned q, const bf16*) {
    unsigned w;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(w) : "r"(product), "r"(q), "r"(key));
    return w;
}
// Sums of two neighbouring tiles as left factors of the next layer: of two steps for tf32, of one for bf16.
__device__ __forceinline__ void as_factor(unsigned (*a)[4], const float (*sums)[4], const float*) {
    for (int n = 0; n < 2; ++n) {
        a[n][0] = __float_as_uint(sums[n][0]), a[n][1] = __float_as_uint(sums[n][2]);
        a[n][2] = __float_as_uint(sums[n][1]), a[n][3] = __float_as_uint(sums[n][3]);
    }
}
__device__ __forceinline__ void as_factor(unsigned (*a)[4], const float (*sums)[4], const bf16*) {
    for (int n = 0; n < 2; ++n)
        for (int h = 0; h < 2; ++h)
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(a[0][2 * n + h]) : "f"(sums[n][2 * h + 1]), "f"(sums[n][2 * h]));
}
