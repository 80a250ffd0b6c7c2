// Multi-table lookup of a whole model in one launch: every embedding, pooled bag, numeric embedding and plain number of a row,
// written side by side into x[B, ld], and the sum of all first-order terms into total[B].
//
// Grid: block b owns rows [b * R, b * R + R). Within it work is given out by output element: a thread owns one unit, a vector
// of up to 4 consecutive output columns of one feature, for every LANES-th row, so that neighbouring threads store to
// neighbouring addresses whatever the tables' dims, and a thread's row loads are independent of one another.
//   1. ids and numbers of the rows go into shared memory, straight from pinned host memory: each crosses the bus once. No two
//      blocks read one host word, for reads of one line queue up (a header word read by 256 blocks took 10 us, H200): which
//      rows are a bucket's padding is told by their own request_of_row, -1, and the generation lies in device memory;
//   2. every id is checked and turned into row addresses through the segment descriptors of the batch's generation;
//   3. units gather, pool, scale, convert and store;  4. one warp a row sums the first-order terms.
// Bytes: B * (ids + sum of row bytes + x columns * sizeof(OUT)). An id outside its table reads the column's out-of-vocabulary
// row and is counted: no id can reach another table's memory.
//
// The plan's sizes are compile-time constants, so that the index arithmetic has no division.
#include "common.cuh"

#ifndef ID
#define ID int
#define OUT float
#define THREADS 256
#define CONTEXT_IDS 1
#define CANDIDATE_IDS 2
#define CONTEXT_NUMBERS 1
#define CANDIDATE_NUMBERS 1
#define USERS 2      // most columns that one id feeds (its embedding and its first-order weight: 2)
#define COLUMNS 8    // row addresses of a row
#define CONSTANTS 1  // columns without an id: numeric embeddings
#define UNITS 40     // of x
#define TOTALS 4     // first-order terms
#endif
#define IDS (CONTEXT_IDS + CANDIDATE_IDS)
#define NUMBERS (CONTEXT_NUMBERS + CANDIDATE_NUMBERS)
#define MAX_ROWS 8  // a block
#define LANES (UNITS && UNITS < THREADS ? THREADS / UNITS : 1)

struct Table { unsigned long long base; long long end; long long rows; int next; int segments; };  // its first segment inline
struct Segment { unsigned long long base; long long end; };  // rows [end of the one before, end) lie at base
struct Column { int table; int position; int row_bytes; int may_pad; long long oov; };  // position < 0: none
struct Unit { unsigned short first, columns, element; unsigned char width, how; int out; int number; };

enum Kind { GATHER = 0, SCALE = 1, COPY = 2 };   // Unit.how: kind | dtype << 2 | mean << 4
enum Dtype { F32 = 0, F16 = 1, BF16 = 2 };

__device__ __forceinline__ const char* row_address(
    const Column& c, long long id, const Table* tables, const Segment* segments, unsigned long long* out_of_range) {
    const Table t = tables[c.table];
    if ((unsigned long long)id >= (unsigned long long)t.rows) {
        if (id == -1 && c.may_pad) return nullptr;
        atomicAdd(out_of_range, 1ull);
        id = c.oov;
    }
    unsigned long long base = t.base;
    long long begin = 0, end = t.end;
    for (int s = t.next; s < t.next + t.segments - 1 && id >= end; ++s) {
        begin = end;
        base = segments[s].base;
        end = segments[s].end;
    }
    return reinterpret_cast<const char*>(base) + (id - begin) * (long long)c.row_bytes;
}

__device__ __forceinline__ float widen(unsigned short h, int dtype) {
    return dtype == F16 ? half_to_float(h) : __uint_as_float((unsigned)h << 16);
}

__device__ __forceinline__ void add_vector(const char* row, const Unit& u, float v[4]) {
    const int dtype = (u.how >> 2) & 3;
    if (u.width == 4 && dtype == F32) {
        const float4 q = *reinterpret_cast<const float4*>(row + u.element * 4);
        v[0] += q.x; v[1] += q.y; v[2] += q.z; v[3] += q.w;
    } else if (u.width == 4) {
        const uint2 q = *reinterpret_cast<const uint2*>(row + u.element * 2);
        v[0] += widen((unsigned short)q.x, dtype); v[1] += widen((unsigned short)(q.x >> 16), dtype);
        v[2] += widen((unsigned short)q.y, dtype); v[3] += widen((unsigned short)(q.y >> 16), dtype);
    } else if (dtype == F32) {
        v[0] += reinterpret_cast<const float*>(row)[u.element];
    } else {
        v[0] += widen(reinterpret_cast<const unsigned short*>(row)[u.element], dtype);
    }
}

// Pools a unit's rows into v (zero before). Padded entries add nothing and are left out of a mean.
__device__ __forceinline__ void pool(const Unit& u, const char* const* rows, const float* numbers, float v[4]) {
    const int kind = u.how & 3;
    if (kind == COPY) { v[0] = numbers[u.number]; return; }
    int found = 0;
    for (int c = 0; c < u.columns; ++c) {
        const char* row = rows[u.first + c];
        if (row) { add_vector(row, u, v); ++found; }
    }
    float factor = 1.0f;
    if (kind == SCALE) factor = numbers[u.number];
    else if ((u.how >> 4) && found > 1) factor = 1.0f / found;
    else return;
    for (int k = 0; k < 4; ++k) v[k] *= factor;
}

extern "C" __global__ void __launch_bounds__(THREADS) lookup(
    const int* __restrict__ header, const int* __restrict__ request_of_row,
    const ID* __restrict__ context_ids, const ID* __restrict__ candidate_ids,
    const float* __restrict__ context_numbers, const float* __restrict__ candidate_numbers,
    const Table* __restrict__ tables, const Segment* __restrict__ segments, int n_tables, int n_segments,
    const Column* __restrict__ users,      // [IDS][USERS], then [CONSTANTS]
    const Unit* __restrict__ units,        // [UNITS], then [TOTALS]
    OUT* __restrict__ x, int ld, float* __restrict__ total, unsigned long long* out_of_range,
    int* __restrict__ state,               // device: [0] receives the true number of rows, for later kernels; [1] generation
    int bucket, int R) {
    extern __shared__ __align__(16) char shared[];
    __shared__ int requests[MAX_ROWS];
    const char** rows = reinterpret_cast<const char**>(shared);          // [R][COLUMNS]
    ID* ids = reinterpret_cast<ID*>(rows + (size_t)R * COLUMNS);         // [R][context | candidate]
    float* numbers = reinterpret_cast<float*>(ids + (size_t)R * IDS);    // [R][context | candidate]

    const int tid = threadIdx.x, first = blockIdx.x * R, staged = min(R, bucket - first);
    const int request = tid < staged ? request_of_row[first + tid] : -1;
    if (blockIdx.x == 0 && tid == 0) state[0] = header[10];
    // Padding rows are read too, rather than wait for request_of_row to cross the bus first.
    for (int i = tid; i < staged * CANDIDATE_IDS; i += THREADS) {
        const int r = i / (CANDIDATE_IDS + !CANDIDATE_IDS);
        ids[r * IDS + CONTEXT_IDS + i - r * CANDIDATE_IDS] = candidate_ids[(long long)first * CANDIDATE_IDS + i];
    }
    for (int i = tid; i < staged * CANDIDATE_NUMBERS; i += THREADS) {
        const int r = i / (CANDIDATE_NUMBERS + !CANDIDATE_NUMBERS);
        numbers[r * NUMBERS + CONTEXT_NUMBERS + i - r * CANDIDATE_NUMBERS] =
            candidate_numbers[(long long)first * CANDIDATE_NUMBERS + i];
    }
    if (tid < staged) requests[tid] = request;
    const int n = __syncthreads_count(request >= 0);  // padding comes last
    if (n == 0) return;
    for (int i = tid; i < n * (CONTEXT_IDS + CONTEXT_NUMBERS); i += THREADS) {
        const int r = i / (CONTEXT_IDS + CONTEXT_NUMBERS + !(CONTEXT_IDS + CONTEXT_NUMBERS));
        const int c = i - r * (CONTEXT_IDS + CONTEXT_NUMBERS);
        const long long q = requests[r];
        if (c < CONTEXT_IDS) ids[r * IDS + c] = context_ids[q * CONTEXT_IDS + c];
        else numbers[r * NUMBERS + c - CONTEXT_IDS] = context_numbers[q * CONTEXT_NUMBERS + c - CONTEXT_IDS];
    }
    if (CONTEXT_IDS + CONTEXT_NUMBERS) __syncthreads();

    const int generation = state[1] & 1;
    tables += generation * n_tables;
    segments += generation * n_segments;
    for (int i = tid; i < n * IDS * USERS; i += THREADS) {
        const int r = i / (IDS * USERS + !IDS), j = i - r * (IDS * USERS);
        const Column c = users[j];
        if (c.position >= 0) rows[r * COLUMNS + c.position] = row_address(c, ids[r * IDS + j / USERS], tables, segments, out_of_range);
    }
    for (int i = tid; i < n * CONSTANTS; i += THREADS) {
        const int r = i / (CONSTANTS + !CONSTANTS);
        const Column c = users[IDS * USERS + i - r * CONSTANTS];
        rows[r * COLUMNS + c.position] = row_address(c, 0, tables, segments, out_of_range);
    }
    __syncthreads();

    for (int i = tid; i < UNITS * LANES; i += THREADS) {
        const Unit u = units[i % (UNITS + !UNITS)];
        OUT* out = x + (long long)first * ld + u.out;
#pragma unroll 4
        for (int r = i / (UNITS + !UNITS); r < n; r += LANES) {
            float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            pool(u, rows + r * COLUMNS, numbers + r * NUMBERS, v);
            if (u.width == 4) store4(out + (long long)r * ld, v);
            else store_value(out + (long long)r * ld, v[0]);
        }
    }
    if (TOTALS == 0) return;
    const int lane = tid & 31;
    for (int r = tid >> 5; r < n; r += THREADS >> 5) {
        float sum = 0.0f;
        for (int j = lane; j < TOTALS; j += 32) {
            float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            pool(units[UNITS + j], rows + r * COLUMNS, numbers + r * NUMBERS, v);
            sum += v[0];
        }
        sum = warp_sum(sum);
        if (lane == 0) total[first + r] = sum;
    }
}
