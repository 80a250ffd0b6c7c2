// Feature interactions on x[B, ld], one warp a row. state[0], left by the lookup, is the true number of rows; those
// past it are a bucket's padding and are skipped.
#include "runtime/common.cuh"
#include "interaction/row_interactions.cuh"

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

// out[b] = the factorization machine of v = x[b, offset : offset + fields * dim]; see row_interactions.cuh.
// Bytes: B * fields * dim * sizeof(X), from L2 just after the lookup.
extern "C" __global__ void fm(
    const int* state, const X* x, int ld, int offset, int fields, int dim, float* __restrict__ out) {
    let_dependents_start();
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    wait_for_dependencies();
    if (row >= state[0]) return;
    const float pairs = fm_row(x + (long long)row * ld + offset, fields, dim);
    if ((threadIdx.x & 31) == 0) out[row] = pairs;
}

// All layers of DCN's cross network, folded as row_interactions.cuh says: out[B, out_ld] = a_L x_0 + c_L, c[width] = c_L.
extern "C" __global__ void cross_v1(
    const int* state, const X* x, int ld, int width, const float* __restrict__ weights,
    const float* __restrict__ k, const float* __restrict__ c, X* __restrict__ out, int out_ld) {
    let_dependents_start();
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    wait_for_dependencies();
    if (row >= state[0]) return;
    const X* x0 = x + (long long)row * ld;
    float none[1];
    const float a = cross_row<LAYERS, LAYERS>(x0, width, weights, k, none);
    for (int i = threadIdx.x & 31; i < width; i += 32) store_value(out + (long long)row * out_ld + i, a * load_value(x0 + i) + c[i]);
}

// The same cross network when only the head reads it: out[b, t] = x_L^T v_t. x_L is never written.
extern "C" __global__ void cross_v1_head(
    const int* state, const X* x, int ld, int width, const float* __restrict__ weights,
    const float* __restrict__ k, float* __restrict__ out) {
    let_dependents_start();
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    wait_for_dependencies();
    if (row >= state[0]) return;
    float logits[TASKS + 1];
    cross_row<DOTS, LAYERS>(x + (long long)row * ld, width, weights, k, logits);
#pragma unroll
    for (int t = 0; t < TASKS; ++t)
        if ((threadIdx.x & 31) == 0) out[(long long)row * TASKS + t] = logits[t];
}

// DCN-V2's mixture: out[b, i * dim + r] = softmax(gates[b])[i] * x[b, i * dim + r] for i < experts.
extern "C" __global__ void mixture(
    const int* state, const X* x, int ld, const X* gates, int gates_ld, int experts, int dim, X* __restrict__ out, int out_ld) {
    let_dependents_start();
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) >> 5, lane = threadIdx.x & 31;
    wait_for_dependencies();
    if (row >= state[0]) return;
    gates += (long long)row * gates_ld;
    float most = load_value(gates), sum = 0.0f;
    for (int i = 1; i < experts; ++i) most = fmaxf(most, load_value(gates + i));
    for (int i = 0; i < experts; ++i) sum += expf(load_value(gates + i) - most);
    for (int k = lane; k < experts * dim; k += 32) {
        const float share = expf(load_value(gates + k / dim) - most) / sum;
        store_value(out + (long long)row * out_ld + k, share * load_value(x + (long long)row * ld + k));
    }
}

// Epilogue of a DCN-V2 layer after its GEMM: out = x0 * (out + bias) + xl in place, element by element, 4 columns a thread.
// All widths and strides are multiples of 4; pad columns come out finite. Bytes: 4 * B * width * sizeof(X), mostly from L2.
extern "C" __global__ void cross_v2_epilogue(
    const int* state, const X* x0, const X* xl, const X* __restrict__ bias,
    X* __restrict__ out, int x0_ld, int xl_ld, int out_ld, int width) {
    let_dependents_start();
    const int c = (blockIdx.y * blockDim.x + threadIdx.x) * 4, r = blockIdx.x;
    wait_for_dependencies();
    if (c >= width || r >= state[0]) return;
    float a[4], p[4], l[4], b[4];
    load4(x0 + (long long)r * x0_ld + c, a);
    load4(out + (long long)r * out_ld + c, p);
    load4(xl + (long long)r * xl_ld + c, l);
    load4(bias + c, b);
    for (int k = 0; k < 4; ++k) p[k] = a[k] * (p[k] + b[k]) + l[k];
    store4(out + (long long)r * out_ld + c, p);
}
