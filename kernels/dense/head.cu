// Output of a model in one kernel: scores[b, t] = sigmoid(sum_p parts_p[b] . w_p[t] + bias[t] + sum_s logits_s[b]).
//
// One warp a row, 8 rows a block; scores are gathered in shared memory and leave as one run of consecutive words, because
// `scores` is pinned host memory and single words would each cross the bus alone. Rows past state[TRUE_ROWS] are not written.
// Bytes: B * (sum of part widths * sizeof(X) + 4 * tasks).
#include "runtime/common.cuh"

#ifndef X
#define X float
#endif
#ifndef TASKS
#define TASKS 1
#endif
#define WARPS ROWS_A_WORD

__device__ __forceinline__ void add_part(const X* p, const float* __restrict__ w, int width, int w_ld, float logit[TASKS]) {
#pragma unroll 8  // so many reads on their way
    for (int i = threadIdx.x & 31; i < width; i += 32) {
        const float e = load_value(p + i);
#pragma unroll
        for (int t = 0; t < TASKS; ++t) logit[t] += e * w[t * w_ld + i];
    }
}

extern "C" __global__ void head(
    const int* state,
    const X* part0, int width0, int ld0, int column0,
    const X* part1, int width1, int ld1, int column1,
    const X* part2, int width2, int ld2, int column2,
    const float* logits0, int step0, const float* logits1, int step1,
    const float* logits2, int step2,
    const float* __restrict__ weights, int w_ld, const float* __restrict__ bias, float* __restrict__ scores, int* done) {
    __shared__ float out[WARPS * TASKS];
    let_dependents_start();
    wait_for_dependencies();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int first = blockIdx.x * WARPS, row = first + warp, rows = state[TRUE_ROWS], batch = state[BATCH_NUMBER];
    if (first >= rows) return;
    if (row < rows) {
        float logit[TASKS];
#pragma unroll
        for (int t = 0; t < TASKS; ++t) logit[t] = 0.0f;
        if (part0) add_part(part0 + (long long)row * ld0, weights + column0, width0, w_ld, logit);
        if (part1) add_part(part1 + (long long)row * ld1, weights + column1, width1, w_ld, logit);
        if (part2) add_part(part2 + (long long)row * ld2, weights + column2, width2, w_ld, logit);
#pragma unroll
        for (int t = 0; t < TASKS; ++t) {
            float z = warp_sum(logit[t]) + bias[t];
            // step 0: one logit for all tasks; else `step` logits a row
            if (logits0) z += logits0[step0 ? (long long)row * step0 + t : row];
            if (logits1) z += logits1[step1 ? (long long)row * step1 + t : row];
            if (logits2) z += logits2[step2 ? (long long)row * step2 + t : row];
            if (lane == 0) out[warp * TASKS + t] = 1.0f / (1.0f + expf(-z));
        }
    }
    __syncthreads();
    const int n = min(WARPS, rows - first) * TASKS;
    for (int i = threadIdx.x; i < n; i += blockDim.x) scores[(long long)first * TASKS + i] = out[i];
    __syncthreads();
    if (threadIdx.x == 0) announce(done, blockIdx.x, batch);
}
