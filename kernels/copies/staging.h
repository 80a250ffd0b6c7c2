// A batch's rows on their way to memory that a graph reads while it starts, and is told how far they are.

#ifndef DPI_STAGING_H
#define DPI_STAGING_H

#include "copies/batch.h"
#include "copies/copy_threads.h"

enum { HEADER_WORDS = 16 };  // batch_header.py

typedef struct {
    const Batch *batch;
    const Piece *pieces;
    Py_ssize_t count;
    int64_t padding;  // rows behind the batch's
    int64_t piece;    // rows that a thread copies at a time; 0: this one copies all
    SharedCopy copy;  // of these pieces
} Staging;

// Of all pieces of a batch: tells that no row is there, and has up to `threads` others begin, if they are to help; they wake up
// while the graph is launched.
void dpi_begin_staging(Staging *staging, const Batch *batch, const Piece *pieces, Py_ssize_t count, int64_t padding,
                       int threads);
// Returns when all rows are there. staging: a Staging that was begun.
void dpi_finish_staging(void *staging);

#endif
