// Feature interactions on x[B, ld], one warp a row. state[0], left by the lookup, is the true number of rows; those
// past it are a bucket's padding and are skipped.
#include "common.cuh"

#ifndef X
#define X float
#endif
#ifndef DOTS
#define DOTS 1  // cross: layers + tasks (or layers alone)
#endif
#ifndef LAYERS
#define LAYERS 1
#endif
#define TASKS (DOTS - LAYERS)

// Factorization machine: out[b] = 1/2 sum_d ((sum_i v_id)^2 - sum_i v_id^2), v = x[b, offset : offset + fields * dim].
// Lanes hold fixed d: with dim < 32, floor(32 / dim) groups of lanes take the fields in turn and are then added up.
// Bytes: B * fields * dim * sizeof(X), from L2 just after the lookup.
extern "C" __global__ void fm(
    const int* __restrict__ state, const X* __restrict__ x, int ld, int offset, int fields, int dim, float* __restrict__ out) {
    const int lane = threadIdx.x & 31;
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    if (row >= state[0]) return;
    const X* v = x + (long long)row * ld + offset;
    float pairs = 0.0f;
    if (dim < 32) {
        const int groups = 32 / dim, group = lane / dim, d = lane - group * dim;
        float sum = 0.0f, squares = 0.0f;
        if (group < groups) {
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
    pairs = warp_sum(pairs);
    if (lane == 0) out[row] = 0.5f * pairs;
}

// Dot products of one row with DOTS weight vectors, every lane gets all of them.
__device__ __forceinline__ void row_dots(const X* x, const float* __restrict__ w, int width, float dots[DOTS]) {
    const int lane = threadIdx.x & 31;
    for (int j = 0; j < DOTS; ++j) dots[j] = 0.0f;
    for (int i = lane; i < width; i += 32) {
        const float e = load_value(x + i);
#pragma unroll
        for (int j = 0; j < DOTS; ++j) dots[j] += e * w[j * width + i];
    }
#pragma unroll
    for (int j = 0; j < DOTS; ++j) dots[j] = warp_sum(dots[j]);
}

// DCN v1, all layers: x_{l+1} = x_0 (x_l^T w_l) + b_l + x_l. With x_l = a_l x_0 + c_l (a_0 = 1, c_0 = 0, c_{l+1} = c_l + b_l):
// x_l^T w_l = a_l (x_0^T w_l) + k_l, k_l = c_l^T w_l known ahead, and a_{l+1} = a_l + x_l^T w_l. So one pass over x_0 does it.
// weights[LAYERS, width]; k[LAYERS]; c[width] = c_L; out[B, out_ld] = a_L x_0 + c_L.
extern "C" __global__ void cross_v1(
    const int* __restrict__ state, const X* __restrict__ x, int ld, int width, const float* __restrict__ weights,
    const float* __restrict__ k, const float* __restrict__ c, X* __restrict__ out, int out_ld) {
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    if (row >= state[0]) return;
    const X* x0 = x + (long long)row * ld;
    float dots[DOTS];
    row_dots(x0, weights, width, dots);
    float a = 1.0f;
#pragma unroll
    for (int l = 0; l < LAYERS; ++l) a += a * dots[l] + k[l];
    for (int i = threadIdx.x & 31; i < width; i += 32) store_value(out + (long long)row * out_ld + i, a * load_value(x0 + i) + c[i]);
}

// The same cross network when only the head reads it: out[b, t] = x_L^T v_t = a_L (x_0^T v_t) + c_L^T v_t.
// weights[LAYERS + TASKS, width]: w then v; k[LAYERS + TASKS]: k_l, then c_L^T v_t. x_L is never written.
extern "C" __global__ void cross_v1_head(
    const int* __restrict__ state, const X* __restrict__ x, int ld, int width, const float* __restrict__ weights,
    const float* __restrict__ k, float* __restrict__ out) {
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    if (row >= state[0]) return;
    float dots[DOTS];
    row_dots(x + (long long)row * ld, weights, width, dots);
    float a = 1.0f;
#pragma unroll
    for (int l = 0; l < LAYERS; ++l) a += a * dots[l] + k[l];
#pragma unroll
    for (int t = 0; t < TASKS; ++t)
        if ((threadIdx.x & 31) == 0) out[(long long)row * TASKS + t] = a * dots[LAYERS + t] + k[LAYERS + t];
}

// Epilogue of a DCN-V2 layer after its GEMM: out = x0 * (out + bias) + xl in place, element by element, 4 columns a thread.
// All widths and strides are multiples of 4; pad columns come out finite. Bytes: 4 * B * width * sizeof(X), mostly from L2.
extern "C" __global__ void cross_v2_epilogue(
    const int* __restrict__ state, const X* __restrict__ x0, const X* __restrict__ xl, const X* __restrict__ bias,
    X* __restrict__ out, int x0_ld, int xl_ld, int out_ld, int width) {
    const int c = (blockIdx.y * blockDim.x + threadIdx.x) * 4, r = blockIdx.x;
    if (c >= width || r >= state[0]) return;
    float a[4], p[4], l[4], b[4];
    load4(x0 + (long long)r * x0_ld + c, a);
    load4(out + (long long)r * out_ld + c, p);
    load4(xl + (long long)r * xl_ld + c, l);
    load4(bias + c, b);
    for (int k = 0; k < 4; ++k) p[k] = a[k] * (p[k] + b[k]) + l[k];
    store4(out + (long long)r * out_ld + c, p);
}
