// Attention over a row's fields on a CPU, head by head, so that all of a head stays in the first cache. Twin of
// `reference.field_attention`.

#include <string.h>

#include "cpu/openmp_pool.h"
#include "attention/products.h"

enum { MOST_FIELDS = 64, MOST_INPUTS = 64 + 1, MOST_SIZE = 32, ROWS = 4 };  // ROWS: that a thread takes at a time

typedef struct {
    const float *x;        // [n, fields * dim], rows x_stride apart
    const float *queries;  // [heads, padded, inputs]: W_Q times the scale; inputs: dim, and 1 if there are biases, which come last
    const float *others;   // [heads, inputs, parts * padded]: W_K, W_V and perhaps W_R turned round
    float *out;            // [n, fields * heads * size]
    int64_t x_stride, fields, dim, inputs, heads, size, padded, parts, relu;
} FieldAttention;

// Softmax over the first dimension of p[fields, columns].
static void softmax(float *p, int64_t fields, int64_t columns) {
    for (float *own = p; own < p + columns; own += LANES) {
        Floats most = load(own), sum = {0};
        for (int64_t j = 1; j < fields; ++j) {
            const Floats next = load(own + j * columns);
            most = chosen((Words)(next <= most), most, next);
        }
        for (int64_t j = 0; j < fields; ++j) sum += *(Floats *)(own + j * columns) = exponential(load(own + j * columns) - most);
        sum = 1.0f / sum;
        for (int64_t j = 0; j < fields; ++j) *(Floats *)(own + j * columns) *= sum;
    }
}

static void attended_rows(void *task, int64_t from, int64_t to) {
    const FieldAttention *t = task;
    const int64_t n = t->inputs, rows = (t->fields + TILE - 1) / TILE * TILE, columns = (t->fields + LANES - 1) / LANES * LANES;
    const int64_t width = t->parts * t->padded, out_row = t->heads * t->size;
    float x[MOST_FIELDS * MOST_INPUTS] = {0}, turned[MOST_INPUTS * MOST_FIELDS] = {0};  // with zeros in the place of more fields
    float q[MOST_SIZE * MOST_FIELDS], kvr[MOST_FIELDS * 3 * MOST_SIZE], p[MOST_FIELDS * MOST_FIELDS], y[MOST_FIELDS * MOST_SIZE];
    for (int64_t row = from; row < to; ++row) {
        for (int64_t f = 0; f < t->fields; ++f) {
            memcpy(x + f * n, t->x + row * t->x_stride + f * t->dim, t->dim * sizeof(float));
            if (n > t->dim) x[f * n + t->dim] = 1;
            for (int64_t d = 0; d < n; ++d) turned[d * columns + f] = x[f * n + d];
        }
        for (int64_t h = 0; h < t->heads; ++h) {
            multiply((Left){t->queries + h * t->padded * n, n, 1}, turned, columns, n, NULL, 0, q, columns, t->padded, columns);
            multiply((Left){x, n, 1}, t->others + h * n * width, width, n, NULL, 0, kvr, width, rows, width);
            multiply((Left){kvr, width, 1}, q, columns, t->size, NULL, 0, p, columns, rows, columns);  // logits[key, query]
            softmax(p, t->fields, columns);
            const float *rest = t->parts == 3 ? kvr + 2 * t->padded : NULL;
            multiply((Left){p, 1, columns}, kvr + t->padded, width, t->fields, rest, width, y, t->padded, rows, t->padded);
            const float least = t->relu ? 0 : -__builtin_inff();
            for (int64_t f = 0; f < t->fields; ++f) {
                float *own = t->out + (row * t->fields + f) * out_row + h * t->size;
                for (int64_t c = 0; c < t->size; ++c) own[c] = y[f * t->padded + c] < least ? least : y[f * t->padded + c];
            }
        }
    }
}

// given: the pointers and then the numbers of `FieldAttention`, in its order.
void dpi_field_attention(const int64_t *given, int64_t n, Parallel parallel, int64_t threads) {
    FieldAttention task = {
        (const float *)given[0], (const float *)given[1], (const float *)given[2], (float *)given[3], given[4], given[5], given[6],
        given[7], given[8], given[9], given[10], given[11], given[12],
    };
    share_out((Shares){attended_rows, &task, n, ROWS, 0}, parallel, threads);
}
