// Blocks of a cluster (sm_90 on): all meet; what lies at an address of shared memory, but in the block of a rank.
#pragma once

__device__ __forceinline__ void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ float2 load_there(unsigned address, int rank) {
    unsigned there;
    float2 v;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(there) : "memory");
    return v;
}
