// What of a lookup is written but once a context: a history, and which of its places have an id. Blocks of their own do it, beside
// those of the rows: a context takes HISTORY_PARTS of them, in each of which a thread has one unit, so that all that a context
// reads is in flight at once. With more contexts than there are such blocks, each takes up to UNROLL at a time, and the ids of
// the next ones are on their way meanwhile. Column values are those of a row: the row of x that has the context's number.
#pragma once
#if HISTORY_PARTS
#include "lookup/pooling.cuh"
#include "lookup/wait_for_rows.cuh"

struct HistoryPart { int first, end, first_word, end_word; };  // tiling.py
__device__ constexpr HistoryPart history_parts[HISTORY_PARTS] = PARTS_OF_HISTORY;

// One unit of `count` contexts, from the one on whose row x is.
template <int N>
__device__ __forceinline__ void write_once(
    const Source& s, const float* scales, int count, OUT* x, int ld, const Staged& at, const Tables& in) {
    x += in.units.unit[s.unit].out;
    float scale[N];
    read_scales<N>(scale, scales);
    Raw<N, DTYPES> raw[UNROLL];
    bool has[UNROLL];
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) has[k] = k < count;
    begin<N, DTYPES, UNROLL>(raw, Same{s}, [](int k) { return k; }, has, at, in);
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
        if (k >= count) break;
        float v[N];
        finish<N, DTYPES>(v, raw[k], s, scale, k, at);
        write_columns<N>(x + (long long)k * ld, v);
    }
}

// Block `number` of so many. header, context_ids: pinned. room: contexts that these have room for, and x. in: of no generation yet.
__device__ __forceinline__ void write_histories(
    int number, int blocks, const int* STAGED header, const unsigned* STAGED context_ids, int room, Tables in, OUT* x, int ld,
    int* state, unsigned* shared) {
    const HistoryPart part = history_parts[number % HISTORY_PARTS];
    const int slots = blocks / HISTORY_PARTS, slot = number / HISTORY_PARTS;  // contexts, or groups of them, taken side by side
    const int tid = threadIdx.x, first_word = part.first_word, words = part.end_word - first_word;
    int* told = reinterpret_cast<int*>(shared);
    unsigned* const ids = shared + 4;  // [2][UNROLL][MOST_PART_WORDS]
    // The ids of `count` contexts from `context` on, of those that there may be.
    const auto bring = [&](int context, int count, int limit, int to) {
        for (int k = 0; k < count && context + k < limit; ++k)
            for (int i = tid; i < words; i += THREADS)
                copy_word(ids + (to * UNROLL + k) * MOST_PART_WORDS + i,
                          context_ids + (long long)(context + k) * CONTEXT_WORDS + first_word + i);
    };
    if (!AHEAD) {  // before it is known how many there are
        if (tid == 0) copy_word(told, header + STAGED_CONTEXTS);
        bring(slot, 1, room, 0);
    }
    wait_for_dependencies();
    in.generation = state[GENERATION] & 1;
    const bool works = tid < part.end - part.first;
    const Source own = source_of(FIRST_ONCE + part.first + (works ? tid : 0), in);
    const float* scales = scales_at<DTYPES>(own.unit, in);
    if (AHEAD && tid == 0) {  // all contexts are there before any row
        wait_for_rows(state + READY_ROWS, 1);
        *told = state[CONTEXTS];
        if (count_up(state + READY_BLOCKS) == (int)gridDim.x - 1) state[READY_ROWS] = state[READY_BLOCKS] = 0;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    const int contexts = min(*told, room), each = min(UNROLL, max(1, (contexts + slots - 1) / slots));
    int now = 0;
    if (slot * each < contexts && (AHEAD || each > 1)) {
        bring(slot * each, each, contexts, now = 1);
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
    }
    for (int context = slot * each; context < contexts; context += slots * each) {
        bring(context + slots * each, each, contexts, now ^ 1);
        const int count = min(each, contexts - context);
        // A unit's ids count from the words of rows on, as a row's own do.
        const Staged at = {nullptr, ids + now * UNROLL * MOST_PART_WORDS - first_word, nullptr, nullptr, nullptr, MOST_PART_WORDS};
        OUT* row = x + (long long)context * ld;
        if (works && NARROW && HOW_WIDTH(own.how) == 1) write_once<1>(own, scales, count, row, ld, at, in);
        else if (works) write_once<VEC>(own, scales, count, row, ld, at, in);
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        now ^= 1;
    }
}
#endif
