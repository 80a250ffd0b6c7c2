// How a lookup that was launched ahead of its rows waits for them. The host stages rows while the kernel starts, and tells in a
// pinned word of the batch's header how many (batch_header.py says how). One thread of the grid reads that word and passes it
// on in device memory: reads of one host line queue up at 40 ns each (H200). From the host's stores to a block's reads leads a
// chain of releases and acquires, with the block's own barrier at its end. The grid may be larger than the device: waiting
// blocks then need the one that passes on to run. As the first of the grid it starts first (which CUDA does not promise, but
// every GPU so far does), and it waits for the host alone.
#pragma once
#include "runtime/common.cuh"

#define ALL_ROWS 0x7fffffff

enum HeaderWord { STAGED_ROWS = 10, STAGED_CONTEXTS = 11 };  // batch_header.py

// Until all rows are staged; gives how many the batch has. ready: rows that are staged, 0 before the launch.
__device__ __forceinline__ int pass_on(const int* told, int* ready) {
    for (int known = 0;;) {
        int word;
        asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(word) : "l"(told) : "memory");
        const int rows = word < 0 ? -1 - word : ALL_ROWS;
        if (rows != known) asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(ready), "r"(rows) : "memory");
        if (word >= 0) return word;
        known = rows;
    }
}

// Until the first `rows` rows are staged, or all that there are. A thousand blocks that look without a pause would keep a slice
// of the L2 busy. A sleep lasts up to twice as long as asked for, and the host copies a row in 4 to 5 ns (H200 host): it ends
// before rows ahead of ours are there. Not longer, for the batch may end before our rows, which then are padding.
__device__ __forceinline__ void wait_for_rows(const int* ready, int rows) {
    for (;;) {
        int now;
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(ready) : "memory");
        if (now >= rows) return;
        __nanosleep(min(rows - now, 256));
    }
}
