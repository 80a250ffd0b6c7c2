// Factorization machine of x[B, ld], a warp a row. Rows past state[TRUE_ROWS] are a bucket's padding and are skipped.
#include "runtime/common.cuh"
#include "interaction/row_interactions.cuh"

// out[b] = the factorization machine of v = x[b, offset : offset + fields * dim]; see row_interactions.cuh.
// Bytes: B * fields * dim * sizeof(X), from L2 just after the lookup.
extern "C" __global__ void fm(
    const int* state, const X* x, int ld, int offset, int fields, int dim, float* __restrict__ out) {
    let_dependents_start();
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    wait_for_dependencies();
    if (row >= state[TRUE_ROWS]) return;
    const float pairs = fm_row(x + (long long)row * ld + offset, fields, dim);
    if ((threadIdx.x & 31) == 0) out[row] = pairs;
}
