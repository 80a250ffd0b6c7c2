// DIN's target attention on a CPU, a row at a time: steps that are masked are not computed. Twin of `reference.attention`.
//
// Sums are of fused multiply-adds, as in layers.c.

#pragma GCC optimize("fp-contract=fast")

#include <string.h>

#include "cpu/openmp_pool.h"
#include "attention/products.h"

enum { STEPS = 32, MOST_DIM = 128, MOST_UNITS = 128, MOST_LENGTH = 1024, ROWS = 4 };  // STEPS: at a time; ROWS: that a thread takes
enum { IDENTITY, RELU, SIGMOID, TANH, LEAKY_RELU, PRELU, DICE };

// Weights [in, padded], zeros beyond a layer's units, `padded` in whole vectors. params: of the activation, [padded].
typedef struct {
    const float *weight, *bias, *params[3];
    int64_t in, padded;
} Hidden;

// A part of the query and of the keys: its dim and its first columns of x, twice, and of out.
typedef struct {
    int64_t dim, query, keys, pooled;
} Part;

typedef struct {
    int64_t from, to, count;
} Kept;

typedef struct {
    const float *x;
    float *out;
    int64_t x_stride, out_width;
    const Part *parts;
    const Kept *kept;
    const Hidden *layers;  // the first one's weight: of the keys
    const float *of_query, *of_product, *last, *scalars;  // as the first layer's weight; [padded]; the last bias, the slope
    int64_t part_count, kept_count, layer_count, length, mask, dim, activation, output, softmax;
} Attention;

static inline Floats sigmoid(Floats x) { return quotient((Floats){0} + 1, 1 + exponential_within(-x, 80)); }

static inline Floats activated(Floats y, int64_t kind, float slope, const float *const *params, int64_t at) {
    const Words below = (Words)(y < 0);
    switch (kind) {
    case RELU: return chosen(below, (Floats){0}, y);
    case SIGMOID: return sigmoid(y);
    case TANH: return 2 * sigmoid(2 * y) - 1;
    case LEAKY_RELU: return chosen(below, slope * y, y);
    case PRELU: return chosen(below, load(params[0] + at) * y, y);
    case DICE: {
        const Floats p = sigmoid(load(params[2] + at) + y * load(params[1] + at));
        return y * (p + load(params[0] + at) * (1 - p));
    }
    default: return y;
    }
}

static void activate(float *h, int64_t rows, const Hidden *l, int64_t kind, float slope) {
    for (int64_t r = 0; kind != IDENTITY && r < rows; ++r, h += l->padded)
        for (int64_t at = 0; at < l->padded; at += LANES) *(Floats *)(h + at) = activated(load(h + at), kind, slope, l->params, at);
}

static float summed(const float *a, const float *b, int64_t n) {
    Floats sums = {0};
    for (int64_t i = 0; i < n; i += LANES) sums += load(a + i) * load(b + i);
    float all = 0;
    for (int l = 0; l < LANES; ++l) all += sums[l];
    return all;
}

// Weights of the n steps listed, those of a row.
static void weigh(const Attention *t, const float *x, const int32_t *steps, int64_t n, float *weights) {
    float query[MOST_DIM], own[MOST_DIM * MOST_UNITS], start[MOST_UNITS], keys[STEPS * MOST_DIM];
    float h[2][STEPS * MOST_UNITS];
    const Hidden *first = t->layers, *end = first + t->layer_count;
    int64_t d = 0;
    for (const Part *p = t->parts; p < t->parts + t->part_count; d += p++->dim) memcpy(query + d, x + p->query, p->dim * sizeof(float));
    memcpy(start, first->bias, first->padded * sizeof(float));
    for (int64_t i = 0; i < t->dim; ++i)
        for (int64_t at = i * first->padded, c = 0; c < first->padded; c += LANES, at += LANES) {
            *(Floats *)(own + at) = load(first->weight + at) + load(t->of_product + at) * query[i];
            *(Floats *)(start + c) += load(t->of_query + at) * query[i];
        }
    for (int64_t at = 0; at < n; at += STEPS) {
        const int64_t count = n - at < STEPS ? n - at : STEPS, rows = (count + TILE - 1) / TILE * TILE;
        for (int64_t s = 0; s < count; ++s) {
            float *key = keys + s * t->dim;
            for (const Part *p = t->parts; p < t->parts + t->part_count; key += p++->dim)
                memcpy(key, x + p->keys + steps[at + s] * p->dim, p->dim * sizeof(float));
        }
        memset(keys + count * t->dim, 0, (rows - count) * t->dim * sizeof(float));
        multiply((Left){keys, t->dim, 1}, own, first->padded, t->dim, start, 0, h[0], first->padded, rows, first->padded);
        activate(h[0], rows, first, t->activation, t->scalars[1]);
        int now = 0;
        for (const Hidden *l = first + 1; l < end; ++l, now ^= 1) {
            multiply((Left){h[now], l[-1].padded, 1}, l->weight, l->padded, l->in, l->bias, 0, h[now ^ 1], l->padded, rows, l->padded);
            activate(h[now ^ 1], rows, l, t->activation, t->scalars[1]);
        }
        const int64_t width = end[-1].padded;
        for (int64_t s = 0; s < count; ++s) weights[at + s] = summed(h[now] + s * width, t->last, width) + t->scalars[0];
    }
}

// Output activation and, over the n steps, softmax.
static void settle(const Attention *t, float *weights, int64_t n) {
    memset(weights + n, 0, LANES * sizeof(float));
    float most = weights[0], sum = 0;
    for (int64_t i = 0; i < n; i += LANES) *(Floats *)(weights + i) = activated(load(weights + i), t->output, t->scalars[1], NULL, 0);
    if (!t->softmax) return;
    for (int64_t i = 0; i < n; ++i) most = i && weights[i] <= most ? most : weights[i];
    for (int64_t i = 0; i < n; i += LANES) *(Floats *)(weights + i) = exponential(load(weights + i) - most);
    for (int64_t i = 0; i < n; ++i) sum += weights[i];
    for (int64_t i = 0; i < n; ++i) weights[i] /= sum;
}

static void attended_rows(void *task, int64_t from, int64_t to) {
    const Attention *t = task;
    float weights[MOST_LENGTH + LANES];
    int32_t steps[MOST_LENGTH];
    for (int64_t row = from; row < to; ++row) {
        const float *x = t->x + row * t->x_stride;
        float *out = t->out + row * t->out_width;
        int64_t n = 0;
        for (int64_t s = 0; s < t->length; ++s)
            if (t->mask < 0 || x[t->mask + s] != 0) steps[n++] = (int32_t)s;
        if (n) {
            weigh(t, x, steps, n, weights);
            settle(t, weights, n);
        } else if (t->softmax)  // all are masked alike
            for (n = 0; n < t->length; ++n) steps[n] = (int32_t)n, weights[n] = 1.0f / t->length;
        for (const Part *p = t->parts; p < t->parts + t->part_count; ++p) {
            float *sums = out + p->pooled;
            memset(sums, 0, p->dim * sizeof(float));
            for (int64_t i = 0; i < n; ++i) {
                const float *key = x + p->keys + steps[i] * p->dim, weight = weights[i];
                for (int64_t c = 0; c < p->dim; ++c) sums[c] += weight * key[c];
            }
        }
        for (const Kept *k = t->kept; k < t->kept + t->kept_count; ++k) memcpy(out + k->to, x + k->from, k->count * sizeof(float));
    }
}

// given: the pointers and numbers of `Attention`, in its order.
void dpi_attention(const int64_t *given, int64_t n, Parallel parallel, int64_t threads) {
    Attention task;
    _Static_assert(sizeof task == 20 * sizeof *given, "eight bytes each");
    memcpy(&task, given, sizeof task);
    share_out((Shares){attended_rows, &task, n, ROWS, 0}, parallel, threads);
}
