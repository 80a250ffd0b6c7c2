// The layers of a weight's MLP, from factors in registers to a share of the scores. The including file defines the sizes.
#pragma once
#include "attention/key_words.cuh"
#include "dense/activation.cuh"

// What layer I makes of the sums of N tiles from tile `first` on; if it is the last, its share of the scores.
template <int I, int N>
__device__ __forceinline__ void conclude(float (*sums)[N][4], int first, const float* weights, float (*scores)[2]) {
    const float* shapes = weights + units_start(I) + 8 * tiles(I);
#pragma unroll
    for (int n = 0; n < N; ++n)
        for (int c = 0; c < 2; ++c) {
            const int u = 8 * (first + n) + 2 * own_lane().member + c;
            const Shape shape = shape_of<ACTIVATION>(shapes, 8 * tiles(I), u);
            const float out = I == LAYERS - 1 ? weights[OUT_START + u] : 0.0f;
            for (int m = 0; m < KEY_TILES; ++m)
                for (int h = 0; h < 2; ++h) {
                    float& v = sums[m][n][2 * h + c];
                    v = approximate<ACTIVATION>(v, shape);
                    if (I == LAYERS - 1) scores[m][h] += out * v;
                }
        }
}
__device__ __forceinline__ void begin(float sums[4], const float* bias) {  // of a tile's units
    const float2 v = *reinterpret_cast<const float2*>(bias + 2 * own_lane().member);
    sums[0] = sums[2] = v.x, sums[1] = sums[3] = v.y;
}

// Layers I and I + 1, and those behind them, of KEY_TILES * 16 keys. a: the left factors of layer I. The units of I come 16 at a
// time and go into the sums of I + 1 at once. Layer 0 starts from c, and its weights depend on the query's words q.
template <int I>
__device__ __forceinline__ void layers(
    const unsigned (*a)[steps(I)][4], const uint2* q, const float* c, const float* weights, float (*scores)[2]) {
    constexpr bool LAST = I == LAYERS - 1;
    constexpr int NEXT = LAST ? 1 : tiles(LAST ? I : I + 1), PAIRS = tiles(I) / 2;
    const int lane = threadIdx.x & 31;
    const uint4* factors = reinterpret_cast<const uint4*>(weights + factor_start(I)) + lane;
    const uint2* behind = reinterpret_cast<const uint2*>(weights + factor_start(I + 1)) + lane;
    float next[KEY_TILES][NEXT][4];
    if constexpr (!LAST) {
#pragma unroll
        for (int n = 0; n < NEXT; ++n)
            for (int m = 0; m < KEY_TILES; ++m) begin(next[m][n], weights + units_start(I + 1) + 8 * n);
    }
#pragma unroll 1
    for (int pair = 0; pair < PAIRS; ++pair) {
        float sums[KEY_TILES][2][4];
        const float* bias = I == 0 ? c : weights + units_start(I);
#pragma unroll
        for (int n = 0; n < 2; ++n)
            for (int m = 0; m < KEY_TILES; ++m) begin(sums[m][n], bias + 16 * pair + 8 * n);
#pragma unroll
        for (int s = 0; s < steps(I); ++s) {
            unsigned b[2][2];
            if constexpr (I == 0) {
                const uint4* at = factors + (s * PAIRS + pair) * 64;
                const uint4 key = at[0], product = at[32];
                const uint2 asked = q[s * 4];
                b[0][0] = formed(key.x, product.x, asked.x, (const X*)nullptr);
                b[0][1] = formed(key.y, product.y, asked.y, (const X*)nullptr);
                b[1][0] = formed(key.z, product.z, asked.x, (const X*)nullptr);
                b[1][1] = formed(key.w, product.w, asked.y, (const X*)nullptr);
            } else {
                const uint4 both = factors[(s * PAIRS + pair) * 32];
                b[0][0] = both.x, b[0][1] = both.y, b[1][0] = both.z, b[1][1] = both.w;
            }
            for (int n = 0; n < 2; ++n)
                for (int m = 0; m < KEY_TILES; ++m) multiply(sums[m][n], a[m][s], b[n], (const X*)nullptr);
        }
        conclude<I, 2>(sums, 2 * pair, weights, scores);
        if constexpr (!LAST) {
            unsigned h[KEY_TILES][2 / EACH][4];
            for (int m = 0; m < KEY_TILES; ++m) as_factor(h[m], sums[m], (const X*)nullptr);
#pragma unroll
            for (int s = 0; s < 2 / EACH; ++s) {
                const uint2* step = behind + (pair * (2 / EACH) + s) * NEXT * 32;
#pragma unroll
                for (int n = 0; n < NEXT; n += 2) {  // two tiles lie side by side, but for an odd last one
                    unsigned b[4];
                    if (n + 1 < NEXT) {
                        const uint4 both = *(reinterpret_cast<const uint4*>(step - lane + n * 32) + lane);
                        b[0] = both.x, b[1] = both.y, b[2] = both.z, b[3] = both.w;
                    } else {
                        const uint2 one = step[n * 32];
                        b[0] = one.x, b[1] = one.y;
                    }
                    for (int m = 0; m < KEY_TILES; ++m) multiply(next[m][n], h[m][s], b, (const X*)nullptr);
                    if (n + 1 < NEXT)
                        for (int m = 0; m < KEY_TILES; ++m) multiply(next[m][n + 1], h[m][s], b + 2, (const X*)nullptr);
                }
            }
        }
    }
    if constexpr (!LAST) {
        conclude<I + 1, NEXT>(next, 0, weights, scores);
        if constexpr (I + 2 < LAYERS) {
            unsigned h[KEY_TILES][NEXT / EACH][4];
#pragma unroll
            for (int n = 0; n < NEXT; n += 2)
                for (int m = 0; m < KEY_TILES; ++m) as_factor(h[m] + n / EACH, next[m] + n, (const X*)nullptr);
            layers<I + 2>(h, q, c, weights, scores);
        }
    }
}
