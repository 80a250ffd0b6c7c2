// DIN's target attention on the tensor cores: what attention.cu computes, with factors of tf32 or bf16 and float32 sums.
//
// Once a row's query is known the first layer is linear in a key: c + M k, c = (W_q + W_d) q + b, M = (W_k - W_d) + W_p diag(q).
// Grid: each block takes an equal share of consecutive rows, at most ROWS at a time. All weights lie in its shared memory,
// packed in the order of the lanes (attention_weights.py), and are on their way before it waits for the kernel ahead.
//   1. c of all ROWS rows is one product of 16 rows of queries; meanwhile other warps copy the columns that pass by, and read
//      which keys there are.
//   2. A warp takes KEY_TILES tiles of 16 keys of one row. It reads the keys from global memory into registers in the very order
//      of a left factor, which is that of the pooled sum too: keys go through no shared memory. M is formed fragment by fragment
//      from two loads, which halves the products of [k, q * k]. 16 units of a layer at a time become the left factor of the layer
//      behind it, again in registers: of m16n8's sums each lane has two neighbouring columns, which is what bf16 asks for; for
//      tf32 the units are renumbered, in the weights. Groups of tiles without keys are not computed.
//   3. The groups of a row are added up in order.
// Activations inside use the approximation of tanh, off by 2^-11 (activation.cuh): less than what rounding h to the factors'
// digits loses.
// Bytes: B * (x columns + out columns) * sizeof(X), and the weights once a block.
#include "dense/activation.cuh"
#include "dense/mma.cuh"

#ifndef X
#define X float
#define LENGTH 21
#define DIMS 16, 5           // of the parts of a key
#define QUERIES 0, 16        // the first column of each part of the query
#define KEYS 24, 360         // of each part's LENGTH * dim columns
#define POOLED 0, 16         // and of its interest in out
#define PARTS 2
#define DIM 21
#define ALIGNED 1, 0         // whether a part's rows begin at 16 bytes and fill whole steps
#define MASK 465             // the first column of the mask, of 1 and 0; -1: none
#define KEPT {0, 21, 21}     // x column, out column, count
#define UNITS 24, 9
#define LAYERS 2
#define ACTIVATION 2
#define OUTPUT 0             // the activation of a weight
#define SOFTMAX 0
#define KEY_TILES 2
#define WARPS 8
#define BLOCKS 1             // of a multiprocessor, that registers must allow
#define ROWS 16              // of a pass: at most 16
#endif
#define THREADS (32 * WARPS)
#define EACH (4 / (int)sizeof(X))  // columns in a word of 4 bytes
#define GROUPS ((LENGTH + 16 * KEY_TILES - 1) / (16 * KEY_TILES))
#define MASK_WORDS ((GROUPS * KEY_TILES + 1) / 2)  // of 32 keys

__device__ constexpr int dims[] = {DIMS}, queries[] = {QUERIES}, keys[] = {KEYS}, pooled[] = {POOLED}, units[] = {UNITS};
__device__ constexpr int aligned[] = {ALIGNED}, kept[][3] = {KEPT};

// Steps along K, of 8 words, and tiles of 8 units. Layers whose units come 16 at a time, and those that are a left factor, have
// an even number of tiles.
__host__ __device__ constexpr int part_steps(int p) { return (dims[p] + 8 * EACH - 1) / (8 * EACH); }
__host__ __device__ constexpr int steps_before(int p) { return p == 0 ? 0 : steps_before(p - 1) + part_steps(p - 1); }
__host__ __device__ constexpr int tiles(int i) {
    return i % 2 == 0 || i + 1 < LAYERS ? (units[i] + 15) / 16 * 2 : (units[i] + 7) / 8;
}
constexpr int STEPS = steps_before(PARTS), WORDS = 2 * STEPS, COLUMNS = 4 * WORDS * EACH;
__host__ __device__ constexpr int steps(int i) { return i == 0 ? STEPS : tiles(i - 1) / EACH; }

// Words of the packed weights: factors of the query, of key and query * key side by side, then of the other layers; behind them
// each layer's bias and shapes[3]; at the end out and its bias.
__host__ __device__ constexpr int factor_start(int i) {
    return i == 0 ? 64 * STEPS * tiles(0) : factor_start(i - 1) + 64 * (i == 1 ? 2 : 1) * steps(i - 1) * tiles(i - 1);
}
__host__ __device__ constexpr int units_start(int i) {
    return i == 0 ? factor_start(LAYERS) : units_start(i - 1) + 4 * 8 * tiles(i - 1);
}
constexpr int OUT_START = units_start(LAYERS), WEIGHT_WORDS = OUT_START + 8 * tiles(LAYERS - 1) + 4;
constexpr int C_PITCH = 8 * tiles(0) + 8, Q_PITCH = 4 * STEPS, PARTIAL = COLUMNS + 2;  // behind a group's sums: its largest score, the sum of weights

#include "attention/key_words.cuh"
#include "attention/hidden_layers.cuh"

// Sums v[N] over the 8 lanes of equal member. Where N is even, a lane goes on with half of them: the first that it ends up with.
template <int N, int STEP = 16>
__device__ __forceinline__ int sum_over_groups(float* v) {
    if constexpr (STEP >= 4) {
        const bool upper = threadIdx.x & STEP;
#pragma unroll
        for (int i = 0; i < (N % 2 ? N : N / 2); ++i) {
            const float mine = N % 2 || !upper ? v[i] : v[i + N / 2], others = N % 2 || upper ? v[i] : v[i + N / 2];
            v[i] = mine + __shfl_xor_sync(0xffffffffu, others, STEP);
        }
        return (N % 2 == 0 && upper ? N / 2 : 0) + sum_over_groups<(N % 2 ? N : N / 2), STEP / 2>(v);
    }
    return 0;
}
__host__ __device__ constexpr int left_of(int n, int step = 16) { return step < 4 ? n : left_of(n % 2 ? n : n / 2, step / 2); }

// The thread's words of a group of keys from key l0 on, of those that there are.
__device__ __forceinline__ void load_keys(unsigned (*w)[2][WORDS], const X* x, int l0, const unsigned (&there)[KEY_TILES]) {
    const int group = own_lane().group;
#pragma unroll
    for (int m = 0; m < KEY_TILES; ++m)
        for (int h = 0; h < 2; ++h) {
            const auto at = [&](int p) { return x + (keys[p] + (l0 + group) * dims[p]) + (16 * m + 8 * h) * dims[p]; };
            load_words(w[m][h], at, there[m] >> (8 * h + group) & 1);
        }
}

// One group of keys of a row: its weighted sum, and with SOFTMAX its largest score and the sum of its weights. as_is: 0x3210,
// which the compiler must not know: a left factor lies in four neighbouring registers, of which a load fills two, and where it
// saw only copies it made them anew for every 16 units (137 of 325 instructions).
__device__ __forceinline__ void weigh(
    const unsigned (*w)[2][WORDS], const unsigned (&there)[KEY_TILES], const uint2* q, const float* c, const float* weights,
    unsigned as_is, float* partial) {
    const Lane lane = own_lane();
    unsigned k[KEY_TILES][STEPS][4];
#pragma unroll
    for (int m = 0; m < KEY_TILES; ++m)
        for (int h = 0; h < 2; ++h)
            for (int i = 0; i < WORDS; ++i) k[m][i / 2][h + i % 2 * 2] = __byte_perm(w[m][h][i], 0u, as_is);
    float scores[KEY_TILES][2] = {};
    layers<0>(k, q + lane.member, c, weights, scores);

    float most = -3.0e38f, sum = 0.0f;
#pragma unroll
    for (int m = 0; m < KEY_TILES; ++m)
        for (int h = 0; h < 2; ++h) {
            float& score = scores[m][h];
            score += __shfl_xor_sync(0xffffffffu, score, 1);
            score += __shfl_xor_sync(0xffffffffu, score, 2);
            score = activate<OUTPUT>(score + weights[OUT_START + 8 * tiles(LAYERS - 1)], Shape{});
            if (there[m] >> (8 * h + lane.group) & 1) most = fmaxf(most, score);
            else score = SOFTMAX ? -3.4e38f : 0.0f;
        }
    if (SOFTMAX) {
        for (int step = 16; step >= 4; step >>= 1) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
#pragma unroll
        for (int m = 0; m < KEY_TILES; ++m)
            for (int h = 0; h < 2; ++h) sum += scores[m][h] = expf(scores[m][h] - most);
        for (int step = 16; step >= 4; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if ((threadIdx.x & 31) == 0) partial[COLUMNS] = most, partial[COLUMNS + 1] = sum;
    }
    float v[WORDS * EACH];
#pragma unroll
    for (int i = 0; i < WORDS * EACH; ++i) {
        v[i] = 0.0f;
        for (int m = 0; m < KEY_TILES; ++m)
            for (int h = 0; h < 2; ++h) {
                const unsigned word = k[m][i / EACH / 2][h + i / EACH % 2 * 2];
                v[i] += scores[m][h] * __uint_as_float(EACH == 1 ? word : i % 2 ? word & 0xffff0000u : word << 16);
            }
    }
    const int first = sum_over_groups<WORDS * EACH>(v);
#pragma unroll
    for (int i = 0; i < left_of(WORDS * EACH); ++i) partial[(first + i) * 4 + lane.member] = v[i];
}

// c of 16 units for the rows of a pass, and with the first of them the queries' words.
__device__ __forceinline__ void multiply_queries(
    const X* x, int x_ld, int n, int pair, const float* weights, float* c, uint2* asked) {
    const Lane lane = own_lane();
    unsigned a[STEPS][4];
    for (int h = 0; h < 2; ++h) {
        const int r = 8 * h + lane.group;
        unsigned w[WORDS];
        load_words(w, [&](int p) { return x + (long long)r * x_ld + queries[p]; }, r < n);
#pragma unroll
        for (int i = 0; i < WORDS; ++i) a[i / 2][h + i % 2 * 2] = w[i];
        if (pair == 0 && r < ROWS)
#pragma unroll
            for (int s = 0; s < STEPS; ++s) asked[r * Q_PITCH + s * 4 + lane.member] = make_uint2(w[2 * s], w[2 * s + 1]);
    }
    float sums[2][4];
    for (int t = 0; t < 2; ++t) begin(sums[t], weights + units_start(0) + 16 * pair + 8 * t);
    const uint4* factors = reinterpret_cast<const uint4*>(weights) + pair * 32 + (threadIdx.x & 31);
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const uint4 both = factors[s * (tiles(0) / 2) * 32];
        const unsigned b[4] = {both.x, both.y, both.z, both.w};
        for (int t = 0; t < 2; ++t) multiply(sums[t], a[s], b + 2 * t, (const X*)nullptr);
    }
    for (int t = 0; t < 2; ++t)
        for (int h = 0; h < 2; ++h)
            *reinterpret_cast<float2*>(c + (8 * h + lane.group) * C_PITCH + 16 * pair + 8 * t + 2 * lane.member) =
                make_float2(sums[t][2 * h], sums[t][2 * h + 1]);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attention_mma(
    const int* state, const X* x, int x_ld, const int* context_rows, const uint4* __restrict__ packed, X* __restrict__ out,
    int out_ld) {
    extern __shared__ __align__(16) char shared[];
    float* weights = reinterpret_cast<float*>(shared);                       // [WEIGHT_WORDS]
    float* c = weights + WEIGHT_WORDS;                                       // [16][C_PITCH]
    uint2* asked = reinterpret_cast<uint2*>(c + 16 * C_PITCH);               // [ROWS][Q_PITCH]
    float* partial = reinterpret_cast<float*>(asked + ROWS * Q_PITCH);       // [ROWS * GROUPS][PARTIAL]
    unsigned* present = reinterpret_cast<unsigned*>(partial + ROWS * GROUPS * PARTIAL);  // [ROWS][MASK_WORDS]
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    let_dependents_start();
    const unsigned to = (unsigned)__cvta_generic_to_shared(shared);
    for (int i = threadIdx.x; i < WEIGHT_WORDS / 4; i += THREADS) copy16(to + 16 * i, packed + i);
    wait_for_dependencies();
    const int rows = state[TRUE_ROWS], share = (rows + (int)gridDim.x - 1) / (int)gridDim.x;
    const unsigned as_is = 0x3210u | (unsigned)rows >> 31;
    const int end = min(rows, ((int)blockIdx.x + 1) * share);
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();

    for (int first = blockIdx.x * share; first < end; first += ROWS) {
        const int n = min(ROWS, end - first);
        const X* own = x + (long long)first * x_ld;
        X* own_out = out + (long long)first * out_ld;
        const auto history = [&](int r) { return x + (long long)(context_rows ? context_rows[first + r] : first + r) * x_ld; };
        unsigned words[KEY_TILES][2][WORDS], there[KEY_TILES];  // of the next group; of the first one on its way ahead of its mask
        for (int m = 0; m < KEY_TILES; ++m) {
            const int left = LENGTH - 16 * (warp % GROUPS * KEY_TILES + m);
            there[m] = warp >= n * GROUPS || left <= 0 ? 0u : left < 16 ? 0xffffu >> (16 - left) : 0xffffu;
        }
        load_keys(words, history(min(warp / GROUPS, n - 1)), 16 * (warp % GROUPS * KEY_TILES), there);
        constexpr int PAIRS = tiles(0) / 2;
        for (int task = warp; task < PAIRS + n * (MASK_WORDS + 1); task += WARPS) {
            if (task < PAIRS) {
                multiply_queries(own, x_ld, n, task, weights, c, asked);
            } else if (task < PAIRS + n * MASK_WORDS) {
                const int r = (task - PAIRS) / MASK_WORDS, w = (task - PAIRS) % MASK_WORDS, l = 32 * w + lane;
                const bool is = l < LENGTH && (MASK < 0 || load_value(history(r) + MASK + l) != 0.0f);
                const unsigned all = __ballot_sync(0xffffffffu, is);
                if (lane == 0) present[r * MASK_WORDS + w] = all;
            } else {
                const int r = task - PAIRS - n * MASK_WORDS;
                for (int s = 0; s < (int)(sizeof(kept) / sizeof(kept[0])); ++s)
                    for (int i = lane; i < kept[s][2]; i += 32)
                        own_out[(long long)r * out_ld + kept[s][1] + i] = own[(long long)r * x_ld + kept[s][0] + i];
            }
        }
        __syncthreads();
        const auto find = [&](int item) {
            const int r = item / GROUPS, tile = item % GROUPS * KEY_TILES;
            unsigned any = 0;
            for (int m = 0; m < KEY_TILES; ++m)
                any |= there[m] = present[r * MASK_WORDS + (tile + m) / 2] >> (tile + m) % 2 * 16 & 0xffffu;
            return any != 0;
        };
        for (int item = warp; item < n * GROUPS; item += WARPS) {
            const int r = item / GROUPS, next = item + WARPS;
            float* sums = partial + item * PARTIAL;
            if (find(item)) {
                weigh(words, there, asked + r * Q_PITCH, c + r * C_PITCH, weights, as_is, sums);
            } else {
                for (int i = lane; i < COLUMNS; i += 32) sums[i] = 0.0f;
                if (lane == 0) sums[COLUMNS] = -3.0e38f, sums[COLUMNS + 1] = 0.0f;
            }
            if (next >= n * GROUPS) break;
            find(next);
            load_keys(words, history(next / GROUPS), 16 * (next % GROUPS * KEY_TILES), there);
        }
        __syncthreads();
        for (int i = threadIdx.x; i < n * DIM; i += THREADS) {
            const int r = i / DIM, e = i % DIM;
            const float* sums = partial + r * GROUPS * PARTIAL;
            const int place = place_of(e);
            float v = 0.0f;
            if (SOFTMAX) {
                float most = -3.0e38f, total = 0.0f;
                for (int g = 0; g < GROUPS; ++g) most = fmaxf(most, sums[g * PARTIAL + COLUMNS]);
                for (int g = 0; g < GROUPS; ++g) {
                    const float scale = expf(sums[g * PARTIAL + COLUMNS] - most);
                    v += scale * sums[g * PARTIAL + place], total += scale * sums[g * PARTIAL + COLUMNS + 1];
                }
                v = total > 0.0f ? v / total : 0.0f;
            } else {
                for (int g = 0; g < GROUPS; ++g) v += sums[g * PARTIAL + place];
            }
            store_value(own_out + (long long)r * out_ld + out_column(e), v);
        }
    }
}
