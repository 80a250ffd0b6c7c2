// Dense layers one after the other for few rows, where the calls of a library would take longer than its products.
//
// Sums are of fused multiply-adds, as in recurrence.c: nothing promises these bits on another processor. A row has the same in any
// batch.

#pragma GCC optimize("fp-contract=fast")

#include <string.h>

#include "cpu/openmp_pool.h"

typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef float Eight __attribute__((vector_size(32)));
typedef float Four __attribute__((vector_size(16)));

#if defined(__AVX512F__)
enum { WIDE = 2 };
#else
enum { WIDE = 1 };  // four rows of it take eight of sixteen registers
#endif
enum { LANES = 16, TILE = 4, ROWS = 16, WIDEST = 512, PRODUCTS = 1 << 18 };  // PRODUCTS: that a thread takes at a time, or more

// weight[in, padded], bias[padded]: zeros from `out` on, up to a whole number of LANES, WIDEST at most; of one output, as they are.
typedef struct {
    int64_t in, out, padded, relu;
    const float *weight, *bias;
} Layer;

typedef struct {
    const Layer *layers;
    int64_t count;
    const float *x;
    float *y;
} Task;

// Outputs [at, at + wide * LANES) of so many rows, of which `most` are to be written.
static inline __attribute__((always_inline)) void tile(const Layer *l, const float *x, int64_t at, float *y, int64_t stride,
                                                       int64_t most, const int rows, const int wide) {
    Floats sums[TILE][TILE];
    for (int r = 0; r < rows; ++r)
        for (int v = 0; v < wide; ++v) sums[r][v] = *(const Floats *)(l->bias + at + v * LANES);
    for (int64_t i = 0; i < l->in; ++i)
        for (int v = 0; v < wide; ++v) {
            const Floats w = *(const Floats *)(l->weight + i * l->padded + at + v * LANES);
            for (int r = 0; r < rows; ++r) sums[r][v] += x[r * l->in + i] * w;
        }
    for (int r = 0; r < rows; ++r)
        if (most < wide * LANES) memcpy(y + r * stride + at, sums[r], most * sizeof(float));
        else memcpy(y + r * stride + at, sums[r], wide * LANES * sizeof(float));  // stores, not a call
}

// One output of each row.
static void dots(const Layer *l, const float *x, int64_t n, float *y) {
    for (int64_t r = 0; r < n; ++r, x += l->in) {
        Floats sums = {0};
        int64_t i = 0;
        for (; i + LANES <= l->in; i += LANES) sums += *(const Floats *)(x + i) * *(const Floats *)(l->weight + i);
        float all = *l->bias;
        for (; i < l->in; ++i) all += x[i] * l->weight[i];
        const union { Floats all; Eight half[2]; } sixteen = {sums};
        const union { Eight all; Four half[2]; } eight = {sixteen.half[0] + sixteen.half[1]};
        const Four four = eight.half[0] + eight.half[1];
        y[r] = all + ((four[0] + four[2]) + (four[1] + four[3]));
    }
}

static void tiles(const Layer *l, const float *x, int64_t n, float *y) {
    const int64_t out = l->out, padded = l->padded;
    int64_t rows = TILE;
    for (int64_t r = 0; r < n; r += rows, x += rows * l->in, y += rows * out) {
        int64_t at = 0;
        if (n - r >= TILE) {
            for (; at + WIDE * LANES <= padded; at += WIDE * LANES) tile(l, x, at, y, out, out - at, TILE, WIDE);
            for (; at < padded; at += LANES) tile(l, x, at, y, out, out - at, TILE, 1);
        } else {
            rows = 1;
            for (; at + TILE * LANES <= padded; at += TILE * LANES) tile(l, x, at, y, out, out - at, 1, TILE);
            for (; at < padded; at += LANES) tile(l, x, at, y, out, out - at, 1, 1);
        }
    }
}

static void layer(const Layer *l, const float *x, int64_t n, float *y) {
    (l->padded == 1 ? dots : tiles)(l, x, n, y);
    for (int64_t i = 0; l->relu && i < n * l->out; ++i) y[i] = y[i] < 0 ? 0 : y[i];
}

// out[rows, out of the last] of given[rows, in of the first], in the calling thread.
void dpi_layered(const void *task, int64_t count, const float *given, int64_t rows, float *out) {
    float kept[2][ROWS * WIDEST];
    const Layer *layers = task, *last = layers + count - 1;
    for (int64_t r = 0; r < rows; r += ROWS) {
        const int64_t n = rows - r < ROWS ? rows - r : ROWS;
        const float *x = given + r * layers->in;
        for (const Layer *l = layers; l <= last; ++l) {
            float *y = l == last ? out + r * l->out : kept[(l - layers) & 1];
            layer(l, x, n, y);
            x = y;
        }
    }
}

static void layers_of_rows(void *task, int64_t from, int64_t to) {
    const Task *t = task;
    dpi_layered(t->layers, t->count, t->x + from * t->layers->in, to - from, t->y + from * t->layers[t->count - 1].out);
}

// y[n, out of the last] of x[n, in of the first].
void dpi_layers(const Layer *layers, int64_t count, const float *x, int64_t n, float *y, Parallel parallel, int64_t threads) {
    Task task = {layers, count, x, y};
    int64_t products = 1;
    for (const Layer *l = layers; l < layers + count; ++l) products += l->in * l->padded;
    share_out((Shares){layers_of_rows, &task, n, (PRODUCTS / products / ROWS + 1) * ROWS, 0}, parallel, threads);
}
