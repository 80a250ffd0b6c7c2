// What the kernels that compute layers share: kinds of jobs, what follows a product, and jobs that take a warp a row. The including
// file defines X, SMOOTH (whether some activation is sigmoid or tanh), PER_ROW (bits of FM and CROSS), and of CROSS jobs DOTS and
// LAYERS: code is fetched anew in every launch, and what no layer needs is left out.
#pragma once
#include "interaction/row_interactions.cuh"

#define MAX_LOGITS 3  // of a head

enum Kind { LINEAR = 0, FM = 1, CROSS = 2 };
enum Activation { IDENTITY = 0, RELU = 1, SIGMOID = 2, TANH = 3 };

__device__ __forceinline__ float activated(float v, int activation) {
    if (activation == RELU) return v < 0.0f ? 0.0f : v;  // keeps NaN, as torch does
    if (!SMOOTH) return v;
    if (activation == SIGMOID) return 1.0f / (1.0f + expf(-v));
    if (activation == TANH) return tanhf(v);
    return v;
}

// A row of an FM or CROSS job, by one warp: its first lane hands each logit, and where that belongs in the job's output, to `put`.
template <typename Job, typename Put>
__device__ __forceinline__ void interact(const Job& job, long long row, Put put) {
    const X* x = static_cast<const X*>(job.x) + row * job.x_ld;
    const bool hands = (threadIdx.x & 31) == 0;
    if (PER_ROW == FM || (PER_ROW != CROSS && job.kind == FM)) {
        const float pairs = fm_row(x, job.width, job.depth);
        if (hands) put(row, pairs);
    } else {
        float logits[DOTS - LAYERS + 1];
        cross_row<DOTS, LAYERS>(x, job.width, static_cast<const float*>(job.weight), job.bias, logits);
        for (int t = 0; hands && t < DOTS - LAYERS; ++t) put(row * (DOTS - LAYERS) + t, logits[t]);
    }
}
