// All steps of a GRU or LSTM on a CPU, for the rows of a batch, once the inputs' products are there. Twin of `reference.gru` and
// `lstm`. Rows are taken ROWS at a time, so that each weight that is read serves several.

#include <string.h>

#include "cpu/openmp_pool.h"
#include "runtime/vectors.h"

enum { ROWS = 4, MOST_HIDDEN = 256, MOST_GATES = 4 * MOST_HIDDEN };
enum Kind { GRU, SCALED, REPLACED, LSTM };

typedef struct {
    const float *x;       // [n, steps, gates * hidden]: W x + b
    const float *weight;  // [hidden, columns]: U turned round; columns: gates * hidden up to a multiple of 32
    const float *bias;    // [columns]: of h
    const float *scale;   // [n, steps], scale_stride apart
    float *out, *cell;    // rows of out are out_stride apart, and steps step_stride; of cell out_stride; null: nobody asks
    int64_t steps, hidden, gates, columns, kind, backwards, scale_stride, out_stride, step_stride;
    int64_t used;         // of hidden, which is a multiple of LANES
} Recurrence;

static inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + exponential(-x)); }
static inline Floats tanh_of(Floats x) { return 1.0f - 2.0f / (1.0f + exponential(x + x)); }

// sums[ROWS, columns] = h[ROWS, hidden] weight + bias
static void multiply(const Recurrence *t, float (*h)[MOST_HIDDEN], float (*sums)[MOST_GATES]) {
    for (int64_t c = 0; c < t->columns; c += 2 * LANES) {
        Floats a[ROWS], b[ROWS];
        for (int r = 0; r < ROWS; ++r) a[r] = load(t->bias + c), b[r] = load(t->bias + c + LANES);
        const float *w = t->weight + c;
        for (int64_t k = 0; k < t->used; ++k, w += t->columns) {
            const Floats left = load(w), right = load(w + LANES);
            for (int r = 0; r < ROWS; ++r) a[r] += left * h[r][k], b[r] += right * h[r][k];
        }
        for (int r = 0; r < ROWS; ++r) *(Floats *)(sums[r] + c) = a[r], *(Floats *)(sums[r] + c + LANES) = b[r];
    }
}

// One step of a row: h and c from its sums of h and of x.
static void step_of(const Recurrence *t, const float *of_h, const float *of_x, float scale, float *h, float *c) {
    const int64_t n = t->hidden, last = (t->gates - 1) * n;
    for (int64_t j = 0; j < n; j += LANES) {
        Floats *state = (Floats *)(h + j), *cell = (Floats *)(c + j);
        const Floats first = sigmoid(load(of_x + j) + load(of_h + j));  // r, or i
        if (t->kind == LSTM) {
            const Floats forget = sigmoid(load(of_x + n + j) + load(of_h + n + j));
            const Floats g = tanh_of(load(of_x + 2 * n + j) + load(of_h + 2 * n + j));
            *cell = forget * *cell + first * g;
            *state = sigmoid(load(of_x + last + j) + load(of_h + last + j)) * tanh_of(*cell);
        } else {
            const Floats g = tanh_of(load(of_x + last + j) + first * load(of_h + last + j));
            Floats update = (Floats){0} + scale;
            if (t->kind != REPLACED) update *= sigmoid(-load(of_x + n + j) - load(of_h + n + j));
            *state += update * (g - *state);
        }
    }
}

static void recurrent_rows(void *task, int64_t from, int64_t to) {
    const Recurrence *t = task;
    const int64_t width = t->gates * t->hidden, bytes = t->used * sizeof(float);
    for (int64_t first = from; first < to; first += ROWS) {
        const int64_t rows = to - first < ROWS ? to - first : ROWS;
        float h[ROWS][MOST_HIDDEN] = {{0}}, c[ROWS][MOST_HIDDEN] = {{0}}, sums[ROWS][MOST_GATES];
        for (int64_t s = 0; s < t->steps; ++s) {
            const int64_t at = t->backwards ? t->steps - 1 - s : s;
            multiply(t, h, sums);
            for (int64_t r = 0; r < rows; ++r) {
                const int64_t row = first + r;
                const float scale = t->scale ? t->scale[row * t->scale_stride + at] : 1;
                step_of(t, sums[r], t->x + (row * t->steps + at) * width, scale, h[r], c[r]);
                memcpy(t->out + row * t->out_stride + at * t->step_stride, h[r], bytes);
            }
        }
        for (int64_t r = 0; r < rows && t->cell; ++r) memcpy(t->cell + (first + r) * t->out_stride, c[r], bytes);
    }
}

// given: the pointers and then the numbers of `Recurrence`, in its order.
void dpi_recurrence(const int64_t *given, int64_t n, Parallel parallel, int64_t threads) {
    Recurrence task = {
        (const float *)given[0], (const float *)given[1], (const float *)given[2], (const float *)given[3], (float *)given[4],
        (float *)given[5], given[6], given[7], given[8], given[9], given[10], given[11], given[12], given[13], given[14], given[15],
    };
    share_out((Shares){recurrent_rows, &task, n, ROWS, 0}, parallel, threads);
}
