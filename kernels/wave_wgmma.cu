// A wave as wave.cu computes it, for many rows: products by warpgroup instructions (wgmma, sm_90a), whose factors the tensor
// memory accelerator copies from global memory. One warp copies, GROUPS warpgroups multiply 64 rows each.
//
// Grid: as in wave.cu. K advances in chunks of 128 bytes through a ring of STAGES buffers: `full` counts the bytes that have
// come, `empty` the warpgroups that are done with a buffer. The first buffers of the weights are filled before the wave waits
// for the one before it. Copies write zeros beyond the factors' edges and swizzle the rows as wgmma expects them.
// Bytes of a block: (BM + BN) * depth * sizeof(X) from L2, BM * BN * sizeof(X) out.
#ifndef X
#define X float
#define BM 128
#define BN 128
#define STAGES 3
#define TASKS 1
#define DOTS 1
#define LAYERS 1
#define HEAD 1
#define PER_ROW 3
#define CROSSED 1
#define SMOOTH 1
#endif
#define GROUPS (BM / 64)
#define THREADS (128 * GROUPS)  // that multiply; one warp more copies
#define CHUNK (128 / (int)sizeof(X))
#define STAGE_BYTES ((BM + BN) * 128)
#define PIECE (BN < 128 ? BN : 128)  // columns of one wgmma
#define SYNC() asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory")
#include "wave.cuh"

struct alignas(64) TensorMap { unsigned long long words[16]; };
struct Maps { TensorMap x[MAX_JOBS], weight[MAX_JOBS]; };

__device__ __forceinline__ void expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait(unsigned barrier, int parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier),
        "r"(parity) : "memory");
}
__device__ __forceinline__ void copy_tile(unsigned to, const TensorMap* map, unsigned barrier, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(column), "r"(row) : "memory");
}

// Matrix in shared memory, rows of 128 bytes, swizzled: groups of 8 rows lie 1024 bytes apart.
__device__ __forceinline__ unsigned long long described(unsigned address) {
    return ((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define N32 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define N64 N32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
// d[64 rows, PIECE columns] += a b^T over 32 bytes of K.
__device__ __forceinline__ void multiply(float* d, unsigned long long a, unsigned long long b) {
#if PIECE == 128
    if (sizeof(X) == 1)
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " N64 "}, %64, %65, 1, 1, 1;"
                     : D16(0), D16(16), D16(32), D16(48) : "l"(a), "l"(b));
    else if (sizeof(X) == 2)
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " N64 "}, %64, %65, 1, 1, 1, 0, 0;"
                     : D16(0), D16(16), D16(32), D16(48) : "l"(a), "l"(b));
    else
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 " N64 "}, %64, %65, 1, 1, 1;"
                     : D16(0), D16(16), D16(32), D16(48) : "l"(a), "l"(b));
#else
    if (sizeof(X) == 1)
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " N32 "}, %32, %33, 1, 1, 1;"
                     : D16(0), D16(16) : "l"(a), "l"(b));
    else if (sizeof(X) == 2)
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " N32 "}, %32, %33, 1, 1, 1, 0, 0;"
                     : D16(0), D16(16) : "l"(a), "l"(b));
    else
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 " N32 "}, %32, %33, 1, 1, 1;"
                     : D16(0), D16(16) : "l"(a), "l"(b));
#endif
}

__device__ __forceinline__ void copy_all(
    const TensorMap* x, const TensorMap* weight, int m0, int n0, int chunks, const int* state, unsigned ring, unsigned full, unsigned empty) {
    const int ahead = min(STAGES, chunks);
    for (int s = 0; s < ahead; ++s) {
        expect(full + 8 * s, BN * 128);
        copy_tile(ring + s * STAGE_BYTES + BM * 128, weight, full + 8 * s, s * CHUNK, n0);
    }
    wait_for_dependencies();
    if (m0 >= state[0]) {  // padding of the bucket: the block may not end before its copies have
        for (int s = 0; s < ahead; ++s) {
            arrive(full + 8 * s);
            wait(full + 8 * s, 0);
        }
        return;
    }
    for (int c = 0; c < chunks; ++c) {
        const int s = c % STAGES;
        if (c >= STAGES) {
            wait(empty + 8 * s, (c / STAGES - 1) & 1);
            expect(full + 8 * s, BN * 128);
            copy_tile(ring + s * STAGE_BYTES + BM * 128, weight, full + 8 * s, c * CHUNK, n0);
        }
        expect(full + 8 * s, BM * 128);
        copy_tile(ring + s * STAGE_BYTES, x, full + 8 * s, c * CHUNK, m0);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + 32) wave_wgmma(
    const __grid_constant__ Maps maps, const __grid_constant__ Wave wave, const int* state) {
    extern __shared__ __align__(1024) char shared[];
    __shared__ __align__(8) unsigned long long barriers[2 * STAGES];
    let_dependents_start();
    int j = 0;
    while (j + 1 < wave.count && (int)blockIdx.x >= wave.jobs[j + 1].first) ++j;
    const Job job = wave.jobs[j];  // a copy: read once, and no store can alias it
    const int block = blockIdx.x - job.first;
    if (PER_ROW && job.kind != LINEAR) {
        if (threadIdx.x < THREADS) rows_of<THREADS / 32>(job, block, state);
        return;
    }
    const int m0 = block / job.tiles * BM, tile_column = block % job.tiles, n0 = tile_column * BN;
    const int chunks = (job.depth + CHUNK - 1) / CHUNK;
    const unsigned ring = ((unsigned)__cvta_generic_to_shared(shared) + 1023) & ~1023u;
    const unsigned full = (unsigned)__cvta_generic_to_shared(barriers), empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {  // a buffer is full when both factors have come
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 2;" ::"r"(full + 8 * s) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + 8 * s), "n"(GROUPS) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= THREADS) {
        if (threadIdx.x == THREADS) copy_all(&maps.x[j], &maps.weight[j], m0, n0, chunks, state, ring, full, empty);
        return;
    }
    const Columns own(job, n0);
    wait_for_dependencies();
    const int rows = state[0], batch = state[3];
    if (m0 >= rows) return;
    const int group = threadIdx.x >> 7, lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
    float sums[BN / PIECE][PIECE / 2];
#pragma unroll
    for (int p = 0; p < BN / PIECE; ++p)
#pragma unroll
        for (int i = 0; i < PIECE / 2; ++i) sums[p][i] = 0.0f;
    for (int c = 0; c < chunks; ++c) {
        const int s = c % STAGES;
        wait(full + 8 * s, (c / STAGES) & 1);
        const unsigned long long a = described(ring + s * STAGE_BYTES + group * 64 * 128);
        const unsigned long long b = described(ring + s * STAGE_BYTES + BM * 128);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int p = 0; p < BN / PIECE; ++p) multiply(sums[p], a + 2 * k, b + 2 * k + p * (PIECE * 128 >> 4));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (c > 0 && (threadIdx.x & 127) == 0) arrive(empty + 8 * ((c - 1) % STAGES));
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int p = 0; p < BN / PIECE; ++p)
#pragma unroll
        for (int i = 0; i < PIECE / 2; ++i) asm volatile("" : "+f"(sums[p][i])::"memory");
    SYNC();
    float* products = reinterpret_cast<float*>(shared + (ring - (unsigned)__cvta_generic_to_shared(shared)));
#pragma unroll
    for (int p = 0; p < BN / PIECE; ++p)
#pragma unroll
        for (int n = 0; n < PIECE / 8; ++n) {
            float* to = products + (group * 64 + warp * 16 + (lane >> 2)) * (BN + 8) + p * PIECE + n * 8 + (lane & 3) * 2;
            *reinterpret_cast<float2*>(to) = make_float2(sums[p][4 * n], sums[p][4 * n + 1]);
            *reinterpret_cast<float2*>(to + 8 * (BN + 8)) = make_float2(sums[p][4 * n + 2], sums[p][4 * n + 3]);
        }
    SYNC();
    conclude<1>(wave.head, job, own, products, m0, n0, tile_column, rows, batch);
}
