// Barriers in shared memory that count threads and bytes (sm_90 on), and the copies that report to them. Addresses as PTX has them.
#pragma once
#include "runtime/common.cuh"

__device__ __forceinline__ void begin_barrier(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void show_barriers() {  // to the copies, behind all that were begun
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The same barrier of another block of the cluster.
__device__ __forceinline__ unsigned of_block(unsigned address, int rank) {
    unsigned other;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(other) : "r"(address), "r"(rank));
    return other;
}
__device__ __forceinline__ void arrive_there(unsigned barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait(unsigned barrier, int parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier),
        "r"(parity) : "memory");
}
// Consecutive bytes, a multiple of 16 at addresses that are.
__device__ __forceinline__ void copy_bytes(unsigned to, const void* from, int bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier) : "memory");
}
// The same to all blocks of the cluster whose ranks are bits, and to their barriers.
__device__ __forceinline__ void copy_bytes(unsigned to, const void* from, int bytes, unsigned barrier, unsigned short ranks) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::
                     "r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"(ranks) : "memory");
}
__device__ __forceinline__ void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
