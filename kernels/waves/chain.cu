// All layers of a model in one launch, for up to 8 rows: where a wave (wave.cu) waits for the end of the one before it, here a
// block waits for the very numbers it reads (awaited_values.cuh). A link of the chain is a layer; its blocks own 16 columns each.
//
// Grid: link l owns blocks [first_l, first_{l+1}), the last block is the head's. A block waits only for blocks of links before
// its own. Blocks start in the order of their numbers (which CUDA does not promise, but every GPU so far does), so some block can
// always go on, however few run at once.
//   1. the block's weights start on their way into shared memory, before the lookup is done (programmatic dependent launch);
//   2. x follows: what the lookup wrote, or words of the links before;
//   3. out^T = W x^T on the tensor cores: 16 columns are the rows of an mma, up to 8 rows its columns; strict float32 on the
//      CUDA cores. Warps split K.
// Weights lie as the lanes take them (packed_weights.py): 1024 bytes for each 64 bytes of K, two steps of an mma. A lane's 16
// bytes of x are its factors of both steps, for K may be summed in any order.
// Bytes of a block: 16 * depth * sizeof(X) of weights, rows * depth * 8 of words.
#ifndef X
#define X float
#define PASSES 3   // of float32 products: 1 rounds to tf32; 3 keeps float32's digits (as of wave.cu: here by one product)
#define ROWS 8     // most rows
#define TASKS 1
#define DOTS 1     // of DCN's folded cross network
#define LAYERS 1
#define PER_ROW 11 // bits of FM, CROSS and NORM
#define CROSSED 7  // DCN-V2 layers: 1, with an outer bias 3; gates: 4
#define KINDS 252
#define MIXES 1    // whether some layer reads a mixture
#define FIELDS 3   // of DLRM's dots, or 0: vectors of DIM columns, of which the first KEEP go in front
#define DIM 8
#define KEEP 8
#define DIAGONAL 0
#endif
#define WARPS 16
#define THREADS (32 * WARPS)
#define COLUMNS 16
#define MAX_LINKS 24
#define GATES (CROSSED & 4)
#include "waves/awaited_values.cuh"
#include "waves/epilogue.cuh"
#include "dense/few_row_products.cuh"
#include "interaction/row_dots.cuh"
#include "dense/row_norms.cuh"

struct Link {
    const void* x;        // X[rows, x_ld]; of a link before: Word[ROWS, depth]
    const void* weight;   // LINEAR: packed; CROSS: float[DOTS, width]; NORM: float[2, depth]
    const float* bias;    // LINEAR: [width]; CROSS: [DOTS]
    const float* shape;   // [3, width] of PRELU and DICE (activation.cuh), or null
    const void* x0;       // of a DCN-V2 layer x0 * (W x + b) + xl, or a gate number * x0 * activation(W x + b), else null: X[rows, x0_ld],
                          // of a link before Word[ROWS, x0_ld]
    const void* xl;       // of one of low rank, where x is V xl: X[rows, xl_ld], of a link before Word[ROWS, xl_ld]; null: x itself.
                          // DOT: all vectors but the first, which is x
    Word* out;            // [ROWS, out_ld], of FM [ROWS], of CROSS [ROWS, TASKS]; null if only the head reads it
    const float* head;    // [TASKS, width]: the head's weights for these columns, or null
    int linked, x0_linked, xl_linked;  // whether x, x0 and xl are of links before
    int x_ld, x0_ld, xl_ld, out_ld;
    int width, depth;     // columns of out and of x, multiples of 8; FM, NORM: fields and dim
    int kind, activation;
    int outer;            // whether the bias is added behind the product with x0
    float number;         // of a gate; NORM: eps
    int mixed_ld, experts;
    const Word* mixed;    // [ROWS, mixed_ld]: the logits of a mixture of x, in as many equal parts as there are experts, or null
    int first, slot;      // block; of the head's partial sums
};
struct Head {
    Word* partial;              // [ROWS, slots, TASKS]
    const float* bias;          // [TASKS]
    const void* logits[MAX_LOGITS];  // float[rows, steps or 1]; of a link: Word
    float* scores;              // [rows, TASKS], pinned host memory
    int* done;                  // pinned; see announce
    int steps[MAX_LOGITS], linked[MAX_LOGITS];  // steps: 0: one logit for all tasks; else TASKS a row
    int slots;
};
struct Chain { Link links[MAX_LINKS]; Head head; int count; };

// softmax(logits[row])[i] times the i-th of as many equal parts of x[row].
__device__ __forceinline__ void mix(X* x, int stride, const float* logits, int rows, int depth, int experts) {
    const int dim = depth / experts;
    for (int i = threadIdx.x; i < rows * depth; i += THREADS) {
        const int row = ROWS == 1 ? 0 : i / depth, column = i - row * depth;
        const float* own = logits + row * experts;
        float most = own[0], sum = 0.0f;
        for (int e = 1; e < experts; ++e) most = fmaxf(most, own[e]);
        for (int e = 0; e < experts; ++e) sum += expf(own[e] - most);
        X* at = x + row * stride + column;
        store_value(at, expf(own[column / dim] - most) / sum * load_value(at));
    }
}

// x into shared memory, the logits of a mixture into the place of the sums, and the number of row r and this column that the products
// are multiplied by and added to, if they are `crossed`. A gate's, of a link before, may come later than x.
__device__ __forceinline__ void take_inputs(
    const Link& link, int rows, int batch, X* x, int stride, float* sums, bool crossed, int r, int column, float& x0, float& xl) {
    if (!link.linked) {
        const int pieces = link.depth * (int)sizeof(X) / 16;
        for (int i = threadIdx.x; i < rows * pieces; i += THREADS) {
            const int row = ROWS == 1 ? 0 : i / pieces, piece = i - row * pieces;
            const X* at = static_cast<const X*>(link.x) + (long long)row * link.x_ld;
            copy16((unsigned)__cvta_generic_to_shared(x + row * stride) + piece * 16, reinterpret_cast<const uint4*>(at) + piece);
        }
    }
    const long long at_x0 = (long long)r * link.x0_ld + column, at_xl = (long long)r * link.xl_ld + column;
    if (crossed && !(GATES && link.x0_linked)) x0 = load_value(static_cast<const X*>(link.x0) + at_x0);
    if (crossed && link.xl && !link.xl_linked) xl = load_value(static_cast<const X*>(link.xl) + at_xl);
    else if (crossed && link.xl) xl = take(static_cast<const Word*>(link.xl) + at_xl, batch);  // there before x, which is made of it
    if (MIXES && link.mixed && threadIdx.x < rows * link.experts)
        sums[threadIdx.x] = take(link.mixed + (long long)(threadIdx.x / link.experts) * link.mixed_ld + threadIdx.x % link.experts, batch);
    if (link.linked) take_rows<ROWS>(x, stride, static_cast<const Word*>(link.x), rows, link.depth, batch);
    asm volatile("cp.async.wait_all;" ::: "memory");
}

__device__ __forceinline__ void layer(const Link& link, const Head& head, int tile, const int* state, char* shared) {
    const int groups = (link.depth * (int)sizeof(X) + 63) / 64, stride = (groups | 1) * 64 / (int)sizeof(X);  // odd: no bank twice
    uint4* weights = reinterpret_cast<uint4*>(shared);              // [groups][2][32]
    X* x = reinterpret_cast<X*>(shared + groups * 1024);            // [ROWS][stride]
    float* sums = reinterpret_cast<float*>(x + ROWS * stride);      // [WARPS][ROWS][COLUMNS]
    const uint4* from = static_cast<const uint4*>(link.weight) + (long long)tile * groups * 64;
    const unsigned to = (unsigned)__cvta_generic_to_shared(weights);
    for (int i = threadIdx.x; i < groups * 64; i += THREADS)
        copy16(to + i * 16, from + i);
    const int r = threadIdx.x / COLUMNS, column = tile * COLUMNS + threadIdx.x % COLUMNS;  // of the sum that the thread ends up with
    const bool own = r < ROWS && column < link.width;
    const float bias = own ? link.bias[column] : 0.0f;
    Shape shape = {0.0f, 0.0f, 0.0f};
    if (SHAPED && own && link.shape) shape = shape_of<HAS(DICE) ? DICE : PRELU>(link.shape, link.width, column);
    float share[TASKS];
#pragma unroll
    for (int t = 0; t < TASKS; ++t) share[t] = own && link.head ? link.head[t * link.width + column] : 0.0f;
    for (int i = threadIdx.x; i < ROWS * (groups * 64 / (int)sizeof(X) - link.depth); i += THREADS) {  // what meets no weight
        const int rest = groups * 64 / (int)sizeof(X) - link.depth;
        store_value(x + i / rest * stride + link.depth + i % rest, 0.0f);
    }
    // All that comes behind x runs twice, first on nothing: code that has not run yet is fetched when it is wanted, and until x is
    // there the block has time for that (H200: 0.3 us a link).
    __shared__ uint4 nothing[64];
    const long long at_x0 = (long long)r * link.x0_ld + column;
    int rows = ROWS, batch = 0;
    float x0 = 0.0f, xl = 0.0f;
#pragma unroll 1
    for (int real = 0; real < 2; ++real) {
        if (real) {
            wait_for_dependencies();
            rows = ROWS == 1 ? 1 : min(state[TRUE_ROWS], ROWS), batch = state[BATCH_NUMBER];  // of one row x need not wait for their number
        }
        const bool crossed = CROSSED && link.x0 && own && r < rows, gate = CROSSED == 4 || (CROSSED & 4 && link.number != 0.0f);
        if (real) take_inputs(link, rows, batch, x, stride, sums, crossed, r, column, x0, xl);
        __syncthreads();
        if (MIXES && link.mixed && real) {
            mix(x, stride, sums, rows, link.depth, link.experts);
            __syncthreads();
        }

        const uint4* factors = real ? weights : nothing;
        const int count = real ? groups : 1;
        if (PASSES == 3) multiply_exactly(factors, reinterpret_cast<const float*>(x), stride, count, sums);
        else multiply_all(factors, x, stride, count, rows, sums);
        __syncthreads();
        if (threadIdx.x < (ROWS == 1 ? 32 : ROWS * COLUMNS)) {  // whole warps
            const bool outer = CROSSED & 2 && link.outer;
            float v = outer ? 0.0f : bias;
            if (r < ROWS) {
#pragma unroll
                for (int w = 0; w < WARPS; ++w) v += sums[(w * ROWS + r) * COLUMNS + threadIdx.x % COLUMNS];
                v = activated(v, link.activation, shape);  // a DCN-V2 layer has none
                if (GATES && crossed && link.x0_linked && real) x0 = take(static_cast<const Word*>(link.x0) + at_x0, batch);
                if (gate && crossed) {
                    v *= x0 * link.number;
                } else if (crossed) {
                    v = x0 * v + (link.xl ? xl : load_value(x + r * stride + column));
                    if (outer) v += bias;
                }
            }
            if (link.head) {
#pragma unroll
                for (int t = 0; t < TASKS; ++t) {
                    float dot = own && r < rows ? share[t] * v : 0.0f;
                    for (int step = COLUMNS / 2; step > 0; step >>= 1) dot += __shfl_xor_sync(0xffffffffu, dot, step);
                    if (threadIdx.x % COLUMNS == 0 && r < rows && real)
                        put(head.partial + ((long long)r * head.slots + link.slot + tile) * TASKS + t, dot, batch);
                }
            }
            if (link.out && own && r < rows && real) put(link.out + (long long)r * link.out_ld + column, v, batch);
        }
        __syncthreads();  // sums and x of nothing are no longer read
    }
}

// FM and CROSS links: a warp a row; NORM by fields. A cross network's weights too are on their way before x is: read beside it, a few
// at a time as registers allow, they took longer than all layers.
__device__ __forceinline__ void rows_of(Link link, const int* state, char* shared) {
    if (PER_ROW == CROSS || (PER_ROW & CROSS && link.kind == CROSS)) {
        float* weights = reinterpret_cast<float*>(shared);  // [DOTS][width], then k[DOTS]
#pragma unroll 1
        for (int i = threadIdx.x; i < DOTS * link.width; i += THREADS) copy_word(weights + i, static_cast<const float*>(link.weight) + i);
        link.weight = weights;
        weights += DOTS * link.width;
        if (threadIdx.x < DOTS) copy_word(weights + threadIdx.x, link.bias + threadIdx.x);
        link.bias = weights;
    }
    wait_for_dependencies();
    const int row = threadIdx.x >> 5, rows = ROWS == 1 ? 1 : min(state[TRUE_ROWS], ROWS), batch = state[BATCH_NUMBER];
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    if (PER_ROW == NORM || (PER_ROW & NORM && link.kind == NORM)) {
        const X* x = static_cast<const X*>(link.x);
        if (link.linked) {
            X* own = reinterpret_cast<X*>(shared);  // [ROWS][x_ld]
            take_rows<ROWS>(own, link.x_ld, static_cast<const Word*>(link.x), rows, link.x_ld, batch);
            __syncthreads();
            x = own;
        }
        const int fields_at_once = THREADS / lanes_of(link.depth) * FIELDS_AT_ONCE;
        for (int block = 0; block * fields_at_once < rows * link.width; ++block)
            norm_fields<THREADS>(
                x, link.x_ld, rows, block, link.width, link.depth, link.number, static_cast<const float*>(link.weight),
                link.activation == RELU_, [&](int r, int column, const float* v, int count) {
                    for (int i = 0; i < count; ++i) put(link.out + (long long)r * link.out_ld + column + i, v[i], batch);
                });
        return;
    }
    if (!LOGITS) return;
    if (row < rows) interact(link, row, [&](long long i, float logit) { put(link.out + i, logit, batch); });
}

#if FIELDS
// A DOT link: a block a row.
__device__ __forceinline__ void dots_of(const Link& link, int row, const int* state, char* shared) {
    typedef Vectors<FIELDS, DIM, DIAGONAL> Row;
    X* z = reinterpret_cast<X*>(shared);
    wait_for_dependencies();
    const int rows = ROWS == 1 ? 1 : min(state[TRUE_ROWS], ROWS), batch = state[BATCH_NUMBER], lane = threadIdx.x & 31;
    if (row >= rows) return;
    Row v;
    if (threadIdx.x < 32) v.load(static_cast<const X*>(link.xl) + (long long)row * link.xl_ld);
    take_rows<1>(z, 0, static_cast<const Word*>(link.x) + (long long)row * link.x_ld, 1, DIM, batch);
    __syncthreads();
    if (threadIdx.x >= 32) return;
    v.load_first(reinterpret_cast<const unsigned*>(z));
    v.round();
    Word* out = link.out + (long long)row * link.width;
    for (int c = lane; c < KEEP; c += 32) put(out + c, load_value(z + c), batch);
    v.dots([&](int i, float dot) { put(out + KEEP + i, dot, batch); });
    for (int c = KEEP + Row::PAIRS + lane; c < link.width; c += 32) put(out + c, 0.0f, batch);  // meets no weight
}
#endif

// The head: a warp a row adds up what all blocks have for it, always in the same order.
__device__ __forceinline__ void conclude(const Head& head, const int* state) {
    const int row = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int steps = lane < MAX_LOGITS ? head.steps[lane] : 0, linked = lane < MAX_LOGITS ? head.linked[lane] : 0;
    const void* const logits = lane < MAX_LOGITS ? head.logits[lane] : nullptr;
    float own[TASKS];  // of a lane: the bias or a logit
#pragma unroll
    for (int t = 0; t < TASKS; ++t) own[t] = lane == MAX_LOGITS ? head.bias[t] : 0.0f;
    int rows = ROWS, batch = 0;
#pragma unroll 1
    for (int real = 0; real < 2; ++real) {  // as a layer
        if (real) {
            wait_for_dependencies();
            rows = min(state[TRUE_ROWS], ROWS), batch = state[BATCH_NUMBER];
        }
        if (row >= rows) continue;
        if (logits && !linked && real)
#pragma unroll
            for (int t = 0; t < TASKS; ++t) own[t] = static_cast<const float*>(logits)[steps ? row * TASKS + t : row];
        for (int t = 0; t < TASKS; ++t) {
            float z = own[t];
            for (int s = lane; s < head.slots && real; s += 32) z += take(head.partial + ((long long)row * head.slots + s) * TASKS + t, batch);
            if (logits && linked && real) z += take(static_cast<const Word*>(logits) + (steps ? row * TASKS + t : row), batch);
            z = 1.0f / (1.0f + expf(-warp_sum(z)));
            if (lane == 0 && real) head.scores[row * TASKS + t] = z;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0 && rows > 0) announce(head.done, 0, batch);
}

extern "C" __global__ void __launch_bounds__(THREADS) chain(const __grid_constant__ Chain chain, const int* state) {
    extern __shared__ __align__(128) char shared[];
    let_dependents_start();
    if (blockIdx.x == gridDim.x - 1) {
        conclude(chain.head, state);
        return;
    }
    int l = 0;
    while (l + 1 < chain.count && (int)blockIdx.x >= chain.links[l + 1].first) ++l;
    const Link link = chain.links[l];  // a copy: read once, and no store can alias it
#if FIELDS
    if (link.kind == DOT) {
        dots_of(link, blockIdx.x - link.first, state, shared);
        return;
    }
#endif
    if (!PER_ROW || link.kind == LINEAR) layer(link, chain.head, blockIdx.x - link.first, state, shared);
    else if (PER_ROW) rows_of(link, state, shared);
}
