// A wave as wave.cu computes it, for many rows: products by warpgroup instructions (wgmma, sm_90a), whose factors the tensor
// memory accelerator copies from global memory. One warp copies. WM x WK warpgroups multiply, each 64 rows of every WK-th chunk.
//
// Grid: as in wave.cu. K advances in chunks of 128 bytes through a ring of STAGES buffers: `full` counts the bytes that have
// come, `empty` the warps or warpgroups that are done with a buffer. The first buffers of the weights are filled before the wave waits
// for the one before it. Copies write zeros beyond the factors' edges and swizzle the rows as wgmma expects them.
// Bytes of a block: (BM + HALVES * BN) * depth * sizeof(X) from L2, BM * BN * sizeof(X) out.
#ifndef X
#define X float
#define PASSES 1  // 3: float32 as exact as its own arithmetic, each factor in two tf32 halves; those of the weights are given
#define BM 128
#define BN 128
#define WK 1
#define STAGES 3  // a multiple of WK, and more: a buffer is always of one share, whose parity of `full` it alone follows
#define TASKS 1
#define DOTS 1
#define LAYERS 1
#define HEAD 1
#define PER_ROW 11
#define CROSSED 7
#define KINDS 252
#define SHARES 1
#define CLUSTERED 0
#define BRINGS 0
#endif
#define WM (BM / 64)
#define THREADS (128 * WM * WK)  // that multiply; one warp more copies
#define HALVES (PASSES == 3 ? 2 : 1)     // of the weights, the second `width` rows behind the first
#define RELEASES (PASSES == 3 ? 4 : 1)   // of a warpgroup for each buffer
#define STAGE_BYTES ((BM + HALVES * BN) * 128)
#define PIECE (BN < 128 ? BN : 128)  // columns of one wgmma
#define SYNC() asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory")
#include "waves/wave.cuh"
#include "dense/mma.cuh"
#include "waves/ring.cuh"

struct Maps { TensorMap x[MAX_JOBS], weight[MAX_JOBS]; };

__device__ __forceinline__ void copy_all(
    const TensorMap* x, const TensorMap* weight, const Job& job, int m0, int n0, const Chunks& chunks, const int* state, unsigned ring,
    unsigned full, unsigned empty) {
    const int ahead = min(STAGES, chunks.own);
    const auto copy_weight = [&](int c) {
        const int s = c % STAGES;
        expect(full + 8 * s, HALVES * BN * 128);
        for (int h = 0; h < HALVES; ++h)
            copy_tile(ring + s * STAGE_BYTES + (BM + h * BN) * 128, weight, full + 8 * s, chunks.at(c) * CHUNK, n0 + h * job.width);
    };
    const auto copy_x = [&](int c) {
        const int s = c % STAGES;
        expect(full + 8 * s, BM * 128);
        copy_tile(ring + s * STAGE_BYTES, x, full + 8 * s, chunks.at(c) * CHUNK, m0);
    };
#pragma unroll 1
    for (int c = 0; c < ahead; ++c) copy_weight(c);
    wait_for_dependencies();
#pragma unroll 1
    for (int c = 0; c < ahead; ++c) copy_x(c);  // of padding too, rather than wait for the number of rows first
    if (m0 >= rows_of_product(job, state)) {  // padding of the bucket: the block may not end before its copies have
        for (int s = 0; s < ahead; ++s) wait(full + 8 * s, 0);
        return;
    }
    const int count = chunks.count(job, state);
#pragma unroll 1
    for (int c = ahead; c < count; ++c) {
        if (!SHARES || c >= STAGES) wait(empty + 8 * (c % STAGES), (c / STAGES - 1) & 1);
        copy_weight(c);
        copy_x(c);
    }
}

static_assert(PASSES == 1 || BN == PIECE, "one wgmma takes all columns");

// A warp reads x into registers and splits it there, a chunk ahead of its products where registers allow. Each chunk has sums of
// its own: the tensor cores cut sums short rather than round them, and their chains of sums have to be short.
struct Halves {
    unsigned high[4][4], low[4][4];
    __device__ __forceinline__ void take(int c, unsigned ring, unsigned full) {
        const int s = c % STAGES, lane = threadIdx.x & 31;
        wait(full + 8 * s, (c / STAGES) & 1);
        const unsigned row = ring + s * STAGE_BYTES + (first_row() + (threadIdx.x >> 5 & 3) * 16 + (lane & 15)) * 128;
#pragma unroll
        for (int k = 0; k < 4; ++k) load_matrices(high[k], row + (((lane >> 4) ^ (lane & 7)) << 4 ^ k << 5));
        split<16>(high[0], low[0]);
    }
    __device__ __forceinline__ void keep() {  // in its registers until here: products that are under way read them
#pragma unroll
        for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(high[i / 4][i % 4]), "+r"(low[i / 4][i % 4])::"memory");
    }
};

__device__ __forceinline__ void multiply_exactly(float* sums, int chunks, unsigned ring, unsigned full, unsigned empty) {
    constexpr bool AHEAD = BN < 128 || THREADS == 128;
    const int first = share();
    Halves x, next;
    if (first < chunks) x.take(first, ring, full);
    for (int c = first; c < chunks; c += WK) {
        const int s = c % STAGES;
        const unsigned long long high = described(ring + s * STAGE_BYTES + BM * 128), low = high + (BN * 128 >> 4);
        float part[PIECE / 2];
        begin_products();
        multiply<0>(part, x.low[0], high);
#pragma unroll
        for (int k = 1; k < 4; ++k) multiply<1>(part, x.low[k], high + 2 * k);
#pragma unroll
        for (int k = 0; k < 4; ++k) multiply<1>(part, x.high[k], low + 2 * k);
#pragma unroll
        for (int k = 0; k < 4; ++k) multiply<1>(part, x.high[k], high + 2 * k);
        commit_products();
        if (AHEAD && c + WK < chunks) next.take(c + WK, ring, full);
        wait_products<0>();
        x.keep();
        come<PIECE / 2>(part);
        if ((threadIdx.x & 31) == 0) arrive(empty + 8 * s);
#pragma unroll
        for (int i = 0; i < PIECE / 2; ++i) sums[i] += part[i];
        if (AHEAD) x = next;
        else if (c + WK < chunks) x.take(c + WK, ring, full);
    }
}

// Starts a tile's lines of x0 and xl on their way to the L2, where they are when the products are there.
__device__ __forceinline__ void bring_to_l2(const Job& job, int m0, int n0, int rows) {
    constexpr int LINES = BN / CHUNK;  // of 128 bytes, of a row
    for (int i = threadIdx.x; i < BM * LINES; i += THREADS) {
        const int row = m0 + i / LINES, column = n0 + i % LINES * CHUNK;
        if (row >= rows || column >= job.width) continue;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(job.x0 + (long long)row * job.x0_ld + column));
        if (!GATES || job.xl) asm volatile("prefetch.global.L2 [%0];" ::"l"(job.xl + (long long)row * job.xl_ld + column));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + 32) wave_wgmma(
    const __grid_constant__ Maps maps, const __grid_constant__ Wave wave, const int* state) {
    extern __shared__ __align__(1024) char shared[];
#if CLUSTERED
    unsigned long long* const barriers = reinterpret_cast<unsigned long long*>(shared);  // of each block: the host's stand-in has one static
#else
    __shared__ __align__(8) unsigned long long barriers[2 * STAGES];
#endif
    let_dependents_start();
    int j = 0;
    while (j + 1 < wave.count && (int)blockIdx.x >= wave.jobs[j + 1].first) ++j;
    const Job job = wave.jobs[j];  // a copy: read once, and no store can alias it
    int block = blockIdx.x - job.first;
    if (PER_ROW && job.kind != LINEAR && !is_share(job)) {
        if (threadIdx.x < THREADS) rows_of<THREADS / 32>(job, block, state);
        return;
    }
    const int cluster = CLUSTERED ? wave.cluster : 1, rank = CLUSTERED ? block % cluster : 0;
    if (CLUSTERED) block /= cluster;
    const int m0 = block / job.tiles * BM, tile_column = block % job.tiles, n0 = tile_column * BN;
    const Chunks chunks(job, rank, cluster);
    const unsigned ring = ((unsigned)__cvta_generic_to_shared(shared) + 1023 + CLUSTERED * 16 * STAGES) & ~1023u;
    const unsigned full = (unsigned)__cvta_generic_to_shared(barriers), empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {  // a buffer is full when both factors have come
            begin_barrier(full + 8 * s, 2);
            begin_barrier(empty + 8 * s, WM * RELEASES);
        }
        show_barriers();
    }
    __syncthreads();
    if (threadIdx.x >= THREADS) {
        if (threadIdx.x == THREADS) copy_all(&maps.x[j], &maps.weight[j], job, m0, n0, chunks, state, ring, full, empty);
        return;
    }
    const Columns own(job, n0);
    wait_for_dependencies();
    const int rows = rows_of_product(job, state), batch = state[BATCH_NUMBER];
    if (m0 >= rows) return;
    if (BRINGS && job.x0) bring_to_l2(job, m0, n0, rows);
    Met met;
    if (EARLY && !rank) met.read(job, own, m0, n0, 0, rows);
    Sums sums;
#pragma unroll
    for (int p = 0; p < BN / PIECE; ++p)
#pragma unroll
        for (int i = 0; i < PIECE / 2; ++i) sums[p][i] = 0.0f;
    const int count = chunks.count(job, state);
    if constexpr (PASSES == 3) multiply_exactly(sums[0], count, ring, full, empty);
    else multiply_all<false>(sums, count, ring, full, empty);
    SYNC();
    float* products = reinterpret_cast<float*>(shared + (ring - (unsigned)__cvta_generic_to_shared(shared)));
    const int lane = threadIdx.x & 31, row = share() * BM + first_row() + (threadIdx.x >> 5 & 3) * 16 + (lane >> 2);
#pragma unroll
    for (int p = 0; p < BN / PIECE; ++p)
#pragma unroll
        for (int n = 0; n < PIECE / 8; ++n) {
            float* to = products + row * (BN + 8) + p * PIECE + n * 8 + (lane & 3) * 2;
            *reinterpret_cast<float2*>(to) = make_float2(sums[p][4 * n], sums[p][4 * n + 1]);
            *reinterpret_cast<float2*>(to + 8 * (BN + 8)) = make_float2(sums[p][4 * n + 2], sums[p][4 * n + 3]);
        }
    __shared__ int contexts[SHARES ? BM : 1];
    const bool apart = chunks.apart(job, state);
    if (apart) wait_for_shares(job, contexts, m0, tile_column, rows, batch);
    SYNC();
    if (CLUSTERED && !add_up<WK>(products, rank, cluster)) return;
    if (is_share(job)) store_shares<WK>(job, products, m0, n0, tile_column, rows, batch);
    else conclude<CLUSTERED ? 1 : WK>(wave.head, job, own, met, products, m0, n0, tile_column, rows, batch, apart ? contexts : nullptr);
}
