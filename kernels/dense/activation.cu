// Bias and activation after a product that was computed without: out = activation(x + bias), 4 columns a thread, in place or not.
// Widths and strides are multiples of 4; pad columns come out finite. Bytes: 2 * B * width * sizeof(X), from L2.
#include "runtime/common.cuh"
#include "dense/activation.cuh"

#ifndef X
#define X float
#define ACTIVATION 7
#endif

extern "C" __global__ void bias_activation(
    const int* state, const X* x, int x_ld, const X* __restrict__ bias, const float* __restrict__ params, X* out, int out_ld,
    int width) {
    let_dependents_start();
    wait_for_dependencies();
    const int c = (blockIdx.y * blockDim.x + threadIdx.x) * 4, r = blockIdx.x;
    if (c >= width || r >= state[TRUE_ROWS]) return;
    float v[4], b[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    load4(x + (long long)r * x_ld + c, v);
    if (bias) load4(bias + c, b);
    for (int k = 0; k < 4; ++k) v[k] = activate<ACTIVATION>(v[k] + b[k], shape_of<ACTIVATION>(params, width, c + k));
    store4(out + (long long)r * out_ld + c, v);
}
