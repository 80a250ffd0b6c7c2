// Values that blocks of a launch hand one another: each lies in memory with the batch's number beside it, so that to read one is to
// know that it is there: no barrier, no fence, and nothing to be cleared. A block may wait for those alone that started before it
// (chain.cu). The including file defines THREADS.
#pragma once
#include "runtime/common.cuh"

#define IN_FLIGHT 4

struct __align__(8) Word { float value; int batch; };

typedef unsigned long long u64;
__device__ __forceinline__ u64 word(const Word* at) {
    u64 w;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(w) : "l"(at) : "memory");
    return w;
}
__device__ __forceinline__ void put(Word* at, float value, int batch) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"((u64)(unsigned)batch << 32 | __float_as_uint(value)) : "memory");
}
__device__ __forceinline__ float take(const Word* at, int batch) {
    u64 w;
    do w = word(at);
    while ((int)(w >> 32) != batch);
    return __uint_as_float((unsigned)w);
}

// Two neighbouring columns of x, in shared memory.
__device__ __forceinline__ void put_pair(float* to, u64 a, u64 b) {
    *reinterpret_cast<float2*>(to) = make_float2(__uint_as_float((unsigned)a), __uint_as_float((unsigned)b));
}
__device__ __forceinline__ void put_pair(bf16* to, u64 a, u64 b) {
    unsigned w;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(__uint_as_float((unsigned)b)), "f"(__uint_as_float((unsigned)a)));
    *reinterpret_cast<unsigned*>(to) = w;
}

// x of links before, as it comes: rows * depth words to X[rows][stride]; rows is at most MOST.
template <int MOST, typename T>
__device__ __forceinline__ void take_rows(T* to, int stride, const Word* from, int rows, int depth, int batch) {
    const int pairs = depth / 2, all = rows * pairs;
    for (int first = threadIdx.x; first < all; first += THREADS * IN_FLIGHT) {
        unsigned waiting = 0;
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; ++k) waiting |= (unsigned)(first + k * THREADS < all) << k;
        while (waiting) {
            u64 a[IN_FLIGHT], b[IN_FLIGHT];
#pragma unroll
            for (int k = 0; k < IN_FLIGHT; ++k)
                if (waiting >> k & 1)
                    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                                 : "=l"(a[k]), "=l"(b[k]) : "l"(from + 2 * (first + k * THREADS)) : "memory");
#pragma unroll
            for (int k = 0; k < IN_FLIGHT; ++k)
                if (waiting >> k & 1 && (int)(a[k] >> 32) == batch && (int)(b[k] >> 32) == batch) {
                    const int i = first + k * THREADS, r = MOST == 1 ? 0 : i / pairs;
                    put_pair(to + r * stride + 2 * (i - r * pairs), a[k], b[k]);
                    waiting &= ~(1u << k);
                }
        }
    }
}
