// A tower: an MLP of few narrow layers and DLRM's interaction of its output, all in one launch. out[b] = the first KEEP columns of
// the MLP's row b, then <v_i, v_j> for all j < i (DIAGONAL: j <= i) of FIELDS vectors of DIM columns, of which the MLP's output is
// v_0 and `vectors` has the others, side by side.
//
// Grid: a block takes 16 rows at a time, as mma's narrow side, and then further ones. A layer's tiles of 16 columns go over its
// warps; where there are fewer tiles than warps, several split K and are added up in order. Values stay in shared memory. Each warp
// has its weights in the order in which it multiplies them (tower.py), and each lane its own in a ring of DEPTH blocks, which fills
// while the kernel before still runs. The dots are mma's too, a warp a row: a row's vectors are both factors, straight from memory.
// Bytes: of a block all weights from the L2 for each 16 rows, and (IN + FIELDS * DIM + columns of out) * sizeof(X) a row.
#include "dense/activation.cuh"

#ifndef X
#define X bf16
#define IN 13             // columns of x
#define LAYERS 2
#define WIDTHS 40, 16     // of the layers; the last is DIM
#define KINDS 1, 1        // their activations, none with parameters
#define DEPTH 2
#define FIELDS 5
#define DIM 16
#define KEEP 16
#define DIAGONAL 0
#endif
#define WARPS 16
#define THREADS (32 * WARPS)
#define ROWS 16
#include "interaction/row_dots.cuh"

__device__ constexpr int widths[] = {WIDTHS}, kinds[] = {KINDS};
__device__ constexpr int columns_into(int l) { return l ? widths[l - 1] : IN; }
__device__ constexpr int tiles(int l) { return up(widths[l], 16) / 16; }
__device__ constexpr int groups(int l) { return up(columns_into(l), 16 * PER_WORD) / (16 * PER_WORD); }  // of 16 words of K
__device__ constexpr int split(int l) {
    int s = 1;
    while (tiles(l) * s * 2 <= WARPS && s * 2 <= groups(l)) s *= 2;
    return s;
}
__device__ constexpr int per_part(int l) { return up(groups(l), split(l)) / split(l); }
__device__ constexpr int rounds(int l) { return up(tiles(l) * split(l), WARPS) / WARPS; }
__device__ constexpr int blocks() {  // of weights, of a warp: 1 KB each
    int n = 0;
    for (int l = 0; l < LAYERS; ++l) n += rounds(l) * per_part(l);
    return n;
}
// Words of a row of layer l's input, or of the last one's output: an odd number of 16 words, so that rows lie in other banks.
__device__ constexpr int pitch(int l) {
    const int words = l < LAYERS ? split(l) * per_part(l) * 16 : up(widths[LAYERS - 1], 16 * PER_WORD) / PER_WORD;
    return words % 32 ? words : words + 16;
}
__device__ constexpr int input_at(int l) { return l ? input_at(l - 1) + ROWS * pitch(l - 1) : 0; }
__device__ constexpr int sum_pitch(int l) { return up(widths[l], 32) + 4; }
__device__ constexpr int sum_words() {
    int n = 0;
    for (int l = 0; l < LAYERS; ++l)
        if (split(l) > 1 && split(l) * ROWS * sum_pitch(l) > n) n = split(l) * ROWS * sum_pitch(l);
    return n;
}
__device__ constexpr int bias_at(int l) { return l ? bias_at(l - 1) + up(widths[l - 1], 16) : 0; }

constexpr int VALUE_WORDS = input_at(LAYERS + 1), SUM_WORDS = sum_words(), BIASES = bias_at(LAYERS);
typedef Vectors<FIELDS, DIM, DIAGONAL> Row;
constexpr int LINE = up(KEEP + Row::PAIRS, 16 / (int)sizeof(X));  // of out; the pad is zeros
constexpr int PIECES = up(IN, 16 / (int)sizeof(X)) * (int)sizeof(X) / 16;  // of 16 bytes, of a row of x
constexpr bool EARLY = Row::EIGHTS * Row::STEPS <= 8;  // whether registers have room for the vectors while the layers are multiplied

// A lane's own 32 bytes of each block of weights.
struct Weights {
    const uint4* from;
    uint4* ring;
    int asked, slot;

    __device__ __forceinline__ Weights(const uint4* weights, char* shared) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        from = weights + warp * (blocks() * 64) + lane;
        ring = reinterpret_cast<uint4*>(shared) + warp * (DEPTH * 64) + lane;
        asked = slot = 0;
        for (int i = 0; i < DEPTH; ++i) ask();
    }
    __device__ __forceinline__ void ask() {
        const unsigned to = (unsigned)__cvta_generic_to_shared(ring + slot * 64);
        copy16(to, from + asked * 64);
        copy16(to + 512, from + asked * 64 + 32);
        asm volatile("cp.async.commit_group;" ::: "memory");
        asked = asked + 1 == blocks() ? 0 : asked + 1;
        slot = slot + 1 == DEPTH ? 0 : slot + 1;
    }
    template <int N> __device__ __forceinline__ void take(uint4 w[N][2]) {  // the oldest; then N times `ask`, in their places
        asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - N) : "memory");
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const int at = slot + i < DEPTH ? slot + i : slot + i - DEPTH;
            w[i][0] = ring[at * 64];
            w[i][1] = ring[at * 64 + 32];
        }
    }
};

template <int L>
__device__ __forceinline__ void layer(Weights& weights, unsigned* values, float* sums, const float* biases) {
    constexpr int TILES = tiles(L), PARTS = split(L), GROUPS = per_part(L), PITCH = pitch(L);
    constexpr int AT_ONCE = GROUPS % 2 ? 1 : 2;  // blocks of weights: fewer waits
    const Shape none = {0.0f, 0.0f, 0.0f};
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    X* out = reinterpret_cast<X*>(values + input_at(L + 1));
    biases += bias_at(L);
    for (int round = 0; round < rounds(L); ++round) {
        const int unit = warp + round * WARPS, tile = unit % TILES, part = unit / TILES;
        const bool there = unit < TILES * PARTS;
        const uint4* x = reinterpret_cast<const uint4*>(values + input_at(L) + (lane >> 2) * PITCH) + (lane & 3);
        if (there) x += part * GROUPS * 4;
        float sum[2][2][4] = {};  // rows, and the steps of a group: no product waits for another
#pragma unroll 2
        for (int g = 0; g < GROUPS; g += AT_ONCE) {
            uint4 w[AT_ONCE][2];
            weights.take<AT_ONCE>(w);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const uint4 v = x[(g + i) * 4 + n * (8 * PITCH / 4)];
#pragma unroll
                    for (int step = 0; step < 2; ++step) {
                        const unsigned a[4] = {w[i][step].x, w[i][step].y, w[i][step].z, w[i][step].w};
                        const unsigned b[2] = {step ? v.z : v.x, step ? v.w : v.y};
                        multiply(sum[n][step], a, b, (X*)0);
                    }
                }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) weights.ask();
        }
        if (!there) continue;
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int row = n * 8 + (lane & 3) * 2 + (k & 1), column = tile * 16 + (lane >> 2) + (k >> 1) * 8;
                const float v = sum[n][0][k] + sum[n][1][k];
                if (column >= widths[L]) continue;
                if (PARTS > 1) sums[(part * ROWS + row) * sum_pitch(L) + column] = v;
                else store_value(out + row * pitch(L + 1) * PER_WORD + column, activate<kinds[L]>(v + biases[column], none));
            }
    }
    __syncthreads();
    if (PARTS > 1) {
        for (int i = threadIdx.x; i < ROWS * widths[L]; i += THREADS) {
            const int row = i / widths[L], column = i % widths[L];
            float v = biases[column];
#pragma unroll
            for (int p = 0; p < PARTS; ++p) v += sums[(p * ROWS + row) * sum_pitch(L) + column];
            store_value(out + row * pitch(L + 1) * PER_WORD + column, activate<kinds[L]>(v, none));
        }
        __syncthreads();
    }
}

// All layers but the last; `between` runs ahead of that.
template <int L, typename Between>
__device__ __forceinline__ void layers(Weights& weights, unsigned* values, float* sums, const float* biases, Between between) {
    if (L == LAYERS - 1) between();
    layer<L>(weights, values, sums, biases);
    if constexpr (L + 1 < LAYERS) layers<L + 1>(weights, values, sums, biases, between);
}

extern "C" __global__ void __launch_bounds__(THREADS) tower(
    const int* state, const X* x, int x_ld, const X* vectors, int vectors_ld, const uint4* packed, const float* bias, X* out,
    int out_ld, int bucket) {
    extern __shared__ __align__(16) char shared[];
    let_dependents_start();
    Weights weights(packed, shared);
    unsigned* values = reinterpret_cast<unsigned*>(shared + WARPS * DEPTH * 1024);
    float* sums = reinterpret_cast<float*>(values + VALUE_WORDS);
    float* biases = sums + SUM_WORDS;
    X* lines = reinterpret_cast<X*>(biases + BIASES);  // [WARPS][LINE]
    for (int i = threadIdx.x; i < BIASES; i += THREADS) biases[i] = bias[i];
    for (int i = threadIdx.x; i < VALUE_WORDS; i += THREADS) values[i] = 0;  // pads meet zero weights, and stay
    for (int i = threadIdx.x; i < WARPS * LINE; i += THREADS) store_value(lines + i, 0.0f);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, piece = threadIdx.x % PIECES, row = threadIdx.x / PIECES;
    const auto input = [&](int first) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row < ROWS && first + row < bucket) v = reinterpret_cast<const uint4*>(x + (long long)(first + row) * x_ld)[piece];
        return v;
    };
    __syncthreads();
    wait_for_dependencies();
    int first = blockIdx.x * ROWS;
    uint4 in = input(first);  // beside the number of rows, not behind it
    const int rows = state[TRUE_ROWS];
    for (; first < rows; first += gridDim.x * ROWS) {
        if (row < ROWS) reinterpret_cast<uint4*>(values + row * pitch(0))[piece] = in;
        __syncthreads();
        in = input(first + gridDim.x * ROWS);
        const int own = first + warp;  // the warp's row, behind the layers
        Row vector;
        const auto load = [&] {
            if (own < rows) vector.load(vectors + (long long)own * vectors_ld);
        };
        if (EARLY) load();
        layers<0>(weights, values, sums, biases, [&] {
            if (!EARLY) load();
        });
        if (own >= rows) continue;
        const unsigned* z = values + input_at(LAYERS) + warp * pitch(LAYERS);
        X* line = lines + warp * LINE;
        vector.load_first(z);
        vector.round();
        for (int c = lane; c < KEEP; c += 32) line[c] = reinterpret_cast<const X*>(z)[c];
        vector.dots([&](int i, float v) { store_value(line + KEEP + i, v); });
        __syncwarp();
        uint4* to = reinterpret_cast<uint4*>(out + (long long)own * out_ld);
        for (int i = lane; i < LINE * (int)sizeof(X) / 16; i += 32) to[i] = reinterpret_cast<const uint4*>(line)[i];
        __syncwarp();
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}
