// Products of a warpgroup on the tensor cores (wgmma, sm_90a): d[64 rows, PIECE columns] += a b^T over 32 bytes of K, PIECE 64 or
// 128. Factors lie in shared memory, in rows of 128 bytes as the tensor memory accelerator swizzles them, or `a` in registers.
// The including file defines X and PIECE.
#pragma once
#include "dense/warpgroup.cuh"

// Groups of 8 rows lie 1024 bytes apart; the matrix begins at a multiple of that, or 32 bytes of K further.
__device__ __forceinline__ unsigned long long described(unsigned address) {
    return ((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
#define N32 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define N64 N32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
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

// float32 to be taken as tf32, `a` as PTX lays out m16n8k8 over the lanes of each of the four warps. ADD: 0 begins anew.
template <int ADD> __device__ __forceinline__ void multiply(float* d, const unsigned a[4], unsigned long long b) {
#if PIECE == 128
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 " N64 "}, {%64, %65, %66, %67}, %68, %69, 1, 1;"
                 : D16(0), D16(16), D16(32), D16(48) : A4(a), "l"(b), "n"(ADD));
#else
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 " N32 "}, {%32, %33, %34, %35}, %36, %37, 1, 1;"
                 : D16(0), D16(16) : A4(a), "l"(b), "n"(ADD));
#endif
}
