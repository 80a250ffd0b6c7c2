// Dense work between oneDNN's products on a CPU, in one pass over its operands. Twin of what `reference` does.

#include <string.h>

#include "cpu/openmp_pool.h"

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

// bfloat16 is the upper half of a float32.
typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(64), aligned(4), may_alias));

enum { LANES = 16, OUTPUTS = 4, PIECE = 1 << 17 };  // PIECE: bytes of weights that a thread takes at a time

typedef struct {
    const uint16_t *weight;
    const float *x, *bias;
    float *y;
    int64_t in, relu;
} Row;

static inline Floats widened(const uint16_t *halves) {
    Words words;
    for (int l = 0; l < LANES; ++l) words[l] = halves[l];
    return (Floats)(words << 16);
}

// Outputs [from, to), four at a time: fewer sums at once would wait for one another.
static void row_outputs(void *task, int64_t from, int64_t to) {
    const Row *t = task;
    for (int64_t o = from; o < to; o += OUTPUTS) {
        const int64_t n = to - o < OUTPUTS ? to - o : OUTPUTS;
        const uint16_t *w[OUTPUTS];
        for (int64_t k = 0; k < OUTPUTS; ++k) w[k] = t->weight + (o + (k < n ? k : 0)) * t->in;
        Floats sums[OUTPUTS] = {{0}};
        int64_t i = 0;
        for (; t->in - i >= LANES; i += LANES) {
            const Floats x = *(const Floats *)(t->x + i);
            for (int64_t k = 0; k < OUTPUTS; ++k)
                sums[k] += x * widened(w[k] + i);
        }
        for (int64_t k = 0; k < n; ++k) {
            float all = t->bias[o + k];
            for (int64_t l = 0; l < LANES; ++l) all += sums[k][l];
            for (int64_t l = i; l < t->in; ++l) {
                const uint32_t word = (uint32_t)w[k][l] << 16;
                float e;
                memcpy(&e, &word, sizeof e);
                all += t->x[l] * e;
            }
            t->y[o + k] = t->relu && all < 0 ? 0 : all;
        }
    }
}

// y[out] = x[in] W^T + bias for W[out, in] of bfloat16, and ReLU of it.
void dpi_row(const uint16_t *weight, int64_t out, int64_t in, const float *x, const float *bias, int64_t relu, float *y,
             Parallel parallel, int64_t threads) {
    Row task = {weight, x, bias, y, in, relu};
    const int64_t rows = PIECE / (2 * in + 1) / OUTPUTS * OUTPUTS;
    share_out((Shares){row_outputs, &task, out, rows ? rows : OUTPUTS, 0}, parallel, threads);
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
