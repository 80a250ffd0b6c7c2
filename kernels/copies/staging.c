// Blocks staged while the graph that reads them starts, which is told how far the rows are; wait_for_rows.cuh has its side.

#include "copies/staging.h"

#include <string.h>

enum { STAGED_ROWS = 10, STAGED_CONTEXTS = 11 };  // batch_header.py
enum { CHUNK = 256 };  // rows copied before that is told: 1 us of work (H200 host), about what a read over the bus takes
// Bytes of rows that several threads copy, that a thread copies at a time, and that one that helps is woken for: to wake one takes
// the caller 1 us. 4,096 rows of 76 bytes are scored 6 us sooner with two that help (H200 host).
enum { LARGE = 256 << 10, PIECE = 32 << 10, HELPED = 128 << 10 };

// The word that tells.
static void tell(const Staging *s, int64_t value) {
    __atomic_store_n((int32_t *)s->batch->out.buf + STAGED_ROWS, (int32_t)value, __ATOMIC_RELEASE);
}

// Rows of the batch, of whichever blocks.
static void copy_piece(const void *with, int64_t i) {
    const Staging *s = with;
    const int64_t first = i * s->piece, end = first + s->piece;
    const Piece *p = s->pieces;
    for (Py_ssize_t low = 0, high = s->count; high - low > 1;) {  // the last block that begins no later
        const Py_ssize_t middle = low + (high - low) / 2;
        if (s->pieces[middle].begin <= first) p = s->pieces + (low = middle);
        else high = middle;
    }
    for (; p < s->pieces + s->count && p->begin < end; ++p) {
        const int64_t from = first > p->begin ? first - p->begin : 0, to = end - p->begin < p->rows ? end - p->begin : p->rows;
        if (to > from) dpi_copy_rows(s->batch, p, from, to - from);
    }
}

static void tell_pieces(const void *with, int64_t pieces) {
    const Staging *s = with;
    tell(s, -1 - pieces * s->piece);
}

// Rows a piece, if several threads are to copy them; else 0.
static int64_t piece_of(const Batch *batch, int64_t row) {
    int64_t piece = CHUNK;
    if (row * batch->rows < LARGE) return 0;
    while (piece > 1 && piece * row > PIECE) piece /= 2;
    while ((batch->rows + piece - 1) / piece > MOST_PIECES) piece *= 2;
    return piece;
}

// Before any row, as blocks that write histories wait for the first rows alone (histories.cuh).
static void copy_contexts(const Staging *s) {
    for (const Piece *p = s->pieces; p < s->pieces + s->count; ++p) dpi_copy_contexts(s->batch, p);
}

void dpi_begin_staging(Staging *s, const Batch *batch, const Piece *pieces, Py_ssize_t count, int64_t padding, int threads) {
    const int64_t row = batch->carried_bytes + (batch->in_place ? 0 : dpi_row_bytes(batch));
    const int64_t helped = row * batch->rows / HELPED;
    s->batch = batch, s->pieces = pieces, s->count = count, s->padding = padding, s->piece = threads ? piece_of(batch, row) : 0;
    ((int32_t *)batch->out.buf)[STAGED_CONTEXTS] = (int32_t)batch->contexts;
    tell(s, -1);
    if (!s->piece) return;
    copy_contexts(s);
    dpi_offer_copy(&s->copy, helped < threads ? (int)helped : threads, (batch->rows + s->piece - 1) / s->piece, copy_piece, s);
}

void dpi_finish_staging(void *staging) {
    Staging *s = staging;
    const Batch *batch = s->batch;
    int64_t done = 0;
    if (s->piece) {
        dpi_finish_copy(&s->copy, tell_pieces);
        done = batch->rows;
    } else {
        copy_contexts(s);
    }
    for (const Piece *p = s->pieces; !s->piece && p < s->pieces + s->count; ++p) {
        for (int64_t r = 0, n; r < p->rows; r += n) {
            const int64_t left = p->rows - r, room = CHUNK - done % CHUNK;
            n = left < room ? left : room;
            dpi_copy_rows(batch, p, r, n);
            done += n;
            if (done % CHUNK == 0) tell(s, -1 - done);
        }
    }
    memset((uint8_t *)batch->out.buf + batch->at[REQUEST_OF_ROW], 0xff, 4 * s->padding);  // -1: padding
    tell(s, done);
}
