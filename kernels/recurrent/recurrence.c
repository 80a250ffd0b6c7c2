// All steps of a GRU or LSTM on a CPU, for the rows of a batch. Twin of `reference.gru` and `lstm`. Rows are taken ROWS at a time,
// so that each weight that is read serves several.

// With fused multiply-adds, which are half of the work: no other code promises the bits of this. A row's do not depend on what
// rows lie beside it: its products are added in one order, and one copy of `step_of` does the rest.
#pragma GCC optimize("fp-contract=fast")

#include <string.h>

#include "cpu/openmp_pool.h"
#include "runtime/vectors.h"

enum { ROWS = 8, FEW = 4, MOST_HIDDEN = 256, MOST_GATES = 4 * MOST_HIDDEN };
enum Kind { GRU, SCALED, REPLACED, LSTM };

typedef struct {
    const float *x;         // [n, steps, inputs], rows x_stride apart; or without `of_x` [n, steps, gates * hidden]: W x + b
    const float *of_x;      // [inputs, columns]: W turned round; columns: gates * hidden up to a multiple of 32
    const float *x_bias;    // [columns]
    const float *of_h;      // [used, columns]: U turned round
    const float *h_bias;    // [columns]; of an LSTM with `of_x` x_bias is in it
    const float *scale;     // [n, steps], scale_stride apart
    float *out, *cell;      // rows of out are out_stride apart, and steps step_stride; of cell out_stride; null: nobody asks
    int64_t x_stride, inputs, steps, hidden, gates, columns, kind, backwards, scale_stride, out_stride, step_stride;
    int64_t used;           // of hidden, which is a multiple of LANES
} Recurrence;

// in[rows, count], rows stride apart, times weight[count, columns]
typedef struct {
    const float *in;
    int64_t stride, count;
    const float *weight;
} Product;

// sums[rows, columns] = bias + the products: a sum never lies in memory between two.
static inline __attribute__((always_inline)) void multiply_rows(
    const Product *products, int64_t many, const float *bias, int64_t columns, float *sums, int64_t from, int rows
) {
    for (int64_t c = 0; c < columns; c += 2 * LANES) {
        Floats a[ROWS], b[ROWS];
        for (int r = 0; r < rows; ++r) a[r] = load(bias + c), b[r] = load(bias + c + LANES);
        for (const Product *p = products; p < products + many; ++p) {
            const float *in = p->in + from * p->stride, *w = p->weight + c;
            for (int64_t k = 0; k < p->count; ++k, w += columns) {
                const Floats left = load(w), right = load(w + LANES);
                for (int r = 0; r < rows; ++r) a[r] += left * in[r * p->stride + k], b[r] += right * in[r * p->stride + k];
            }
        }
        for (int r = 0; r < rows; ++r) {
            *(Floats *)(sums + (from + r) * columns + c) = a[r];
            *(Floats *)(sums + (from + r) * columns + c + LANES) = b[r];
        }
    }
}

// Leftover rows by fours, then one by one.
static void multiply(const Product *products, int64_t many, const float *bias, int64_t columns, float *sums, int64_t rows) {
    int64_t r = 0;
    if (rows == ROWS) multiply_rows(products, many, bias, columns, sums, 0, ROWS), r = ROWS;
    else if (rows >= FEW) multiply_rows(products, many, bias, columns, sums, 0, FEW), r = FEW;
    for (; r < rows; ++r) multiply_rows(products, many, bias, columns, sums, r, 1);
}

// e^x of what a gate saturates at: beyond, its sigmoid is off by 1e-12, and no product of three is more than a float holds.
static inline Floats gate(Floats x) { return exponential_within(x, 28); }

// One step of a row: h and c from its sums of h and of x; of an LSTM of_h has both. Fractions are added first, for one quotient.
static __attribute__((noinline)) void step_of(
    const Recurrence *t, const float *of_h, const float *of_x, float scale, float *h, float *c
) {
    const int64_t n = t->hidden, last = (t->gates - 1) * n;
    for (int64_t j = 0; j < n; j += LANES) {
        Floats *state = (Floats *)(h + j), *cell = (Floats *)(c + j);
        if (t->kind == LSTM) {
            const Floats forget = 1 + gate(-load(of_h + n + j)), g = gate(-2 * load(of_h + 2 * n + j));  // tanh: (1 - g) / (1 + g)
            const Floats input = (1 + gate(-load(of_h + j))) * (1 + g);
            *cell = quotient(*cell * input + (1 - g) * forget, forget * input);
            const Floats out = 1 + gate(-load(of_h + last + j)), end = gate(-2 * *cell);
            *state = quotient(1 - end, out * (1 + end));
        } else {
            const Floats reset = 1 + gate(-load(of_x + j) - load(of_h + j));  // 1 / r
            const Floats g = gate(-2 * (load(of_x + last + j) + quotient(load(of_h + last + j), reset)));
            Floats under = 1 + g;
            const Floats over = scale * ((1 - g) - *state * under);
            if (t->kind != REPLACED) under *= 1 + gate(load(of_x + n + j) + load(of_h + n + j));
            *state += quotient(over, under);
        }
    }
}

static void recurrent_rows(void *task, int64_t from, int64_t to) {
    const Recurrence *t = task;
    const int64_t n = t->hidden, width = t->gates * n, bytes = t->used * sizeof(float), joint = t->of_x && t->kind == LSTM;
    for (int64_t first = from; first < to; first += ROWS) {
        const int64_t rows = to - first < ROWS ? to - first : ROWS;
        float h[ROWS * MOST_HIDDEN], c[ROWS * MOST_HIDDEN], of_h[ROWS * MOST_GATES], of_x[ROWS * MOST_GATES];
        memset(h, 0, rows * n * sizeof *h);
        memset(c, 0, rows * n * sizeof *c);
        for (int64_t s = 0; s < t->steps; ++s) {
            const int64_t at = t->backwards ? t->steps - 1 - s : s;
            const float *x = t->x + first * t->x_stride + at * (t->of_x ? t->inputs : width);
            const Product products[] = {{x, t->x_stride, t->inputs, t->of_x}, {h, n, t->used, t->of_h}};
            if (joint) {
                multiply(products, 2, t->h_bias, t->columns, of_h, rows);
            } else {
                if (t->of_x) multiply(products, 1, t->x_bias, t->columns, of_x, rows);
                multiply(products + 1, 1, t->h_bias, t->columns, of_h, rows);
            }
            for (int64_t r = 0; r < rows; ++r) {
                const int64_t row = first + r;
                float *sums = of_h + r * t->columns;
                const float scale = t->scale ? t->scale[row * t->scale_stride + at] : 1;
                const float *own = t->of_x ? of_x + r * t->columns : x + r * t->x_stride;
                if (t->kind == LSTM && !joint) for (int64_t j = 0; j < width; ++j) sums[j] += own[j];
                step_of(t, sums, own, scale, h + r * n, c + r * n);
                memcpy(t->out + row * t->out_stride + at * t->step_stride, h + r * n, bytes);
            }
        }
        for (int64_t r = 0; r < rows && t->cell; ++r) memcpy(t->cell + (first + r) * t->out_stride, c + r * n, bytes);
    }
}

// given: the pointers and then the numbers of `Recurrence`, in its order.
void dpi_recurrence(const int64_t *given, int64_t n, Parallel parallel, int64_t threads) {
    Recurrence task;
    memcpy(&task, given, sizeof task);
    share_out((Shares){recurrent_rows, &task, n, ROWS, 0}, parallel, threads);
}
