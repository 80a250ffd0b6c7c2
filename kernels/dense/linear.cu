// Epilogue of a linear layer whose product was computed without one: out = activation(out + bias) in place, 4 columns a thread.
// Widths and strides are multiples of 4. Bytes: 2 * B * width * sizeof(X), from L2.
#include "runtime/common.cuh"

#ifndef X
#define X float
#endif

extern "C" __global__ void bias_relu(const X* __restrict__ bias, X* __restrict__ out, int ld, int width, int relu) {
    let_dependents_start();
    wait_for_dependencies();
    const int c = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
    if (c >= width) return;
    float v[4], b[4];
    X* p = out + (long long)blockIdx.x * ld + c;
    load4(p, v);
    load4(bias + c, b);
    for (int k = 0; k < 4; ++k) {
        v[k] += b[k];
        if (relu) v[k] = v[k] < 0.0f ? 0.0f : v[k];  // keeps NaN, as torch does
    }
    store4(p, v);
}
