// What the rows of a context share of a product, W_c x_c of its columns of x, is multiplied once, by a job of kind SHARE on
// the first blocks of the wave: x[most, depth] are these columns of each context, as the lookup wrote them. Blocks of the
// product itself multiply the other columns of their rows, and add the share of each row's context as they add its bias.
//
// A row's block waits, when its products are there, for the number of the batch beside the shares: both take about as long. It
// waits only for blocks that started before it (see chain.cu). A batch of more than `most` contexts has no shares: the first
// blocks have nothing to do, and a row's block goes on with the columns of its context. The sum's order is fixed either way.
// Included by wave.cuh behind Job.
#pragma once

#define SHARE 3  // a kind of job
static_assert(!SHARES || (!FP8 && !CLUSTERED), "products of e4m3 have a scale each; a cluster's blocks take chunks in their order");

__device__ __forceinline__ bool is_share(const Job& job) { return SHARES && job.kind == SHARE; }
__device__ __forceinline__ bool has_shares(const Job& job, const int* state) {
    return SHARES && 0 < state[CONTEXTS] && state[CONTEXTS] <= job.most;
}
// Of a SHARE one a context.
__device__ __forceinline__ int rows_of_product(const Job& job, const int* state) {
    if (is_share(job)) return has_shares(job, state) ? state[CONTEXTS] : 0;
    return state[TRUE_ROWS];
}

// The chunks of 128 bytes of K in the order in which a block takes them: first a row's own, then, if there are no shares, those
// of its context. In a cluster a block takes its part of all, from `cut` on; of few chunks some blocks have none.
struct Chunks {
    int all, own, cut;
    __device__ __forceinline__ Chunks(const Job& job, int rank, int cluster)
        : all((job.depth * (int)sizeof(X) + 127) / 128), own(SHARES ? all - job.skipped : all), cut(SHARES ? job.cut : 0) {
        if (!CLUSTERED) return;
        cut = all * rank / cluster;
        all = own = all * (rank + 1) / cluster - cut;
    }
    __device__ __forceinline__ int at(int c) const {
        if (CLUSTERED) return c + cut;
        return !SHARES || c < cut ? c : c < own ? c + all - own : c - own + cut;
    }
    __device__ __forceinline__ bool apart(const Job& job, const int* state) const { return own < all && has_shares(job, state); }
    __device__ __forceinline__ int count(const Job& job, const int* state) const { return apart(job, state) ? own : all; }
};

// The contexts of a tile's rows, in shared memory, when the shares of all of them are there. Before a barrier.
__device__ __forceinline__ void wait_for_shares(const Job& job, int* contexts, int m0, int tile_column, int rows, int batch) {
    for (int r = threadIdx.x; r < min(BM, rows - m0); r += THREADS) {
        const int context = job.context_of_row[m0 + r];
        const int* at = job.shares_done + context / BM * job.tiles + tile_column;
        int found;
        do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(at) : "memory");
        while (found != batch);
        contexts[r] = context;
    }
}

// A thread's 4 columns of the share of the context that it met last.
struct Share {
    const float* at;
    int width, context;
    float own[4];
    __device__ __forceinline__ Share(const Job& job, int column) : at(job.shares + column), width(job.width), context(-1) {}
    __device__ __forceinline__ void add(int of, float v[4]) {
        if (of != context) load4(at + (long long)(context = of) * width, own);
        for (int k = 0; k < 4; ++k) v[k] += own[k];
    }
};

// Adds up the products of a SHARE's tile (as conclude's), stores them, and tells that they are there.
template <int PARTS>
__device__ __forceinline__ void store_shares(const Job& job, const float* products, int m0, int n0, int tile_column, int rows, int batch) {
    const int own = threadIdx.x % ROW_THREADS * 4, column = n0 + own;
    for (int r = threadIdx.x / ROW_THREADS; column < job.width && r < min(BM, rows - m0); r += THREADS / ROW_THREADS) {
        float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (int w = 0; w < PARTS; ++w) {
            float p[4];
            load4(products + (w * BM + r) * (BN + 8) + own, p);
            for (int k = 0; k < 4; ++k) v[k] += p[k];
        }
        store4(job.shares + (long long)(m0 + r) * job.width + column, v);
    }
    SYNC();
    if (threadIdx.x == 0)
        asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(job.shares_done + m0 / BM * job.tiles + tile_column), "r"(batch) : "memory");
}
