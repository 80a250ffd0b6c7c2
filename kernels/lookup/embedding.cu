// Multi-table lookup of a whole model in one launch: every embedding, pooled bag, numeric embedding and plain number of a row,
// written side by side into x[B, ld], and the sum of all first-order terms into total[B].
//
// Grid: block b owns rows [b * R, b * R + R). A thread of the first UNIT_THREADS owns one unit, a vector of VEC (or 1)
// consecutive output columns of one feature, for every LANES-th row: neighbouring threads read one table row and store to
// neighbouring addresses whatever the tables' dims, and UNROLL row loads of a thread are in flight before the first is used. A
// history is written once a context, by blocks of its own behind the first one (histories.cuh). The other warps sum the
// first-order terms, GROUP lanes a row, so that these reads wait beside the units' and not after them.
//   1. ids and numbers of the rows start on their way into shared memory, straight from pinned host memory, 128-byte lines at a
//      time: each crosses the bus once, and whole (row_loads.cuh). No line should be read by many blocks, as its reads queue up at
//      40 ns each (H200): so a row's own request_of_row, -1, tells that it is padding, the generation lies in device memory, and
//      with CARRIED each row has its context's ids and numbers beside it, which else take a second trip over the bus;
//   2. meanwhile each thread reads where its table lies in either generation of segment descriptors, beside which one the batch is of;
//   3. every id is checked, and rows are gathered, pooled, scaled, converted and stored, or summed.
// Launched AHEAD of its rows, a block first waits until the host has staged them (wait_for_rows.cuh).
// Bytes: B * (ids + sum of row bytes + x columns * sizeof(OUT)). An id outside its table reads the column's out-of-vocabulary
// row and is counted: no id can reach another table's memory. The plan's sizes are compile-time constants: no index is divided.
#include "runtime/common.cuh"

#ifndef ID
#define ID unsigned       // unsigned long long where some id has 8 bytes
#define OUT float
#define CONTEXT_BYTES 4   // of a context's ids: whole words
#define CANDIDATE_BYTES 8 // of a row's ids
#define CONTEXT_NUMBERS 1
#define CANDIDATE_NUMBERS 1
#define UNITS 40          // of x
#define TOTALS 4          // first-order terms
#define VEC 4             // columns of a wide unit: a multiple of 4
#define NARROW 1          // whether some units are one column wide
#define MASKS 1           // whether some units are masks
#define LARGEST 1         // whether some bags are pooled by max
#define DTYPES 15         // bit set of the dtypes of x's tables
#define TOTAL_DTYPES 15   // and of the first-order ones
#define MOST 4            // most ids that one unit pools
#define PARTS 3           // of bags, see bags.cuh
#define SINGLES 2         // features of one id beside bags, see there
#define JOINS 1           // bags of several parts
#define TEAM 4            // threads that take a part together
#define FLIGHT 8          // rows of a part that a thread has in flight
#define EVICT_FIRST 1     // whether the L1 lets go of table rows before others
#define GROUP 8           // lanes that sum a row's first-order terms: a power of two up to 32
#define UNIT_THREADS 256  // whole warps
#define TOTAL_THREADS 32  // whole warps
#define BLOCKS 2          // of a multiprocessor, that registers must allow
#define OUT_FACTOR 1.0f   // what values are multiplied by where OUT is fp8: one over its scale
#define TIERS 0           // whether tables lie in several segments, or by the ranks of their rows
#define AHEAD 0           // whether rows may still be staged after the launch
#define FIRST_ONCE 24     // units of x ahead of those that are written but once a context, in the row of its number: of one id or mask
#define ROW_WORDS 1       // of a context's ids, the first ones: that hold what its rows read
#define CARRIED 0         // whether each row has these beside it, and the context's numbers
#define HISTORY_PARTS 2   // of what is written once a context, each a block's
#define PARTS_OF_HISTORY {{0, 8, 0, 1}, {8, 16, 0, 1}}  // tiling.py's HistoryPart
#define MOST_PART_WORDS 1
#define SHARED {16, 48}   // columns of x, [first, end), that are written for each context too; {0, 0}: none
#endif
#if AHEAD
#define STAGED            // the host writes it while the kernel runs: no read may move ahead of the wait, or be one of constants
#else
#define STAGED __restrict__
#endif
#define UNROLL 4          // rows that a thread has in flight
#define CONTEXT_WORDS (CONTEXT_BYTES / 4)
#define CANDIDATE_WORDS (CANDIDATE_BYTES / 4)
#define NUMBERS (CONTEXT_NUMBERS + CANDIDATE_NUMBERS)
#define THREADS (UNIT_THREADS + TOTAL_THREADS)
#define ONCE (FIRST_ONCE < UNITS)
#define CARRIED_WORDS (ROW_WORDS + CONTEXT_NUMBERS)
#define TERMS ((TOTALS + GROUP - 1) / GROUP < 8 ? (TOTALS + GROUP - 1) / GROUP : 8)  // of a lane, in flight

#include "lookup/wait_for_rows.cuh"
#include "lookup/row_loads.cuh"
#include "lookup/pooling.cuh"
#include "lookup/bags.cuh"
#include "lookup/histories.cuh"

__device__ __forceinline__ bool narrow(const Source& s) { return NARROW && HOW_WIDTH(s.how) == 1; }

__device__ constexpr int shared_columns[2] = SHARED;
#define SHARES (shared_columns[1] > 0)
// Whether a row is its context's first; requests[-1] is of the row ahead of the block. Whether the block has it from the row before.
__device__ __forceinline__ bool begins(const int* requests, int r) { return requests[r] != requests[r - 1]; }
__device__ __forceinline__ bool repeats(const int* requests, int r) { return r > 0 && !begins(requests, r); }
// A context's own row of x, if these columns belong there and a row is that context's first.
struct Contexts {
    OUT* x;    // [most, columns of SHARED]
    int most;  // more are not wanted
    __device__ __forceinline__ bool want(int column, int r, const int* requests) const {
        return SHARES && shared_columns[0] <= column && column < shared_columns[1] && begins(requests, r) && requests[r] < most;
    }
    __device__ __forceinline__ OUT* at(int column, int context) const {
        return x + (long long)context * (shared_columns[1] - shared_columns[0]) + column - shared_columns[0];
    }
};

// x: of the block's first row.
template <int N, int LANES>
__device__ __forceinline__ void write_unit(
    const Source& s, const float* scales, int lane, int n, OUT* x, int ld, const int* requests, const Contexts& contexts,
    const Staged& at, const Tables& in) {
    const int column = in.units.unit[s.unit].out;
    x += column;
    float scale[N];
    read_scales<N>(scale, scales);  // on their way together with the first rows
    if (MOST > 1 && s.ids > 1) {
#pragma unroll 1
        for (int r = lane; r < n; r += LANES) {
            float v[N];
            pool<N, DTYPES>(v, s, scale, r, at, in);
            write_columns<N>(x + (long long)r * ld, v);
            if (contexts.want(column, r, requests)) write_columns<N>(contexts.at(column, requests[r]), v);
        }
        return;
    }
    for (int first = lane; first < n; first += LANES * UNROLL) {
        Raw<N, DTYPES> raw[UNROLL];
        bool has[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) has[k] = first + k * LANES < n;
        begin<N, DTYPES, UNROLL>(
            raw, Same{s}, [&](int k) { return first + k * LANES; }, has, at, in);
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            const int r = first + k * LANES;
            if (r >= n) break;
            float v[N];
            finish<N, DTYPES>(v, raw[k], s, scale, r, at);
            write_columns<N>(x + (long long)r * ld, v);
            if (contexts.want(column, r, requests)) write_columns<N>(contexts.at(column, requests[r]), v);
        }
    }
}

__device__ __forceinline__ int lines(int bytes) { return (bytes + 127) / 128 * 128; }

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) lookup(
    const int* STAGED header, const int* STAGED request_of_row,
    const unsigned* STAGED context_ids, const unsigned* STAGED candidate_ids,
    const float* STAGED context_numbers, const float* STAGED candidate_numbers,
    const unsigned* STAGED carried,        // of CARRIED: [rows][CARRIED_WORDS]
    int room, int histories,               // contexts that context_ids hold; blocks that write histories
    const Table* __restrict__ tables, const Segment* __restrict__ segments, int n_tables, int n_segments,
    const Units* __restrict__ units,       // of x, then first-order terms
    OUT* __restrict__ x, int ld, float* __restrict__ total, unsigned long long* out_of_range,
    int* __restrict__ state,               // device, see common.cuh
    int* __restrict__ context_rows,        // of ONCE and SHARED: for each row its context
    OUT* __restrict__ shared_x, int most_contexts,  // of SHARED, see Contexts
    int bucket, int R, int counts) {
    extern __shared__ __align__(128) char shared[];  // whole lines, of which what is staged may take one more (row_loads.cuh)
    Source* terms = reinterpret_cast<Source*>(shared);                     // [TOTALS]
    float* term_scales = reinterpret_cast<float*>(terms + TOTALS);         // [TOTALS]
    int* requests = reinterpret_cast<int*>(term_scales + TOTALS) + 1;      // [R], and of the row ahead
    int* read_for = requests + R;                                          // [R]: a row's first neighbour of the same context
    unsigned* own_context_ids = reinterpret_cast<unsigned*>(read_for + R); // [R][ROW_WORDS], of those rows alone
    float* own_context_numbers = reinterpret_cast<float*>(own_context_ids + R * ROW_WORDS);  // [R][CONTEXT_NUMBERS]
    char* free = shared + lines(TOTALS * (sizeof(Source) + 4) + 4 + R * 4 * (CARRIED ? 2 : 2 + CARRIED_WORDS));
    char* own_context = free + lines(R * CANDIDATE_BYTES + 124) + lines(R * CANDIDATE_NUMBERS * 4 + 124);
    let_dependents_start();
    Tables in = {*units, tables, segments, out_of_range, n_tables, n_segments, 0};
#if HISTORY_PARTS
    if (blockIdx.x > 0 && blockIdx.x <= histories)
        return write_histories(blockIdx.x - 1, histories, header, context_ids, room, in, x, ld, state, (unsigned*)shared);
#endif

    const int tid = threadIdx.x, first = (blockIdx.x ? blockIdx.x - histories : 0) * R, staged = min(R, bucket - first);
    const bool recorder = blockIdx.x == 0 && tid == THREADS - 1;
    int true_rows = 0, all_contexts = 0;
    Staged at = {own_context_ids, nullptr, own_context_numbers, nullptr, read_for, CANDIDATE_WORDS};
    // Padding too, rather than wait for request_of_row to cross the bus first. It goes to shared memory as well: in a register its
    // sign was wanted before the other reads had started, which then came a trip over the bus later (1.3 us, H200).
    const auto fetch_rows = [&] {
        if (tid < staged) copy_word(requests + tid, request_of_row + first + tid);
        if (SHARES && tid == 0 && first > 0) copy_word(requests - 1, request_of_row + first - 1);
        else if (tid == 0) requests[-1] = -1;
        const auto staged_rows = [&](const auto* rows, int words, char* to) {
            return stage(rows + (long long)first * words, staged * words, first * words, (bucket - first - staged) * words, to);
        };
        at.candidate_ids = staged_rows(candidate_ids, CANDIDATE_WORDS, free);
        at.candidate_numbers = staged_rows(candidate_numbers, CANDIDATE_NUMBERS, free + lines(R * CANDIDATE_BYTES + 124));
        if (!CARRIED) return;
        at.context_ids = staged_rows(carried, CARRIED_WORDS, own_context);
        at.context_numbers = reinterpret_cast<const float*>(at.context_ids + ROW_WORDS);
    };
    if (!AHEAD) {
        if (recorder) true_rows = header[STAGED_ROWS];
        if ((ONCE || SHARES) && recorder) all_contexts = header[STAGED_CONTEXTS];
        fetch_rows();
    }

    wait_for_dependencies();
    const int batch = recorder ? state[BATCH_NUMBER] : 0;
    in.generation = state[GENERATION] & 1;
    Source own;
    const float* scales = nullptr;
    const auto take = [&](int unit) {
        own = source_of(unit, in);
        scales = scales_at<DTYPES>(unit, in);
    };
    if (FIRST_ONCE && tid < UNIT_THREADS) take(tid % (FIRST_ONCE + !FIRST_ONCE));  // while the ids are on their way
    for (int j = tid - UNIT_THREADS; j >= 0 && j < TOTALS; j += TOTAL_THREADS + !TOTAL_THREADS) {
        terms[j] = source_of(UNITS + j, in);
        if (TOTAL_DTYPES >> I8) read_scales<1>(term_scales + j, scales_at<TOTAL_DTYPES>(UNITS + j, in));
    }
#if PARTS + SINGLES
    char* own_bags = own_context + (CARRIED ? lines(R * CARRIED_WORDS * 4 + 124) : 0);
    const Bags bags = {reinterpret_cast<Part*>(own_bags), reinterpret_cast<int*>(own_bags + (PARTS + SINGLES + JOINS) * sizeof(Part)),
                       reinterpret_cast<float*>(own_bags + (PARTS + SINGLES + JOINS) * sizeof(Part) + 16)};
#pragma unroll 1
    for (int j = tid; j < PARTS + SINGLES + JOINS; j += THREADS) {
        const int unit = UNITS + TOTALS + j;
        bags.parts[j] = {source_of(unit, in), scales_at<DTYPES>(unit, in), in.units.unit[unit].out, 0};
    }
    if (tid == 0) *bags.drawn = 0;
#endif
    if (AHEAD) {
        // The first block goes on when all rows are there, as its last thread passes on until then and a barrier needs all
        // threads: it reads its rows together with the last block, so nothing takes longer.
        if ((ONCE || SHARES) && recorder) state[CONTEXTS] = header[STAGED_CONTEXTS];  // for whom pass_on lets go on
        if (recorder) true_rows = pass_on(header + STAGED_ROWS, state + READY_ROWS);
        else if (tid == THREADS - 1) wait_for_rows(state + READY_ROWS, first + staged);
        __syncthreads();
        // When all blocks have counted themselves, nobody passes on or waits any more. Other warps' reads cross the bus meanwhile.
        if (tid == THREADS - 1 && count_up(state + READY_BLOCKS) == (int)gridDim.x - 1) state[READY_ROWS] = state[READY_BLOCKS] = 0;
        fetch_rows();
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    const int n = __syncthreads_count(tid < staged && requests[tid] >= 0);  // its own copy; padding comes last
    if (recorder) {
        state[TRUE_ROWS] = true_rows;
        if (!AHEAD && (ONCE || SHARES)) state[CONTEXTS] = all_contexts;
        if (counts) state[BATCH_NUMBER] = batch + 1;
    }
    if (n == 0) return;
    if ((ONCE || SHARES) && tid < n) context_rows[first + tid] = requests[tid];
    if (!CARRIED && CARRIED_WORDS) {
        if (tid < n) {
            int r = tid;
            while (repeats(requests, r)) --r;
            read_for[tid] = r;
        }
        constexpr int EACH = CARRIED_WORDS + !CARRIED_WORDS;
        for (int i = tid; i < n * EACH; i += THREADS) {
            const int r = i / EACH, c = i - r * EACH, number = c - ROW_WORDS;
            if (repeats(requests, r)) continue;
            const long long q = requests[r];
            if (number < 0) copy_word(own_context_ids + r * ROW_WORDS + c, context_ids + q * CONTEXT_WORDS + c);
            else copy_word(own_context_numbers + r * CONTEXT_NUMBERS + number, context_numbers + q * CONTEXT_NUMBERS + number);
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
    }

    if (tid < UNIT_THREADS) {
        x += (long long)first * ld;
        const Contexts contexts = {shared_x, most_contexts};
        constexpr int LANES = FIRST_ONCE && FIRST_ONCE < UNIT_THREADS ? UNIT_THREADS / FIRST_ONCE : 1;
        for (int i = tid; FIRST_ONCE && i < FIRST_ONCE * LANES; i += UNIT_THREADS) {
            const int lane = i / (FIRST_ONCE + !FIRST_ONCE);
            if (FIRST_ONCE * LANES > UNIT_THREADS && i != tid) take(i);
            if (narrow(own)) write_unit<1, LANES>(own, scales, lane, n, x, ld, requests, contexts, at, in);
            else write_unit<VEC, LANES>(own, scales, lane, n, x, ld, requests, contexts, at, in);
        }
#if PARTS + SINGLES
        pool_bags<VEC, DTYPES>(bags, n, R, x, ld, at, in);
#endif
        return;
    }
    // Whole warps stay together in this loop, for the shuffles.
    const int lane = tid % 32, member = lane % GROUP;
    for (int base = (tid - UNIT_THREADS) / 32 * (32 / GROUP); base < n; base += TOTAL_THREADS / GROUP) {
        const int r = base + lane / GROUP;
        float sum = 0.0f;
        for (int from = member; r < n && from < TOTALS; from += GROUP * (TERMS + !TERMS)) {
            Raw<1, TOTAL_DTYPES> raw[TERMS + !TERMS];
            bool has[TERMS + !TERMS];
            const auto term = [&](int k) -> const Source& { return terms[min(from + k * GROUP, TOTALS - 1)]; };
#pragma unroll
            for (int k = 0; k < TERMS; ++k) has[k] = from + k * GROUP < TOTALS;
            begin<1, TOTAL_DTYPES, TERMS + !TERMS>(raw, term, [&](int) { return r; }, has, at, in);
#pragma unroll
            for (int k = 0; k < TERMS; ++k) {
                if (from + k * GROUP >= TOTALS) break;
                if (MOST > 1 && term(k).ids > 1) continue;
                float v[1];
                finish<1, TOTAL_DTYPES>(v, raw[k], term(k), term_scales + from + k * GROUP, r, at);
                sum += v[0];
            }
#pragma unroll 1
            for (int k = 0; MOST > 1 && k < TERMS && from + k * GROUP < TOTALS; ++k) {
                if (term(k).ids <= 1) continue;
                float v[1];
                pool<1, TOTAL_DTYPES>(v, term(k), term_scales + from + k * GROUP, r, at, in);
                sum += v[0];
            }
        }
        for (int step = GROUP / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (member == 0 && r < n) total[first + r] = sum;
    }
}
