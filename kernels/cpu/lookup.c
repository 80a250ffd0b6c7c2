// The lookup on a CPU: which rows of a packed table (several, one after the other) a batch's id records name, and those rows side
// by side or summed. Twin of rows_numpy.py and of torch.embedding_bag; c_build.py knows no more of it than these signatures.
//
// An id is read as the 4-byte word of the record that holds it, shifted and masked: the same few instructions whatever its
// width, so that a compiler makes one vectorised loop of all columns of a side.

#include <string.h>

#include "cpu/openmp_pool.h"

// A record begins where its buffer does, which another process may have laid anywhere.
typedef uint32_t __attribute__((aligned(1), may_alias)) Word;
typedef uint64_t __attribute__((aligned(1), may_alias)) Long;

// Columns [start, stop) read their ids from one side's record.
typedef struct {
    int32_t context, start, stop;
} Stretch;

// By column: the word that holds its id, how far to shift it and what to keep of it (all ones, shifted, for 8 bytes: two
// words); first row and rows of its table, of the id type; where an id outside it reads, and where one of all ones does (pads:
// 1 if that is padding, and not counted).
typedef struct {
    int64_t columns, stretches, candidate_bytes, context_bytes;
    const Stretch *stretch;
    const int32_t *word, *shift;
    const void *mask, *first, *rows, *oov, *pad, *pads;
} Columns;

static inline uint32_t id_32(const uint8_t *record, int32_t word, int32_t shift, uint32_t mask) {
    return (((const Word *)record)[word] >> shift) & mask;
}

static inline uint64_t id_64(const uint8_t *record, int32_t word, int32_t shift, uint64_t mask) {
    return mask == UINT64_MAX ? *(const Long *)((const Word *)record + word) : id_32(record, word, shift, (uint32_t)mask);
}

static const uint64_t NO_IDS = 0;  // the record of a side without ids, whose columns all read row 0

enum { NEAR_ROWS = 64 };  // whose ids are read column by column: a column's constants stay in registers

// The rows of the packed table, id[n, columns], for n rows from row `from` on; gives how many ids were outside their tables.
#define PACKED_ROWS(NAME, ID, READ)                                                                  \
    static int64_t NAME(const Columns *s, int64_t from, int64_t n, const uint8_t *candidate, const uint8_t *context,  \
                        const int32_t *request, int64_t contexts, ID *restrict at) {                \
        int64_t found = 0;                                                                          \
        for (int64_t first = 0; first < n; first += NEAR_ROWS)                                      \
            for (int64_t k = 0; k < s->stretches; ++k) {                                            \
                const Stretch part = s->stretch[k];                                                 \
                const int64_t bytes = part.context ? s->context_bytes : s->candidate_bytes;         \
                const int64_t end = n - first < NEAR_ROWS ? n : first + NEAR_ROWS;                  \
                const uint8_t *records = bytes ? (part.context ? context : candidate) : (const uint8_t *)&NO_IDS; \
                for (int32_t c = part.start; c < part.stop; ++c) {                                  \
                    const ID mask = ((const ID *)s->mask)[c], begin = ((const ID *)s->first)[c], rows = ((const ID *)s->rows)[c]; \
                    const ID oov = ((const ID *)s->oov)[c], pad = ((const ID *)s->pad)[c], pads = ((const ID *)s->pads)[c]; \
                    const int32_t word = s->word[c], shift = s->shift[c];                           \
                    for (int64_t r = first; r < end; ++r) {                                         \
                        const int64_t row = part.context ? (contexts == 1 ? 0 : request[from + r]) : from + r; \
                        const ID id = READ(records + row * bytes, word, shift, mask);               \
                        const ID ones = id == mask, outside = id >= rows;                           \
                        at[r * s->columns + c] = outside ? (ones ? pad : oov) : id + begin;         \
                        found += outside & ~(ones & pads);                                          \
                    }                                                                               \
                }                                                                                   \
            }                                                                                       \
        return found;                                                                               \
    }

PACKED_ROWS(packed_rows_32, uint32_t, id_32)
PACKED_ROWS(packed_rows_64, uint64_t, id_64)

enum { BLOCK = 1024 };  // ids that are worked out before their rows are read, and that a thread takes at a time

typedef struct {
    const Columns *columns;
    int64_t wide, contexts, outside;
    const uint8_t *candidate, *context;
    const int32_t *request;
    void *at;
} Lookup;

static void lookup_rows(void *task, int64_t from, int64_t to) {
    Lookup *t = task;
    const Columns *s = t->columns;
    int64_t outside, first = from * s->columns;
    const int64_t n = to - from, contexts = t->contexts;
    if (t->wide)
        outside = packed_rows_64(s, from, n, t->candidate, t->context, t->request, contexts, (uint64_t *)t->at + first);
    else
        outside = packed_rows_32(s, from, n, t->candidate, t->context, t->request, contexts, (uint32_t *)t->at + first);
    __atomic_fetch_add(&t->outside, outside, __ATOMIC_RELAXED);
}

// at: uint32 or (`wide`) uint64[n, columns]. request may be null if there is one context. Gives how many ids were outside their
// tables.
int64_t dpi_lookup(const Columns *s, int64_t wide, int64_t n, const uint8_t *candidate, const uint8_t *context,
                   const int32_t *request, int64_t contexts, void *at, Parallel parallel, int64_t threads) {
    Lookup task = {s, wide, contexts, 0, candidate, context, request, at};
    const int64_t step = 16 * BLOCK / (s->columns + 1) + 1;
    share_out((Shares){lookup_rows, &task, n, step, 0}, parallel, threads);
    return task.outside;
}

// What the float32 rows of a packed table become, column by column: times a number of the row (-1 - i: of its context; NO_NUMBER: 1),
// at x's column `to` if that is not negative; MORE, of a bag: added where the column before goes. Then `copies` numbers
// themselves, and of `marks` columns 1 where there is an id and 0 where it is padding. plain: no column has a number, and x is the
// rows side by side; apart: no number and no bag.
typedef struct {
    int64_t dim, width, copies, marks, plain, apart, candidate_numbers, context_numbers;
    const float *table, *weights;
    const int32_t *number, *weight_number, *to, *copied, *copied_to, *marked, *marked_to;
} Floats;

enum { NO_NUMBER = INT32_MAX, MORE = -2 };

static inline float number_of(int32_t number, const float *own, const float *shared) {
    return number == NO_NUMBER ? 1 : number >= 0 ? own[number] : shared[-1 - number];
}

// Dims d to d + LANES of all columns of a row, while there are so many: to x, and (FM) its share of them.
#define LANES(C) (*(const Lanes *)(table + (int64_t)at[C] * dim + d) * by[C])
#define LANES_OF_ROW(COUNT, FM)                                                                     \
    for (; dim - d >= COUNT; d += COUNT) {                                                          \
        typedef float Lanes __attribute__((vector_size(4 * COUNT), aligned(4), may_alias));         \
        Lanes sum = {0}, squares = {0};                                                             \
        for (int64_t c = 0; c < columns;) {                                                         \
            const int64_t place = to[c];                                                            \
            Lanes e = LANES(c);                                                                     \
            while (++c < columns && to[c] == MORE) e += LANES(c);                                   \
            if (place >= 0) *(Lanes *)(out + place + d) = e;                                        \
            if (FM) sum += e, squares += e * e;                                                     \
        }                                                                                           \
        sum = sum * sum - squares;                                                                  \
        for (int i = 0; FM && i < COUNT; ++i) all += sum[i];                                        \
    }
#define ROW(FM) { LANES_OF_ROW(16, FM) LANES_OF_ROW(8, FM) LANES_OF_ROW(4, FM) LANES_OF_ROW(1, FM) }

enum { MOST_COLUMNS = 4096, AHEAD = 16 };  // rows whose first cache line is asked for before they are copied

#define COPY(DIM)                                                                                   \
    for (int64_t i = 0; i < count; ++i) {                                                           \
        __builtin_prefetch(table + (int64_t)at[i + AHEAD < count ? i + AHEAD : i] * (DIM));         \
        memcpy(x + i * (DIM), table + (int64_t)at[i] * (DIM), (DIM) * sizeof(float));               \
    }

#define PLACE(DIM)                                                                                  \
    for (int64_t c = 0; c < columns; ++c)                                                           \
        if (to[c] >= 0) memcpy(out + to[c], table + (int64_t)at[c] * (DIM), (DIM) * sizeof(float));

static void place_rows(const uint32_t *restrict at, int64_t columns, const int32_t *restrict to, const float *restrict table,
                       int64_t dim, float *restrict out) {
    switch (dim) {
    case 16: PLACE(16) break;
    case 32: PLACE(32) break;
    case 64: PLACE(64) break;
    default: PLACE(dim)
    }
}

static void copy_rows(const uint32_t *restrict at, int64_t count, const float *restrict table, int64_t dim, float *restrict x) {
    switch (dim) {
    case 4: COPY(4) break;
    case 8: COPY(8) break;
    case 10: COPY(10) break;
    case 16: COPY(16) break;
    case 32: COPY(32) break;
    default: COPY(dim)
    }
}

typedef struct {
    Lookup ids;
    const Floats *floats;
    const float *candidate_numbers, *context_numbers;
    float *x, *total, *fm;
    const void *layers;
    int64_t count, outputs;
} Pass;

// As many as BLOCK ids name if rows are narrow, or 64 kB if they are wide.
static int64_t rows_at_once(const Columns *s, const Floats *f) {
    const int64_t ids = f->dim > 16 ? 16 * BLOCK / f->dim : BLOCK;
    return s->columns < ids ? ids / s->columns : 1;
}

// Rows [from, end), x's from its begin on.
static void read_rows(Pass *t, int64_t from, int64_t end, float *x) {
    const Columns *s = t->ids.columns;
    const Floats *f = t->floats;
    uint32_t block[MOST_COLUMNS];
    float by[MOST_COLUMNS];
    const int64_t columns = s->columns, step = rows_at_once(s, f), dim = f->dim;
    const float *restrict table = f->table;
    const int32_t *restrict to = f->to;
    const uint32_t *restrict pad = s->pad;
    float *total = t->total, *fm = t->fm;
    const int copied = f->plain && !fm;
    int64_t outside = 0;
    for (int64_t r = from; r < end; ++r) {
        const int64_t done = (r - from) % step, rows = done ? 0 : r + step < end ? step : end - r;
        if (rows) {
            outside += packed_rows_32(s, r, rows, t->ids.candidate, t->ids.context, t->ids.request, t->ids.contexts, block);
            if (x && copied) copy_rows(block, rows * columns, table, dim, x + (r - from) * f->width);
            else if (x) for (int64_t i = 0; i < rows * columns; ++i) __builtin_prefetch(table + (int64_t)block[i] * dim);
        }
        const uint32_t *restrict at = block + done * columns;
        const float *own = t->candidate_numbers + r * f->candidate_numbers;
        const float *shared = t->context_numbers + (t->ids.request ? t->ids.request[r] : 0) * f->context_numbers;
        if (x && !copied) {
            float *out = x + (r - from) * f->width, all = 0;
            int64_t d = 0;
            if (f->apart && !fm) place_rows(at, columns, to, table, dim, out);
            else {
                for (int64_t c = 0; c < columns; ++c) by[c] = number_of(f->number[c], own, shared);
                if (fm) ROW(1) else ROW(0)
            }
            for (int64_t i = 0; i < f->copies; ++i) out[f->copied_to[i]] = number_of(f->copied[i], own, shared);
            for (int64_t i = 0; i < f->marks; ++i) out[f->marked_to[i]] = at[f->marked[i]] != pad[f->marked[i]];
            if (fm) fm[r] = 0.5f * all;
        }
        if (total) {
            float sum = 0;
            for (int64_t c = 0; c < columns; ++c)
                sum += f->weights[at[c]] * (f->plain ? 1 : number_of(f->weight_number[c], own, shared));
            total[r] = sum;
        }
    }
    __atomic_fetch_add(&t->ids.outside, outside, __ATOMIC_RELAXED);
}

enum { NEAR = 1 << 13, LAYER_ROWS = 16, WIDEST_X = NEAR / LAYER_ROWS };  // NEAR: numbers of x that stay in the first cache

void dpi_layered(const void *layers, int64_t count, const float *given, int64_t rows, float *out);  // of layers.c

static void float_rows(void *task, int64_t from, int64_t end) {
    Pass *t = task;
    const int64_t width = t->floats->width, step = t->count ? NEAR / width / LAYER_ROWS * LAYER_ROWS : end - from;
    float x[NEAR];
    for (int64_t r = from, n; r < end; r += n) {
        n = end - r < step ? end - r : step;
        read_rows(t, r, r + n, t->count ? x : t->x ? t->x + r * width : NULL);
        if (t->count) dpi_layered(t->layers, t->count, x, n, t->x + r * t->outputs);
    }
}

// As dpi_lookup for packed tables of less than 2^31 float32 rows and at most 4096 columns; fm: 1/2 sum_d ((sum_i v_id)^2 -
// sum_i v_id^2) of all columns. x, total and fm may be null. With layers, of WIDEST_X inputs at most, x is their
// `outputs` of it.
int64_t dpi_floats(const Columns *s, const Floats *f, int64_t n, const uint8_t *candidate, const uint8_t *context,
                   const int32_t *request, int64_t contexts, const float *candidate_numbers, const float *context_numbers,
                   float *x, float *total, float *fm, const void *layers, int64_t count, int64_t outputs, Parallel parallel, int64_t threads) {
    Pass task = {{s, 0, contexts, 0, candidate, context, request, NULL}, f, candidate_numbers, context_numbers,
                 x, total, fm, layers, count, outputs};
    share_out((Shares){float_rows, &task, n, rows_at_once(s, f), 0}, parallel, threads);
    return task.ids.outside;
}
