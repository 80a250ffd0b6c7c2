// How a lookup finds and pools what one unit of its output is made of. The including file (embedding.cu) defines the plan's sizes.
#pragma once
#include "words.cuh"

struct __align__(16) Table {  // its first segment inline; scale: float32[dim] of an int8 table
    unsigned long long base; long long end; long long rows; const float* scale; int next; int segments; long long unused;
};
struct Segment { unsigned long long base; long long end; };  // rows [end of the one before, end) lie at base
// id: first byte among a row's [context | candidate] ids, which are id_bytes wide; number: place among its numbers; offset: bytes.
struct __align__(16) Unit {
    long long oov; int table; int out; unsigned short id, ids, number, row_bytes, offset; unsigned char width, how;
    unsigned short pick, id_bytes;
};
// A unit whose row of an id below `limit` lies at base + id * row_bytes. how: Unit's | width << 8 | id_bytes << 12 | pick << 16.
struct __align__(16) Source {
    const char* base; unsigned long long limit; unsigned short id, ids, number, row_bytes; int unit; int how;
};

// Unit.how: kind | dtype << 2 | mean << 4 | may_pad << 5 | counted << 6 | largest << 7
enum Kind { GATHER = 0, SCALE = 1, COPY = 2, MASK = 3 };

struct Staged {  // in shared memory
    const unsigned* context_ids; const unsigned* candidate_ids; const float* context_numbers; const float* candidate_numbers;
    // The id at byte `at`, with no branch on its width: no id crosses a word, and a word's other bytes are permuted away.
    __device__ __forceinline__ ID id(int r, int at, int how) const {
        const int i = at >> 2;
        const unsigned* word = candidate_ids + r * CANDIDATE_WORDS + i - CONTEXT_WORDS;
        if (CONTEXT_WORDS && i < CONTEXT_WORDS) word = context_ids + r * CONTEXT_WORDS + i;
        const unsigned low = __byte_perm(*word, 0, (how >> 16) + 0x11 * (at & 3));
        if constexpr (sizeof(ID) == 8) return (how >> 12 & 15) == 8 ? (ID)word[1] << 32 | low : low;
        return low;
    }
    __device__ __forceinline__ float number(int r, int i) const {
        if (CONTEXT_NUMBERS && i < CONTEXT_NUMBERS) return context_numbers[r * CONTEXT_NUMBERS + i];
        return candidate_numbers[r * CANDIDATE_NUMBERS + i - CONTEXT_NUMBERS];
    }
};
struct Tables {
    const Unit* units; const Table* tables; const Segment* segments; unsigned long long* out_of_range;
    __device__ __forceinline__ void choose(int generation, int n_tables, int n_segments) {
        tables += generation * n_tables, segments += generation * n_segments;
    }
};

// The row of an id that the first segment does not hold: in a later segment; outside the table the row oov, and it is counted;
// null for padding.
__device__ __forceinline__ const char* far_row(unsigned long long any, int unit, Tables in) {
    const Unit& u = in.units[unit];
    const Table& t = in.tables[u.table];
    long long id = (long long)any;
    if (any >= (unsigned long long)t.rows) {
        if (any == ~0ull >> (64 - 8 * u.id_bytes) && (u.how >> 5 & 1)) return nullptr;
        if (u.how >> 6 & 1) atomicAdd(in.out_of_range, 1ull);
        id = u.oov;
    }
    unsigned long long base = t.base;
    long long begin = 0, end = t.end;
    for (int s = t.next; s < t.next + t.segments - 1 && id >= end; ++s) {
        begin = end;
        base = in.segments[s].base;
        end = in.segments[s].end;
    }
    return reinterpret_cast<const char*>(base) + (id - begin) * (long long)u.row_bytes + u.offset;
}

// Starts the loads of K rows: of id[k] by source(k), where has[k] says that it is wanted; where it is padding, has[k] becomes
// false. All rows that first segments hold are on their way before any other is looked for.
template <int N, int SET, int K, typename Of>
__device__ __forceinline__ void fetch(Raw<N, SET> raw[K], Of source, const ID id[K], bool has[K], const Tables& in) {
    bool far = false;
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const Source& s = source(k);
        const bool near = id[k] < (ID)s.limit;
        if (has[k] && near) raw[k].load(s.how, s.base + (unsigned long long)id[k] * s.row_bytes);
        far |= has[k] && !near;
    }
    if (!far) return;
#pragma unroll 1
    for (int k = 0; k < K; ++k) {  // a loop, as this is rare and long
        bool wanted = false;
        ID own = 0;
#pragma unroll
        for (int j = 0; j < K; ++j)
            if (j == k) own = id[j], wanted = has[j];
        const Source& s = source(k);
        if (!wanted || own < (ID)s.limit) continue;
        const char* p = far_row(own, s.unit, in);
        Raw<N, SET> row;
        row.clear();
        if (p) row.load(s.how, p);
#pragma unroll
        for (int j = 0; j < K; ++j)
            if (j == k) raw[j] = row, has[j] = p;
    }
}

// Starts the loads of what K units of one id each need: of source(k) for row(k), where has[k].
template <int N, int SET, int K, typename Of, typename Row>
__device__ __forceinline__ void begin(Raw<N, SET> raw[K], Of source, Row row, bool has[K], const Staged& at, const Tables& in) {
    ID id[K];
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const Source& s = source(k);
        if (NUMBERS && kind(s.how) == COPY) has[k] = false;
        if (MASKS && kind(s.how) == MASK) has[k] = false;
        if (MOST > 1 && s.ids > 1) has[k] = false;
        id[k] = has[k] && !(NUMBERS && kind(s.how) == SCALE) ? at.id(row(k), s.id, s.how) : 0;
    }
    fetch<N, SET, K>(raw, source, id, has, in);
}

// v: the columns of a unit of one id, or of none, for row r.
template <int N, int SET>
__device__ __forceinline__ void finish(
    float v[N], const Raw<N, SET>& raw, const Source& s, const float scale[N], int r, const Staged& at) {
    if (NUMBERS && kind(s.how) == COPY) {
        v[0] = at.number(r, s.number);
        return;
    }
    if (MASKS && kind(s.how) == MASK) {
        const bool padding = at.id(r, s.id, s.how) == (ID)(~0ull >> (64 - 8 * (s.how >> 12 & 15)));
        v[0] = padding && (s.how >> 5 & 1) ? 0.0f : 1.0f;
        return;
    }
    const float factor = NUMBERS && kind(s.how) == SCALE ? at.number(r, s.number) : 1.0f;
    for (int k = 0; k < N; ++k) {
        v[k] = raw.value(s.how, k);
        if (SET >> I8) v[k] *= scale[k];
        if (NUMBERS) v[k] *= factor;
    }
}

// v: the columns of a unit of several ids. Padded entries add nothing and are left out of a mean. int8 rows are summed as
// integers are.
template <int N, int SET>
__device__ __forceinline__ void pool(float v[N], const Source& s, const float scale[N], int r, const Staged& at, const Tables& in) {
    constexpr int K = MOST < 4 ? MOST : 4;  // rows in flight
    int found = 0;
    for (int k = 0; k < N; ++k) v[k] = 0.0f;
#pragma unroll 1
    for (int c = 0; c < s.ids; c += K) {
        Raw<N, SET> rows[K];
        ID id[K];
        bool has[K];
#pragma unroll
        for (int j = 0; j < K; ++j) {
            has[j] = c + j < s.ids;
            id[j] = has[j] ? at.id(r, s.id + (c + j) * (s.how >> 12 & 15), s.how) : 0;
        }
        fetch<N, SET, K>(rows, [&](int) -> const Source& { return s; }, id, has, in);
#pragma unroll
        for (int j = 0; j < K; ++j)
            if (has[j]) {
                ++found;
                for (int k = 0; k < N; ++k) {
                    const float e = rows[j].value(s.how, k);
                    if (LARGEST && (s.how >> 7 & 1)) v[k] = found > 1 ? fmaxf(v[k], e) : e;
                    else v[k] += e;
                }
            }
    }
    const float factor = (s.how >> 4 & 1) && found > 1 ? 1.0f / found : 1.0f;
    for (int k = 0; k < N; ++k) {
        if (SET >> I8) v[k] *= scale[k];
        v[k] *= factor;
    }
}

__device__ __forceinline__ Source source_of(int unit, const Unit& u, const Tables& in) {
    Source s = {nullptr, 0, u.id, u.ids, u.number, u.row_bytes, unit, u.how | u.width << 8 | u.id_bytes << 12 | u.pick << 16};
    if ((NUMBERS && kind(u.how) == COPY) || (MASKS && kind(u.how) == MASK)) return s;
    const Table& t = in.tables[u.table];
    s.base = reinterpret_cast<const char*>(t.base) + u.offset;
    s.limit = t.end;
    return s;
}

// Where the scales of an int8 unit lie; null of any other.
template <int SET>
__device__ __forceinline__ const float* scales_at(const Unit& u, const Tables& in) {
    if (!(SET >> I8) || !is<SET, I8>(u.how) || (NUMBERS && kind(u.how) == COPY) || (MASKS && kind(u.how) == MASK)) return nullptr;
    return in.tables[u.table].scale + u.offset;
}

template <int N>
__device__ __forceinline__ void read_scales(float scale[N], const float* from) {
    for (int k = 0; k < N; ++k) scale[k] = 1.0f;
    if (!from) return;
    if constexpr (N % 4 == 0) {
        for (int k = 0; k < N; k += 4) load4(from + k, scale + k);  // not by asm, which the compiler may start before it is asked for
    } else {
        for (int k = 0; k < N; ++k) scale[k] = from[k];
    }
}
