// Tiles of matrices by the tensor memory accelerator (sm_90 on), for a block or a cluster of blocks, through a ring of buffers whose
// barriers `full` count the bytes that have come, and `empty` who is done with a buffer.
#pragma once
#include "runtime/mbarrier.cuh"

struct alignas(64) TensorMap { unsigned long long words[16]; };

__device__ __forceinline__ void copy_tile(unsigned to, const TensorMap* map, unsigned barrier, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(column), "r"(row) : "memory");
}

// The same for every block of a cluster, at the same places of each one's shared memory.
template <int BLOCKS>
__device__ __forceinline__ void copy_tile_to_all(unsigned to, const TensorMap* map, unsigned barrier, int column, int row) {
    if (BLOCKS == 1) return copy_tile(to, map, barrier, column, row);
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], "
        "[%2], %5;" ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row), "h"((unsigned short)((1 << BLOCKS) - 1)) : "memory");
}
template <int BLOCKS> __device__ __forceinline__ void arrive_at_all(unsigned barrier) {
    if (BLOCKS == 1) return arrive(barrier);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) arrive_there(of_block(barrier, b));
}
template <int BLOCKS> __device__ __forceinline__ void meet_cluster() {
    if (BLOCKS == 1) return;
    __syncwarp();  // by whole warps
    arrive_at_cluster();
    wait_for_cluster();
}

__device__ __forceinline__ void bring_to_l2(const void* from, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// By the whole block, for so many buffers. One is full when both factors have come, and empty when `releases` have let it go.
__device__ __forceinline__ void make_barriers(int buffers, int releases, unsigned full, unsigned empty) {
    if (threadIdx.x == 0) {
        for (int s = 0; s < buffers; ++s) {
            begin_barrier(full + 8 * s, 2);
            begin_barrier(empty + 8 * s, releases);
        }
        show_barriers();
    }
    __syncthreads();
}
