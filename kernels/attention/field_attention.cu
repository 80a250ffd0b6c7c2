// Attention over a row's fields, projections included (AutoInt's interacting layer, Song et al. 2019, eq. 5 to 8): for head h,
//   out[f, h] = activation(sum_g softmax_g(scale Q[f, h] . K[g, h]) V[g, h] + R[f, h]),  Q, K, V, R = x[FIELDS, DIM] W^T + b.
//
// A warp takes one head of one row, and all of it stays in registers: the tensor cores' products come out as they go in. Lanes
// hold of a product [16, 8] the columns 2 m and 2 m + 1, m = lane % 4, of rows lane / 4 and lane / 4 + 8; of a left factor the
// same rows, of a right factor [K, 8] the column lane / 4. So Q is a left factor and K a right one of Q K^T as they stand, the
// weights of softmax a left factor, and V a right one if it is made transposed, V^T = W_V x^T, for which x is a right factor as
// it lies. In which order the numbers of K are summed is free, as long as both factors agree: a lane takes 8 bytes of x at once.
// Bytes: B * (FIELDS * DIM + FIELDS * HEADS * SIZE) * sizeof(X), x from the L2 for each head; weights from the L1.
// Strict float32 (PASSES 3) multiplies with both halves of each factor.
#include "dense/mma.cuh"
#include "dense/activation.cuh"

#ifndef X
#define X float
#define FIELDS 7
#define DIM 10
#define HEADS 2
#define SIZE 5           // of a head
#define RESIDUAL 1       // whether there is R
#define ACTIVATION 1
#define PASSES 3
#define SCALE 0.5f       // of the logits of softmax to the base of 2
#endif
#define WARPS 4
#define MATRICES (3 + RESIDUAL)              // Q, K, V, R
constexpr bool PAIRS = sizeof(X) == 2;       // of numbers in a word
constexpr int K_STEP = PAIRS ? 16 : 8;
constexpr int STEPS = (DIM + K_STEP - 1) / K_STEP;  // of x's columns
constexpr int SIXTEENS = (FIELDS + 15) / 16, KEYS = 2 * SIXTEENS, PARTS = (SIZE + 15) / 16 * 2;  // tiles of 16 and 8 fields, of 8 columns
constexpr int KEY_STEPS = PAIRS ? SIXTEENS : KEYS, PART_STEPS = PAIRS ? PARTS / 2 : PARTS;

__device__ __forceinline__ unsigned word(float v) {
    unsigned w = __float_as_uint(v), rest;
    if (PASSES == 1) split<1>(&w, &rest);
    return w;
}
__device__ __forceinline__ unsigned word(float low, float high) {
    unsigned w;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
    return w;
}
__device__ __forceinline__ void product(float c[4], const unsigned a[4], const unsigned b[2]) {
    if constexpr (PASSES == 3) {
        unsigned high[6] = {a[0], a[1], a[2], a[3], b[0], b[1]}, low[6];
        split<6>(high, low);
        multiply(c, low, high + 4, (const X*)nullptr);
        multiply(c, high, low + 4, (const X*)nullptr);
        multiply(c, high, high + 4, (const X*)nullptr);
    } else {
        multiply(c, a, b, (const X*)nullptr);
    }
}
// What a lane gives to one step from a row of n numbers: two words, of the columns that are its own; zeros beyond.
__device__ __forceinline__ void take(const X* row, int step, bool there, unsigned& first, unsigned& second) {
    constexpr int OWN = K_STEP / 4;
    const int column = step * K_STEP + (threadIdx.x & 3) * OWN;
    if constexpr (DIM % OWN == 0) {
        const uint2 both = there && column < DIM ? *reinterpret_cast<const uint2*>(row + column) : make_uint2(0, 0);
        first = PAIRS ? both.x : word(__uint_as_float(both.x));
        second = PAIRS ? both.y : word(__uint_as_float(both.y));
    } else {
        float v[4];
        for (int k = 0; k < OWN; ++k) v[k] = there && column + k < DIM ? load_value(row + column + k) : 0.0f;
        first = PAIRS ? word(v[0], v[1]) : word(v[0]);
        second = PAIRS ? word(v[2], v[3]) : word(v[1]);
    }
}
// Two tiles of a product side by side (bf16; else one) as a left factor; its rows from 8 * half on as a right one.
__device__ __forceinline__ void as_left(const float (*tiles)[4], int step, unsigned a[4]) {
    const float* c = tiles[PAIRS ? 2 * step : step];
    if constexpr (PAIRS) {
        const float* next = tiles[2 * step + 1];
        a[0] = word(c[0], c[1]), a[1] = word(c[2], c[3]), a[2] = word(next[0], next[1]), a[3] = word(next[2], next[3]);
    } else {
        a[0] = word(c[0]), a[1] = word(c[2]), a[2] = word(c[1]), a[3] = word(c[3]);
    }
}
__device__ __forceinline__ void as_right(const float (*tiles)[4], int step, int half, unsigned b[2]) {
    const float* c = tiles[PAIRS ? 2 * step : step] + 2 * half;
    if constexpr (PAIRS) {
        const float* next = tiles[2 * step + 1] + 2 * half;
        b[0] = word(c[0], c[1]), b[1] = word(next[0], next[1]);
    } else {
        b[0] = word(c[0]), b[1] = word(c[1]);
    }
}

struct Weights {  // of a head: words[MATRICES][STEPS][PARTS][32 lanes][2], as `take` has them of row 8 part + lane / 4; bias[MATRICES][8 PARTS]
    const uint2* words;
    const float* bias;
    __device__ __forceinline__ void right(int matrix, int step, int part, unsigned b[2]) const {
        const uint2 w = words[((matrix * STEPS + step) * PARTS + part) * 32 + (threadIdx.x & 31)];
        b[0] = PAIRS ? w.x : word(__uint_as_float(w.x)), b[1] = PAIRS ? w.y : word(__uint_as_float(w.y));
    }
    // Begins a tile whose columns are the head's.
    __device__ __forceinline__ void begin(int matrix, int part, float c[4]) const {
        const float* of = bias + matrix * 8 * PARTS + 8 * part + 2 * (threadIdx.x & 3);
        c[0] = c[2] = of[0], c[1] = c[3] = of[1];
    }
};
struct Row {  // x's words, a left factor of 16 fields as they lie
    unsigned words[SIXTEENS][STEPS][4];
    __device__ __forceinline__ void project(const Weights& w, int matrix, int sixteen, float (*tiles)[4]) const {
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                unsigned b[2];
                w.right(matrix, s, part, b);
                product(tiles[part], words[sixteen][s], b);
            }
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) field_attention(
    const int* state, const X* __restrict__ x, int x_ld, const uint2* __restrict__ weights, const float* __restrict__ biases,
    X* __restrict__ out, int out_ld) {
    let_dependents_start();
    const int lane = threadIdx.x & 31, group = lane >> 2, member = lane & 3, warp = blockIdx.x * WARPS + (threadIdx.x >> 5);
    const int head = warp % HEADS, apart = gridDim.x * WARPS / HEADS;  // the grid is a multiple of HEADS
    const Weights w = {weights + head * (MATRICES * STEPS * PARTS * 32), biases + head * (MATRICES * 8 * PARTS)};
    wait_for_dependencies();
    const int rows = state[TRUE_ROWS];
    for (int r = warp / HEADS; r < rows; r += apart) {
        const X* own = x + (long long)r * x_ld;
        Row row;
#pragma unroll
        for (int t = 0; t < SIXTEENS; ++t)
#pragma unroll
            for (int s = 0; s < STEPS; ++s)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int field = 16 * t + 8 * half + group;
                    take(own + field * DIM, s, field < FIELDS, row.words[t][s][half], row.words[t][s][2 + half]);
                }
        unsigned keys[KEYS][PART_STEPS][2], values[PARTS][KEY_STEPS][2];
#pragma unroll
        for (int t = 0; t < SIXTEENS; ++t) {
            float k[PARTS][4];
#pragma unroll
            for (int part = 0; part < PARTS; ++part) w.begin(1, part, k[part]);
            row.project(w, 1, t, k);
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int s = 0; s < PART_STEPS; ++s) as_right(k, s, half, keys[2 * t + half][s]);
        }
#pragma unroll
        for (int pair = 0; pair < PARTS / 2; ++pair) {  // 16 columns of V, as rows
            float v[KEYS][4];
#pragma unroll
            for (int j = 0; j < KEYS; ++j) {
                const float* of = w.bias + 2 * 8 * PARTS + 16 * pair + group;
                v[j][0] = v[j][1] = of[0], v[j][2] = v[j][3] = of[8];
            }
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                unsigned low[2], high[2];
                w.right(2, s, 2 * pair, low);
                w.right(2, s, 2 * pair + 1, high);
                const unsigned a[4] = {low[0], high[0], low[1], high[1]};
#pragma unroll
                for (int j = 0; j < KEYS; ++j) {
                    const unsigned b[2] = {row.words[j / 2][s][j % 2], row.words[j / 2][s][2 + j % 2]};
                    product(v[j], a, b);
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int s = 0; s < KEY_STEPS; ++s) as_right(v, s, half, values[2 * pair + half][s]);
        }
        X* to = out + (long long)r * out_ld + head * SIZE;
#pragma unroll
        for (int t = 0; t < SIXTEENS; ++t) {
            float q[PARTS][4], logit[KEYS][4];
#pragma unroll
            for (int part = 0; part < PARTS; ++part) w.begin(0, part, q[part]);
            row.project(w, 0, t, q);
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                for (int e = 0; e < 4; ++e) q[part][e] *= SCALE;
#pragma unroll
            for (int j = 0; j < KEYS; ++j)
                for (int e = 0; e < 4; ++e) logit[j][e] = 0.0f;
#pragma unroll
            for (int s = 0; s < PART_STEPS; ++s) {
                unsigned a[4];
                as_left(q, s, a);
#pragma unroll
                for (int j = 0; j < KEYS; ++j) product(logit[j], a, keys[j][s]);
            }
            float most[2] = {-3.0e38f, -3.0e38f}, sum[2] = {0.0f, 0.0f};  // of fields `group` and `group` + 8
#pragma unroll
            for (int j = 0; j < KEYS; ++j)
                for (int e = 0; e < 4; ++e)
                    if (8 * j + 2 * member + (e & 1) < FIELDS) most[e >> 1] = fmaxf(most[e >> 1], logit[j][e]);
            for (int half = 0; half < 2; ++half)
                for (int step = 1; step < 4; step *= 2) most[half] = fmaxf(most[half], __shfl_xor_sync(0xffffffffu, most[half], step));
#pragma unroll
            for (int j = 0; j < KEYS; ++j)
                for (int e = 0; e < 4; ++e) {
                    const bool there = 8 * j + 2 * member + (e & 1) < FIELDS;
                    logit[j][e] = there ? exp2f(logit[j][e] - most[e >> 1]) : 0.0f;
                    sum[e >> 1] += logit[j][e];
                }
            for (int half = 0; half < 2; ++half) {
                for (int step = 1; step < 4; step *= 2) sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], step);
                sum[half] = 1.0f / sum[half];
            }
            float y[PARTS][4];
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                for (int e = 0; e < 4; ++e) y[part][e] = 0.0f;
#pragma unroll
            for (int s = 0; s < KEY_STEPS; ++s) {
                unsigned a[4];
                as_left(logit, s, a);
#pragma unroll
                for (int part = 0; part < PARTS; ++part) product(y[part], a, values[part][s]);
            }
            float rest[PARTS][4];
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                if (RESIDUAL) w.begin(MATRICES - 1, part, rest[part]);
            if (RESIDUAL) row.project(w, MATRICES - 1, t, rest);
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                for (int e = 0; e < 4; ++e) {
                    const int field = 16 * t + 8 * (e >> 1) + group, column = 8 * part + 2 * member + (e & 1);
                    float v = y[part][e] * sum[e >> 1];
                    if (RESIDUAL) v += rest[part][e];
                    if (field < FIELDS && column < SIZE)
                        store_value(to + field * (HEADS * SIZE) + column, activate<ACTIVATION>(v, Shape{}));
                }
        }
    }
}
