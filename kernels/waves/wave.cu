// One wave of a model's graph in one launch: every operator that can run at the same time, each on its own range of blocks.
// Linear layers, gates and DCN-V2 layers are tiled matrix products on the tensor cores; a factorization machine and the folded cross
// network of DCN take a warp a row beside them, layer norms a few lanes a field. If the wave is the model's last, its products are
// dotted with the head's weights as they leave the registers. The last block of a tile of rows waits for the others' sums, and writes
// scores.
//
// Grid: job j owns blocks [first_j, first_{j+1}); a product's tile t is rows (t / tiles) * BM.., columns (t % tiles) * BN...
// K advances in spans of SPAN * 128 bytes through a ring of STAGES buffers (cp.async). The buffers of the weights are filled before
// the wave waits for the one before it (programmatic dependent launch), so that only x is on the critical path.
// Few tiles of a deep K: a cluster's blocks compute one together. Their numbers follow one another.
// Warps: WM x WN tiles of the block's tile, times WK that take every WK-th step of 32 bytes of K and are added up at the end.
// Bytes of a block: (BM + BN) * depth * sizeof(X) from L2, BM * BN * sizeof(X) out.

#ifndef X
#define X float
#define PASSES 1  // of float32 products: 1 rounds to tf32; 3 splits each factor in two tf32 halves and keeps float32's digits
#define BM 16
#define BN 32
#define WM 1
#define WN 1
#define WK 4
#define SPAN 1
#define STAGES 4
#define TASKS 1
#define DOTS 1    // of DCN's folded cross network
#define LAYERS 1
#define HEAD 1
#define PER_ROW 11
#define CROSSED 7
#define KINDS 252
#define SHARES 1
#define CLUSTERED 0
#endif
#define WARPS (WM * WN * WK)
#define THREADS (32 * WARPS)
#define COPY_ROWS (THREADS / 8)
#define MT (BM / WM / 16)              // m16n8 tiles of a warp
#define NT (BN / WN / 8)
#define STAGE_BYTES (SPAN * (BM + BN) * 128)
#define SYNC() __syncthreads()
#include "waves/wave.cuh"
#include "dense/mma.cuh"

__device__ __forceinline__ void copy16(unsigned to, const void* from, bool there) {  // zeros if it is not there
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int PENDING> __device__ __forceinline__ void wait_group() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// The block's tile of one product: where its factors lie in global and in shared memory, worked out once, for the loop over K
// has to be short. A thread copies one 16-byte piece of every COPY_ROWS-th row. Pieces of a row are swizzled against bank
// conflicts; rows that a thread touches differ by multiples of 8, so its swizzle is one constant.
struct Product {
    const char* x;
    const char* weight;
    int x_step, weight_step;    // bytes between rows that a thread copies
    int x_rows, weight_rows;    // of the thread's rows in this tile that exist
    int left;                   // bytes of the thread's row from its piece to the end of K
    unsigned shared, to;        // the ring; the thread's piece in it
    Chunks chunks;
    int taken, spans;           // of the chunks

    __device__ __forceinline__ Product(const Job& job, int m0, int n0, int bucket, char* ring, int rank, int cluster)
        : chunks(job, rank, cluster) {
        const int r = threadIdx.x >> 3, piece = threadIdx.x & 7, bytes = job.depth * (int)sizeof(X);
        x_step = COPY_ROWS * job.x_ld * (int)sizeof(X);
        weight_step = COPY_ROWS * bytes;
        x = reinterpret_cast<const char*>(job.x + (long long)(m0 + r) * job.x_ld) + piece * 16;
        weight = static_cast<const char*>(job.weight) + (long long)(n0 + r) * bytes + piece * 16;
        x_rows = (min(bucket - m0, BM) - r + COPY_ROWS - 1) / COPY_ROWS;
        weight_rows = (min(job.width - n0, BN) - r + COPY_ROWS - 1) / COPY_ROWS;
        left = bytes - piece * 16;
        shared = (unsigned)__cvta_generic_to_shared(ring);
        to = shared + r * 128 + ((piece ^ (r & 7)) << 4);
        take(chunks.own);
    }
    __device__ __forceinline__ void take(int count) {
        taken = count;
        spans = (count + SPAN - 1) / SPAN;
    }
    template <int ROWS> __device__ __forceinline__ void load(const char* from, int step, int rows, unsigned at, int span) const {
#pragma unroll
        for (int g = 0; g < SPAN; ++g) {
            const int c = span * SPAN + g, done = chunks.at(c) * 128;
            const bool there = done < left && (!(SHARES || CLUSTERED) || c < taken);
#pragma unroll
            for (int i = 0; i < (ROWS + COPY_ROWS - 1) / COPY_ROWS; ++i)
                if (ROWS % COPY_ROWS == 0 || (threadIdx.x >> 3) + i * COPY_ROWS < ROWS)
                    copy16(at + g * (BM + BN) * 128 + i * COPY_ROWS * 128, from + (long long)i * step + done, i < rows && there);
        }
    }
    __device__ __forceinline__ void load_x(int span) const { load<BM>(x, x_step, x_rows, to + span % STAGES * STAGE_BYTES, span); }
    __device__ __forceinline__ void load_weight(int span) const {
        load<BN>(weight, weight_step, weight_rows, to + span % STAGES * STAGE_BYTES + BM * 128, span);
    }
    __device__ __forceinline__ void multiply_span(int span, float sums[MT][NT][4]) const {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        const int wk = warp / (WM * WN), wm = warp % WM, wn = warp / WM % WN;
        const unsigned stage = shared + span % STAGES * STAGE_BYTES;
        const unsigned a_row = stage + (wm * (BM / WM) + (lane & 15)) * 128, a_piece = ((lane >> 4) ^ (lane & 7)) << 4;
        const unsigned second = NT > 1 ? (lane >> 4) << 3 : 0;  // of two tiles' columns; where there is one it is read twice
        const unsigned b_row = stage + (BM + wn * (BN / WN) + (lane & 7) + second) * 128;
        const unsigned b_piece = (((lane >> 3) & 1) ^ (lane & 7)) << 4;
#pragma unroll
        for (int i = 0; i < 4 * SPAN / WK; ++i) {
            const int step = wk + i * WK;  // 32 bytes of K
            const unsigned in = (step >> 2) * (BM + BN) * 128, flip = (step & 3) << 5;
            unsigned a[MT][4], b[NT + NT % 2][2], a_rest[MT][4], b_rest[NT][2];
#pragma unroll
            for (int m = 0; m < MT; ++m) load_matrices(a[m], a_row + in + m * 2048 + (a_piece ^ flip));
#pragma unroll
            for (int n = 0; n < NT; n += 2) load_matrices(b[n], b_row + in + n * 1024 + (b_piece ^ flip));
            if (PASSES == 3) {
                split<4 * MT>(a[0], a_rest[0]);
                split<2 * NT>(b[0], b_rest[0]);
            }
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    if (PASSES == 3) {
                        multiply(sums[m][n], a_rest[m], b[n], (X*)0);
                        multiply(sums[m][n], a[m], b_rest[n], (X*)0);
                    }
                    multiply(sums[m][n], a[m], b[n], (X*)0);
                }
        }
    }
};

// Writes the tile's products, one after the other by warp, where all threads can read them: [WK][BM][BN + 8].
__device__ __forceinline__ void spill(float* products, const float sums[MT][NT][4]) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int wk = warp / (WM * WN), wm = warp % WM, wn = warp / WM % WN;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const int r = wm * (BM / WM) + m * 16 + (lane >> 2), c = wn * (BN / WN) + n * 8 + (lane & 3) * 2;
            float* to = products + (wk * BM + r) * (BN + 8) + c;
            *reinterpret_cast<float2*>(to) = make_float2(sums[m][n][0], sums[m][n][1]);
            *reinterpret_cast<float2*>(to + 8 * (BN + 8)) = make_float2(sums[m][n][2], sums[m][n][3]);
        }
}

__device__ __forceinline__ void linear(const Wave& wave, const Job& job, int block, const int* state, int bucket, char* shared) {
    const int cluster = CLUSTERED ? wave.cluster : 1, rank = CLUSTERED ? block % cluster : 0;
    if (CLUSTERED) block /= cluster;
    const int m0 = block / job.tiles * BM, tile_column = block % job.tiles, n0 = tile_column * BN;
    Product product(job, m0, n0, is_share(job) ? job.most : bucket, shared, rank, cluster);
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s)
        if (s < product.spans) product.load_weight(s);
    const Columns own(job, n0);
    wait_for_dependencies();
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {  // of padding too, rather than wait for the number of rows first
        if (s < product.spans) product.load_x(s);
        commit();
    }
    const int rows = rows_of_product(job, state), batch = state[BATCH_NUMBER];
    if (m0 >= rows) {  // padding of the bucket
        wait_group<0>();
        return;
    }
    const bool apart = product.chunks.apart(job, state);
    if (SHARES && !apart && product.chunks.own < product.chunks.all) {  // what is on its way stops short of the contexts' columns
        wait_group<0>();
        product.take(product.chunks.all);
        for (int s = product.chunks.own / SPAN; s < min(STAGES - 1, product.spans); ++s) {
            product.load_weight(s);
            product.load_x(s);
        }
        commit();
        wait_group<0>();
    }
    Met met;
    if (EARLY && !rank) met.read(job, own, m0, n0, 0, rows);
    float sums[MT][NT][4] = {};
    for (int c = 0; c < product.spans; ++c) {
        wait_group<STAGES - 2>();
        __syncthreads();
        if (c + STAGES - 1 < product.spans) {
            product.load_weight(c + STAGES - 1);
            product.load_x(c + STAGES - 1);
        }
        commit();
        if (PASSES == 3) {  // the tensor cores cut sums short rather than round them: keep their chains of sums short
            float part[MT][NT][4] = {};
            product.multiply_span(c, part);
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int k = 0; k < 4; ++k) sums[m][n][k] += part[m][n][k];
        } else {
            product.multiply_span(c, sums);
        }
    }
    wait_group<0>();
    __syncthreads();
    float* products = reinterpret_cast<float*>(shared);
    spill(products, sums);
    __shared__ int contexts[SHARES ? BM : 1];
    if (apart) wait_for_shares(job, contexts, m0, tile_column, rows, batch);
    __syncthreads();

    if (CLUSTERED && !add_up<WK>(products, rank, cluster)) return;
    if (is_share(job)) store_shares<WK>(job, products, m0, n0, tile_column, rows, batch);
    else conclude<CLUSTERED ? 1 : WK>(wave.head, job, own, met, products, m0, n0, tile_column, rows, batch, apart ? contexts : nullptr);
}

extern "C" __global__ void __launch_bounds__(THREADS) wave(const __grid_constant__ Wave wave, const int* state, int bucket) {
    extern __shared__ __align__(128) char shared[];
    let_dependents_start();
    int j = 0;
    while (j + 1 < wave.count && (int)blockIdx.x >= wave.jobs[j + 1].first) ++j;
    const Job job = wave.jobs[j];  // a copy: read once, and no store can alias it
    const int block = blockIdx.x - job.first;
    if (!PER_ROW || job.kind == LINEAR || is_share(job)) linear(wave, job, block, state, bucket, shared);
    else if (PER_ROW) rows_of<WARPS>(job, block, state);
}
