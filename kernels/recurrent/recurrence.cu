// A layer of GRU or LSTM over all steps of a sequence, in one or both directions (`reference.gru` and `lstm` have the formulas).
//
// A block takes 16 rows in one direction, and at each step multiplies [x_t | h] with [W | U] on the tensor cores: a warp has 8
// hidden columns (TILES times) of all gates, so that what a gate needs of another lies in the same lane, as do its h and c, in
// float32. Factors are as the tensor cores take them (tf32, bf16, or both halves of a float32): x_t and h lie twice in shared
// memory, so that one barrier a step is enough, and x of the next step is on its way meanwhile. A lane takes 8 bytes of a row at
// once: in which order the numbers of K are summed is free, as long as both factors agree. Weights stay in registers if there
// are few (KEPT), else they come from the L1 at each step.
// Bytes: B * (steps * (INPUTS + DIRECTIONS * HIDDEN)) * sizeof(X), x once a direction, and the weights once a block.
#include "dense/mma.cuh"
#include "dense/activation.cuh"

#ifndef X
#define X float
#define LSTM 0
#define GATE 0          // of a GRU: 0 none, 1 its update gate is scaled, 2 replaced
#define INPUTS 32
#define HIDDEN 32
#define DIRECTIONS 1
#define PASSES 3
#define WARPS 4
#define TILES 1         // of 8 hidden columns a warp
#define KEPT 0
#define LAST_CELL 0     // whether the last cell states of an LSTM follow the hidden states
#endif
constexpr int GATES = LSTM ? 4 : GATE == 2 ? 2 : 3;
constexpr int SUMS = LSTM ? 4 : GATES + 1;         // a GRU's n adds up apart what comes of x and what comes of h
constexpr int OWN = 8 / sizeof(X), K_STEP = 4 * OWN;  // columns of a lane, and of four
constexpr int X_STEPS = (INPUTS + K_STEP - 1) / K_STEP, STEPS_K = X_STEPS + (HIDDEN + K_STEP - 1) / K_STEP;
constexpr int LD = 8 * (STEPS_K | 1) * 4 / sizeof(X);  // of a row in shared memory: 8 rows of words in different banks
constexpr int ROWS = 16, THREADS = 32 * WARPS, TAKEN = (ROWS * INPUTS + THREADS - 1) / THREADS;
constexpr int UNROLL = KEPT ? STEPS_K : 4;

template <int N> struct Words { unsigned of[N]; };
using Weight = Words<PASSES == 3 ? 4 : 2>;  // a lane's of a step and gate: rounded, and what that loses

__device__ __forceinline__ void put(X* to, float v) {
    if constexpr (sizeof(X) == 4 && PASSES == 1) {
        unsigned w = __float_as_uint(v), rest;
        split<1>(&w, &rest);
        v = __uint_as_float(w);
    }
    store_value(to, v);
}
__device__ __forceinline__ Weight weight_at(const unsigned* at) {
    Weight w;
    if constexpr (PASSES == 3) {
        const uint4 four = *reinterpret_cast<const uint4*>(at);
        w.of[0] = four.x, w.of[1] = four.y, w.of[2] = four.z, w.of[3] = four.w;
    } else {
        const uint2 two = *reinterpret_cast<const uint2*>(at);
        w.of[0] = two.x, w.of[1] = two.y;
    }
    return w;
}
template <int KIND> __device__ __forceinline__ float squashed(float v) {
    return sizeof(X) == 2 ? approximate<KIND>(v, Shape{}) : activate<KIND>(v, Shape{});
}

extern "C" __global__ void __launch_bounds__(THREADS) recurrence(
    const int* state, const X* __restrict__ x, int x_ld, const X* __restrict__ scale, int scale_ld,
    const unsigned* __restrict__ weights, const float* __restrict__ biases, int steps, X* __restrict__ out, int out_ld) {
    extern __shared__ __align__(16) char memory[];
    X* const shared = reinterpret_cast<X*>(memory);  // [2][ROWS][LD]: x_t, and from column X_STEPS * K_STEP on h
    let_dependents_start();
    const int lane = threadIdx.x & 31, group = lane >> 2, member = lane & 3, warp = threadIdx.x >> 5;
    const int direction = blockIdx.x % DIRECTIONS, first = blockIdx.x / DIRECTIONS * ROWS;
    constexpr int WORDS = sizeof(Weight) / 4;
    // words[direction][warp][tile][STEPS_K][GATES][32 lanes][WORDS], biases[direction][SUMS][8 * WARPS * TILES]
    const unsigned* own = weights + ((direction * WARPS + warp) * TILES * STEPS_K * GATES * 32 + lane) * WORDS;
    Weight kept[KEPT ? TILES : 1][KEPT ? STEPS_K : 1][GATES];
    float bias[TILES][SUMS][2], h[TILES][4], c[TILES][4];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        const int unit = (warp * TILES + tile) * 8 + 2 * member;
#pragma unroll
        for (int s = 0; s < SUMS; ++s)
            for (int e = 0; e < 2; ++e) bias[tile][s][e] = biases[(direction * SUMS + s) * (8 * WARPS * TILES) + unit + e];
        for (int e = 0; e < 4; ++e) h[tile][e] = c[tile][e] = 0.0f;
        if constexpr (KEPT) {
#pragma unroll
            for (int k = 0; k < STEPS_K; ++k)
#pragma unroll
                for (int g = 0; g < GATES; ++g)
                    kept[tile][k][g] = weight_at(own + ((tile * STEPS_K + k) * GATES + g) * (32 * WORDS));
        }
    }
    for (int i = threadIdx.x; i < 2 * ROWS * LD * (int)sizeof(X) / 4; i += THREADS) reinterpret_cast<unsigned*>(memory)[i] = 0u;
    __syncthreads();
    wait_for_dependencies();
    const int rows = state[TRUE_ROWS];
    if (first >= rows) return;
    X next[TAKEN];
    auto take = [&](int t) {
#pragma unroll
        for (int i = 0; i < TAKEN; ++i) {
            const int at = threadIdx.x + i * THREADS, row = first + at / INPUTS;
            if (at < ROWS * INPUTS && row < rows) next[i] = x[(long long)row * x_ld + (long long)t * INPUTS + at % INPUTS];
        }
    };
    auto keep = [&](X* tile) {
#pragma unroll
        for (int i = 0; i < TAKEN; ++i) {
            const int at = threadIdx.x + i * THREADS;
            if (at < ROWS * INPUTS && first + at / INPUTS < rows) put(tile + at / INPUTS * LD + at % INPUTS, load_value(next + i));
        }
    };
    take(direction ? steps - 1 : 0);
    keep(shared);
    __syncthreads();
    for (int step = 0; step < steps; ++step) {
        const int t = direction ? steps - 1 - step : step;
        const X* now = shared + (step & 1) * (ROWS * LD);
        X* then = shared + (1 - (step & 1)) * (ROWS * LD);
        if (step + 1 < steps) take(direction ? t - 1 : t + 1);
        float a[2] = {1.0f, 1.0f};  // of rows `group` and `group` + 8
        if (GATE)
            for (int half = 0; half < 2; ++half) {
                const int row = first + group + 8 * half;
                if (row < rows) a[half] = load_value(scale + (long long)row * scale_ld + t);
            }
        float sum[TILES][SUMS][4];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int s = 0; s < SUMS; ++s)
                for (int e = 0; e < 4; ++e) sum[tile][s][e] = bias[tile][s][e & 1];
        auto multiplied = [&](int k, bool of_state) {
            const uint2 low = *reinterpret_cast<const uint2*>(now + group * LD + k * K_STEP + member * OWN);
            const uint2 high = *reinterpret_cast<const uint2*>(now + (group + 8) * LD + k * K_STEP + member * OWN);
            unsigned left[4] = {low.x, high.x, low.y, high.y}, rest[4];
            if (PASSES == 3) split<4>(left, rest);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
                for (int g = 0; g < GATES; ++g) {
                    Weight w;
                    if constexpr (KEPT) w = kept[tile][k][g];
                    else w = weight_at(own + ((tile * STEPS_K + k) * GATES + g) * (32 * WORDS));
                    float* to = sum[tile][!LSTM && of_state && g == GATES - 1 ? GATES : g];
                    if constexpr (PASSES == 3) {
                        multiply(to, rest, w.of, (const X*)nullptr);
                        multiply(to, left, w.of + 2, (const X*)nullptr);
                    }
                    multiply(to, left, w.of, (const X*)nullptr);
                }
        };
#pragma unroll UNROLL
        for (int k = 0; k < X_STEPS; ++k) multiplied(k, false);
#pragma unroll UNROLL
        for (int k = X_STEPS; k < STEPS_K; ++k) multiplied(k, true);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = group + 8 * (e >> 1), unit = (warp * TILES + tile) * 8 + 2 * member + (e & 1);
                float (*of)[4] = sum[tile];
                if constexpr (LSTM) {
                    const float kept_on = squashed<SIGMOID_>(of[1][e]) * c[tile][e];
                    c[tile][e] = kept_on + squashed<SIGMOID_>(of[0][e]) * squashed<TANH_>(of[2][e]);
                    h[tile][e] = squashed<SIGMOID_>(of[3][e]) * squashed<TANH_>(c[tile][e]);
                } else {
                    const float n = squashed<TANH_>(of[GATES - 1][e] + squashed<SIGMOID_>(of[0][e]) * of[GATES][e]);
                    float update = a[e >> 1];
                    if (GATE != 2) update *= squashed<SIGMOID_>(-of[1][e]);
                    h[tile][e] += update * (n - h[tile][e]);
                }
                if (unit < HIDDEN) {
                    put(then + row * LD + X_STEPS * K_STEP + unit, h[tile][e]);
                    const long long at = (long long)(first + row) * out_ld + (t * DIRECTIONS + direction) * HIDDEN + unit;
                    if (first + row < rows) store_value(out + at, h[tile][e]);
                }
            }
        if (step + 1 < steps) keep(then);
        __syncthreads();
    }
    if (LAST_CELL)
        for (int tile = 0; tile < TILES; ++tile)
            for (int e = 0; e < 4; ++e) {
                const int row = first + group + 8 * (e >> 1), unit = (warp * TILES + tile) * 8 + 2 * member + (e & 1);
                const long long at = (long long)row * out_ld + (steps * DIRECTIONS + direction) * HIDDEN + unit;
                if (unit < HIDDEN && row < rows) store_value(out + at, c[tile][e]);
            }
}
