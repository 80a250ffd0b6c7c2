// The yardstick of the lookup's bandwidth: out[i] = table[ids[i]], rows of VECTORS * 16 bytes, nothing checked or converted.
//
// Grid: a thread owns one 16-byte vector of UNROLL rows that lie a grid apart, so that neighbouring threads read and write
// neighbouring addresses and every thread has UNROLL independent loads in flight. Bytes: n * (4 + 2 * row bytes).

#ifndef VECTORS
#define VECTORS 4
#define UNROLL 4
#endif

extern "C" __global__ void __launch_bounds__(256) gather(
    const uint4* __restrict__ table, const int* __restrict__ ids, uint4* __restrict__ out, long long n) {
    const long long thread = (long long)blockIdx.x * 256 + threadIdx.x, apart = (long long)gridDim.x * 256 / VECTORS;
    const long long first = thread / VECTORS;
    const int vector = (int)(thread % VECTORS);
    uint4 v[UNROLL];
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
        const long long i = first + k * apart;
        if (i < n) v[k] = table[(long long)ids[i] * VECTORS + vector];
    }
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
        const long long i = first + k * apart;
        if (i < n) out[i * VECTORS + vector] = v[k];
    }
}
