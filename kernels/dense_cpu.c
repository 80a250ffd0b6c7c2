// Dense work between oneDNN's products on a CPU, in one pass over its operands. Twin of what `reference` does.

#include <string.h>

#include "team.h"

// y[n, width] + shared[request], and ReLU of it.
void dpi_add_shared(float *restrict y, int64_t n, int64_t width, const float *restrict shared, const int32_t *request,
                    int64_t relu) {
    for (int64_t r = 0; r < n; ++r, y += width) {
        const float *add = shared + request[r] * width;
        const float least = relu ? 0 : -__builtin_inff();
        for (int64_t c = 0; c < width; ++c) {
            float e = y[c] + add[c];
            y[c] = e < least ? least : e;
        }
    }
}

enum { MOST_DIM = 256, ROWS = 64 };  // ROWS: that a thread takes at a time

typedef struct {
    const float *x;
    int64_t stride, fields, dim;
    float *out;
} Fm;

static void fm_rows(void *task, int64_t from, int64_t to) {
    const Fm *t = task;
    for (int64_t r = from; r < to; ++r) {
        const float *v = t->x + r * t->stride;
        float sum[MOST_DIM], squares[MOST_DIM], all = 0;
        memset(sum, 0, t->dim * sizeof(float));
        memset(squares, 0, t->dim * sizeof(float));
        for (int64_t i = 0; i < t->fields; ++i)
            for (int64_t d = 0; d < t->dim; ++d) {
                float e = v[i * t->dim + d];
                sum[d] += e;
                squares[d] += e * e;
            }
        for (int64_t d = 0; d < t->dim; ++d) all += sum[d] * sum[d] - squares[d];
        t->out[r] = 0.5f * all;
    }
}

// 1/2 sum_d ((sum_i v_id)^2 - sum_i v_id^2) of rows of `fields` vectors of `dim`, `stride` floats apart; dim at most 256.
void dpi_fm(const float *x, int64_t n, int64_t stride, int64_t fields, int64_t dim, float *out, Parallel parallel,
            int64_t threads) {
    Fm task = {x, stride, fields, dim, out};
    share_out((Shares){fm_rows, &task, n, ROWS, 0}, parallel, threads);
}
