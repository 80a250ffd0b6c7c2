// Cross networks on x[B, ld], a warp a row; a mixture of experts. Rows past state[TRUE_ROWS] are a bucket's padding and are skipped.
#include "runtime/common.cuh"
#include "interaction/row_interactions.cuh"

#ifndef DOTS
#define DOTS 1  // layers + tasks (or layers alone)
#endif
#ifndef LAYERS
#define LAYERS 1
#endif
#ifndef VEC
#define VEC 4  // columns of a thread of the mixture
#endif
#define TASKS (DOTS - LAYERS)

// All layers of DCN's cross network, folded as row_interactions.cuh says: out[B, out_ld] = a_L x_0 + c_L, c[width] = c_L.
extern "C" __global__ void cross_v1(
    const int* state, const X* x, int ld, int width, const float* __restrict__ weights,
    const float* __restrict__ k, const float* __restrict__ c, X* __restrict__ out, int out_ld) {
    let_dependents_start();
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    wait_for_dependencies();
    if (row >= state[TRUE_ROWS]) return;
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
    if (row >= state[TRUE_ROWS]) return;
    float logits[TASKS + 1];
    cross_row<DOTS, LAYERS>(x + (long long)row * ld, width, weights, k, logits);
#pragma unroll
    for (int t = 0; t < TASKS; ++t)
        if ((threadIdx.x & 31) == 0) out[(long long)row * TASKS + t] = logits[t];
}

// DCN-V2's mixture: out[b, i * dim + r] = softmax(gates[b])[i] * x[b, i * dim + r] for i < experts. A thread takes VEC columns of an
// expert of a row: a warp that goes through a row waits for memory again and again.
extern "C" __global__ void mixture(
    const int* state, const X* x, int ld, const X* gates, int gates_ld, int experts, int dim, X* __restrict__ out, int out_ld) {
    let_dependents_start();
    const int vectors = experts * dim / VEC, at = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = at / vectors, column = (at - row * vectors) * VEC;
    wait_for_dependencies();
    if (row >= state[TRUE_ROWS]) return;
    float v[VEC];
    if constexpr (VEC == 4) load4(x + (long long)row * ld + column, v);
    else v[0] = load_value(x + (long long)row * ld + column);
    gates += (long long)row * gates_ld;
    float most = load_value(gates), sum = 0.0f;
    for (int i = 1; i < experts; ++i) most = fmaxf(most, load_value(gates + i));
    for (int i = 0; i < experts; ++i) sum += expf(load_value(gates + i) - most);
    const float share = expf(load_value(gates + column / dim) - most) / sum;
    for (int k = 0; k < VEC; ++k) v[k] *= share;
    if constexpr (VEC == 4) store4(out + (long long)row * out_ld + column, v);
    else store_value(out + (long long)row * out_ld + column, v[0]);
}
