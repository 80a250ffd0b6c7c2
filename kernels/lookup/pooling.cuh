// How a lookup finds and pools what one unit of its output is made of. The including file (embedding.cu) defines the plan's sizes.
#pragma once
#include "lookup/unit_records.cuh"

// The row of an id that the first segment does not hold: in a later segment; outside the table the row oov, and it is counted;
// null for padding.
__device__ __forceinline__ const char* far_row(unsigned long long any, int unit, const Tables& in) {
    const Unit& u = in.units.unit[unit];
    const Far& far = in.units.far[unit];
    const Table& t = in.tables[in.generation * in.n_tables + far.table];
    const Segment* segments = in.segments + in.generation * in.n_segments;
    long long id = (long long)any;
    if (any >= (unsigned long long)t.rows) {
        if (any == HOW_PADDING_ID(u.how) && HOW_MAY_PAD(u.how)) return nullptr;
        if (HOW_COUNTED(u.how)) atomicAdd(in.out_of_range, 1ull);
        id = far.oov;
    }
    if (TIERS && t.ranks) id = t.ranks[id];
    unsigned long long base = t.base;
    long long begin = 0, end = t.end;
    for (int s = t.next; s < t.next + t.segments - 1 && id >= end; ++s) {
        begin = end;
        base = segments[s].base;
        end = segments[s].end;
    }
    return reinterpret_cast<const char*>(base) + (id - begin) * (long long)u.row_bytes + far.offset;
}

// Of all k the same source.
struct Same {
    const Source& one;
    __device__ __forceinline__ const Source& operator()(int) const { return one; }
};
template <typename Of> struct is_same_source { static constexpr bool value = false; };
template <> struct is_same_source<Same> { static constexpr bool value = true; };

// at[k]: where the row of id[k] lies that source(k) reads, where has[k] says that it is wanted; else, and for padding, null. Ranks
// of all ids are on their way before one is used.
template <int K, typename Of>
__device__ __forceinline__ void find_rows(unsigned long long at[K], Of source, const ID id[K], const bool has[K], const Tables& in) {
    ID rank[K];
    bool far = false;
#pragma unroll
    for (int k = 0; k < K; ++k) {
        rank[k] = id[k];
#if TIERS
        const Source& s = source(k);
        if (s.ranks && has[k] && id[k] < (ID)s.limit) {
            unsigned word;
            load_bytes<4>(reinterpret_cast<const char*>(s.ranks + id[k]), &word);
            rank[k] = word;
        }
#endif
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const Source& s = source(k);
        bool near = id[k] < (ID)s.limit;
#if TIERS
        near = near && rank[k] < (ID)s.near;
#endif
        at[k] = has[k] && near ? (unsigned long long)s.base + (unsigned long long)rank[k] * s.row_bytes : 0;
        far |= has[k] && !near;
    }
    if (!far) return;
#if TIERS
    if constexpr (is_same_source<Of>::value) {  // segments are read once for all ids, AT_ONCE of them together
        const Source& s = source(0);
        const Far& f = in.units.far[s.unit];
        const Table& t = in.tables[in.generation * in.n_tables + f.table];
        const Segment* segment = in.segments + in.generation * in.n_segments + t.next;
        unsigned long long begin = s.near;
#pragma unroll 1
        for (int left = t.segments - 1; left > 0; left -= AT_ONCE, segment += AT_ONCE) {
            Segment some[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) some[i] = segment[min(i, left - 1)];
            far = false;
#pragma unroll
            for (int k = 0; k < K; ++k) {
                const bool wanted = has[k] && !at[k];
                unsigned long long from = begin;
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    const unsigned long long end = some[i].end;
                    if (wanted && id[k] < (ID)s.limit && rank[k] >= (ID)from && rank[k] < (ID)end)
                        at[k] = some[i].base + f.offset + (rank[k] - from) * s.row_bytes;
                    from = end;
                }
                far |= wanted && !at[k];
            }
            if (!far) return;
            begin = some[AT_ONCE - 1].end;
        }
    }
#endif
#pragma unroll 1
    for (int k = 0; k < K; ++k) {  // a loop, as this is rare and long
        bool wanted = false;
        ID own = 0;
#pragma unroll
        for (int j = 0; j < K; ++j)
            if (j == k) own = id[j], wanted = has[j] && !at[j];
        if (!wanted) continue;
        const unsigned long long found = (unsigned long long)far_row(own, source(k).unit, in);
#pragma unroll
        for (int j = 0; j < K; ++j)
            if (j == k) at[j] = found;
    }
}

// Starts the loads of K rows: of id[k] by source(k), where has[k] says that it is wanted; where it is padding, has[k] becomes
// false. All rows that first segments hold are on their way before any other is looked for; in TIERS, where many are elsewhere,
// all are looked for, and then all are on their way.
template <int N, int SET, int K, typename Of>
__device__ __forceinline__ void fetch(Raw<N, SET> raw[K], Of source, const ID id[K], bool has[K], const Tables& in) {
    if (TIERS) {
        unsigned long long at[K];
        find_rows<K>(at, source, id, has, in);
#pragma unroll
        for (int k = 0; k < K; ++k) {
            const bool wanted = has[k];
            has[k] = has[k] && at[k];
            if (has[k]) raw[k].load(source(k).how, reinterpret_cast<const char*>(at[k]));
            else if (wanted) raw[k].clear();
        }
        return;
    }
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
        if (NUMBERS && HOW_KIND(s.how) == COPY) has[k] = false;
        if (MASKS && HOW_KIND(s.how) == MASK) has[k] = false;
        if (MOST > 1 && s.ids > 1) has[k] = false;
        id[k] = has[k] && !(NUMBERS && HOW_KIND(s.how) == SCALE) ? at.id(row(k), s.id, s.how) : 0;
    }
    fetch<N, SET, K>(raw, source, id, has, in);
}

// v: the columns of a unit of one id, or of none, for row r.
template <int N, int SET>
__device__ __forceinline__ void finish(
    float v[N], const Raw<N, SET>& raw, const Source& s, const float scale[N], int r, const Staged& at) {
    if (NUMBERS && HOW_KIND(s.how) == COPY) {
        v[0] = at.number(r, s.number);
        return;
    }
    if (MASKS && HOW_KIND(s.how) == MASK) {
        const bool padding = at.id(r, s.id, s.how) == (ID)HOW_PADDING_ID(s.how);
        v[0] = padding && HOW_MAY_PAD(s.how) ? 0.0f : 1.0f;
        return;
    }
    const float factor = NUMBERS && HOW_KIND(s.how) == SCALE ? at.number(r, s.number) : 1.0f;
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
            id[j] = has[j] ? at.id(r, s.id + (c + j) * HOW_ID_BYTES(s.how), s.how) : 0;
            if (HOW_MAY_PAD(s.how) && id[j] == (ID)HOW_PADDING_ID(s.how)) has[j] = false;
        }
        fetch<N, SET, K>(rows, Same{s}, id, has, in);
#pragma unroll
        for (int j = 0; j < K; ++j)
            if (has[j]) {
                ++found;
                for (int k = 0; k < N; ++k) {
                    const float e = rows[j].value(s.how, k);
                    if (LARGEST && HOW_LARGEST(s.how)) v[k] = found > 1 ? fmaxf(v[k], e) : e;
                    else v[k] += e;
                }
            }
    }
    const float factor = HOW_MEAN(s.how) && found > 1 ? 1.0f / found : 1.0f;
    for (int k = 0; k < N; ++k) {
        if (SET >> I8) v[k] *= scale[k];
        v[k] *= factor;
    }
}

// Reads both, so that neither waits until the generation is known: the compiler would make it one load of the right one.
__device__ __forceinline__ unsigned long long chosen(const unsigned long long both[2], int generation) {
    unsigned long long first, second;
    asm volatile("ld.global.nc.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(both));
    return generation ? second : first;
}
__device__ __forceinline__ Source source_of(int unit, const Tables& in) {
    const Unit u = in.units.unit[unit];
    const char* base = reinterpret_cast<const char*>(chosen(in.units.base[unit], in.generation));
    Source s = {base, chosen(in.units.limit[unit], in.generation), u.id, u.ids, u.number, u.row_bytes, unit, u.how};
#if TIERS
    s.near = chosen(in.units.near[unit], in.generation);
    s.ranks = reinterpret_cast<const unsigned*>(chosen(in.units.ranks[unit], in.generation));
#endif
    return s;
}

// Where the scales of an int8 unit lie; null of any other.
template <int SET>
__device__ __forceinline__ const float* scales_at(int unit, const Tables& in) {
    return SET >> I8 ? reinterpret_cast<const float*>(chosen(in.units.scale[unit], in.generation)) : nullptr;
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

template <int N, typename T>
__device__ __forceinline__ void write_columns(T* out, float v[N]) {
    if (sizeof(T) == 1)
        for (int j = 0; j < N; ++j) v[j] *= OUT_FACTOR;
    if constexpr (N == 1) store_value(out, v[0]);
    else if constexpr (N % 8 == 0 && sizeof(T) == 2) for (int j = 0; j < N; j += 8) store8(out + j, v + j);
    else for (int j = 0; j < N; j += 4) store4(out + j, v + j);
}
