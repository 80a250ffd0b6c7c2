// What the kernels that compute layers share: kinds of jobs, what follows a product, and jobs that take a warp a row. The including
// file defines X, KINDS (bits of the activations beyond RELU that layers have), PER_ROW (bits of FM, CROSS and NORM), and of CROSS jobs DOTS and
// LAYERS: code is fetched anew in every launch, and what no layer needs is left out.
#pragma once
#include "dense/activation.cuh"
#include "interaction/row_interactions.cuh"

#define MAX_LOGITS 3  // of a head
#define HAS(kind) (KINDS >> kind & 1)
#define SHAPED (HAS(PRELU) || HAS(DICE))  // whether some activation has parameters

enum Kind { LINEAR = 0, FM = 1, CROSS = 2, DOT = 4, NORM = 8 };
#define LOGITS (PER_ROW & (FM | CROSS))  // which jobs make logits

__device__ __forceinline__ float activated(float v, int kind, const Shape& shape) {
    if (kind == RELU_) return activate<RELU_>(v, shape);
    if (HAS(SIGMOID_) && kind == SIGMOID_) return activate<SIGMOID_>(v, shape);
    if (HAS(TANH_) && kind == TANH_) return activate<TANH_>(v, shape);
    if (HAS(GELU) && kind == GELU) return activate<GELU>(v, shape);
    if (HAS(GELU_TANH) && kind == GELU_TANH) return activate<GELU_TANH>(v, shape);
    if (HAS(PRELU) && kind == PRELU) return activate<PRELU>(v, shape);
    if (HAS(DICE) && kind == DICE) return activate<DICE>(v, shape);
    return v;
}

// A row of an FM or CROSS job, by one warp: its first lane hands each logit, and where that belongs in the job's output, to `put`.
template <typename Job, typename Put>
__device__ __forceinline__ void interact(const Job& job, long long row, Put put) {
    const X* x = static_cast<const X*>(job.x) + row * job.x_ld;
    const bool hands = (threadIdx.x & 31) == 0;
    if (LOGITS == FM || (LOGITS != CROSS && job.kind == FM)) {
        const float pairs = fm_row(x, job.width, job.depth);
        if (hands) put(row, pairs);
    } else {
        float logits[DOTS - LAYERS + 1];
        cross_row<DOTS, LAYERS>(x, job.width, static_cast<const float*>(job.weight), job.bias, logits);
        for (int t = 0; hands && t < DOTS - LAYERS; ++t) put(row * (DOTS - LAYERS) + t, logits[t]);
    }
}
