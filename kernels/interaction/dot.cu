// DLRM's interaction: out[b] = the first KEEP columns of [first, second], then <v_i, v_j> of its FIELDS vectors of DIM columns
// for all j < i (DIAGONAL: j <= i), row by row.
//
// A block has ROWS rows, its vectors in shared memory (float32, each padded so that neighbours lie in different banks). A
// thread takes tiles of 2 x 2 pairs, 4 columns a step: 4 16-byte reads for 16 multiplications.
// Bytes: B * (FIELDS * DIM + KEEP + pairs) * sizeof(X). Rows past state[TRUE_ROWS] are skipped.
#include "runtime/common.cuh"

#ifndef X
#define X float
#define FIELDS 5
#define DIM 6
#define KEEP 6
#define DIAGONAL 0
#define ROWS 2
#endif
#define THREADS 128
#define COLUMNS ((DIM + 3) / 4 * 4)
#define PITCH (COLUMNS + 4)
#define SIDE ((FIELDS + 1) / 2)
#define TILES (SIDE * (SIDE + 1) / 2)

extern "C" __global__ void dot(
    const int* state, const X* first, int first_width, int first_ld, const X* second, int second_ld, X* __restrict__ out,
    int out_ld) {
    extern __shared__ __align__(16) float vectors[];  // [ROWS][2 * SIDE][PITCH]
    let_dependents_start();
    wait_for_dependencies();
    const int row = blockIdx.x * ROWS, n = min(ROWS, state[TRUE_ROWS] - row);
    if (n <= 0) return;
    first += (long long)row * first_ld;
    second += (long long)row * second_ld;
    out += (long long)row * out_ld;
    for (int k = threadIdx.x; k < n * 2 * SIDE * COLUMNS; k += THREADS) {
        const int r = k / (2 * SIDE * COLUMNS), f = k / COLUMNS % (2 * SIDE), c = k % COLUMNS, at = f * DIM + c;
        float v = 0.0f;
        if (f < FIELDS && c < DIM) {
            v = at < first_width ? load_value(first + (long long)r * first_ld + at)
                                 : load_value(second + (long long)r * second_ld + at - first_width);
            if (at < KEEP) store_value(out + (long long)r * out_ld + at, v);
        }
        vectors[(r * 2 * SIDE + f) * PITCH + c] = v;
    }
    __syncthreads();
    for (int k = threadIdx.x; k < n * TILES; k += THREADS) {
        const int r = k / TILES, tile = k % TILES;
        int i = (int)((sqrtf(8.0f * tile + 1.0f) - 1.0f) * 0.5f);  // the row of tiles: i (i + 1) / 2 <= tile
        while (i * (i + 1) / 2 > tile) --i;
        while ((i + 1) * (i + 2) / 2 <= tile) ++i;
        const int j = tile - i * (i + 1) / 2;
        const float* a = vectors + (r * 2 * SIDE + 2 * i) * PITCH;
        const float* b = vectors + (r * 2 * SIDE + 2 * j) * PITCH;
        float sum[2][2] = {};
#pragma unroll 4
        for (int c = 0; c < COLUMNS; c += 4) {
            float u[2][4], v[2][4];
            for (int s = 0; s < 2; ++s) load4(a + s * PITCH + c, u[s]), load4(b + s * PITCH + c, v[s]);
            for (int s = 0; s < 2; ++s)
                for (int t = 0; t < 2; ++t)
                    for (int e = 0; e < 4; ++e) sum[s][t] += u[s][e] * v[t][e];
        }
        for (int s = 0; s < 2; ++s)
            for (int t = 0; t < 2; ++t) {
                const int p = 2 * i + s, q = 2 * j + t;
                if (p < FIELDS && (DIAGONAL ? q <= p : q < p))
                    store_value(out + (long long)r * out_ld + KEEP + p * (DIAGONAL ? p + 1 : p - 1) / 2 + q, sum[s][t]);
            }
    }
}
