// A ring of STAGES buffers in shared memory, in which chunks of 128 bytes of K come by the tensor memory accelerator: BM rows of x,
// behind them the weights. `full` counts the bytes that have come to each, `empty` the warpgroups that are done with it. The
// including file defines X, BM, BN, STAGES, WM and WK (warpgroups along the rows and along K), PIECE and STAGE_BYTES.
#pragma once
#include "runtime/barriers.cuh"
#include "dense/wgmma.cuh"

#define CHUNK (128 / (int)sizeof(X))
static_assert(STAGES % WK == 0 && STAGES > WK, "a buffer passes between warpgroups");

struct alignas(64) TensorMap { unsigned long long words[16]; };
typedef float Sums[BN / PIECE][PIECE / 2];

__device__ __forceinline__ void copy_tile(unsigned to, const TensorMap* map, unsigned barrier, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(column), "r"(row) : "memory");
}

// Which share of K, and which 64 rows of the tile, are this warpgroup's. The shuffle tells the compiler that a warp agrees.
__device__ __forceinline__ int warpgroup() { return __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0); }
__device__ __forceinline__ int share() { return WK > 1 ? warpgroup() / WM : 0; }
__device__ __forceinline__ int first_row() { return WM > 1 ? warpgroup() % WM * 64 : 0; }

// LAST: whether the last buffers are given back too, for what comes behind the factors.
template <bool LAST>
__device__ __forceinline__ void multiply_all(Sums& sums, int chunks, unsigned ring, unsigned full, unsigned empty) {
    const int first = share(), row = first_row();
    int done = first;  // the chunk whose buffer is to be given back
    for (int c = first; c < chunks; c += WK) {
        const int s = c % STAGES;
        wait(full + 8 * s, (c / STAGES) & 1);
        const unsigned long long a = described(ring + s * STAGE_BYTES + row * 128);
        const unsigned long long b = described(ring + s * STAGE_BYTES + BM * 128);
        begin_products();
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int p = 0; p < BN / PIECE; ++p) multiply(sums[p], a + 2 * k, b + 2 * k + p * (PIECE * 128 >> 4));
        commit_products();
        wait_products<1>();
        if (c > first && (threadIdx.x & 127) == 0) arrive(empty + 8 * (done % STAGES));
        done = c;
    }
    wait_products<0>();
    if (LAST && done < chunks && (threadIdx.x & 127) == 0) arrive(empty + 8 * (done % STAGES));
#pragma unroll
    for (int p = 0; p < BN / PIECE; ++p) come<PIECE / 2>(sums[p]);
}
