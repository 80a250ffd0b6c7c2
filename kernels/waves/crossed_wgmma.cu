// A cross layer x0 * (x W^T + b) + xl of many rows (DCN-V2, Wang et al. 2021, eq. 1 and 2), alone in its wave: products as in
// wave_wgmma.cu. Behind the last chunks x0 and xl come through the same ring, box by box, so that they are on their way while the
// last products run; each thread combines them with its sums where they lie, and each box goes out from there as soon as it is
// done. Nothing else is kept in shared memory: two blocks fit a multiprocessor, one multiplies while the other waits for memory.
//
// Grid: column tiles within row tiles. Bytes of a block: (BM + BN) * depth + 2 * BM * BN in, BM * BN out, times sizeof(X). Rows
// of the bucket's padding within a tile are written, too.
#ifndef X
#define X bf16
#define BM 128
#define BN 128
#define STAGES 3
#define OUTER 0  // 1: the bias is added behind the product with x0
#endif
#define WK 1
#define WM (BM / 64)
#define THREADS (128 * WM)  // that multiply; one warp more copies
#define STAGE_BYTES ((BM + BN) * 128)
#define PIECE (BN < 128 ? BN : 128)
#define FP8 (sizeof(X) == 1)
#define SYNC() asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory")
#include "waves/ring.cuh"

#define BOX_BYTES (BM * 128)
#define BOXES (BN / CHUNK)                       // of x0, and of xl
#define IN_BUFFER (STAGE_BYTES / BOX_BYTES)      // boxes that a buffer of the ring holds
#define BEHIND ((2 * BOXES + IN_BUFFER - 1) / IN_BUFFER)  // buffers of them
static_assert(BEHIND <= STAGES && BOXES * CHUNK == BN, "x0 and xl lie in the ring together, in whole lines");

struct Layer {
    TensorMap x, weight, x0, xl, out;  // tiles of BM rows, of the weights BN
    const float *bias, *scale;         // [width]; scale: what the products are multiplied by, where X is fp8
    float x0_scale, xl_scale, out_factor;  // fp8: a value is what lies in memory times its scale; out_factor: one over that of out
    int width, depth, tiles;           // columns of out, of x; column tiles
};

__device__ __forceinline__ void bring_to_l2(const TensorMap* map, int column, int row) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(column), "r"(row) : "memory");
}

// Where box `b` lies in the ring: number i of x0 is 2 * i, of xl the one behind it.
__device__ __forceinline__ unsigned box(int chunks, int b) {
    return (chunks + b / IN_BUFFER) % STAGES * STAGE_BYTES + b % IN_BUFFER * BOX_BYTES;
}

__device__ __forceinline__ void copy_all(
    const Layer& layer, int m0, int n0, int chunks, const int* state, unsigned ring, unsigned full, unsigned empty) {
    const int ahead = min(STAGES, chunks);
    const auto copy_weight = [&](int c) {
        const int s = c % STAGES;
        expect(full + 8 * s, BN * 128);
        copy_tile(ring + s * STAGE_BYTES + BM * 128, &layer.weight, full + 8 * s, c * CHUNK, n0);
    };
    const auto copy_x = [&](int c) {
        const int s = c % STAGES;
        expect(full + 8 * s, BM * 128);
        copy_tile(ring + s * STAGE_BYTES, &layer.x, full + 8 * s, c * CHUNK, m0);
    };
    const auto copy_behind = [&](int i) {
        const unsigned barrier = full + 8 * ((chunks + i) % STAGES);
        const int first = i * IN_BUFFER, end = min(first + IN_BUFFER, 2 * BOXES);
        arrive(barrier);
        expect(barrier, (end - first) * BOX_BYTES);
        for (int b = first; b < end; ++b)
            copy_tile(ring + box(chunks, b), b % 2 ? &layer.xl : &layer.x0, barrier, n0 + b / 2 * CHUNK, m0);
    };
#pragma unroll 1
    for (int c = 0; c < ahead; ++c) copy_weight(c);
    wait_for_dependencies();
#pragma unroll 1
    for (int c = 0; c < ahead; ++c) copy_x(c);
    if (m0 >= state[TRUE_ROWS]) {  // the block may not end before its copies have
        for (int s = 0; s < ahead; ++s) wait(full + 8 * s, 0);
        return;
    }
#pragma unroll 1
    for (int b = 0; b < BOXES; ++b) {
        bring_to_l2(&layer.x0, n0 + b * CHUNK, m0);
        bring_to_l2(&layer.xl, n0 + b * CHUNK, m0);
    }
#pragma unroll 1
    for (int c = ahead; c < chunks + BEHIND; ++c) {
        if (c >= STAGES) wait(empty + 8 * (c % STAGES), (c / STAGES - 1) & 1);
        if (c < chunks) copy_weight(c), copy_x(c);
        else copy_behind(c - chunks);
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

// The sums of a thread, as wgmma lays them out, with x0 and xl of their box number B, in the place of xl.
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

// Combines boxes from number B on; each goes out when all threads are done with it.
template <int B>
__device__ __forceinline__ void conclude(
    const Layer& layer, const Sums& sums, char* buffers, unsigned ring, unsigned full, const float* bias, const float* scale, int chunks,
    int m0, int n0) {
    if constexpr (B < BOXES) {
        for (int i = 2 * B / IN_BUFFER; i <= (2 * B + 1) / IN_BUFFER; ++i) wait(full + 8 * ((chunks + i) % STAGES), (chunks + i) / STAGES & 1);
        const unsigned x0 = box(chunks, 2 * B), xl = box(chunks, 2 * B + 1);
        combine<B>(layer, sums, buffers + x0, buffers + xl, bias, scale);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // what was written here is what the copy out reads
        SYNC();
        if (threadIdx.x == 0) {
            asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&layer.out),
                         "r"(ring + xl), "r"(n0 + B * CHUNK), "r"(m0) : "memory");
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
        conclude<B + 1>(layer, sums, buffers, ring, full, bias, scale, chunks, m0, n0);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + 32) crossed_wgmma(const __grid_constant__ Layer layer, const int* state) {
    extern __shared__ __align__(1024) char shared[];
    __shared__ __align__(8) unsigned long long barriers[2 * STAGES];
    __shared__ __align__(16) float bias[BN], scale[FP8 ? BN : 2];
    let_dependents_start();
    const int m0 = blockIdx.x / layer.tiles * BM, n0 = blockIdx.x % layer.tiles * BN;
    const int chunks = (layer.depth + CHUNK - 1) / CHUNK;
    const unsigned ring = ((unsigned)__cvta_generic_to_shared(shared) + 1023) & ~1023u;
    const unsigned full = (unsigned)__cvta_generic_to_shared(barriers), empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {  // a buffer is full when both factors have come, or all boxes
            begin_barrier(full + 8 * s, 2);
            begin_barrier(empty + 8 * s, WM);
        }
        show_barriers();
    }
    for (int c = threadIdx.x; c < BN; c += THREADS + 32) {
        bias[c] = n0 + c < layer.width ? layer.bias[n0 + c] : 0.0f;
        if (FP8) scale[c] = n0 + c < layer.width ? layer.scale[n0 + c] : 0.0f;
    }
    __syncthreads();
    if (threadIdx.x >= THREADS) {
        if (threadIdx.x == THREADS) copy_all(layer, m0, n0, chunks, state, ring, full, empty);
        return;
    }
    wait_for_dependencies();
    if (m0 >= state[TRUE_ROWS]) return;
    Sums sums;
#pragma unroll
    for (int p = 0; p < BN / PIECE; ++p)
#pragma unroll
        for (int i = 0; i < PIECE / 2; ++i) sums[p][i] = 0.0f;
    multiply_all<true>(sums, chunks, ring, full, empty);
    char* const buffers = shared + (ring - (unsigned)__cvta_generic_to_shared(shared));
    conclude<0>(layer, sums, buffers, ring, full, bias, scale, chunks, m0, n0);
    if (threadIdx.x != 0) return;
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
