// A cross layer x0 * (x W^T + b) + xl of many rows (DCN-V2, Wang et al. 2021, eq. 1 and 2), alone in its wave: products as in
// wave_wgmma.cu. Behind the last chunks x0 and xl come through the same ring, box by box, so that they are on their way while the
// last products run; each thread combines them with its sums where they lie, and the box goes out from there.
//
// HELD 0: a block has one tile, whose x comes through the ring beside the weights. Nothing else is kept in shared memory: two
// blocks fit a multiprocessor, one multiplies while the other waits for memory. Bytes of a block: (BM + BN) * depth + 2 * BM * BN
// in, BM * BN out, times sizeof(X).
// HELD > 0, the chunks of a short x: a block keeps the x of its rows and goes through a span of column tiles, so x is read once
// for all of them. GROUPS of warpgroups take tiles in turn, each with a ring of its own, and one multiplies while another waits.
// Bytes of a block: BM * depth, and BN * depth + 2 * BM * BN in and BM * BN out for each tile.
//
// Grid: column tiles, or spans of them, within row tiles. Rows of the bucket's padding within a tile are written, too.
#ifndef X
#define X bf16
#define BM 128
#define BN 128
#define STAGES 3
#define HELD 8
#define GROUPS 2
#define OUTER 0  // 1: the bias is added behind the product with x0
#endif
#define WK 1
#define WM (BM / 64)
#define THREADS (128 * WM)  // of a group, that multiply; one warp more for each copies
#define STAGE_BYTES ((HELD ? BM : BM + BN) * 128)
#define PIECE (BN < 128 ? BN : 128)
#define FP8 (sizeof(X) == 1)
#define SYNC(group) asm volatile("bar.sync %0, %1;" ::"r"(1 + (group)), "n"(THREADS) : "memory")
#include "waves/ring.cuh"

#define BOX_BYTES (BM * 128)
#define BOXES (BN / CHUNK)                       // of x0, and of xl
#define IN_BUFFER (STAGE_BYTES / BOX_BYTES)      // boxes that a buffer of the ring holds
#define BEHIND ((2 * BOXES + IN_BUFFER - 1) / IN_BUFFER)  // buffers of them
static_assert(BOXES * CHUNK == BN, "x0 and xl lie in the ring in whole lines");
static_assert(HELD ? BM >= BN && STAGES >= 3 : BEHIND <= STAGES && GROUPS == 1, "boxes are given back one by one, or all are there");

struct Layer {
    TensorMap x, weight, x0, xl, out;  // tiles of BM rows, of the weights BN
    const float *bias, *scale;         // [width]; scale: what the products are multiplied by, where X is fp8
    float x0_scale, xl_scale, out_factor;  // fp8: a value is what lies in memory times its scale; out_factor: one over that of out
    int width, depth, tiles, spans;    // columns of out, of x; column tiles, and blocks that share those of a row tile
};

__device__ __forceinline__ void bring_to_l2(const TensorMap* map, int column, int row) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(column), "r"(row) : "memory");
}

// A ring of a group, and what has come to it before the tile at hand: then chunks of the weights, and boxes, x0 and xl in turn.
struct Ring {
    unsigned at, full, empty;
    int before, chunks;
    __device__ __forceinline__ int buffer_of(int box) const { return (before + chunks + box / IN_BUFFER) % STAGES; }
    __device__ __forceinline__ unsigned place_of(int box) const { return buffer_of(box) * STAGE_BYTES + box % IN_BUFFER * BOX_BYTES; }
    __device__ __forceinline__ void wait_for(int box) const {
        wait(full + 8 * buffer_of(box), (before + chunks + box / IN_BUFFER) / STAGES & 1);
    }
    __device__ __forceinline__ void next_tile() { before += HELD ? chunks + BEHIND : 0; }
};

// What a block keeps of x, and a barrier for each chunk of it.
struct Held { unsigned at, there; };

// first, end: column tiles, of which every GROUPS-th is this group's.
__device__ __forceinline__ void copy_all(
    const Layer& layer, int m0, int first, int end, bool brings_x, Ring ring, const Held& held, const int* state) {
    const int chunks = ring.chunks, ahead = min(STAGES, chunks);
    const auto copy_weight = [&](int tile, int c) {
        const int s = (ring.before + c) % STAGES;
        expect(ring.full + 8 * s, BN * 128);
        copy_tile(ring.at + s * STAGE_BYTES + (HELD ? 0 : BM * 128), &layer.weight, ring.full + 8 * s, c * CHUNK, tile * BN);
    };
    const auto copy_x = [&](int c) {
        const unsigned barrier = HELD ? held.there + 8 * c : ring.full + 8 * (c % STAGES);
        expect(barrier, BM * 128);
        copy_tile(HELD ? held.at + c * (BM * 128) : ring.at + c % STAGES * STAGE_BYTES, &layer.x, barrier, c * CHUNK, m0);
    };
    const auto copy_behind = [&](int tile, int i) {
        const unsigned barrier = ring.full + 8 * ((ring.before + chunks + i) % STAGES);
        const int from = i * IN_BUFFER, to = min(from + IN_BUFFER, 2 * BOXES);
        if (!HELD) arrive(barrier);
        expect(barrier, (to - from) * BOX_BYTES);
        for (int b = from; b < to; ++b)
            copy_tile(ring.at + ring.place_of(b), b % 2 ? &layer.xl : &layer.x0, barrier, tile * BN + b / 2 * CHUNK, m0);
    };
#pragma unroll 1
    for (int c = 0; c < ahead; ++c) copy_weight(first, c);
    wait_for_dependencies();
    const int of_x = HELD ? HELD * brings_x : ahead;
#pragma unroll 1
    for (int c = 0; c < of_x; ++c) copy_x(c);
    if (m0 >= state[TRUE_ROWS]) {  // the block may not end before its copies have
        for (int s = 0; s < ahead; ++s) wait(ring.full + 8 * s, 0);
        for (int c = 0; HELD && c < of_x; ++c) wait(held.there + 8 * c, 0);
        return;
    }
#pragma unroll 1
    for (int tile = first; tile < end; tile += GROUPS, ring.next_tile()) {
#pragma unroll 1
        for (int b = 0; b < BOXES; ++b) {
            bring_to_l2(&layer.x0, tile * BN + b * CHUNK, m0);
            bring_to_l2(&layer.xl, tile * BN + b * CHUNK, m0);
        }
#pragma unroll 1
        for (int c = tile == first ? ahead : 0; c < chunks + BEHIND; ++c) {
            const int i = ring.before + c;
            if (i >= STAGES) wait(ring.empty + 8 * (i % STAGES), (i / STAGES - 1) & 1);
            if (c >= chunks) copy_behind(tile, c - chunks);
            else if (copy_weight(tile, c); !HELD) copy_x(c);
        }
    }
}

// Two neighbouring columns.
__device__ __forceinline__ void load2(const float* p, float v[2]) {
    const float2 both = *reinterpret_cast<const float2*>(p);
    v[0] = both.x, v[1] = both.y;
}
__device__ __forceinline__ void load2(const bf16* p, float v[2]) {
    const unsigned both = *reinterpret_cast<const unsigned*>(p);
    v[0] = __uint_as_float(both << 16), v[1] = __uint_as_float(both & 0xffff0000u);
}
__device__ __forceinline__ void load2(const fp8* p, float v[2]) { widen_fp8(*reinterpret_cast<const unsigned short*>(p), v); }
__device__ __forceinline__ void store2(float* p, const float v[2]) { *reinterpret_cast<float2*>(p) = make_float2(v[0], v[1]); }
__device__ __forceinline__ void store2(bf16* p, const float v[2]) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(v[1]), "f"(v[0]));
    *reinterpret_cast<unsigned*>(p) = both;
}
__device__ __forceinline__ void store2(fp8* p, const float v[2]) { *reinterpret_cast<unsigned short*>(p) = pack_fp8(v[0], v[1]); }

// The sums of a thread, as wgmma lays them out, with x0 and xl of box number B of each, in the place of xl.
template <int B>
__device__ __forceinline__ void combine(const Layer& layer, const Sums& sums, char* x0, char* xl, const float* bias, const float* scale) {
    const int lane = threadIdx.x & 31, row = first_row() + (threadIdx.x >> 5 & 3) * 16 + (lane >> 2);
#pragma unroll
    for (int i = 0; i < CHUNK / 8; ++i) {
        const int n = B * CHUNK / 8 + i, column = n * 8 + (lane & 3) * 2;
        const unsigned in_row = (column % CHUNK * (int)sizeof(X)) ^ (lane >> 2) << 4;  // swizzled: rows of 128 bytes, 8 of them
        float add[2], factor[2];
        load2(bias + column, add);
        if (FP8) load2(scale + column, factor);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = (row + 8 * half) * 128 + in_row;
            float a[2], last[2], v[2];
            load2(reinterpret_cast<const X*>(x0 + at), a);
            load2(reinterpret_cast<const X*>(xl + at), last);
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const float sum = sums[n * 8 / PIECE][n * 8 % PIECE / 2 + 2 * half + k];
                v[k] = FP8 ? sum * factor[k] : sum;
                if (!OUTER) v[k] += add[k];
                if (FP8) a[k] *= layer.x0_scale, last[k] *= layer.xl_scale;
                v[k] = a[k] * v[k] + last[k];
                if (OUTER) v[k] += add[k];
                if (FP8) v[k] *= layer.out_factor;
            }
            store2(reinterpret_cast<X*>(xl + at), v);
        }
    }
}

// Boxes from number B on: each goes out as soon as it is combined, and makes room.
template <int B>
__device__ __forceinline__ void conclude(
    const Layer& layer, const Sums& sums, const Ring& ring, char* buffers, const float* bias, const float* scale, int m0, int n0, int group) {
    if constexpr (B < BOXES) {
        ring.wait_for(2 * B), ring.wait_for(2 * B + 1);
        combine<B>(layer, sums, buffers + ring.place_of(2 * B), buffers + ring.place_of(2 * B + 1), bias, scale);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // what was written here is what the copies out read
        SYNC(group);
        if ((threadIdx.x & 127) == 0) {
            const bool sends = threadIdx.x % THREADS == 0;
            if (sends) {
                asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&layer.out),
                             "r"(ring.at + ring.place_of(2 * B + 1)), "r"(n0 + B * CHUNK), "r"(m0) : "memory");
                asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            }
            if (HELD) {
                arrive(ring.empty + 8 * ring.buffer_of(2 * B));
                if (sends) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
                arrive(ring.empty + 8 * ring.buffer_of(2 * B + 1));
            }
        }
        conclude<B + 1>(layer, sums, ring, buffers, bias, scale, m0, n0, group);
    }
}

extern "C" __global__ void __launch_bounds__(GROUPS * (THREADS + 32)) crossed_wgmma(const __grid_constant__ Layer layer, const int* state) {
    extern __shared__ __align__(16) char shared[];  // the rings lie aligned within: so what is static takes no more than its bytes
    __shared__ __align__(8) unsigned long long barriers[GROUPS * 2 * STAGES + HELD];
    __shared__ __align__(16) float all_bias[GROUPS][BN], all_scale[GROUPS][FP8 ? BN : 2];
    let_dependents_start();
    const int m0 = (int)blockIdx.x / layer.spans * BM, span = (int)blockIdx.x % layer.spans;
    const int first = span * layer.tiles / layer.spans, end = HELD ? (span + 1) * layer.tiles / layer.spans : first + 1;
    const unsigned begin = ((unsigned)__cvta_generic_to_shared(shared) + 1023) & ~1023u;
    const unsigned barrier = (unsigned)__cvta_generic_to_shared(barriers);
    const Held held = {begin, barrier + 8 * GROUPS * 2 * STAGES};
    if (threadIdx.x == 0) {
        for (int g = 0; g < GROUPS; ++g) {
            for (int s = 0; s < STAGES; ++s) {  // a buffer is full when its factors have come, or its boxes
                begin_barrier(barrier + 8 * (2 * g * STAGES + s), HELD ? 1 : 2);
                begin_barrier(barrier + 8 * ((2 * g + 1) * STAGES + s), WM);
            }
        }
        for (int c = 0; c < HELD; ++c) begin_barrier(held.there + 8 * c, 1);
        show_barriers();
    }
    __syncthreads();
    const int group = GROUPS == 1 ? 0 : threadIdx.x < GROUPS * THREADS ? warpgroup() / WM : (threadIdx.x - GROUPS * THREADS) / 32;
    const unsigned full = barrier + 8 * 2 * group * STAGES;
    Ring ring = {begin + HELD * BM * 128 + group * STAGES * STAGE_BYTES, full, full + 8 * STAGES, 0, (layer.depth + CHUNK - 1) / CHUNK};
    if (first + group >= end) return;
    if (threadIdx.x >= GROUPS * THREADS) {
        if (threadIdx.x % 32 == 0) copy_all(layer, m0, first + group, end, group == 0, ring, held, state);
        return;
    }
    float *const bias = all_bias[group], *const scale = all_scale[group];
    wait_for_dependencies();
    if (m0 >= state[TRUE_ROWS]) return;
    char* const buffers = shared + (ring.at - (unsigned)__cvta_generic_to_shared(shared));
#pragma unroll 1
    for (int tile = first + group; tile < end; tile += GROUPS, ring.next_tile()) {
        const int n0 = tile * BN;
        for (int c = threadIdx.x % THREADS; c < BN; c += THREADS) {
            bias[c] = n0 + c < layer.width ? layer.bias[n0 + c] : 0.0f;
            if (FP8) scale[c] = n0 + c < layer.width ? layer.scale[n0 + c] : 0.0f;
        }
        Sums sums;
#pragma unroll
        for (int p = 0; p < BN / PIECE; ++p)
#pragma unroll
            for (int i = 0; i < PIECE / 2; ++i) sums[p][i] = 0.0f;
        multiply_all<true>(sums, ring.chunks, ring.at, ring.full, ring.empty, ring.before, held.at, held.there);
        SYNC(group);  // for the biases
        conclude<0>(layer, sums, ring, buffers, bias, scale, m0, n0, group);
    }
    if (threadIdx.x % THREADS == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
