// What a lookup reads: where tables lie, the units of its output (units.py, descriptors.py write both), and a batch's staged rows. The
// including file (embedding.cu) defines the plan's sizes.
#pragma once
#include "lookup/row_loads.cuh"

struct __align__(16) Table {  // its first segment inline; scale, for `DeviceLookup.place`: float32[dim] of an int8 table
    unsigned long long base; long long end; long long rows; const float* scale; int next; int segments; const unsigned* ranks;
};
struct __align__(16) Segment { unsigned long long base; long long end; };  // rows [end of the one before, end) lie at base
// units.py says what the fields of a unit are.
struct __align__(16) Unit { unsigned short id, ids, number, row_bytes; int out; int how; };
struct __align__(16) Far { long long oov; int table; int offset; };  // for ids that the first segment does not hold
// base, limit, scale: of either generation: a row of id < limit lies at base + id * row_bytes; scale is null but of int8. Copied
// from the tables, so that one read leads to rows; side by side, so that a warp's reads are whole lines.
// In TIERS rows lie in the order of their ranks (null: that of their ids). limit is then the table's rows, near the first segment's.
#ifndef AT_ONCE
#define AT_ONCE 3  // segments of a table that are looked at together: those behind the first of a plan for two GPUs
#endif
#define RECORDS (UNITS + TOTALS + PARTS + SINGLES + JOINS)
struct __align__(16) Units {
    unsigned long long base[RECORDS][2], limit[RECORDS][2];
    Unit unit[RECORDS];
    unsigned long long scale[RECORDS][2];
#if TIERS
    unsigned long long near[RECORDS][2], ranks[RECORDS][2];
#endif
    Far far[RECORDS];
#if PARTS + SINGLES
    float zeros[TEAM * VEC];  // bags.cuh reads them where there is no row
#endif
};
struct __align__(16) Source {  // a unit, of the batch's generation
    const char* base; unsigned long long limit; unsigned short id, ids, number, row_bytes; int unit; int how;
#if TIERS
    unsigned long long near; const unsigned* ranks;
#endif
};

enum Kind { GATHER = 0, SCALE = 1, COPY = 2, MASK = 3 };

struct Staged {  // in shared memory
    const unsigned* context_ids; const unsigned* candidate_ids; const float* context_numbers; const float* candidate_numbers;
    const int* read_for;  // for each row the one that has its context's ids and numbers; not with CARRIED
    int candidate_words;  // from row to row
    // The id at byte `at`, with no branch on its width: no id crosses a word, and a word's other bytes are permuted away.
    __device__ __forceinline__ ID id(int r, int at, int how) const {
        const int i = at >> 2;
        const unsigned* word = candidate_ids + r * candidate_words + i - ROW_WORDS;
        if (ROW_WORDS && i < ROW_WORDS) word = context_ids + (CARRIED ? r * CARRIED_WORDS : read_for[r] * ROW_WORDS) + i;
        const unsigned low = __byte_perm(*word, 0, HOW_PICK(how) + 0x11 * (at & 3));
        if constexpr (sizeof(ID) == 8) return HOW_ID_BYTES(how) == 8 ? (ID)word[1] << 32 | low : low;
        return low;
    }
    __device__ __forceinline__ float number(int r, int i) const {
        if (CONTEXT_NUMBERS && i < CONTEXT_NUMBERS)
            return context_numbers[(CARRIED ? r * CARRIED_WORDS : read_for[r] * CONTEXT_NUMBERS) + i];
        return candidate_numbers[r * CANDIDATE_NUMBERS + i - CONTEXT_NUMBERS];
    }
};
struct Tables {
    const Units& units; const Table* tables; const Segment* segments; unsigned long long* out_of_range;
    int n_tables, n_segments, generation;  // tables and segments are of generation 0, then of 1
};
