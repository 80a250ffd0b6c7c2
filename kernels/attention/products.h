// Products of matrices so small that they stay in a core's caches.

#ifndef DPI_PRODUCTS_H
#define DPI_PRODUCTS_H

#include "runtime/vectors.h"

enum { TILE = 4 };

// A matrix's number (i, k) is at i * row + k * step.
typedef struct {
    const float *at;
    int64_t row, step;
} Left;

// c[rows, 16 vectors] = (start or 0) + a[rows, n] b[n, ..]: all sums stay in registers.
static inline __attribute__((always_inline)) void tile(Left a, const float *b, int64_t b_row, int64_t n, const float *start,
                                                       int64_t start_row, float *c, int64_t c_row, const int rows,
                                                       const int vectors) {
    Floats sums[16];
    for (int r = 0; r < rows; ++r)
        for (int v = 0; v < vectors; ++v)
            sums[r * vectors + v] = start ? load(start + r * start_row + v * LANES) : (Floats){0};
    for (int64_t k = 0; k < n; ++k, b += b_row)
        for (int r = 0; r < rows; ++r)
            for (int v = 0; v < vectors; ++v) sums[r * vectors + v] += load(b + v * LANES) * a.at[r * a.row + k * a.step];
    for (int r = 0; r < rows; ++r)
        for (int v = 0; v < vectors; ++v) *(Floats *)(c + r * c_row + v * LANES) = sums[r * vectors + v];
}

// The same for `rows`, a multiple of TILE, and `columns`, of LANES. A vector alone takes eight rows: four sums would wait for
// one another.
static void multiply(Left a, const float *b, int64_t b_row, int64_t n, const float *start, int64_t start_row, float *c,
                     int64_t c_row, int64_t rows, int64_t columns) {
    for (int64_t at = 0; at < columns;) {
        const int64_t left = (columns - at) / LANES, vectors = left > 4 ? 4 : left;
        for (int64_t r = 0; r < rows;) {
            const Left own = {a.at + r * a.row, a.row, a.step};
            const float *from = start ? start + r * start_row + at : NULL;
            float *to = c + r * c_row + at;
            const int64_t count = vectors == 1 && rows - r >= 2 * TILE ? 2 * TILE : TILE;
            if (vectors == 4) tile(own, b + at, b_row, n, from, start_row, to, c_row, TILE, 4);
            else if (vectors == 3) tile(own, b + at, b_row, n, from, start_row, to, c_row, TILE, 3);
            else if (vectors == 2) tile(own, b + at, b_row, n, from, start_row, to, c_row, TILE, 2);
            else if (count == TILE) tile(own, b + at, b_row, n, from, start_row, to, c_row, TILE, 1);
            else tile(own, b + at, b_row, n, from, start_row, to, c_row, 2 * TILE, 1);
            r += count;
        }
        at += vectors * LANES;
    }
}

#endif
