// How a lookup moves words: ids and numbers into shared memory, and columns of a table row, of any dtype, into registers.
// The including file defines THREADS, of a block.
#pragma once
#include "runtime/common.cuh"

enum Dtype { F32 = 0, F16 = 1, BF16 = 2, I8 = 3 };

// Starts copying words into shared memory. Returns where the first one will lie: as far into a line of 128 bytes as `from` does,
// for which `to` is the start of one. Only so is a line one request: 16,384 rows of 26 ids cross the bus in 24 us, and in 52 us if
// they lie otherwise, as lines then come in halves (H200). Words that share 16 bytes with an end come along, of the `before` and
// `after` that the array has there.
template <typename T>
__device__ __forceinline__ const T* stage(const T* from, int words, int before, int after, char* to) {
    constexpr int V = 16 / sizeof(T);
    const int skew = (int)((unsigned long long)from & 127) / (int)sizeof(T);  // words of its line before `from`
    T* at = reinterpret_cast<T*>(to) + skew;
    const unsigned target = (unsigned)__cvta_generic_to_shared(at);
    for (int i = threadIdx.x * V - skew; i < words; i += THREADS * V) {
        if (i <= -V) continue;
        if (i >= -before && i + V <= words + after) {
            copy16(target + i * (int)sizeof(T), from + i);
        } else {
#pragma unroll 1
            for (int k = max(i, 0); k < min(i + V, words); ++k)
                copy_word(at + k, from + k);
        }
    }
    return at;
}

// Through the L1: requests that skew towards a few hot rows would all queue at the slice of the L2 that has them. 16,384 x 26
// rows of dim 16 take 7 us rather than 15, Zipf ids (H200); uniform ids take the same time either way.
#if EVICT_FIRST           // tiling.py says where
#define LOAD "ld.global.nc.L1::evict_first"
#else
#define LOAD "ld.global.nc"
#endif
template <int BYTES>
__device__ __forceinline__ void load_bytes(const char* p, unsigned* w) {
    if constexpr (BYTES == 1) {
        asm(LOAD ".u8 %0, [%1];" : "=r"(*w) : "l"(p));
    } else if constexpr (BYTES == 2) {
        unsigned short h;
        asm(LOAD ".u16 %0, [%1];" : "=h"(h) : "l"(p));
        *w = h;
    } else if constexpr (BYTES == 4) {
        asm(LOAD ".u32 %0, [%1];" : "=r"(*w) : "l"(p));
    } else if constexpr (BYTES == 8) {
        asm(LOAD ".v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(p));
    } else {
        asm(LOAD ".v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(p));
        if constexpr (BYTES > 16) load_bytes<BYTES - 16>(p + 16, w + 4);
    }
}

// How a unit is read: fields of a word that units.py packs, whose How says what each is. No functions: with those the compiler
// orders the whole kernel otherwise.
#define HOW_KIND(how) ((how) & 3)
#define HOW_DTYPE(how) ((how) >> 2 & 3)
#define HOW_MEAN(how) ((how) >> 4 & 1)
#define HOW_MAY_PAD(how) ((how) >> 5 & 1)
#define HOW_COUNTED(how) ((how) >> 6 & 1)
#define HOW_LARGEST(how) ((how) >> 7 & 1)
#define HOW_WIDTH(how) ((how) >> 8 & 15)
#define HOW_ID_BYTES(how) ((how) >> 12 & 15)
#define HOW_PICK(how) ((how) >> 16)  // an id's bytes of its word, for __byte_perm
#define HOW_PADDING_ID(how) (~0ull >> (64 - 8 * HOW_ID_BYTES(how)))

// Whether a unit has dtype D; known at compile time where all of a set have one.
template <int SET, int D>
__device__ __forceinline__ bool is(int how) { return SET == 1 << D || ((SET >> D & 1) && HOW_DTYPE(how) == D); }

template <int SET> __host__ __device__ constexpr int widest() { return SET & 1 ? 4 : SET & 6 ? 2 : 1; }

// N columns of one row, as they come.
template <int N, int SET>
struct Raw {
    unsigned words[(N * widest<SET>() + 3) / 4];
    __device__ __forceinline__ void load(int how, const char* p) {
        if (is<SET, F32>(how)) load_bytes<N * (SET & 1 ? 4 : 1)>(p, words);
        else if (is<SET, I8>(how)) load_bytes<N>(p, words);
        else load_bytes<N * (SET & 7 ? 2 : 1)>(p, words);
    }
    __device__ __forceinline__ float value(int how, int k) const {
        if (is<SET, F32>(how)) return __uint_as_float(words[SET & 1 ? k : 0]);
        if (is<SET, I8>(how))  // as the last byte of 2^23 + 128 + value: converting takes four times as long
            return __uint_as_float(__byte_perm(words[k / 4] ^ 0x80808080u, 0x4b000000u, 0x7650 + k % 4)) - 8388736.0f;
        const unsigned short h = (unsigned short)(words[SET & 7 ? k / 2 : 0] >> 16 * (k % 2));
        return is<SET, F16>(how) ? half_to_float(h) : __uint_as_float((unsigned)h << 16);
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int k = 0; k < (int)(sizeof(words) / 4); ++k) words[k] = 0;
    }
};
