// One layer of xDeepFM's compressed interaction network: for row b and column d of the embeddings
//   y[n] = activation(sum_i sum_j W[n, i M + j] xk[b, i, d] x0[b, j, d] + bias[n]),  i < maps before, j < M fields,
// next[b, n, d] = y[n] for n < `next_maps`, and pooled[b, n - direct] = sum_d y[n] for n >= direct.
//
// It is a product of [rows * DIM, maps * M] and W^T on the tensor cores, whose left factor is never stored: a thread keeps
// x0[b, j, d] of the rows and columns that PTX gives it in registers, and a step's factors are those times one xk[b, i, d].
// Weights come packed in the order of the lanes (cin.py), so that a warp reads 512 consecutive bytes, from L1 where other warps
// are at the same i. A block has WM x WK warps: WM take 32 (b, d) each, all of whole rows b, and WK split the i among them,
// which are added up in shared memory. Its columns are NF tiles of 8 maps.
// tf32 factors are rounded; with PASSES 3 each is split in two halves, and sums stay short, as the tensor cores cut them off.
#include "dense/mma.cuh"
#include "dense/activation.cuh"

#ifndef X
#define X float
#define FIRST 1      // xk is x0 too, of type X; else maps of the layer before, float32
#define M 7
#define DIM 4
#define NF 2         // even
#define WM 4
#define WK 2
#define PASSES 3
#define ACTIVATION 1
#endif
#define STEPS ((M + 7) / 8)
#define WARPS (WM * WK)
#define THREADS (32 * WARPS)
#define ROWS (32 * WM / DIM)       // whole rows of a block
#define MAPS (8 * NF)              // of a block
#define PITCH (MAPS + 1)
#if FIRST
#define XK X
#else
#define XK float
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) cin_layer(
    const int* state, const X* x0, int x0_ld, const XK* xk, int xk_ld, int maps, const float4* __restrict__ weights,
    const float* __restrict__ bias, int units, float* __restrict__ next, int next_ld, int next_maps, X* __restrict__ pooled,
    int pooled_ld, int direct, const float* __restrict__ params) {
    extern __shared__ __align__(16) float sums[];  // [WK][WM * 32][PITCH]
    let_dependents_start();
    wait_for_dependencies();
    const int first = blockIdx.x * ROWS, rows = min(ROWS, state[TRUE_ROWS] - first);
    if (rows <= 0) return;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, wm = warp % WM, wk = warp / WM;
    const int group = lane >> 2, member = lane & 3;

    // The thread's 4 places (b, d) and its columns j of x0; what does not exist is 0 and adds nothing.
    float own[4][STEPS][2];
    const XK* of[4];
    bool there[4];
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        const int place = wm * 32 + (p >> 1) * 16 + (p & 1) * 8 + group, b = place / DIM, d = place % DIM;
        there[p] = b < rows;
        const long long row = first + (there[p] ? b : 0);
        of[p] = xk + row * xk_ld + d;
#pragma unroll
        for (int s = 0; s < STEPS; ++s)
            for (int h = 0; h < 2; ++h) {
                const int j = 8 * s + 4 * h + member;
                own[p][s][h] = there[p] && j < M ? load_value(x0 + row * x0_ld + j * DIM + d) : 0.0f;
            }
    }
    float total[2][NF][4];
#pragma unroll
    for (int t = 0; t < 2; ++t)
        for (int f = 0; f < NF; ++f)
            for (int e = 0; e < 4; ++e) total[t][f][e] = 0.0f;

    const float4* w = weights + (long long)blockIdx.y * maps * STEPS * (NF / 2) * 32 + lane;
    for (int i = wk; i < maps; i += WK) {
        float at[4];
#pragma unroll
        for (int p = 0; p < 4; ++p) at[p] = there[p] ? load_value(of[p] + i * DIM) : 0.0f;
        float part[2][NF][4];
        if (PASSES == 3) {
#pragma unroll
            for (int t = 0; t < 2; ++t)
                for (int f = 0; f < NF; ++f)
                    for (int e = 0; e < 4; ++e) part[t][f][e] = 0.0f;
        }
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            unsigned a[2][4], a_rest[2][4];
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                for (int e = 0; e < 4; ++e)  // PTX's order: rows group, group + 8 of columns member, then of member + 4
                    a[t][e] = __float_as_uint(at[2 * t + (e & 1)] * own[2 * t + (e & 1)][s][e >> 1]);
                split<4>(a[t], a_rest[t]);
            }
#pragma unroll
            for (int f = 0; f < NF; f += 2) {
                const float4 both = w[((long long)i * STEPS + s) * (NF / 2) * 32 + f / 2 * 32];
                unsigned b[4] = {__float_as_uint(both.x), __float_as_uint(both.y), __float_as_uint(both.z), __float_as_uint(both.w)};
                unsigned b_rest[4];
                split<4>(b, b_rest);
#pragma unroll
                for (int t = 0; t < 2; ++t)
                    for (int g = 0; g < 2; ++g) {
                        float* c = PASSES == 3 ? part[t][f + g] : total[t][f + g];
                        if (PASSES == 3) {
                            multiply(c, a_rest[t], b + 2 * g, (const float*)nullptr);
                            multiply(c, a[t], b_rest + 2 * g, (const float*)nullptr);
                        }
                        multiply(c, a[t], b + 2 * g, (const float*)nullptr);
                    }
            }
        }
        if (PASSES == 3) {
#pragma unroll
            for (int t = 0; t < 2; ++t)
                for (int f = 0; f < NF; ++f)
                    for (int e = 0; e < 4; ++e) total[t][f][e] += part[t][f][e];
        }
    }
#pragma unroll
    for (int t = 0; t < 2; ++t)
        for (int f = 0; f < NF; ++f)
            for (int e = 0; e < 4; ++e) {
                const int place = wm * 32 + t * 16 + (e >> 1) * 8 + group, map = f * 8 + member * 2 + (e & 1);
                sums[(wk * WM * 32 + place) * PITCH + map] = total[t][f][e];
            }
    __syncthreads();
    const int map0 = blockIdx.y * MAPS, here = min(MAPS, units - map0), places = rows * DIM;
    for (int k = threadIdx.x; k < here * WM * 32; k += THREADS) {  // neighbours are places: that is how the maps lie
        const int place = k % (WM * 32), map = k / (WM * 32), n = map0 + map;
        if (place >= places) continue;
        float v = bias ? bias[n] : 0.0f;
#pragma unroll
        for (int q = 0; q < WK; ++q) v += sums[(q * WM * 32 + place) * PITCH + map];
        v = activate<ACTIVATION>(v, Shape{params[0], 0.0f, 0.0f});
        sums[place * PITCH + map] = v;
        if (n < next_maps) next[(long long)(first + place / DIM) * next_ld + n * DIM + place % DIM] = v;
    }
    __syncthreads();
    for (int k = threadIdx.x; k < here * rows; k += THREADS) {
        const int map = k % here, b = k / here, n = map0 + map;
        if (n < direct) continue;
        float sum = 0.0f;
        for (int d = 0; d < DIM; ++d) sum += sums[(b * DIM + d) * PITCH + map];
        store_value(pooled + (long long)(first + b) * pooled_ld + n - direct, sum);
    }
}
