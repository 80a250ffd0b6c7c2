// A layer of GRU or LSTM over all steps of a sequence, in one or both directions (`reference.gru` and `lstm` have the formulas).
//
// A block takes 16 rows in one direction, and at each step multiplies h with U, and x of the next step with W, on the tensor
// cores: a warp has 8 hidden columns (TILES times) of all gates, so that what a gate needs of another lies in the same lane, as
// do its h and c, in float32. So the way from one h to the next is one product alone, and one barrier, as h and x lie twice in
// shared memory, and x of the step after the next is on its way meanwhile. Factors are as the tensor cores take them (tf32,
// bf16, or both halves of a float32). A lane takes 8 bytes of a row at once: in which order the numbers of K are summed is free,
// as long as both factors agree. Weights stay in registers as far as there is room (KEPT), else come from the L1 at each step.
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
#define KEPT 0          // 1: U stays in registers, 2: W too
#define LAST_CELL 0     // whether the last cell states of an LSTM follow the hidden states
#endif
constexpr int GATES = LSTM ? 4 : GATE == 2 ? 2 : 3;
constexpr int OWN = 8 / sizeof(X), K_STEP = 4 * OWN;  // columns of a lane, and of four
constexpr int X_STEPS = (INPUTS + K_STEP - 1) / K_STEP, H_STEPS = (HIDDEN + K_STEP - 1) / K_STEP;
constexpr int LD = 8 * ((X_STEPS + H_STEPS) | 1) * 4 / sizeof(X);  // of a row in shared memory: 8 rows of words in other banks
constexpr int ROWS = 16, THREADS = 32 * WARPS, TAKEN = (ROWS * INPUTS + THREADS - 1) / THREADS;
constexpr int COLUMNS = 8 * WARPS * TILES;

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
// Off by some 2^-22: no digit that a float32 sum of the gates would have.
__device__ __forceinline__ float inverse_of_one_and_power(float exponent) {
    float power, inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
    return inverse;
}
__device__ __forceinline__ float sigmoid_of(float v) {
    return sizeof(X) == 2 ? approximate<SIGMOID_>(v, Shape{}) : inverse_of_one_and_power(v * -1.44269504f);
}
__device__ __forceinline__ float tanh_of(float v) {
    return sizeof(X) == 2 ? approximate_tanh(v) : fmaf(-2.0f, inverse_of_one_and_power(v * 2.88539008f), 1.0f);
}

// One side's weights as a warp multiplies them: W with x_t, U with h.
template <int STEPS, bool STAY> struct Factor {
    static constexpr int WORDS = sizeof(Weight) / 4;
    const unsigned* words;  // [TILES][STEPS][GATES][32 lanes][WORDS], from the lane's own on
    Weight kept[STAY ? TILES : 1][STAY ? STEPS : 1][GATES];

    __device__ __forceinline__ Weight loaded(int tile, int k, int g) const {
        return weight_at(words + ((tile * STEPS + k) * GATES + g) * (32 * WORDS));
    }
    __device__ __forceinline__ void begin(const unsigned* all, int warp) {  // all: [warps][TILES]..
        words = all + warp * (TILES * STEPS * GATES * 32 * WORDS) + (threadIdx.x & 31) * WORDS;
        if constexpr (STAY)
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
                for (int k = 0; k < STEPS; ++k)
#pragma unroll
                    for (int g = 0; g < GATES; ++g) kept[tile][k][g] = loaded(tile, k, g);
    }
    __device__ __forceinline__ void multiply_into(float (*sum)[GATES][4], const X* rows) const {
        const X* own = rows + ((threadIdx.x & 31) >> 2) * LD + (threadIdx.x & 3) * OWN;
        constexpr int UNROLL = STAY ? STEPS : 4;
#pragma unroll UNROLL
        for (int k = 0; k < STEPS; ++k) {
            const uint2 low = *reinterpret_cast<const uint2*>(own + k * K_STEP);
            const uint2 high = *reinterpret_cast<const uint2*>(own + 8 * LD + k * K_STEP);
            unsigned left[4] = {low.x, high.x, low.y, high.y}, rest[4];
            if (PASSES == 3) split<4>(left, rest);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
                for (int g = 0; g < GATES; ++g) {
                    Weight w;
                    if constexpr (STAY) w = kept[tile][k][g];
                    else w = loaded(tile, k, g);
                    if constexpr (PASSES == 3) {
                        multiply(sum[tile][g], rest, w.of, (const X*)nullptr);
                        multiply(sum[tile][g], left, w.of + 2, (const X*)nullptr);
                    }
                    multiply(sum[tile][g], left, w.of, (const X*)nullptr);
                }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) recurrence(
    const int* state, const X* __restrict__ x, int x_ld, const X* __restrict__ scale, int scale_ld,
    const unsigned* __restrict__ of_x, const unsigned* __restrict__ of_h, const float* __restrict__ biases, int steps,
    X* __restrict__ out, int out_ld) {
    extern __shared__ __align__(16) char memory[];
    X* const shared = reinterpret_cast<X*>(memory);  // [2][ROWS][LD]: h, and from column H_STEPS * K_STEP on x_t
    let_dependents_start();
    const int lane = threadIdx.x & 31, group = lane >> 2, member = lane & 3, warp = threadIdx.x >> 5;
    const int direction = blockIdx.x % DIRECTIONS, first = blockIdx.x / DIRECTIONS * ROWS;
    Factor<X_STEPS, (KEPT > 1)> w;
    Factor<H_STEPS, (KEPT > 0)> u;
    w.begin(of_x, direction * WARPS + warp);
    u.begin(of_h, direction * WARPS + warp);
    float bias[TILES][GATES + 1][2], h[TILES][4], c[TILES][4];  // bias: of x's sums, and of h's for the last gate of a GRU
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        const float* own = biases + direction * ((GATES + 1) * COLUMNS) + (warp * TILES + tile) * 8 + 2 * member;
#pragma unroll
        for (int s = 0; s <= GATES; ++s)
            for (int e = 0; e < 2; ++e) bias[tile][s][e] = own[s * COLUMNS + e];
        for (int e = 0; e < 4; ++e) h[tile][e] = c[tile][e] = 0.0f;
    }
    for (int i = threadIdx.x; i < 2 * ROWS * LD * (int)sizeof(X) / 4; i += THREADS) reinterpret_cast<unsigned*>(memory)[i] = 0u;
    __syncthreads();
    wait_for_dependencies();
    const int rows = state[TRUE_ROWS];
    if (first >= rows) return;
    X next[TAKEN];
    auto time_of = [&](int step) { return direction ? steps - 1 - step : step; };
    auto take = [&](int t) {
#pragma unroll
        for (int i = 0; i < TAKEN; ++i) {
            const int at = threadIdx.x + i * THREADS, row = first + at / INPUTS;
            if (at < ROWS * INPUTS && row < rows) next[i] = x[(long long)row * x_ld + (long long)t * INPUTS + at % INPUTS];
        }
    };
    auto keep = [&](int step) {
        X* to = shared + (step & 1) * (ROWS * LD) + H_STEPS * K_STEP;
#pragma unroll
        for (int i = 0; i < TAKEN; ++i) {
            const int at = threadIdx.x + i * THREADS;
            if (at < ROWS * INPUTS && first + at / INPUTS < rows) put(to + at / INPUTS * LD + at % INPUTS, load_value(next + i));
        }
    };
    float now[TILES][GATES][4], then[TILES][GATES][4];  // what the sums of this step and the next have of x
    auto multiply_x = [&](float (*sum)[GATES][4], int step) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int g = 0; g < GATES; ++g)
                for (int e = 0; e < 4; ++e) sum[tile][g][e] = bias[tile][g][e & 1];
        w.multiply_into(sum, shared + (step & 1) * (ROWS * LD) + H_STEPS * K_STEP);
    };
    for (int step = 0; step < 2 && step < steps; ++step) {
        take(time_of(step));
        keep(step);
    }
    __syncthreads();
    multiply_x(now, 0);
    __syncthreads();
    for (int step = 0; step < steps; ++step) {
        const int t = time_of(step);
        if (step + 2 < steps) take(time_of(step + 2));
        float a[2] = {1.0f, 1.0f};  // of rows `group` and `group` + 8
        if (GATE)
            for (int half = 0; half < 2; ++half) {
                const int row = first + group + 8 * half;
                if (row < rows) a[half] = load_value(scale + (long long)row * scale_ld + t);
            }
        float sum[TILES][GATES][4];  // of h
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int g = 0; g < GATES; ++g)
                for (int e = 0; e < 4; ++e) sum[tile][g][e] = g == GATES - 1 ? bias[tile][GATES][e & 1] : 0.0f;
        u.multiply_into(sum, shared + (step & 1) * (ROWS * LD));
        if (step + 1 < steps) multiply_x(then, step + 1);
        X* const new_h = shared + (1 - (step & 1)) * (ROWS * LD);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = group + 8 * (e >> 1), unit = (warp * TILES + tile) * 8 + 2 * member + (e & 1);
                float of[GATES];
#pragma unroll
                for (int g = 0; g < GATES; ++g) of[g] = now[tile][g][e] + sum[tile][g][e];
                if constexpr (LSTM) {
                    const float left = sigmoid_of(of[1]) * c[tile][e];
                    c[tile][e] = left + sigmoid_of(of[0]) * tanh_of(of[2]);
                    h[tile][e] = sigmoid_of(of[GATES - 1]) * tanh_of(c[tile][e]);
                } else {
                    const float n = tanh_of(now[tile][GATES - 1][e] + sigmoid_of(of[0]) * sum[tile][GATES - 1][e]);
                    float update = a[e >> 1];
                    if (GATE != 2) update *= sigmoid_of(-of[1]);
                    h[tile][e] += update * (n - h[tile][e]);
                }
                if (unit < HIDDEN) {
                    put(new_h + row * LD + unit, h[tile][e]);
                    const long long at = (long long)(first + row) * out_ld + (t * DIRECTIONS + direction) * HIDDEN + unit;
                    if (first + row < rows) store_value(out + at, h[tile][e]);
                }
#pragma unroll
                for (int g = 0; g < GATES; ++g) now[tile][g][e] = then[tile][g][e];
            }
        if (step + 2 < steps) keep(step + 2);
        __syncthreads();
    }
    if (LAST_CELL)
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = first + group + 8 * (e >> 1), unit = (warp * TILES + tile) * 8 + 2 * member + (e & 1);
                const long long at = (long long)row * out_ld + (steps * DIRECTIONS + direction) * HIDDEN + unit;
                if (unit < HIDDEN && row < rows) store_value(out + at, c[tile][e]);
            }
}
