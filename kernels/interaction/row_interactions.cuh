// Interactions that one warp computes for one row of x. Included where X, the type of x, is defined.
#pragma once
#include "runtime/common.cuh"

#ifndef X
#define X float
#endif

// Factorization machine: 1/2 sum_d ((sum_i v_id)^2 - sum_i v_id^2) of v[fields, dim]. Every lane gets it.
// Lanes hold fixed d: with dim < 32, floor(32 / dim) groups of lanes take the fields in turn and are then added up.
__device__ __forceinline__ float fm_row(const X* v, int fields, int dim) {
    const int lane = threadIdx.x & 31;
    float pairs = 0.0f;
    if (dim < 32) {
        const int groups = 32 / dim, group = lane / dim, d = lane - group * dim;
        float sum = 0.0f, squares = 0.0f;
        if (group < groups) {
#pragma unroll 4
            for (int f = group; f < fields; f += groups) {
                const float e = load_value(v + f * dim + d);
                sum += e;
                squares += e * e;
            }
        }
        float all = sum;
        for (int g = 1; g < groups; ++g) all += __shfl_sync(0xffffffffu, sum, (lane + g * dim) & 31);
        pairs = (lane < dim ? all * all : 0.0f) - squares;
    } else {
        for (int d = lane; d < dim; d += 32) {
            float sum = 0.0f, squares = 0.0f;
            for (int f = 0; f < fields; ++f) {
                const float e = load_value(v + f * dim + d);
                sum += e;
                squares += e * e;
            }
            pairs += sum * sum - squares;
        }
    }
    return 0.5f * warp_sum(pairs);
}

// DCN v1, all layers: x_{l+1} = x_0 (x_l^T w_l) + b_l + x_l. With x_l = a_l x_0 + c_l (a_0 = 1, c_0 = 0, c_{l+1} = c_l + b_l):
// x_l^T w_l = a_l (x_0^T w_l) + k_l, k_l = c_l^T w_l known ahead, and a_{l+1} = a_l + x_l^T w_l. So one pass over x_0 does it.
// weights[DOTS, width]: w_l, then the DOTS - LAYERS vectors v_t of the head; k[DOTS]: k_l, then c_L^T v_t.
// Returns a_L, and logits[t] = x_L^T v_t = a_L (x_0^T v_t) + c_L^T v_t; every lane gets all.
template <int DOTS_, int LAYERS_>
__device__ __forceinline__ float cross_row(const X* x, int width, const float* weights, const float* k, float* logits) {
    const int lane = threadIdx.x & 31;
    float dots[DOTS_];
#pragma unroll
    for (int j = 0; j < DOTS_; ++j) dots[j] = 0.0f;
    for (int i = lane; i < width; i += 32) {
        const float e = load_value(x + i);
#pragma unroll
        for (int j = 0; j < DOTS_; ++j) dots[j] += e * weights[j * width + i];
    }
    float a = 1.0f;
#pragma unroll
    for (int j = 0; j < DOTS_; ++j) dots[j] = warp_sum(dots[j]);
#pragma unroll
    for (int l = 0; l < LAYERS_; ++l) a += a * dots[l] + k[l];
#pragma unroll
    for (int t = LAYERS_; t < DOTS_; ++t) logits[t - LAYERS_] = a * dots[t] + k[t];
    return a;
}
