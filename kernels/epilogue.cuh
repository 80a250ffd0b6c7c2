// What the kernels that compute layers share: kinds of jobs, and what follows a product. The including file defines SMOOTH (whether some activation is
// sigmoid or tanh): code is fetched anew in every launch, and what no layer needs is left out.
#pragma once

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
