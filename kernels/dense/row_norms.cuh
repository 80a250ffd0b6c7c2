// Layer norms of rows' fields, each over its own DIM columns: (x - mean) / sqrt(variance + eps) * weight + bias, then perhaps ReLU.
// Neighbouring lanes take a field, four columns each where a warp holds them so: then x is read once, and a group of lanes has
// FIELDS_AT_ONCE fields on their way, of whichever rows. Else it takes as many one after the other.
#pragma once
#include "runtime/common.cuh"

#define FIELDS_AT_ONCE 4

__device__ __forceinline__ float sum_of_lanes(float v, int lanes) {
    for (int step = lanes / 2; step > 0; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);
    return v;
}
__device__ __forceinline__ bool in_fours(int dim) { return dim % 4 == 0 && dim <= 128; }
// Of a field: a power of two. norm_lanes of wave_jobs.py.
__device__ __forceinline__ int lanes_of(int dim) {
    int lanes = 32;
    while (lanes / 2 >= (in_fours(dim) ? dim / 4 : dim)) lanes /= 2;
    return lanes;
}

// The block's share of all fields of so many rows, by THREADS_ threads. weight: float[2 * dim], the bias behind. `put` takes a row, a
// column of it, and the values from there on: four, or one.
template <int THREADS_, typename T, typename Put>
__device__ __forceinline__ void norm_fields(
    const T* x, int ld, int rows, int block, int fields, int dim, float eps, const float* weight, bool relu, Put put) {
    const int lanes = lanes_of(dim), own = threadIdx.x & (lanes - 1), groups = THREADS_ / lanes, all = rows * fields;
    const int first = block * groups * FIELDS_AT_ONCE + threadIdx.x / lanes;
    const auto normed = [&](float v, float mean, float scale, float w, float b) {
        v = (v - mean) * scale * w + b;
        return relu && v < 0.0f ? 0.0f : v;  // keeps NaN, as torch does
    };
    if (in_fours(dim)) {
        const int column = own * 4;
        const bool there = column < dim;
        float v[FIELDS_AT_ONCE][4], w[4], b[4];
#pragma unroll
        for (int k = 0; k < FIELDS_AT_ONCE; ++k) {
            const int field = first + k * groups, row = field / fields;
            for (int i = 0; i < 4; ++i) v[k][i] = 0.0f;
            if (there && field < all) load4(x + (long long)row * ld + (field - row * fields) * dim + column, v[k]);
        }
        if (there) load4(weight + column, w), load4(weight + dim + column, b);
#pragma unroll
        for (int k = 0; k < FIELDS_AT_ONCE; ++k) {
            const int field = first + k * groups, row = field / fields;
            const float mean = sum_of_lanes((v[k][0] + v[k][1]) + (v[k][2] + v[k][3]), lanes) / dim;
            float squares = 0.0f;
            for (int i = 0; i < 4; ++i) squares += there ? (v[k][i] - mean) * (v[k][i] - mean) : 0.0f;
            const float scale = rsqrtf(sum_of_lanes(squares, lanes) / dim + eps);
            if (!there || field >= all) continue;
            for (int i = 0; i < 4; ++i) v[k][i] = normed(v[k][i], mean, scale, w[i], b[i]);
            put(row, (field - row * fields) * dim + column, v[k], 4);
        }
        return;
    }
#pragma unroll 1
    for (int k = 0; k < FIELDS_AT_ONCE; ++k) {
        const int field = first + k * groups, row = min(field, all - 1) / fields, end = field < all ? dim : 0;
        const int column = (field - row * fields) * dim;
        const T* at = x + (long long)row * ld + column;
        float sum = 0.0f, squares = 0.0f;
        for (int c = own; c < end; c += lanes) sum += load_value(at + c);
        const float mean = sum_of_lanes(sum, lanes) / dim;
        for (int c = own; c < end; c += lanes) {
            const float d = load_value(at + c) - mean;
            squares += d * d;
        }
        const float scale = rsqrtf(sum_of_lanes(squares, lanes) / dim + eps);
        for (int c = own; c < end; c += lanes) {
            const float v = normed(load_value(at + c), mean, scale, weight[c], weight[dim + c]);
            put(row, column + c, &v, 1);
        }
    }
}
