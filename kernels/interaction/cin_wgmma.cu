// A layer of the compressed interaction network as cin.cu computes it (its formula stands there), in bf16 or tf32, by warpgroup
// instructions (wgmma, sm_90a), whose left factor is formed in registers and whose right one a warp copies into shared memory.
//
// A place is a (b, d). A block takes 64 places a warpgroup, of whole rows b, and COLUMNS maps n. SHARES blocks, a cluster,
// split the sum over i; then they split the maps, and each adds up its own over all shares, in their order.
// Of x0 a lane keeps the fields j = 4 t + member, t < OWN, of its two places. K advances by groups of four i, and in them by
// steps t: a lane multiplies its own field t with four xk[b, i, d], and padding is to multiples of 4, in i and in j alone. A
// step is the K of one product of bf16, of two of tf32. The first layer, whose xk is x0, takes W[i, j] + W[j, i] at once: the
// group i = 4 g .. 4 g + 3 meets the groups of fields g .. g + OWN / 2, modulo OWN, and the fields rotate through the
// registers.
// Weights come packed in that order (cin_wgmma.py), a chunk of steps at a time, through a ring of STAGES buffers: `full`
// counts the bytes that have come, `empty` the warpgroups that are done. The first are filled before the kernel waits for the
// one before it. A warp of its own copies.
// Bytes of a block: weights COLUMNS * K / SHARES * sizeof(X) from L2, K as padded; maps 64 * WARPGROUPS * (in + out) *
// sizeof(X).
#ifndef X
#define X bf16
#define FIRST 1       // xk is x0; else maps of the layer before, [rows, DIM, maps]
#define M 39          // 5 or more
#define DIM 16
#define COLUMNS 128   // a multiple of 16
#define WIDTH 128     // maps as packed, all of the layer and padding
#define WARPGROUPS 2
#define SHARES 1
#define CHUNKS 2      // of a group's steps; even
#define STAGES 8
#define ACTIVATION 1
#endif
#include "dense/activation.cuh"
#include "interaction/cin_products.cuh"
#include "runtime/barriers.cuh"

#define OWN ((M + 3) / 4)
#define STEPS (FIRST ? OWN / 2 + 1 : OWN)
#define STEP_OF(chunk) (STEPS * (chunk) / CHUNKS)  // its first
#define MOST ((STEPS + CHUNKS - 1) / CHUNKS)
#define PRODUCTS ((int)sizeof(X) / 2)              // of a step
#define STEP_BYTES (PRODUCTS * COLUMNS * 32)
#define STAGE_BYTES (MOST * STEP_BYTES)
#define GROUP_BYTES (STEPS * PRODUCTS * WIDTH * 32)  // of all maps
#define THREADS (128 * WARPGROUPS)                 // that multiply; one warp more copies
#define ROWS (64 * WARPGROUPS / DIM)
#define RESIDENT (2 / WARPGROUPS)                  // blocks that a multiprocessor has room for
#define PITCH (COLUMNS + 8)
#define BARRIER_BYTES 256
#define SYNC() asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory")
static_assert(CHUNKS % 2 == 0 && CHUNKS <= STEPS && STAGES * 16 <= BARRIER_BYTES && COLUMNS % (2 * SHARES) == 0, "");

// A number as a register takes it: bf16 twice.
__device__ __forceinline__ unsigned word(const bf16* p) { return *p * 0x10001u; }
__device__ __forceinline__ unsigned word(const float* p) { return __float_as_uint(*p); }
__device__ __forceinline__ unsigned product(unsigned a, unsigned b, const bf16*) {
    unsigned z;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(a), "r"(b));
    return z;
}
__device__ __forceinline__ unsigned product(unsigned a, unsigned b, const float*) {
    unsigned z;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(z) : "f"(__uint_as_float(a) * __uint_as_float(b)));
    return z;
}
// xk of one place and four i.
typedef unsigned Maps[2 * PRODUCTS];
__device__ __forceinline__ void load_maps(unsigned* to, const bf16* p) {
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    to[0] = v.x, to[1] = v.y;
}
__device__ __forceinline__ void load_maps(unsigned* to, const float* p) {
    const uint4 v = *reinterpret_cast<const uint4*>(p);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}
__device__ __forceinline__ void put_pair(bf16* p, float v, float w) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(w), "f"(v));
    *reinterpret_cast<unsigned*>(p) = both;
}
__device__ __forceinline__ void put_pair(float* p, float v, float w) { *reinterpret_cast<float2*>(p) = make_float2(v, w); }

// A lane's two places: its fields, and the current group's xk. Beyond the rows they are another row's; nobody reads their sums.
struct Places {
    unsigned own[2][OWN];
    Maps at[2], soon[2];
    const X* xk[2];

    __device__ __forceinline__ void begin(
        const X* x0, int x0_ld, const X* maps, int maps_ld, int pitch, int first, int last, int g) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int place = (threadIdx.x >> 5) * 16 + r * 8 + (lane >> 2), b = place / DIM, d = place % DIM;
            const long long row = min(first + b, last);
            if (!FIRST) xk[r] = maps + row * maps_ld + (long long)d * pitch + 4 * g;
#pragma unroll
            for (int t = 0; t < OWN; ++t) {
                const int j = 4 * (FIRST ? (t + g) % OWN : t) + (lane & 3);
                own[r][t] = j < M ? word(x0 + row * x0_ld + j * DIM + d) : 0u;
            }
        }
        prefetch(false);
        step();
    }
    __device__ __forceinline__ void prefetch(bool further) {  // of maps that lie in memory
        if (FIRST) return;
#pragma unroll
        for (int r = 0; r < 2; ++r) load_maps(soon[r], xk[r] += further ? 4 : 0);
    }
    __device__ __forceinline__ void step() {  // to the group that was prefetched, or that the fields have come to
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            unsigned four[4];
            if (FIRST) {
#pragma unroll
                for (int q = 0; q < 4; ++q) four[q] = __shfl_sync(0xffffffffu, own[r][0], (threadIdx.x & 28) | q);
            }
#pragma unroll
            for (int w = 0; w < 2 * PRODUCTS; ++w)
                if (!FIRST) at[r][w] = soon[r][w];
                else at[r][w] = PRODUCTS == 2 ? four[w] : __byte_perm(four[2 * w & 3], four[(2 * w + 1) & 3], 0x7610);
        }
    }
    __device__ __forceinline__ void rotate() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const unsigned before = own[r][0];
#pragma unroll
            for (int t = 0; t + 1 < OWN; ++t) own[r][t] = own[r][t + 1];
            own[r][OWN - 1] = before;
        }
    }
};
typedef unsigned Factors[MOST][PRODUCTS][4];

template <int CHUNK> __device__ __forceinline__ void form(Factors& a, const Places& p) {
#pragma unroll
    for (int t = STEP_OF(CHUNK); t < STEP_OF(CHUNK + 1); ++t)
#pragma unroll
        for (int h = 0; h < PRODUCTS; ++h)
#pragma unroll
            for (int e = 0; e < 4; ++e)  // PTX's order: rows group, group + 8 of the first words of K, then of the others
                a[t - STEP_OF(CHUNK)][h][e] = product(p.own[e & 1][t], p.at[e & 1][2 * h + (e >> 1)], (const X*)nullptr);
}

// A buffer of the ring, the one before, and which of its uses this is.
struct Turn {
    int stage = 0, last = 0, parity = 0;
    __device__ __forceinline__ void next() {
        last = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// One thread copies all chunks of a share; a copy for each product, or of all at once where they lie side by side.
__device__ __forceinline__ void copy_all(
    const char* from, int groups, const int* state, int first, unsigned ring, unsigned full, unsigned empty) {
    const int chunks = groups * CHUNKS, ahead = min(STAGES, chunks);
    Turn turn;
    int c = 0;
    const auto copy = [&] {
        const int products = (STEP_OF(c + 1) - STEP_OF(c)) * PRODUCTS, joined = COLUMNS == WIDTH ? products : 1;
        expect(full + 8 * turn.stage, products * COLUMNS * 32);
        for (int n = 0; n < products; n += joined) {
            copy_bytes(ring + turn.stage * STAGE_BYTES + n * COLUMNS * 32, from, joined * COLUMNS * 32, full + 8 * turn.stage);
            from += joined * WIDTH * 32;
        }
        c = c + 1 == CHUNKS ? 0 : c + 1;
        turn.next();
    };
#pragma unroll 1
    for (int n = 0; n < ahead; ++n) copy();
    wait_for_dependencies();
    if (first >= state[TRUE_ROWS]) {  // padding of the bucket: the block may not end before its copies have
        for (int s = 0; s < ahead; ++s) wait(full + 8 * s, 0);
        return;
    }
#pragma unroll 1
    for (int n = ahead; n < chunks; ++n) {
        wait(empty + 8 * turn.stage, turn.parity ^ 1);
        copy();
    }
}

template <int CHUNK> __device__ __forceinline__ void multiply_chunks(
    float* sums, Factors (&a)[2], Places& p, Turn& turn, bool first, unsigned ring, unsigned full, unsigned empty) {
    if constexpr (CHUNK < CHUNKS) {
        wait(full + 8 * turn.stage, turn.parity);
        const unsigned long long b = described(ring + turn.stage * STAGE_BYTES);
        begin_products();
#pragma unroll
        for (int t = 0; t < STEP_OF(CHUNK + 1) - STEP_OF(CHUNK); ++t)
#pragma unroll
            for (int h = 0; h < PRODUCTS; ++h) multiply(sums, a[CHUNK & 1][t][h], b + (t * PRODUCTS + h) * (COLUMNS * 32 >> 4));
        commit_products();
        wait_products<1>();  // those of the chunk before, whose factors are overwritten now
        if ((CHUNK > 0 || !first) && (threadIdx.x & 127) == 0) arrive(empty + 8 * turn.last);
        turn.next();
        if constexpr (CHUNK + 1 < CHUNKS) form<CHUNK + 1>(a[(CHUNK + 1) & 1], p);
        multiply_chunks<CHUNK + 1>(sums, a, p, turn, first, ring, full, empty);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, RESIDENT) cin_wgmma(
    const int* state, int bucket, const X* x0, int x0_ld, const X* xk, int xk_ld, int xk_pitch, int groups, const char* weights,
    const float* __restrict__ bias, int units, X* __restrict__ next, int next_ld, int next_pitch, int next_maps,
    X* __restrict__ pooled, int pooled_ld, int direct, const float* __restrict__ params) {
    extern __shared__ __align__(1024) char shared[];
    let_dependents_start();
    const int blocks = (units + COLUMNS - 1) / COLUMNS, rank = blockIdx.x % SHARES, tile = blockIdx.x / SHARES;
    const int first = tile / blocks * ROWS, map0 = tile % blocks * COLUMNS;
    const int from = groups * rank / SHARES, to = groups * (rank + 1) / SHARES;
    const unsigned full = (unsigned)__cvta_generic_to_shared(shared), empty = full + 8 * STAGES, ring = full + BARRIER_BYTES;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) begin_barrier(full + 8 * s, 1), begin_barrier(empty + 8 * s, WARPGROUPS);
        show_barriers();
    }
    __syncthreads();
    if (threadIdx.x >= THREADS) {
        const char* own = weights + (long long)from * GROUP_BYTES + map0 * 32;
        if (threadIdx.x == THREADS) copy_all(own, to - from, state, first, ring, full, empty);
        return;
    }
    wait_for_dependencies();
    Places p;  // of padding too, rather than wait for the number of rows first
    p.begin(x0, x0_ld, xk, xk_ld, xk_pitch, first, bucket - 1, from);
    Factors a[2];
    form<0>(a[0], p);
    if (first >= state[TRUE_ROWS]) return;

    float sums[COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) sums[i] = 0.0f;
    Turn turn;
#pragma unroll 1
    for (int g = from; g < to; ++g) {
        p.prefetch(g + 1 < to);
        multiply_chunks<0>(sums, a, p, turn, g == from, ring, full, empty);
        if (FIRST) p.rotate();
        p.step();
        form<0>(a[0], p);
    }
    wait_products<0>();
    come<COLUMNS / 2>(sums);
    SYNC();

    float* table = reinterpret_cast<float*>(shared + BARRIER_BYTES);  // [64 * WARPGROUPS][PITCH], in the ring's place
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n) {
        float* at = table + ((threadIdx.x >> 5) * 16 + (lane >> 2)) * PITCH + n * 8 + (lane & 3) * 2;
        *reinterpret_cast<float2*>(at) = make_float2(sums[4 * n], sums[4 * n + 1]);
        *reinterpret_cast<float2*>(at + 8 * PITCH) = make_float2(sums[4 * n + 2], sums[4 * n + 3]);
    }
    if (SHARES > 1) arrive_at_cluster(), wait_for_cluster();
    else SYNC();
    const int rows = min(ROWS, state[TRUE_ROWS] - first);
    constexpr int HERE = COLUMNS / SHARES;  // maps that this block adds up
    const float slope = params[0];
#pragma unroll 2
    for (int k = threadIdx.x; k < rows * DIM * (HERE / 2); k += THREADS) {
        const int place = k / (HERE / 2), column = rank * HERE + k % (HERE / 2) * 2, n = map0 + column;
        float2* at = reinterpret_cast<float2*>(table + place * PITCH + column);
        float2 v = {0.0f, 0.0f};
        if (SHARES == 1) v = *at;
#pragma unroll
        for (int q = 0; SHARES > 1 && q < SHARES; ++q) {
            const float2 part = load_there((unsigned)__cvta_generic_to_shared(at), q);
            v.x += part.x, v.y += part.y;
        }
        if (bias) v.x += n < units ? bias[n] : 0.0f, v.y += n + 1 < units ? bias[n + 1] : 0.0f;
        v.x = activate<ACTIVATION>(v.x, Shape{slope, 0.0f, 0.0f});
        v.y = activate<ACTIVATION>(v.y, Shape{slope, 0.0f, 0.0f});
        *at = v;
        if (n < next_pitch) {  // zeros beyond the maps: they meet zero weights
            X* p = next + (long long)(first + place / DIM) * next_ld + place % DIM * next_pitch + n;
            put_pair(p, n < next_maps ? v.x : 0.0f, n + 1 < next_maps ? v.y : 0.0f);
        }
    }
    if (SHARES > 1) arrive_at_cluster();
    SYNC();
    for (int k = threadIdx.x; k < rows * HERE; k += THREADS) {
        const int b = k / HERE, column = rank * HERE + k % HERE, n = map0 + column;
        if (n < direct || n >= units) continue;
        float sum = 0.0f;
#pragma unroll 4
        for (int d = 0; d < DIM; ++d) sum += table[(b * DIM + d) * PITCH + column];
        store_value(pooled + (long long)(first + b) * pooled_ld + n - direct, sum);
    }
    if (SHARES > 1) wait_for_cluster();  // others may still read this block's sums
}
