// Products of a warpgroup (wgmma, sm_90a): d[64, COLUMNS] += a b^T over 32 bytes of K, COLUMNS a multiple of 16 up to 128. `a`
// lies in registers, of bf16 as PTX lays out m16n8k16 over the lanes of each of the four warps, of float32 as m16n8k8. b lies
// in shared memory without a swizzle: 8 rows of 16 bytes, the same rows' other 16 bytes, then the next 8 rows. The including
// file defines X and COLUMNS.
#pragma once
#include "dense/warpgroup.cuh"

__device__ __forceinline__ unsigned long long described(unsigned address) {
    return ((address & 0x3ffff) >> 4) | 128ull >> 4 << 16 | 256ull >> 4 << 32;  // to the other 16 bytes, to 8 rows on
}
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TO_16 "%0,%1,%2,%3,%4,%5,%6,%7"
#define TO_32 TO_16 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define TO_48 TO_32 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define TO_64 TO_48 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define TO_80 TO_64 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define TO_96 TO_80 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define TO_112 TO_96 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define TO_128 TO_112 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define OF_16 "{%8,%9,%10,%11}, %12"
#define OF_32 "{%16,%17,%18,%19}, %20"
#define OF_48 "{%24,%25,%26,%27}, %28"
#define OF_64 "{%32,%33,%34,%35}, %36"
#define OF_80 "{%40,%41,%42,%43}, %44"
#define OF_96 "{%48,%49,%50,%51}, %52"
#define OF_112 "{%56,%57,%58,%59}, %60"
#define OF_128 "{%64,%65,%66,%67}, %68"
#define SUMS_16 D4(0), D4(4)
#define SUMS_32 D16(0)
#define SUMS_48 SUMS_32, D4(16), D4(20)
#define SUMS_64 SUMS_32, D16(16)
#define SUMS_80 SUMS_64, D4(32), D4(36)
#define SUMS_96 SUMS_64, D16(32)
#define SUMS_112 SUMS_96, D4(48), D4(52)
#define SUMS_128 SUMS_96, D16(48)
#define WGMMA(k_and_types, more)                                                                                             \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" TEXT(COLUMNS) k_and_types " {" JOIN(TO_, COLUMNS) "}, " JOIN(OF_, COLUMNS) \
                 more : JOIN(SUMS_, COLUMNS) : A4(a), "l"(b))
__device__ __forceinline__ void multiply(float* d, const unsigned a[4], unsigned long long b) {
    if (sizeof(X) == 2) WGMMA("k16.f32.bf16.bf16", ", 1, 1, 1, 0;");
    else WGMMA("k8.f32.tf32.tf32", ", 1, 1, 1;");
}
