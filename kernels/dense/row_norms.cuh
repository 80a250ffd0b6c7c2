// Layer norm of a row's fields, each over its own DIM columns, by one warp: (x - mean) / sqrt(variance + eps) * weight + bias, then
// perhaps ReLU. As many fields side by side as have room in the warp; columns are read anew for each of the three sums, from a cache or
// from shared memory.
#pragma once
#include "runtime/common.cuh"

__device__ __forceinline__ float sum_of_lanes(float v, int lanes) {
    for (int step = lanes / 2; step > 0; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);
    return v;
}

// weight: float[2 * dim], the bias behind. `put` takes a column and its value.
template <typename T, typename Put>
__device__ __forceinline__ void norm_row(const T* x, int fields, int dim, float eps, const float* weight, bool relu, Put put) {
    int lanes = 32;  // of a field
    while (lanes / 2 >= dim) lanes /= 2;
    const int lane = threadIdx.x & 31, own = lane & (lanes - 1), together = 32 / lanes;
#pragma unroll 4
    for (int first = 0; first < fields; first += together) {  // whole warps
        const int field = first + lane / lanes, end = field < fields ? dim : 0;
        const T* at = x + field * dim;
        float sum = 0.0f, squares = 0.0f;
        for (int c = own; c < end; c += lanes) sum += load_value(at + c);
        const float mean = sum_of_lanes(sum, lanes) / dim;
        for (int c = own; c < end; c += lanes) {
            const float d = load_value(at + c) - mean;
            squares += d * d;
        }
        const float scale = rsqrtf(sum_of_lanes(squares, lanes) / dim + eps);
        for (int c = own; c < end; c += lanes) {
            const float v = (load_value(at + c) - mean) * scale * weight[c] + weight[dim + c];
            put(field * dim + c, relu && v < 0.0f ? 0.0f : v);  // keeps NaN, as torch does
        }
    }
}
