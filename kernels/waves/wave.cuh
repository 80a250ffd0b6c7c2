// What every kernel that computes a wave shares: its arguments, and what is done with a tile's products once they are there.
// The including file defines X, BM, BN, TASKS, DOTS, LAYERS, THREADS (that take part in the epilogue) and SYNC (for them), and
// what the wave's jobs need, for code is fetched anew in every launch and what is left out is not waited for (H200: the epilogue
// took 4,000 cycles with all activations unrolled into it): HEAD, PER_ROW (bits of FM, CROSS and NORM), CROSSED (DCN-V2
// layers: 1, with an outer bias 3; gates: 4), KINDS (bits of activations), SHARES (whether contexts have shares of products: shares.cuh),
// CLUSTERED (whether a cluster's blocks compute a tile together, each a part of K).
#pragma once
#include "runtime/barriers.cuh"
#include "runtime/common.cuh"
#include "waves/awaited_values.cuh"
#include "waves/epilogue.cuh"
#include "dense/row_norms.cuh"

#define ROW_THREADS (BN / 4)  // threads that share a row in the epilogue, 4 columns each
#define MAX_JOBS 8
#define FP8 (sizeof(X) == 1)
#define GATES (CROSSED & 4)

struct Job {
    const X* x;                // [rows, x_ld]
    const void* weight;        // LINEAR: X[width, depth]; CROSS: float[DOTS, width]; NORM: float[2, depth]
    const float* bias;         // LINEAR: [width]; CROSS: [DOTS]
    const float* shape;        // [3, width] of PRELU and DICE (activation.cuh), or null
    const float* scale;        // [width]: what the products are multiplied by, where X is fp8
    const X* x0;               // of a DCN-V2 layer x0 * (W x + b) + xl, or a gate x0_scale * x0 * activation(W x + b), else null
    const X* xl;               // of a DCN-V2 layer: x itself, or of low rank, where x is V xl, another value; of a gate null
    void* out;                 // X[rows, out_ld], float[rows, ..] of FM and CROSS; null if only the head reads it
    const float* head;         // [TASKS, width]: the head's weights for these columns, or null
    float x_scale, x0_scale, xl_scale;  // a value is what lies in memory times its scale (fp8; of x for FM; x_scale of NORM: its eps)
    float out_factor;          // one over that of out
    int x_ld, x0_ld, xl_ld, out_ld;
    int width, depth;          // columns of out and of x, multiples of 8; FM, NORM: fields and dim
    int kind, activation;
    int outer;                 // whether the bias is added behind the product with x0
    int first, tiles;          // first block; column tiles
    int slot;                  // of the head's partial sums
    int cut, skipped;          // of a product with shares: the chunk at which its contexts' columns begin, and how many they are
    int most;                  // contexts of a batch that has shares
    const int* context_of_row; // [rows]
    float* shares;             // [most, width]
    int* shares_done;          // [most / BM, tiles]: the number of the batch whose shares are there
};
struct Head {
    Word* partial;             // [rows, slots, TASKS]
    const float* bias;         // [TASKS]
    const float* logits[MAX_LOGITS];
    float* scores;             // [rows, TASKS], pinned host memory
    int* done;                 // pinned; see announce
    int steps[MAX_LOGITS];     // 0: one logit for all tasks; else TASKS logits a row
    int slots;
};
struct Wave { Job jobs[MAX_JOBS]; Head head; int count, cluster; };  // cluster: blocks of one
#include "waves/shares.cuh"

// The last of all blocks that have sums for the head of the tile's rows adds them up, 8 lanes a row, always in the same order. It waits
// for the others' numbers, as a link of a chain does: they started before it.
__device__ __forceinline__ void finish(const Head& head, int m0, int rows, int batch) {
    constexpr int EACH = (BM * 8 + THREADS - 1) / THREADS;  // rows of 8 lanes: all that they read is on its way at once
    const int n = min(BM, rows - m0), lane = threadIdx.x & 7, from = threadIdx.x >> 3;
    const auto row = [&](int k) { return (long long)m0 + min(from + k * (THREADS / 8), n - 1); };
    const float* const logits = lane < MAX_LOGITS ? head.logits[lane] : nullptr;
    const bool each = logits && head.steps[lane];  // of whose tasks
    for (int t = 0; t < TASKS; ++t) {
        float z[EACH];
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const float* own = lane == MAX_LOGITS ? head.bias + t : logits ? logits + (each ? row(k) * TASKS + t : row(k)) : nullptr;
            z[k] = own ? __ldcg(own) : 0.0f;
        }
#pragma unroll 1
        for (int s = lane; s < head.slots; s += 8) {
            for (unsigned waiting = (1u << EACH) - 1; waiting;) {
                u64 w[EACH];
#pragma unroll
                for (int k = 0; k < EACH; ++k) w[k] = word(head.partial + (row(k) * head.slots + s) * TASKS + t);
#pragma unroll
                for (int k = 0; k < EACH; ++k)
                    if (waiting >> k & 1 && (int)(w[k] >> 32) == batch) z[k] += __uint_as_float((unsigned)w[k]), waiting &= ~(1u << k);
            }
        }
#pragma unroll
        for (int k = 0; k < EACH; ++k) {  // whole warps
            const int r = from + k * (THREADS / 8);
            for (int step = 4; step > 0; step >>= 1) z[k] += __shfl_xor_sync(0xffffffffu, z[k], step);
            if (lane == 0 && r < n) head.scores[(long long)(m0 + r) * TASKS + t] = 1.0f / (1.0f + expf(-z[k]));
        }
    }
    SYNC();
    if (threadIdx.x * ROWS_A_WORD < n) announce(head.done, m0 / ROWS_A_WORD + threadIdx.x, batch);
}

// A thread's 4 columns of the tile: what is added to their products, and the head's weights for them. Read ahead of the products.
struct Columns {
    int column;  // in the tile
    bool there;
    float bias[4], scale[4], share[TASKS][4];

    __device__ __forceinline__ Columns(const Job& job, int n0) : column(threadIdx.x % ROW_THREADS * 4), there(n0 + column < job.width) {
        for (int k = 0; k < 4; ++k) bias[k] = 0.0f;
        for (int t = 0; t < TASKS; ++t)
            for (int k = 0; k < 4; ++k) share[t][k] = 0.0f;
        if (!there || is_share(job)) return;
        load4(job.bias + n0 + column, bias);
        if (FP8) load4(job.scale + n0 + column, scale);
        if (HEAD && job.head)
            for (int t = 0; t < TASKS; ++t) load4(job.head + t * job.width + n0 + column, share[t]);
    }
};

// The blocks of a cluster have a part of a tile's sums each, in PARTS products as conclude takes them. The first block adds them up, in
// the order of K, in the place of its first products; to the others this says that they are done.
template <int PARTS> __device__ __forceinline__ bool add_up(float* products, int rank, int cluster) {
    static_assert(THREADS % ROW_THREADS == 0, "a thread goes on with what it added up, here and in conclude");
    for (int i = threadIdx.x; PARTS > 1 && i < BM * ROW_THREADS; i += THREADS) {
        float* at = products + i / ROW_THREADS * (BN + 8) + i % ROW_THREADS * 4;
        float v[4];
        load4(at, v);
#pragma unroll
        for (int w = 1; w < PARTS; ++w) {
            float p[4];
            load4(at + w * BM * (BN + 8), p);
            for (int k = 0; k < 4; ++k) v[k] += p[k];
        }
        store4(at, v);
    }
    arrive_at_cluster();
    wait_for_cluster();
    if (rank) {
        arrive_at_cluster();
        wait_for_cluster();  // its sums have to stay until they are read
        return false;
    }
    for (int i = threadIdx.x; i < BM * ROW_THREADS; i += THREADS) {
        float* at = products + i / ROW_THREADS * (BN + 8) + i % ROW_THREADS * 4;
        const unsigned address = (unsigned)__cvta_generic_to_shared(at);
        float v[4];
        load4(at, v);
#pragma unroll 4
        for (int other = 1; other < cluster; ++other) {
            const float2 a = load_there(address, other), b = load_there(address + 8, other);
            v[0] += a.x, v[1] += a.y, v[2] += b.x, v[3] += b.y;
        }
        store4(at, v);
    }
    arrive_at_cluster();
    return true;
}

constexpr int OWN_ROWS = (BM * ROW_THREADS + THREADS - 1) / THREADS;  // of the tile, in which a thread has its columns
// Whether x0 and xl are read ahead of the products, where they take few registers; else it is a trip to the L2 behind them.
constexpr bool EARLY = CROSSED && OWN_ROWS * (int)sizeof(Four<X>) <= 64;
constexpr int MOST_AT_ONCE = CROSSED && KINDS < 1 << GELU ? 16 / (int)sizeof(X) : 4;
constexpr int AT_ONCE = EARLY || OWN_ROWS < MOST_AT_ONCE ? OWN_ROWS : MOST_AT_ONCE;

// What a thread's products of some rows meet in a cross layer or a gate. All reads are on their way before the first is used.
struct Met {
    Four<X> x0[AT_ONCE], xl[AT_ONCE];
    __device__ __forceinline__ void read(const Job& job, const Columns& own, int m0, int n0, int from, int rows) {
        if (!CROSSED || !own.there || !job.x0) return;
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {
            const int row = m0 + threadIdx.x / ROW_THREADS + (from + u) * (THREADS / ROW_THREADS);
            if (row >= rows) continue;
            x0[u] = four(job.x0 + (long long)row * job.x0_ld + n0 + own.column);
            if (!GATES || job.xl) xl[u] = four(job.xl + (long long)row * job.xl_ld + n0 + own.column);
        }
    }
};

// Adds up the PARTS products [PARTS][BM][BN + 8] of the tile, applies bias, cross layer and activation, stores, and hands the
// head its share. met: read if EARLY. contexts: of the tile's rows, if each context has a share of the products.
template <int PARTS>
__device__ __forceinline__ void conclude(
    const Head& head, const Job& job, const Columns& own, Met& met, const float* products, int m0, int n0, int tile_column,
    int rows, int batch, const int* contexts) {
    const int column = n0 + own.column, from = threadIdx.x / ROW_THREADS;
    constexpr int STEP = THREADS / ROW_THREADS;
    const bool outer = CROSSED & 2 && job.outer;
    Share of_context(job, column);
    Shape shape[SHAPED ? 4 : 1];  // read here: kept beside the sums of the products it would take their registers
    if (SHAPED && own.there && job.shape)
        for (int k = 0; k < 4; ++k) shape[k] = shape_of<HAS(DICE) ? DICE : PRELU>(job.shape, job.width, column + k);
    for (int i = 0; i < OWN_ROWS; i += AT_ONCE) {
        if (!EARLY) met.read(job, own, m0, n0, i, rows);
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {
            const int r = from + (i + u) * STEP, row = m0 + r;
            if (r >= BM) break;  // whole warps
            const bool valid = own.there && row < rows;
            float v[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) v[k] = FP8 || outer ? 0.0f : own.bias[k];
            if (SHARES && contexts && valid) of_context.add(contexts[r], v);
            for (int w = 0; w < PARTS; ++w) {
                float p[4];
                load4(products + (w * BM + r) * (BN + 8) + own.column, p);
                for (int k = 0; k < 4; ++k) v[k] += p[k];
            }
            if (FP8)
                for (int k = 0; k < 4; ++k) v[k] = v[k] * own.scale[k] + (outer ? 0.0f : own.bias[k]);
            for (int k = 0; k < 4; ++k) v[k] = activated(v[k], job.activation, shape[SHAPED ? k : 0]);  // a DCN-V2 layer has none
            if (CROSSED && valid && job.x0) {
                float a[4], b[4] = {};
                widen4(met.x0[u], a);
                if (!GATES || job.xl) widen4(met.xl[u], b);
                if (FP8 || GATES)
                    for (int k = 0; k < 4; ++k) a[k] *= job.x0_scale, b[k] *= job.xl_scale;
                for (int k = 0; k < 4; ++k) v[k] = a[k] * v[k] + b[k];
                if (outer)
                    for (int k = 0; k < 4; ++k) v[k] += own.bias[k];
            }
            if (HEAD && job.head) {
                for (int t = 0; t < TASKS; ++t) {
                    float dot = 0.0f;
                    if (valid)
                        for (int k = 0; k < 4; ++k) dot += own.share[t][k] * v[k];
                    for (int step = ROW_THREADS / 2; step > 0; step >>= 1) dot += __shfl_xor_sync(0xffffffffu, dot, step);
                    if (threadIdx.x % ROW_THREADS == 0 && row < rows)
                        put(head.partial + ((long long)row * head.slots + job.slot + tile_column) * TASKS + t, dot, batch);
                }
            }
            if (FP8)
                for (int k = 0; k < 4; ++k) v[k] *= job.out_factor;
            if (valid && job.out) store4(static_cast<X*>(job.out) + (long long)row * job.out_ld + column, v);
        }
    }
    if (HEAD && job.head && job.slot + tile_column == head.slots - 1) finish(head, m0, rows, batch);
}

// NORM jobs by fields; FM and CROSS a warp a row, WARPS rows a block.
template <int WARPS_> __device__ __forceinline__ void rows_of(const Job& job, int block, const int* state) {
    wait_for_dependencies();
    const int rows = state[TRUE_ROWS], row = block * WARPS_ + (threadIdx.x >> 5);
    if (PER_ROW == NORM || (PER_ROW & NORM && job.kind == NORM)) {
        norm_fields<32 * WARPS_>(
            job.x, job.x_ld, rows, block, job.width, job.depth, job.x_scale, static_cast<const float*>(job.weight),
            job.activation == RELU_, [&](int r, int column, const float* v, int count) {
                X* at = static_cast<X*>(job.out) + (long long)r * job.out_ld + column;
                if (count == 4) store4(at, v);
                else store_value(at, *v);
            });
        return;
    }
    if (!LOGITS || row >= rows) return;
    const float scale = FP8 && job.kind == FM ? job.x_scale * job.x_scale : 1.0f;
    interact(job, row, [&](long long i, float logit) { static_cast<float*>(job.out)[i] = logit * scale; });
}
