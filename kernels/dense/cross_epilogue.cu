// Epilogue of a DCN-V2 layer whose product was computed without one: out = x0 * (out + bias) + xl in place, or with an
// outer bias x0 * out + bias + xl, 4 columns a thread.
// All widths and strides are multiples of 4; pad columns come out finite. Bytes: 4 * B * width * sizeof(X), mostly from L2.
#include "runtime/common.cuh"

#ifndef X
#define X float
#endif

extern "C" __global__ void cross_v2_epilogue(
    const int* state, const X* x0, const X* xl, const X* __restrict__ bias,
    X* __restrict__ out, int x0_ld, int xl_ld, int out_ld, int width, int outer) {
    let_dependents_start();
    const int c = (blockIdx.y * blockDim.x + threadIdx.x) * 4, r = blockIdx.x;
    wait_for_dependencies();
    if (c >= width || r >= state[TRUE_ROWS]) return;
    float a[4], p[4], l[4], b[4];
    load4(x0 + (long long)r * x0_ld + c, a);
    load4(out + (long long)r * out_ld + c, p);
    load4(xl + (long long)r * xl_ld + c, l);
    load4(bias + c, b);
    for (int k = 0; k < 4; ++k) p[k] = outer ? a[k] * p[k] + (b[k] + l[k]) : a[k] * (p[k] + b[k]) + l[k];
    store4(out + (long long)r * out_ld + c, p);
}
