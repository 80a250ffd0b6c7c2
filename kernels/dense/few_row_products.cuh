// Products of up to 8 rows and a block's 16 columns, by all its warps, which split K: of x[ROWS][stride] and weights as the lanes take
// them (packed_weights.py), both in shared memory. The including file defines X, ROWS, WARPS and COLUMNS.
#pragma once
#include "dense/mma.cuh"

// A warp's share of the products, of all rows and columns: sums[WARPS][ROWS][COLUMNS]. Rows beyond `rows` may be anything.
__device__ __forceinline__ void multiply_all(const uint4* weights, const X* x, int stride, int groups, int rows, float* sums) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = lane >> 2;
    float sum[2][4] = {};  // of the two steps: no product waits for another
    for (int g = warp; g < groups; g += WARPS) {
        const uint4 w[2] = {weights[g * 64 + lane], weights[g * 64 + 32 + lane]};
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row < rows) v = reinterpret_cast<const uint4*>(x + row * stride)[g * 4 + (lane & 3)];
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            const unsigned a[4] = {w[step].x, w[step].y, w[step].z, w[step].w}, b[2] = {step ? v.z : v.x, step ? v.w : v.y};
            multiply(sum[step], a, b, (X*)0);
        }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const int n = (lane & 3) * 2 + (k & 1), m = (lane >> 2) + (k >> 1) * 8;
        if (n < ROWS) sums[(warp * ROWS + n) * COLUMNS + m] = sum[0][k] + sum[1][k];
    }
}

// Strict float32 by the CUDA cores: of so few rows that is fewer instructions than to split the factors and multiply thrice on the
// tensor cores. Of a group's 16 words of K a lane multiplies four, for two columns and every row.
__device__ __forceinline__ void multiply_exactly(const uint4* weights, const float* x, int stride, int groups, float* sums) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, column = lane >> 2, word = lane & 3;
    const float4* w = reinterpret_cast<const float4*>(weights);
    float low[ROWS] = {}, high[ROWS] = {};  // of the columns `column` and 8 further
    for (int g = warp; g < groups; g += WARPS) {
        const float4 a = w[g * 64 + lane], b = w[g * 64 + 32 + lane];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float4 v = reinterpret_cast<const float4*>(x + r * stride)[g * 4 + word];
            low[r] += (a.x * v.x + a.z * v.y) + (b.x * v.z + b.z * v.w);
            high[r] += (a.y * v.x + a.w * v.y) + (b.y * v.z + b.w * v.w);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        for (int step = 1; step < 4; step <<= 1) {
            low[r] += __shfl_xor_sync(0xffffffffu, low[r], step);
            high[r] += __shfl_xor_sync(0xffffffffu, high[r], step);
        }
        if (word == 0) {
            sums[(warp * ROWS + r) * COLUMNS + column] = low[r];
            sums[(warp * ROWS + r) * COLUMNS + column + 8] = high[r];
        }
    }
}
