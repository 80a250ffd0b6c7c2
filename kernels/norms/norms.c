// Softmax, layer norm and choices of many short rows, in one pass each: attention has rows of tens of numbers, on which torch
// spends most of its time between them. Twin of torch's.
//
// Sums are of fused multiply-adds, as in layers.c. A row has the same in any batch.

#pragma GCC optimize("fp-contract=fast")

#include <string.h>

#include "cpu/openmp_pool.h"
#include "runtime/vectors.h"

enum { PIECE = 1 << 14 };  // numbers that a thread takes at a time

typedef struct {
    const float *x, *weight, *bias;  // weight and bias may be null
    float *y;
    int64_t width;
    float eps;
} Norm;

// The numbers from i on, `rest` beyond the end.
static inline Floats part(const float *x, int64_t i, int64_t width, float rest) {
    if (width - i >= LANES) return load(x + i);
    Floats v = (Floats){0} + rest;
#if defined(__AVX512F__)
    return (Floats)_mm512_mask_loadu_ps((__m512)v, (__mmask16)((1u << (width - i)) - 1), x + i);
#else
    memcpy(&v, x + i, (width - i) * sizeof(float));
    return v;
#endif
}

static inline void put(float *y, int64_t i, int64_t width, Floats v) {
    if (width - i >= LANES) *(Floats *)(y + i) = v;
#if defined(__AVX512F__)
    else _mm512_mask_storeu_ps(y + i, (__mmask16)((1u << (width - i)) - 1), (__m512)v);
#else
    else memcpy(y + i, &v, (width - i) * sizeof(float));
#endif
}

static inline float total(Floats v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    for (int half = LANES / 2; half; half /= 2)
        for (int k = 0; k < half; ++k) v[k] += v[k + half];
    return v[0];
#endif
}

static inline float largest(Floats v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float most = v[0];
    for (int k = 1; k < LANES; ++k) most = v[k] > most ? v[k] : most;
    return most;
#endif
}

static void softmax_rows(void *task, int64_t from, int64_t to) {
    const Norm *t = task;
    const int64_t n = t->width;
    const Floats none = {0};
    for (int64_t r = from; r < to; ++r) {
        const float *x = t->x + r * n;
        float *y = t->y + r * n, most = -__builtin_inff();
        Floats each = none + most, sum = none;
        for (int64_t i = 0; i < n; i += LANES) {
            const Floats next = part(x, i, n, most);
            each = chosen((Words)(next <= each), each, next);
        }
        most = largest(each);
        for (int64_t i = 0; i < n; i += LANES) {
            const Floats v = part(x, i, n, -__builtin_inff()) - most;
            const Floats e = chosen((Words)(v < -87), none, exponential(v));  // zero where a mask hides
            put(y, i, n, e);
            sum += e;
        }
        const float share = 1 / total(sum);
        for (int64_t i = 0; i < n; i += LANES) put(y, i, n, part(y, i, n, 0) * share);
    }
}

static void norm_rows(void *task, int64_t from, int64_t to) {
    const Norm *t = task;
    const int64_t n = t->width;
    for (int64_t r = from; r < to; ++r) {
        const float *x = t->x + r * n;
        float *y = t->y + r * n;
        Floats sum = {0}, squares = {0};
        for (int64_t i = 0; i < n; i += LANES) sum += part(x, i, n, 0);
        const float mean = total(sum) / n;
        for (int64_t i = 0; i < n; i += LANES) {
            const Floats off = part(x, i, n, mean) - mean;
            squares += off * off;
        }
        const float scale = 1 / __builtin_sqrtf(total(squares) / n + t->eps);
        for (int64_t i = 0; i < n; i += LANES) {
            Floats v = (part(x, i, n, 0) - mean) * scale;
            if (t->weight) v *= part(t->weight, i, n, 0);
            if (t->bias) v += part(t->bias, i, n, 0);
            put(y, i, n, v);
        }
    }
}

// y[n, width], which may be x.
void dpi_softmax(const float *x, int64_t n, int64_t width, float *y, Parallel parallel, int64_t threads) {
    Norm task = {x, NULL, NULL, y, width, 0};
    share_out((Shares){softmax_rows, &task, n, PIECE / width + 1, 0}, parallel, threads);
}

void dpi_layer_norm(const float *x, int64_t n, int64_t width, const float *weight, const float *bias, float eps, float *y,
                    Parallel parallel, int64_t threads) {
    Norm task = {x, weight, bias, y, width, eps};
    share_out((Shares){norm_rows, &task, n, PIECE / width + 1, 0}, parallel, threads);
}

// A tensor [n, steps, width] by its strides; `each` is 0 or 1.
typedef struct {
    const float *x;
    int64_t row, step, each;
} Strided;

typedef struct {
    const Strided *of;  // condition, yes, no
    int64_t steps, width;
    float *y;
} Choice;

static inline Floats strided(Strided t, int64_t row, int64_t step, int64_t i, int64_t n) {
    const float *x = t.x + row * t.row + step * t.step;
    return t.each ? part(x, i, n, 0) : part(x, n, n, *x);
}

static void choose_rows(void *task, int64_t from, int64_t to) {
    const Choice *t = task;
    const int64_t n = t->width;
    for (int64_t r = from; r < to; ++r)
        for (int64_t s = 0; s < t->steps; ++s)
            for (int64_t i = 0; i < n; i += LANES) {
                const Words is = (Words)(strided(t->of[0], r, s, i, n) != 0);
                const Floats yes = strided(t->of[1], r, s, i, n), no = strided(t->of[2], r, s, i, n);
                put(t->y + (r * t->steps + s) * n, i, n, chosen(is, yes, no));
            }
}

// y[n, steps, width] = condition != 0 ? yes : no, three tensors of that shape one after the other.
void dpi_choice(const Strided *of, int64_t n, int64_t steps, int64_t width, float *y, Parallel parallel, int64_t threads) {
    Choice task = {of, steps, width, y};
    share_out((Shares){choose_rows, &task, n, PIECE / (steps * width) + 1, 0}, parallel, threads);
}
