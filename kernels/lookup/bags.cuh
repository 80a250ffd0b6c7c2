// How a lookup pools bags whose lengths differ. bag_parts.py cuts bags into parts of about as many ids, those with the most first.
// TEAM neighbouring threads take one part of one row, each a vector of its columns, with FLIGHT row loads in flight; what a warp
// takes next it draws from a counter, so that no thread waits for who has a long bag.
// Order of a sum: a part's ids as they lie, then the bag's parts as they lie, through shared memory. Which warp takes what
// changes no bit.
#pragma once
#include "lookup/pooling.cuh"

#define WHOLE_BAG 0xffff            // `number` of a part that is a whole bag; of another the place of its sum
#define SUM_WORDS (TEAM * VEC + 4)  // of a partial sum: its columns, and then of how many rows
#define TEAMS (32 / TEAM)           // of a warp

struct __align__(16) Part { Source source; const float* scales; int out; int unused; };
struct Bags {  // in shared memory
    Part* parts;  // [PARTS], then [JOINS]: whole bags, of `ids` sums from place `number` on
    int* drawn;   // how many pairs of a part and a row were taken
    float* sums;  // [places][R][SUM_WORDS]
};

template <int SET> struct Term { typedef float type; };
template <> struct Term<1 << I8> { typedef int type; };

// The sum, or the largest values, of N columns of some rows. int8 rows alone are summed as integers: one instruction a column.
template <int N, int SET>
struct Sum {
    typename Term<SET>::type v[N];
    int rows;

    __device__ __forceinline__ void clear() {
        for (int k = 0; k < N; ++k) v[k] = 0;
        rows = 0;
    }
    __device__ __forceinline__ void add(const Raw<N, SET>& row, int how, bool has) {  // without one the row is zeros
        const bool largest = LARGEST && HOW_LARGEST(how);
        for (int k = 0; k < N; ++k) {
            if constexpr (SET == 1 << I8) {
                const unsigned word = row.words[k / 4];
                if (!largest) asm("dp4a.s32.s32 %0, %1, %2, %0;" : "+r"(v[k]) : "r"(word), "r"(1 << 8 * (k % 4)));
                else if (has) v[k] = larger(v[k], (int)(signed char)(word >> 8 * (k % 4)));
            } else {
                if (!largest) v[k] += row.value(how, k);
                else if (has) v[k] = larger(v[k], row.value(how, k));
            }
        }
        if (LARGEST) rows += has;
    }
    __device__ __forceinline__ int larger(int a, int b) const { return rows ? max(a, b) : b; }
    __device__ __forceinline__ float larger(float a, float b) const { return rows ? fmaxf(a, b) : b; }
};

// Where the rows lie that a part's ids from c on name: of id c + k * TEAM + member; 0 of padding and of what is beyond `ids`. A
// team's threads look for different rows, and then tell each other.
template <int OWN>
__device__ __forceinline__ void find_rows(
    unsigned long long row[OWN], const Source& s, int ids, int c, int member, int r, const Staged& at, const Tables& in) {
    ID id[OWN];
    bool far[OWN], any = false;
#pragma unroll
    for (int k = 0; k < OWN; ++k) {
        const int j = k * TEAM + member;
        const bool has = j < FLIGHT && c + j < ids;
        id[k] = at.id(r, s.id + min(c + j, (int)s.ids - 1) * HOW_ID_BYTES(s.how), s.how);  // of the last rather than branch
        const bool near = id[k] < (ID)s.limit, padding = HOW_MAY_PAD(s.how) && id[k] == (ID)HOW_PADDING_ID(s.how);
        row[k] = has && near ? (unsigned long long)s.base + (unsigned long long)id[k] * s.row_bytes : 0;
        any |= far[k] = has && !near && !padding;
    }
    if (!any) return;
#pragma unroll 1
    for (int k = 0; k < OWN; ++k) {  // a loop, as this is rare and long
        bool wanted = false;
        ID own = 0;
#pragma unroll
        for (int j = 0; j < OWN; ++j)
            if (j == k) own = id[j], wanted = far[j];
        if (!wanted) continue;
        const unsigned long long found = (unsigned long long)far_row(own, s.unit, in);
#pragma unroll
        for (int j = 0; j < OWN; ++j)
            if (j == k) row[j] = found;
    }
}

__device__ __forceinline__ const char* row_of(unsigned long long v, int lane) {  // what a lane has found
    if (TEAM == 1) return reinterpret_cast<const char*>(v);
    const unsigned low = __shfl_sync(0xffffffffu, (unsigned)v, lane), high = __shfl_sync(0xffffffffu, (unsigned)(v >> 32), lane);
    return reinterpret_cast<const char*>((unsigned long long)high << 32 | low);
}

// Adds a part's rows, `shift` bytes into each. Warps stay together: `most` is the most ids that any of its teams has. Where there
// is no row zeros are read, of lines that the L1 has: loads that some threads leave out take registers twice.
template <int N, int SET>
__device__ __forceinline__ void add_rows(
    Sum<N, SET>& sum, const Source& s, int ids, int most, int shift, int r, const Staged& at, const Tables& in) {
    constexpr int OWN = (FLIGHT + TEAM - 1) / TEAM;
    const int lane = threadIdx.x % 32, member = lane % TEAM;
#pragma unroll 1
    for (int c = 0; c < most; c += FLIGHT) {
        unsigned long long own[OWN];
        unsigned has[OWN], any = 0;
        find_rows<OWN>(own, s, ids, c, member, r, at, in);
#pragma unroll
        for (int k = 0; k < OWN; ++k) {
            const unsigned found = __ballot_sync(0xffffffffu, own[k] != 0);
            if (!own[k]) own[k] = (unsigned long long)in.units.zeros;
            any |= found;
            has[k] = found >> (lane - member) & (0xffffffffu >> (32 - TEAM));
        }
        if (!any) continue;
        Raw<N, SET> rows[FLIGHT];
#pragma unroll
        for (int j = 0; j < FLIGHT; ++j) rows[j].load(s.how, row_of(own[j / TEAM], lane - member + j % TEAM) + shift);
#pragma unroll
        for (int j = 0; j < FLIGHT; ++j) sum.add(rows[j], s.how, has[j / TEAM] >> j % TEAM & 1);
#pragma unroll
        for (int k = 0; k < OWN; ++k)
            if (!LARGEST) sum.rows += __popc(has[k]);
    }
}

// Writes a bag's columns, of the sum of `rows` rows.
template <int N, int SET>
__device__ __forceinline__ void write_bag(float v[N], int rows, const Part& part, int column, OUT* x) {
    float scale[N];
    read_scales<N>(scale, SET >> I8 && part.scales ? part.scales + column : nullptr);
    const float factor = HOW_MEAN(part.source.how) && rows > 1 ? 1.0f / rows : 1.0f;
    for (int k = 0; k < N; ++k) {
        if (SET >> I8) v[k] *= scale[k];
        v[k] *= factor;
    }
    write_columns<N>(x + part.out + column, v);
}

// All bags of the block's n rows, by the first UNIT_THREADS threads. x: of the block's first row.
template <int N, int SET>
__device__ __forceinline__ void pool_bags(const Bags& bags, int n, int R, OUT* x, int ld, const Staged& at, const Tables& in) {
    const int lane = threadIdx.x % 32, team = lane / TEAM, column = lane % TEAM * N;
#pragma unroll 1
    for (;;) {
        int first = lane == 0 ? atomicAdd(bags.drawn, TEAMS) : 0;
        first = __shfl_sync(0xffffffffu, first, 0);
        if (first >= PARTS * n) break;
        const unsigned i = min(first + team, PARTS * n - 1), p = i / (unsigned)n, r = i - p * n;
        const bool mine = team < TEAMS && first + team < PARTS * n;
        const Part& part = bags.parts[p];
        const Source s = part.source;
        const int shift = column * (is<SET, F32>(s.how) ? 4 : is<SET, I8>(s.how) ? 1 : 2);
        Sum<N, SET> sum;
        sum.clear();
        const int most = __shfl_sync(0xffffffffu, (int)s.ids, 0);  // as parts come with the most ids first
        add_rows<N, SET>(sum, s, mine ? s.ids : 0, most, shift, r, at, in);
        if (!mine) continue;
        float v[N];
        for (int k = 0; k < N; ++k) v[k] = (float)sum.v[k];
        if (s.number == WHOLE_BAG) {
            write_bag<N, SET>(v, sum.rows, part, column, x + (long long)r * ld);
        } else {
            float* to = bags.sums + (s.number * R + r) * SUM_WORDS;
            for (int k = 0; k < N; k += 4) store4(to + column + k, v + k);
            if (column == 0) to[TEAM * VEC] = __uint_as_float((unsigned)sum.rows);
        }
    }
    if (!JOINS) return;
    asm volatile("bar.sync 1, %0;" ::"n"(UNIT_THREADS) : "memory");
    for (int i = threadIdx.x / 32 * TEAMS + team; team < TEAMS && i < JOINS * n; i += UNIT_THREADS / 32 * TEAMS) {
        const unsigned j = (unsigned)i / (unsigned)n, r = i - j * n;
        const Part& bag = bags.parts[PARTS + j];
        float v[N];
        for (int k = 0; k < N; ++k) v[k] = 0.0f;
        int rows = 0;
#pragma unroll 1
        for (int p = 0; p < bag.source.ids; ++p) {
            const float* from = bags.sums + ((bag.source.number + p) * R + r) * SUM_WORDS;
            const int more = (int)__float_as_uint(from[TEAM * VEC]);
            if (!more) continue;
            float e[N];
            for (int k = 0; k < N; k += 4) load4(from + column + k, e + k);
            for (int k = 0; k < N; ++k) {
                if (LARGEST && HOW_LARGEST(bag.source.how)) v[k] = rows ? fmaxf(v[k], e[k]) : e[k];
                else v[k] += e[k];
            }
            rows += more;
        }
        write_bag<N, SET>(v, rows, bag, column, x + (long long)r * ld);
    }
}
