// How a lookup pools bags whose lengths differ. bag_parts.py cuts bags into parts of about as many ids, those with the most first,
// and behind them come the features of one id. TEAM neighbouring threads take a part of one row, or such a feature of FLIGHT rows,
// each a vector of its columns with FLIGHT row loads in flight. What a warp takes next it draws from a counter, so that no thread
// waits for who has a long bag.
// Order of a sum: a part's ids as they lie, then the bag's parts as they lie, through shared memory. Which warp takes what
// changes no bit.
#pragma once
#if PARTS + SINGLES
#include "lookup/pooling.cuh"

#define WHOLE_BAG 0xffff            // `number` of a part that is a whole bag; of another the place of its sum
#define SUM_WORDS (TEAM * VEC + 4)  // of a partial sum: its columns, and then of how many rows
#define TEAMS (32 / TEAM)           // of a warp
#define OWN ((FLIGHT + TEAM - 1) / TEAM)  // rows that a thread looks for, of those that its team has in flight
#define ALL 0xffffffffu

struct __align__(16) Part { Source source; const float* scales; int out; int unused; };
struct Bags {  // in shared memory
    Part* parts;  // [PARTS], then [SINGLES], then [JOINS]: whole bags, of `ids` sums from place `number` on
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

// Rows that a team has in flight: where they lie, each of which one of its threads looks for, and then tells the others.
struct Flight {
    unsigned long long row[OWN];  // of number k * TEAM + member
    unsigned has[OWN];            // whether there is one, a bit for each of the team's

    // Rows of the ids from number c on: of one row (APART 0), or of one id of neighbouring rows (1). Those from `count` on, and
    // padding, are none; `readable` ids may be looked at. Gives whether any team of the warp has one.
    template <int APART>
    __device__ __forceinline__ bool find(const Source& s, int count, int readable, int c, int r, const Staged& at, const Tables& in) {
        const int lane = threadIdx.x % 32, member = lane % TEAM;
        ID id[OWN];
        bool wanted[OWN];
#pragma unroll
        for (int k = 0; k < OWN; ++k) {
            const int j = k * TEAM + member, i = min(c + j, readable - 1);  // the last rather than branch
            id[k] = at.id(r + APART * i, s.id + !APART * i * HOW_ID_BYTES(s.how), s.how);
            const bool padding = HOW_MAY_PAD(s.how) && id[k] == (ID)HOW_PADDING_ID(s.how);
            wanted[k] = j < FLIGHT && c + j < count && !padding;
        }
        find_rows<OWN>(row, Same{s}, id, wanted, in);
        unsigned any = 0;
#pragma unroll
        for (int k = 0; k < OWN; ++k) {
            const unsigned found = __ballot_sync(ALL, row[k] != 0);
            if (!row[k]) row[k] = (unsigned long long)in.units.zeros;
            any |= found;
            has[k] = found >> (lane - member) & (ALL >> (32 - TEAM));
        }
        return any;
    }
    __device__ __forceinline__ bool there(int j) const { return has[j / TEAM] >> j % TEAM & 1; }
    // Where there is no row zeros lie, in lines that the L1 has: loads that some threads leave out take registers twice.
    __device__ __forceinline__ const char* at(int j) const {
        const unsigned long long v = row[j / TEAM];
        if (TEAM == 1) return reinterpret_cast<const char*>(v);
        const int lane = threadIdx.x % 32, from = lane - lane % TEAM + j % TEAM;
        const unsigned low = __shfl_sync(ALL, (unsigned)v, from), high = __shfl_sync(ALL, (unsigned)(v >> 32), from);
        return reinterpret_cast<const char*>((unsigned long long)high << 32 | low);
    }
};

// Adds a part's rows, `shift` bytes into each. Warps stay together: `most` is the most ids that any of its teams has.
template <int N, int SET>
__device__ __forceinline__ void add_rows(
    Sum<N, SET>& sum, const Source& s, int ids, int most, int shift, int r, const Staged& at, const Tables& in) {
#pragma unroll 1
    for (int c = 0; c < most; c += FLIGHT) {
        Flight flight;
        if (!flight.find<0>(s, ids, s.ids, c, r, at, in)) continue;
        Raw<N, SET> rows[FLIGHT];
#pragma unroll
        for (int j = 0; j < FLIGHT; ++j) rows[j].load(s.how, flight.at(j) + shift);
#pragma unroll
        for (int j = 0; j < FLIGHT; ++j) sum.add(rows[j], s.how, flight.there(j));
#pragma unroll
        for (int k = 0; k < OWN; ++k)
            if (!LARGEST) sum.rows += __popc(flight.has[k]);
    }
}

// Writes columns of a bag, or of one row: the values times their scales.
template <int N, int SET>
__device__ __forceinline__ void write_scaled(float v[N], const float scale[N], float factor, OUT* x) {
    for (int k = 0; k < N; ++k) {
        if (SET >> I8) v[k] *= scale[k];
        v[k] *= factor;
    }
    if constexpr (sizeof(OUT) == 2 && N % 8 == 0) {
        for (int k = 0; k < N; k += 8) {  // not store8, of which the compiler makes four stores here
            unsigned w[4];
            for (int i = 0; i < 4; ++i) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w[i]) : "f"(v[k + 2 * i + 1]), "f"(v[k + 2 * i]));
            asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(x + k), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
        }
    } else {
        write_columns<N>(x, v);
    }
}
template <int N, int SET>
__device__ __forceinline__ void read_scales(float scale[N], const Part& part, int column) {
    read_scales<N>(scale, SET >> I8 && part.scales ? part.scales + column : nullptr);
}
__device__ __forceinline__ float mean_factor(int how, int rows) { return HOW_MEAN(how) && rows > 1 ? 1.0f / rows : 1.0f; }

// All bags of the block's n rows, and all features of one id, by the first UNIT_THREADS threads. x: of the block's first row.
template <int N, int SET>
__device__ __forceinline__ void pool_bags(
    const Bags& bags, int n, int R, OUT* x, int ld, const Staged& at, const Tables& in) {
    const int lane = threadIdx.x % 32, team = lane / TEAM, column = lane % TEAM * N;
    const auto draw = [&] { return __shfl_sync(ALL, lane == 0 ? atomicAdd(bags.drawn, TEAMS) : 0, 0); };
    const auto shift_of = [&](int how) { return column * (is<SET, F32>(how) ? 4 : is<SET, I8>(how) ? 1 : 2); };
    const auto to = [&](int r, const Part& part) { return x + ((long long)r * ld + part.out + column); };
    const int pairs = PARTS * n, first_single = (pairs + TEAMS - 1) / TEAMS * TEAMS;
    int first = draw();
#pragma unroll 1
    for (; first < pairs; first = draw()) {
        const unsigned i = min(first + team, pairs - 1), p = i / (unsigned)n, r = i - p * n;
        const bool mine = team < TEAMS && first + team < pairs;
        const Part& part = bags.parts[p];
        const Source s = part.source;
        Sum<N, SET> sum;
        sum.clear();
        const int most = __shfl_sync(ALL, (int)s.ids, 0);  // as parts come with the most ids first
        add_rows<N, SET>(sum, s, mine ? s.ids : 0, most, shift_of(s.how), r, at, in);
        if (!mine) continue;
        float v[N];
        for (int k = 0; k < N; ++k) v[k] = (float)sum.v[k];
        if (s.number == WHOLE_BAG) {
            float scale[N];
            read_scales<N, SET>(scale, part, column);
            write_scaled<N, SET>(v, scale, mean_factor(s.how, sum.rows), to(r, part));
        } else {
            float* sums = bags.sums + (s.number * R + r) * SUM_WORDS;
            for (int k = 0; k < N; k += 4) store4(sums + column + k, v + k);
            if (column == 0) sums[TEAM * VEC] = __uint_as_float((unsigned)sum.rows);
        }
    }
    const unsigned groups = (n + FLIGHT - 1) / FLIGHT, singles = SINGLES * groups;
#pragma unroll 1
    for (first -= first_single; first < (int)singles; first = draw() - first_single) {
        const unsigned i = min((unsigned)(first + team), singles - 1), p = i / groups;
        const int r = (i - p * groups) * FLIGHT;
        const bool mine = team < TEAMS && first + team < (int)singles;
        const Part& part = bags.parts[PARTS + p];
        const Source s = part.source;
        Flight flight;
        flight.find<1>(s, mine ? n - r : 0, n - r, 0, r, at, in);
        Raw<N, SET> rows[FLIGHT];
#pragma unroll
        for (int j = 0; j < FLIGHT; ++j) rows[j].load(s.how, flight.at(j) + shift_of(s.how));
        float scale[N];
        read_scales<N, SET>(scale, part, column);
        if (!mine) continue;
        // Backwards, so that those beyond n are written over by the n-th: with a branch each row would be read behind the one before.
#pragma unroll
        for (int j = FLIGHT - 1; j >= 0; --j) {
            float v[N];
            for (int k = 0; k < N; ++k) v[k] = rows[j].value(s.how, k);
            write_scaled<N, SET>(v, scale, 1.0f, to(min(r + j, n - 1), part));
        }
    }
    if (!JOINS) return;
    asm volatile("bar.sync 1, %0;" ::"n"(UNIT_THREADS) : "memory");
    for (int i = threadIdx.x / 32 * TEAMS + team; team < TEAMS && i < JOINS * n; i += UNIT_THREADS / 32 * TEAMS) {
        const unsigned j = (unsigned)i / (unsigned)n, r = i - j * n;
        const Part& bag = bags.parts[PARTS + SINGLES + j];
        float v[N], scale[N];
        read_scales<N, SET>(scale, bag, column);
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
        write_scaled<N, SET>(v, scale, mean_factor(bag.source.how, rows), to(r, bag));
    }
}
#endif
