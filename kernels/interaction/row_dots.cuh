// Dots of a row's vectors with one another on the tensor cores, by one warp. Included where X, their type, is defined.
#pragma once
#include "dense/mma.cuh"

#define PER_WORD (4 / (int)sizeof(X))

__device__ constexpr int up(int n, int to) { return (n + to - 1) / to * to; }

// FIELDS_ vectors of DIM_ columns as mma takes them, either side: of vectors 8n to 8n + 7 lane (g, t) has 16 bytes of the g-th, of
// each 64. K may be summed in any order, so these are its words of two steps.
template <int FIELDS_, int DIM_, int DIAGONAL_>
struct Vectors {
    static constexpr int EIGHTS = up(FIELDS_, 8) / 8, STEPS = up(DIM_, 16 * PER_WORD) / (16 * PER_WORD);
    static constexpr int PAIRS = FIELDS_ * (FIELDS_ + (DIAGONAL_ ? 1 : -1)) / 2;
    uint4 v[EIGHTS][STEPS];

    // All but the first, of which `from` has the second's first column.
    __device__ __forceinline__ void load(const X* from) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int n = 0; n < EIGHTS; ++n)
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                const int field = n * 8 + (lane >> 2), column = (s * 16 + (lane & 3) * 4) * PER_WORD;
                v[n][s] = make_uint4(0, 0, 0, 0);
                if (field > 0 && field < FIELDS_ && column < DIM_)
                    v[n][s] = *reinterpret_cast<const uint4*>(from + (field - 1) * DIM_ + column);
            }
    }
    __device__ __forceinline__ void load_first(const unsigned* z) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int s = 0; s < STEPS; ++s)
            if (lane < 4 && (s * 16 + lane * 4) * PER_WORD < DIM_) v[0][s] = *reinterpret_cast<const uint4*>(z + s * 16 + lane * 4);
    }
    __device__ __forceinline__ void round() {  // to tf32; the tensor cores would cut
        if (sizeof(X) != 4) return;
#pragma unroll
        for (int n = 0; n < EIGHTS; ++n)
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                uint4& w = v[n][s];
                w = make_uint4(rounded(w.x), rounded(w.y), rounded(w.z), rounded(w.w));
            }
    }
    static __device__ __forceinline__ unsigned rounded(unsigned w) {
        unsigned z;
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(z) : "f"(__uint_as_float(w)));
        return z;
    }
    // Gives each pair <v_i, v_j> of j < i (DIAGONAL_: j <= i) to `put`, with its place, row by row.
    template <typename Put> __device__ __forceinline__ void dots(Put put) const {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int m = 0; m < (EIGHTS + 1) / 2; ++m)
#pragma unroll
            for (int n = 0; n < EIGHTS && n < 2 * m + 2; ++n) {
                float sum[4] = {};
#pragma unroll
                for (int s = 0; s < STEPS; ++s) {
                    const uint4 p = v[2 * m][s], q = 2 * m + 1 < EIGHTS ? v[2 * m + 1][s] : make_uint4(0, 0, 0, 0), r = v[n][s];
                    const unsigned a[4] = {p.x, q.x, p.y, q.y}, b[2] = {r.x, r.y};
                    const unsigned c[4] = {p.z, q.z, p.w, q.w}, d[2] = {r.z, r.w};
                    multiply(sum, a, b, (X*)0);
                    multiply(sum, c, d, (X*)0);
                }
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const int i = m * 16 + (lane >> 2) + (k >> 1) * 8, j = n * 8 + (lane & 3) * 2 + (k & 1);
                    if (i < FIELDS_ && (DIAGONAL_ ? j <= i : j < i)) put(i * (DIAGONAL_ ? i + 1 : i - 1) / 2 + j, sum[k]);
                }
            }
    }
};
