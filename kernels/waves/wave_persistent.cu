// A wave as wave_wgmma.cu computes it, for thousands of rows: blocks stay, one a multiprocessor, and take tile after tile. So the
// factors of the next tile are copied while one is concluded, and x0 and xl of a cross layer come to the L2 while it is multiplied.
//
// Grid: as many blocks as there are multiprocessors, or tiles, in clusters of CLUSTER. A cluster's tiles lie below one another: each
// block copies its share of the weights to all of them. Cluster i takes the units i, i + clusters, .. of the jobs, which lie one
// after the other as the blocks of wave.cu, each of CLUSTER tiles. One warp copies. Each of the BM / 64 warpgroups multiplies 64
// rows and all columns of a tile; a warp concludes its 16 rows alone, SLICE columns at once, by way of shared memory, where a
// thread finds 8 columns of a row.
// Bytes of a tile: (BM + BN / CLUSTER) * depth * sizeof(X) from L2, BM * BN * sizeof(X) out.
#ifndef X
#define X bf16
#define BM 128
#define BN 256
#define STAGES 4
#define CLUSTER 2
#define TASKS 1
#define DOTS 1
#define LAYERS 1
#define HEAD 0    // a row's share of it would have to be summed over more threads than a warp has
#define PER_ROW 3
#define CROSSED 3
#define KINDS 252
#endif
#define WARPGROUPS (BM / 64)
#define THREADS (128 * WARPGROUPS)  // that multiply; a warpgroup more gives them its registers, and one of its warps copies
#define CHUNK (128 / (int)sizeof(X))
#define STAGE_BYTES ((BM + BN) * 128)
#define PIECE BN
#ifndef SLICE
#define SLICE 32
#endif
#ifndef BRING
#define BRING 1
#endif
#define PITCH (SLICE + 8)
#define ROW_LANES (SLICE / 8)           // that conclude a row of a slice, 8 columns each
#define PASS_ROWS (32 / ROW_LANES)      // that a warp concludes at once
#define PASSES_OF_16 (16 / PASS_ROWS)
#define SYNC() asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory")
#include "waves/wave.cuh"
#include "runtime/tile_copies.cuh"
#include "waves/wgmma.cuh"

struct Maps { TensorMap x[MAX_JOBS], weight[MAX_JOBS]; };

static_assert(!HEAD, "a wave that ends in a head has other tiles");

__device__ __forceinline__ int block_rank() { return CLUSTER > 1 ? blockIdx.x % CLUSTER : 0; }

// A tile of some job.
struct Tile {
    int job, first, m0, n0, chunks;  // first: row of the cluster; chunks of 128 bytes of K, 0: the job is no product

    __device__ __forceinline__ Tile(const Wave& wave, int unit) : job(0), first(0), m0(0), n0(0), chunks(0) {
        while (job + 1 < wave.count && unit >= wave.jobs[job + 1].first) ++job;
        const Job& of = wave.jobs[job];
        if (PER_ROW && of.kind != LINEAR) return;
        const int own = unit - of.first;
        first = own / of.tiles * (CLUSTER * BM), m0 = first + block_rank() * BM;
        n0 = own % of.tiles * BN, chunks = (of.depth + CHUNK - 1) / CHUNK;
    }
};

// What the copying warp does; a block's first product is computed even if it is padding of the bucket, rather than wait for the
// number of rows first.
__device__ __forceinline__ void copy_tiles(
    const Maps& maps, const Wave& wave, const int* state, unsigned ring, unsigned full, unsigned empty) {
    const int lane = threadIdx.x & 31;
    int at = 0, rows = -1;  // at: chunks so far, which go round the ring
    for (int unit = blockIdx.x / CLUSTER; unit < wave.units; unit += gridDim.x / CLUSTER) {
        const Tile t(wave, unit);
        if (t.chunks == 0 || (rows >= 0 && t.first >= rows)) continue;
        const Job& job = wave.jobs[t.job];
        const auto copy_x = [&](int c) {
            const int s = (at + c) % STAGES;
            expect(full + 8 * s, BM * 128);
            copy_tile(ring + s * STAGE_BYTES, &maps.x[t.job], full + 8 * s, c * CHUNK, t.m0);
        };
        const auto copy_weight = [&](int c) {  // this block's share
            const int s = (at + c) % STAGES, share = block_rank() * (BN / CLUSTER);
            expect(full + 8 * s, BN * 128);
            copy_tile_to_all<CLUSTER>(ring + s * STAGE_BYTES + (BM + share) * 128, &maps.weight[t.job], full + 8 * s, c * CHUNK, t.n0 + share);
        };
        int c = 0;
        if (rows < 0) {
            const int ahead = min(STAGES, t.chunks);
            if (lane == 0)
                for (int i = 0; i < ahead; ++i) copy_weight(i);
            wait_for_dependencies();
            if (lane == 0)
                for (; c < ahead; ++c) copy_x(c);
            rows = state[TRUE_ROWS];
        }
        if (BRING && CROSSED && job.x0) {
            const int bytes = min(BN, job.width - t.n0) * (int)sizeof(X);
            for (int row = t.m0 + lane; row < min(t.m0 + BM, rows); row += 32) {
                bring_to_l2(job.x0 + (long long)row * job.x0_ld + t.n0, bytes);
                bring_to_l2(job.xl + (long long)row * job.xl_ld + t.n0, bytes);
            }
        }
        if (lane == 0)
            for (; c < t.chunks; ++c) {
                if (at + c >= STAGES) wait(empty + 8 * ((at + c) % STAGES), ((at + c) / STAGES - 1) & 1);
                copy_weight(c);
                copy_x(c);
            }
        at += t.chunks;
    }
}

// Multiplies a tile's 64 rows of this warpgroup. at: chunks of the block's tiles before.
__device__ __forceinline__ void multiply_tile(float* sums, int chunks, int at, unsigned ring, unsigned full, unsigned empty) {
    const int row = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0) * 64;  // tells the compiler that a warp agrees
    const bool releases = (threadIdx.x & 127) == 0;
    for (int c = 0; c < chunks; ++c) {
        const int s = (at + c) % STAGES;
        wait(full + 8 * s, (at + c) / STAGES & 1);
        const unsigned long long a = described(ring + s * STAGE_BYTES + row * 128);
        const unsigned long long b = described(ring + s * STAGE_BYTES + BM * 128);
        begin_products();
#pragma unroll
        for (int k = 0; k < 4; ++k) multiply(sums, a + 2 * k, b + 2 * k);
        commit_products();
        wait_products<1>();
        if (c > 0 && releases) arrive_at_all<CLUSTER>(empty + 8 * ((at + c - 1) % STAGES));
    }
    wait_products<0>();
    come<BN / 2>(sums);
    if (releases) arrive_at_all<CLUSTER>(empty + 8 * ((at + chunks - 1) % STAGES));
}

// Of 8 columns of the rows that a thread concludes: x0 and xl of a cross layer.
struct Crossed {
    Eight<X> x0[PASSES_OF_16], xl[PASSES_OF_16];
    __device__ __forceinline__ void load(const Job& job, int row, int column, int rows) {
#pragma unroll
        for (int h = 0; h < PASSES_OF_16; ++h, row += PASS_ROWS) {
            if (column >= job.width || row >= rows) continue;
            x0[h] = eight(job.x0 + (long long)row * job.x0_ld + column);
            xl[h] = eight(job.xl + (long long)row * job.xl_ld + column);
        }
    }
};

// Applies bias, cross layer and activation to a warp's 16 rows of the tile, from row m0 on, and stores them. slice: the warp's
// own float[16][PITCH] in shared memory.
__device__ __forceinline__ void conclude_rows(const Job& job, const float* sums, float* slice, int m0, int n0, int rows) {
    constexpr int SLICES = BN / SLICE;
    const int lane = threadIdx.x & 31, r = lane / ROW_LANES, c = lane % ROW_LANES * 8;
    const bool crosses = CROSSED && job.x0, outer = CROSSED > 1 && job.outer;
    Crossed crossed[2];
    if (crosses) crossed[0].load(job, m0 + r, n0 + c, rows);
#pragma unroll
    for (int p = 0; p < SLICES; ++p) {
        if (n0 + p * SLICE >= job.width) break;
        __syncwarp();
#pragma unroll
        for (int n = 0; n < SLICE / 8; ++n) {
            const float* from = sums + (p * (SLICE / 8) + n) * 4;
            float* to = slice + (lane >> 2) * PITCH + n * 8 + (lane & 3) * 2;  // as the sums lie over the lanes
            *reinterpret_cast<float2*>(to) = make_float2(from[0], from[1]);
            *reinterpret_cast<float2*>(to + 8 * PITCH) = make_float2(from[2], from[3]);
        }
        __syncwarp();
        const int column = n0 + p * SLICE + c;
        if (crosses && p + 1 < SLICES) crossed[(p + 1) & 1].load(job, m0 + r, column + SLICE, rows);  // on its way meanwhile
        if (column >= job.width) continue;
        float bias[8], scale[8];
        Shape shape[SHAPED ? 8 : 1];
        load4(job.bias + column, bias), load4(job.bias + column + 4, bias + 4);
        if (FP8) load4(job.scale + column, scale), load4(job.scale + column + 4, scale + 4);
        if (SHAPED && job.shape)
            for (int k = 0; k < 8; ++k) shape[k] = shape_of<HAS(DICE) ? DICE : PRELU>(job.shape, job.width, column + k);
#pragma unroll
        for (int h = 0; h < PASSES_OF_16; ++h) {
            const int own = r + h * PASS_ROWS, row = m0 + own;
            if (row >= rows) continue;
            float v[8], a[8], b[8];
            load4(slice + own * PITCH + c, v), load4(slice + own * PITCH + c + 4, v + 4);
            for (int k = 0; k < 8; ++k) v[k] = (FP8 ? v[k] * scale[k] : v[k]) + (outer ? 0.0f : bias[k]);
            if (crosses) {
                widen8(crossed[p & 1].x0[h], a);
                widen8(crossed[p & 1].xl[h], b);
                for (int k = 0; k < 8; ++k) v[k] = (FP8 ? a[k] * job.x0_scale : a[k]) * v[k] + (FP8 ? b[k] * job.xl_scale : b[k]);
                if (outer)
                    for (int k = 0; k < 8; ++k) v[k] += bias[k];
            }
            for (int k = 0; k < 8; ++k) v[k] = activated(v[k], job.activation, shape[SHAPED ? k : 0]);
            if (FP8)
                for (int k = 0; k < 8; ++k) v[k] *= job.out_factor;
            store8(static_cast<X*>(job.out) + (long long)row * job.out_ld + column, v);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + 128) wave_persistent(
    const __grid_constant__ Maps maps, const __grid_constant__ Wave wave, const int* state) {
    extern __shared__ __align__(1024) char shared[];  // the ring, the warps' slices, barriers
    let_dependents_start();
    const unsigned start = (unsigned)__cvta_generic_to_shared(shared), ring = (start + 1023) & ~1023u;
    constexpr int SLICES = STAGES * STAGE_BYTES, BARRIERS = SLICES + THREADS / 32 * 16 * PITCH * 4;
    const unsigned full = ring + BARRIERS, empty = full + 8 * STAGES;
    make_barriers(STAGES, WARPGROUPS * CLUSTER, full, empty);
    meet_cluster<CLUSTER>();  // nobody copies to a block whose barriers are not there
    if (threadIdx.x >= THREADS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x < THREADS + 32) copy_tiles(maps, wave, state, ring, full, empty);
        meet_cluster<CLUSTER>();
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    float* slice = reinterpret_cast<float*>(shared + (ring - start) + SLICES) + (threadIdx.x >> 5) * 16 * PITCH;
    wait_for_dependencies();
    const int rows = state[TRUE_ROWS];
    int at = 0;
    for (int unit = blockIdx.x / CLUSTER; unit < wave.units; unit += gridDim.x / CLUSTER) {
        const Tile t(wave, unit);
        const Job& job = wave.jobs[t.job];
        if (PER_ROW && t.chunks == 0) {
            rows_of<THREADS / 32>(job, (unit - job.first) * CLUSTER + block_rank(), state);
            continue;
        }
        if (at > 0 && t.first >= rows) continue;  // see copy_tiles
        float sums[BN / 2];
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) sums[i] = 0.0f;
        multiply_tile(sums, t.chunks, at, ring, full, empty);
        at += t.chunks;
        conclude_rows(job, sums, slice, t.m0 + (threadIdx.x >> 5) * 16, t.n0, rows);
    }
    meet_cluster<CLUSTER>();  // nobody goes while another block may still tell it of a buffer
}
