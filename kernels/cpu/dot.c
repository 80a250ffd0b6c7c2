// DLRM's dots of the pairs of a row's vectors, in one pass over them. Twin of `reference.dot`.
//
// Sums are of fused multiply-adds, as in layers.c. A row has the same in any batch.

#pragma GCC optimize("fp-contract=fast")

#include <string.h>

#include "cpu/openmp_pool.h"

typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));

#if defined(__AVX512F__)
enum { TILE = 8 };
#else
enum { TILE = 4 };  // eight of it take sixteen of sixteen registers
#endif
enum { LANES = 16, NUMBERS = 1 << 14, ROWS = 16 };  // NUMBERS: of a row's vectors, at most; ROWS: that a thread takes at a time

// Vectors lie side by side, `width` numbers in the first part, the others in the second.
typedef struct {
    const float *first, *second;
    int64_t width, first_stride, second_stride, fields, dim, keep, diagonal;
    float *out;
} Dot;

// turned[dim][padded]: the dots of vectors [i, i + TILE) and those before them, 16 of these at a time.
static void dots_of(const Dot *t, const float *turned, int64_t padded, int64_t i, float *out) {
    const int64_t last = i + TILE < t->fields ? i + TILE : t->fields;
    for (int64_t at = 0; at < last; at += LANES) {
        Floats sums[TILE] = {{0}};
        const float *of = turned;
        for (int64_t d = 0; d < t->dim; ++d, of += padded) {
            const Floats others = *(const Floats *)(of + at);
            for (int k = 0; k < TILE; ++k) sums[k] += of[i + k] * others;
        }
        for (int64_t k = i; k < last; ++k) {
            const int64_t left = k + t->diagonal - at, before = k * (k - 1) / 2 + k * t->diagonal;
            if (left > 0) memcpy(out + before + at, &sums[k - i], (left < LANES ? left : LANES) * sizeof(float));
        }
    }
}

static void dot_rows(void *task, int64_t from, int64_t to) {
    const Dot *t = task;
    const int64_t padded = (t->fields + LANES - 1) / LANES * LANES, before = t->keep < t->width ? t->keep : t->width;
    const int64_t pairs = t->fields * (t->fields - 1) / 2 + t->fields * t->diagonal;
    float turned[NUMBERS];
    memset(turned, 0, padded * t->dim * sizeof(float));
    for (int64_t r = from; r < to; ++r) {
        const float *first = t->first + r * t->first_stride, *second = t->second + r * t->second_stride;
        float *out = t->out + r * (t->keep + pairs);
        for (int64_t f = 0; f < t->fields; ++f) {
            const float *v = f * t->dim < t->width ? first + f * t->dim : second + f * t->dim - t->width;
            for (int64_t d = 0; d < t->dim; ++d) turned[d * padded + f] = v[d];
        }
        memcpy(out, first, before * sizeof(float));
        memcpy(out + before, second, (t->keep - before) * sizeof(float));
        for (int64_t i = 0; i < t->fields; i += TILE) dots_of(t, turned, padded, i, out + t->keep);
    }
}

// out[n, keep + pairs] of rows of `fields` vectors, padded to whole LANES at most NUMBERS of them. `second` may be no address if
// all vectors are in `first`.
void dpi_dot(const float *first, int64_t width, int64_t first_stride, const float *second, int64_t second_stride, int64_t n,
             int64_t fields, int64_t dim, int64_t keep, int64_t diagonal, float *out, Parallel parallel, int64_t threads) {
    Dot task = {first, second, width, first_stride, second_stride, fields, dim, keep, diagonal, out};
    share_out((Shares){dot_rows, &task, n, ROWS, 0}, parallel, threads);
}
