// DIN's target attention: pooled[b] = sum_l w_l k_l, w_l = MLP([q, k_l, q - k_l, q * k_l]), and the columns of x that pass by.
//
// The first layer is linear in k once the query is known: (W_q + W_d) q + b + (W_k - W_d + W_p diag(q)) k. A block has one row:
// it forms that vector and that matrix in shared memory once, so that a key costs DIM products a unit, not 4 DIM, and nothing of
// 4 DIM columns is made. A warp takes POSITIONS keys at a time through all layers; its lanes are the units. Keys that the mask
// leaves out are skipped. Sums are float32. Where the row's matrix does not fit (FORMED 0), its terms are read from the cache.
// Bytes: B * (x columns + out columns) * sizeof(X), and the weights from L2, a block each.
#include "runtime/common.cuh"
#include "dense/activation.cuh"

#ifndef X
#define X float
#define LENGTH 5
#define DIMS 4, 2            // of the parts of a key
#define QUERIES 0, 4         // the first column of each part of the query
#define KEYS 6, 26           // of each part's LENGTH * dim columns
#define POOLED 0, 4          // and of its interest in out
#define PARTS 2
#define DIM 6
#define MASK 36              // the first column of the mask; -1: none
#define KEPT {0, 6, 6}       // x column, out column, count
#define UNITS 8, 3
#define LAYERS 2
#define ACTIVATION 7
#define OUTPUT 0             // the activation of a weight
#define SOFTMAX 1
#define FORMED 1
#endif
#define WARPS 4
#define THREADS (32 * WARPS)
#define POSITIONS 4
#define COLUMNS ((DIM + 3) / 4 * 4)

__device__ constexpr int dims[] = {DIMS}, queries[] = {QUERIES}, keys[] = {KEYS}, pooled[] = {POOLED}, units[] = {UNITS};
__device__ constexpr int kept[][3] = {KEPT};

__host__ __device__ constexpr int widest() {
    int most = 0;
    for (int i = 0; i < LAYERS; ++i) most = most < units[i] ? units[i] : most;
    return most;
}
constexpr int WIDEST = (widest() + 3) / 4 * 4;
// The parameters of all layers after one another: for the first c[u][DIM] and key[u][COLUMNS], product[u][COLUMNS], then
// weight[u][before] of each other; behind it each layer's bias[u] and activation [3][u]; at the end out[last] and its bias.
__host__ __device__ constexpr int layer_size(int i) {
    return (i == 0 ? units[0] * (DIM + 2 * COLUMNS) : units[i] * units[i - 1]) + 4 * units[i];
}
__host__ __device__ constexpr int layer_start(int i) { return i == 0 ? 0 : layer_start(i - 1) + layer_size(i - 1); }

// Column e of key l in x, and of the query.
__device__ __forceinline__ int key_column(int l, int e) {
    int start = 0;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        if (e < start + dims[p]) return keys[p] + l * dims[p] + e - start;
        start += dims[p];
    }
    return 0;
}
template <int N>
__device__ __forceinline__ int part_column(const int (&first)[N], int e) {
    int start = 0;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        if (e < start + dims[p]) return first[p] + e - start;
        start += dims[p];
    }
    return 0;
}

// out[p][u] = activation(bias[u] + sum_m weight(u, m) in[p][m]) of layer I for POSITIONS keys, a warp.
template <int I, int BEFORE, typename Weight>
__device__ __forceinline__ void layer(const float* in, int in_pitch, float* out, const float* bias, const float* shapes, Weight weight) {
    constexpr int U = units[I];
    for (int u = threadIdx.x & 31; u < U; u += 32) {
        float sum[POSITIONS];
        for (int p = 0; p < POSITIONS; ++p) sum[p] = bias[u];
#pragma unroll 4
        for (int m = 0; m < BEFORE; ++m) {
            const float w = weight(u, m);
            for (int p = 0; p < POSITIONS; ++p) sum[p] += w * in[p * in_pitch + m];
        }
        const Shape s = shape_of<ACTIVATION>(shapes, U, u);
        for (int p = 0; p < POSITIONS; ++p) out[p * WIDEST + u] = activate<ACTIVATION>(sum[p], s);
    }
    __syncwarp();
}

// The layers after the first, from one buffer to the other. Returns the buffer that holds the last one's values.
template <int I>
__device__ __forceinline__ float* others(float* in, float* out, const float* __restrict__ weights) {
    if constexpr (I < LAYERS) {
        constexpr int U = units[I], BEFORE = units[I - 1];
        const float* w = weights + layer_start(I);
        layer<I, BEFORE>(in, WIDEST, out, w + U * BEFORE, w + U * BEFORE + U, [&](int u, int m) { return w[m * U + u]; });
        return others<I + 1>(out, in, weights);
    }
    return in;
}

extern "C" __global__ void __launch_bounds__(THREADS) attention(
    const int* state, const X* x, int x_ld, const int* context_rows, const float* __restrict__ weights, X* __restrict__ out,
    int out_ld) {
    extern __shared__ __align__(16) char shared[];
    float* scores = reinterpret_cast<float*>(shared);            // [LENGTH]
    float* query = scores + (LENGTH + 3) / 4 * 4;                // [COLUMNS]
    float* constant = query + COLUMNS;                           // [units[0]]
    float* buffers = constant + (units[0] + 3) / 4 * 4;          // [WARPS][POSITIONS][COLUMNS + 2 * WIDEST]
    float* partial = buffers;                                    // [THREADS] or [DIM], when the layers are done
    constexpr int EACH = POSITIONS * (COLUMNS + 2 * WIDEST);
    float* matrix = buffers + (WARPS * EACH > THREADS + DIM ? WARPS * EACH : THREADS + DIM);  // [COLUMNS][units[0] + 1] if FORMED
    __shared__ float reduced[2];
    let_dependents_start();
    wait_for_dependencies();
    if ((int)blockIdx.x >= state[TRUE_ROWS]) return;
    const X* history = x + (long long)(context_rows ? context_rows[blockIdx.x] : blockIdx.x) * x_ld;  // where keys and mask are
    x += (long long)blockIdx.x * x_ld;
    out += (long long)blockIdx.x * out_ld;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

    for (int s = 0; s < (int)(sizeof(kept) / sizeof(kept[0])); ++s)
        for (int i = threadIdx.x; i < kept[s][2]; i += THREADS) out[kept[s][1] + i] = x[kept[s][0] + i];
    for (int e = threadIdx.x; e < COLUMNS; e += THREADS) query[e] = e < DIM ? load_value(x + part_column(queries, e)) : 0.0f;
    __syncthreads();
    constexpr int U = units[0], PITCH = U + 1;
    const float* of_key = weights + U * DIM;
    const float* of_product = of_key + U * COLUMNS;
    const float* first_bias = of_product + U * COLUMNS;
    for (int u = threadIdx.x; u < U; u += THREADS) {  // weights lie column by column, so that lanes read neighbours
        float sum = first_bias[u];
        for (int e = 0; e < DIM; ++e) sum += weights[e * U + u] * query[e];
        constant[u] = sum;
    }
    if (FORMED)
        for (int i = threadIdx.x; i < U * COLUMNS; i += THREADS)
            matrix[i / U * PITCH + i % U] = of_key[i] + of_product[i] * query[i / U];
    __syncthreads();

    const float* last = weights + layer_start(LAYERS);
    float* own = buffers + warp * EACH;
    for (int l0 = warp * POSITIONS; l0 < LENGTH; l0 += WARPS * POSITIONS) {
        bool any = MASK < 0;
        if (MASK >= 0)
            for (int p = 0; p < POSITIONS; ++p) any |= l0 + p < LENGTH && load_value(history + MASK + l0 + p) != 0.0f;
        if (!any) {  // the whole warp
            if (lane < POSITIONS && l0 + lane < LENGTH) scores[l0 + lane] = 0.0f;
            continue;
        }
        for (int i = lane; i < POSITIONS * COLUMNS; i += 32) {
            const int p = i / COLUMNS, e = i % COLUMNS;
            own[i] = l0 + p < LENGTH && e < DIM ? load_value(history + key_column(l0 + p, e)) : 0.0f;
        }
        __syncwarp();
        float* h = own + POSITIONS * COLUMNS;
        layer<0, COLUMNS>(own, COLUMNS, h, constant, first_bias + U, [&](int u, int e) {
            return FORMED ? matrix[e * PITCH + u] : of_key[e * U + u] + of_product[e * U + u] * query[e];
        });
        h = others<1>(h, h + POSITIONS * WIDEST, weights);
        for (int p = 0; p < POSITIONS && l0 + p < LENGTH; ++p) {
            float sum = 0.0f;
            for (int u = lane; u < units[LAYERS - 1]; u += 32) sum += last[u] * h[p * WIDEST + u];
            sum = warp_sum(sum);
            if (lane == 0) {
                const float mask = MASK < 0 ? 1.0f : load_value(history + MASK + l0 + p);
                scores[l0 + p] = activate<OUTPUT>(sum + last[units[LAYERS - 1]], Shape{}) * mask;
            }
        }
        __syncwarp();
    }
    __syncthreads();

    float scale = 1.0f;
    if (SOFTMAX) {
        float most = -3.0e38f, sum = 0.0f;
        for (int l = threadIdx.x; l < LENGTH; l += THREADS) {
            if (MASK >= 0 && load_value(history + MASK + l) == 0.0f) scores[l] = -1.0e9f;
            most = fmaxf(most, scores[l]);
        }
        for (int step = 16; step > 0; step >>= 1) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
        if (lane == 0) partial[warp] = most;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int w = 1; w < WARPS; ++w) most = fmaxf(most, partial[w]);
            reduced[0] = most;
        }
        __syncthreads();
        for (int l = threadIdx.x; l < LENGTH; l += THREADS) sum += scores[l] = expf(scores[l] - reduced[0]);
        sum = warp_sum(sum);
        if (lane == 0) partial[warp] = sum;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int w = 1; w < WARPS; ++w) sum += partial[w];
            reduced[1] = sum;
        }
        __syncthreads();
        scale = 1.0f / reduced[1];
    }

    // Threads are columns of the keys; where those are few, several share one and are added up in order.
    constexpr int SHARE = DIM < THREADS ? THREADS / DIM : 1;
    for (int e0 = 0; e0 < DIM; e0 += THREADS) {
        const int e = e0 + (int)threadIdx.x % (DIM < THREADS ? DIM : THREADS), turn = SHARE > 1 ? (int)threadIdx.x / DIM : 0;
        float sum = 0.0f;
        if (e < DIM && turn < SHARE)
            for (int l = turn; l < LENGTH; l += SHARE)
                if (scores[l] != 0.0f) sum += scores[l] * load_value(history + key_column(l, e));
        if (SHARE > 1) {
            partial[threadIdx.x] = sum;
            __syncthreads();
            for (int t = 1; t < SHARE && turn == 0; ++t) sum += partial[t * DIM + e];
        }
        if (e < DIM && turn == 0) store_value(out + part_column(pooled, e), sum * scale);
    }
}
