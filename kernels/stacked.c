// The lookup on a CPU: which rows of a stack of tables a batch's id records name, and those rows side by side or summed.
// Twin of stack_rows.StackRows and of torch.embedding; built by native.py, which knows no more of it than these signatures.
//
// Ids are read at their own widths. Runs of columns that lie side by side in the record go through one vectorised loop.

#include <stdint.h>
#include <string.h>

// A record begins where its buffer does, which another process may have laid anywhere.
typedef uint16_t __attribute__((aligned(1), may_alias)) stored_u16;
typedef int32_t __attribute__((aligned(1), may_alias)) stored_i32;
typedef int64_t __attribute__((aligned(1), may_alias)) stored_i64;

typedef struct {
    int32_t context, byte, width, column, count;  // width 0: no id, row 0
} Run;

// first, rows, oov, pad, pads: by column, of the id type. oov and pad are rows of the stack; pads is 1 where an id of all ones
// is padding, which reads row pad, and not an id outside its table, which reads row oov and is counted.
typedef struct {
    int64_t columns, runs, candidate_bytes, context_bytes;
    const Run *run;
    const void *first, *rows, *oov, *pad, *pads;
} Stack;

#define READ_RUN(ID, UNSIGNED, STORED, ONES)                                                        \
    {                                                                                               \
        const STORED *restrict ids = (const STORED *)(record + run.byte);                           \
        for (int32_t i = 0; i < run.count; ++i) {                                                   \
            ID id = (ID)ids[i];                                                                     \
            ID ones = id == (ID)(ONES), outside = (UNSIGNED)id >= (UNSIGNED)rows[i];                \
            to[i] = outside ? (ones ? pad[i] : oov[i]) : id + first[i];                             \
            bad += outside & ~(ones & pads[i]);                                                     \
        }                                                                                           \
    }

// The rows of the stack, id[n, columns], for n rows; gives how many ids were outside their tables.
#define STACK_ROWS(NAME, ID, UNSIGNED)                                                              \
    static int64_t NAME(const Stack *s, int64_t n, const uint8_t *candidate, const uint8_t *context,  \
                        const int32_t *request, int64_t contexts, ID *restrict at) {                \
        int64_t found = 0;                                                                          \
        for (int64_t r = 0; r < n; ++r) {                                                           \
            ID bad = 0;                                                                             \
            const uint8_t *own = candidate + r * s->candidate_bytes;                                \
            const uint8_t *shared = context + (contexts == 1 ? 0 : request[r] * s->context_bytes);  \
            for (int64_t k = 0; k < s->runs; ++k) {                                                 \
                const Run run = s->run[k];                                                          \
                const uint8_t *record = run.context ? shared : own;                                 \
                const ID *restrict first = (const ID *)s->first + run.column;                       \
                const ID *restrict rows = (const ID *)s->rows + run.column;                         \
                const ID *restrict oov = (const ID *)s->oov + run.column;                           \
                const ID *restrict pad = (const ID *)s->pad + run.column;                           \
                const ID *restrict pads = (const ID *)s->pads + run.column;                         \
                ID *restrict to = at + r * s->columns + run.column;                                 \
                switch (run.width) {                                                                \
                case 1: READ_RUN(ID, UNSIGNED, uint8_t, 0xff) break;                                \
                case 2: READ_RUN(ID, UNSIGNED, stored_u16, 0xffff) break;                             \
                case 4: READ_RUN(ID, UNSIGNED, stored_i32, -1) break;                                  \
                case 8: READ_RUN(ID, UNSIGNED, stored_i64, -1) break;                                  \
                default: memcpy(to, first, run.count * sizeof(ID));                                 \
                }                                                                                   \
            }                                                                                       \
            found += bad;                                                                           \
        }                                                                                           \
        return found;                                                                               \
    }

STACK_ROWS(stack_rows_32, int32_t, uint32_t)
STACK_ROWS(stack_rows_64, int64_t, uint64_t)

enum { AHEAD = 12 };  // rows whose first cache line is asked for before it is copied

#define COPY(BYTES)                                                                                 \
    for (int64_t i = 0; i < count; ++i) {                                                           \
        __builtin_prefetch(table + (int64_t)at[i + AHEAD < count ? i + AHEAD : i] * (BYTES));       \
        memcpy(out + i * (BYTES), table + (int64_t)at[i] * (BYTES), BYTES);                         \
    }

// Rows of `bytes` bytes side by side; then sums of `columns` float32 weights a row, in order.
#define GATHER(NAME, ID)                                                                            \
    static void NAME(const ID *restrict at, int64_t count, const char *restrict table, int64_t bytes, char *restrict out) { \
        switch (bytes) {                                                                            \
        case 4: COPY(4) break;                                                                      \
        case 16: COPY(16) break;                                                                    \
        case 32: COPY(32) break;                                                                    \
        case 40: COPY(40) break;                                                                    \
        case 64: COPY(64) break;                                                                    \
        case 128: COPY(128) break;                                                                  \
        default: COPY(bytes)                                                                        \
        }                                                                                           \
    }                                                                                               \
    static void NAME##_sums(const ID *restrict at, int64_t n, int64_t columns, const float *restrict w, float *restrict out) { \
        for (int64_t r = 0; r < n; ++r) {                                                           \
            float sum = 0;                                                                          \
            for (int64_t c = 0; c < columns; ++c) sum += w[at[r * columns + c]];                    \
            out[r] = sum;                                                                           \
        }                                                                                           \
    }

GATHER(gather_32, int32_t)
GATHER(gather_64, int64_t)

// at: int32 or int64[n, columns] (`wide`), filled. table: rows of `bytes` bytes, copied to x; weights: float32, summed to total.
// Either may be null. Gives how many ids were outside their tables.
int64_t dpi_lookup(const Stack *s, int64_t wide, int64_t n, const uint8_t *candidate, const uint8_t *context,
                   const int32_t *request, int64_t contexts, void *at, const char *table, int64_t bytes, char *x,
                   const float *weights, float *total) {
    int64_t outside, count = n * s->columns;
    if (wide) {
        outside = stack_rows_64(s, n, candidate, context, request, contexts, at);
        if (table) gather_64(at, count, table, bytes, x);
        if (weights) gather_64_sums(at, n, s->columns, weights, total);
    } else {
        outside = stack_rows_32(s, n, candidate, context, request, contexts, at);
        if (table) gather_32(at, count, table, bytes, x);
        if (weights) gather_32_sums(at, n, s->columns, weights, total);
    }
    return outside;
}

// 1/2 sum_d ((sum_i v_id)^2 - sum_i v_id^2) of rows of `fields` vectors of `dim`, `stride` floats apart; dim at most 256.
void dpi_fm(const float *restrict x, int64_t n, int64_t stride, int64_t fields, int64_t dim, float *restrict out) {
    for (int64_t r = 0; r < n; ++r) {
        const float *v = x + r * stride;
        float sum[256], squares[256], all = 0;
        memset(sum, 0, dim * sizeof(float));
        memset(squares, 0, dim * sizeof(float));
        for (int64_t i = 0; i < fields; ++i)
            for (int64_t d = 0; d < dim; ++d) {
                float e = v[i * dim + d];
                sum[d] += e;
                squares[d] += e * e;
            }
        for (int64_t d = 0; d < dim; ++d) all += sum[d] * sum[d] - squares[d];
        out[r] = 0.5f * all;
    }
}
