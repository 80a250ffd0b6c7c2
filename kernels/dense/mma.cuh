// Products on the tensor cores, a warp each: c[16, 8] += a[16, depth] b[depth, 8], factors as PTX lays them out over the lanes.
#pragma once
#include "runtime/common.cuh"

__device__ __forceinline__ void multiply(float c[4], const unsigned a[4], const unsigned b[2], const bf16*) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void multiply(float c[4], const unsigned a[4], const unsigned b[2], const float*) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void multiply(float c[4], const unsigned a[4], const unsigned b[2], const fp8*) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Four 8 x 8 matrices of 16-bit words from shared memory: of 4-byte words the left factor, a lane's address its row and 16 bytes.
__device__ __forceinline__ void load_matrices(unsigned r[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

// Rounds factors to the digits of tf32; `rest` is what is lost, exactly, itself rounded to tf32: together 23 binary digits.
// (The tensor cores cut what they are given after 11 digits; adding half a unit first makes that rounding.)
template <int N> __device__ __forceinline__ void split(unsigned* v, unsigned* rest) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float whole = __uint_as_float(v[i]);
        const bool huge = (v[i] & 0x7fffffffu) >= 0x7f7ff000u;  // would round to infinity, or is it, or NaN: which must stay NaN
        const unsigned cut = whole != whole ? 0x7fc00000u : v[i] & 0xffffe000u;
        v[i] = huge ? cut : (v[i] + 0x1000u) & 0xffffe000u;
        rest[i] = huge ? 0u : __float_as_uint(whole - __uint_as_float(v[i])) + 0x1000u;
    }
}
