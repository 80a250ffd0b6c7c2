// A batch that blocks are joined into, row by row, in memory that a device reads in place.

#ifndef DPI_BATCH_H
#define DPI_BATCH_H

#include "runtime/module.h"

// Of RowBlock.places; odd sections have a row a context, even ones a row a row.
enum { PLACES = 6, REQUEST_OF_ROW = 0, CONTEXT_IDS = 1, CANDIDATE_IDS = 2, CONTEXT_NUMBERS = 3, CANDIDATE_NUMBERS = 4 };
enum { MOST_CARRIED = 64 };  // bytes, id_record.py

typedef struct {
    Py_buffer out;
    Py_ssize_t sections;
    int64_t section[PLACES][2];  // index among places, and bytes a row or context
    int64_t first[PLACES], at[PLACES];  // where the first row or context goes, and the next one
    int64_t rows, contexts;      // so far
    int past_caches;             // whether rows go to memory past the host's caches, see put
    int in_place;                // whether rows' ids and numbers are read where they are, and so not copied
    Py_buffer carried;           // for each row the first `prefix` bytes of its context's ids, and its numbers
    int64_t prefix, carried_bytes;  // of a row's; 0: there is none
} Batch;

// A block whose bytes were checked, and where in the batch they go.
typedef struct {
    Py_buffer from;
    int64_t places[PLACES], at[PLACES], begin, rows, contexts;  // begin: its first row in the batch
    int32_t first, shift;  // context of the batch; and what makes such a one of the block's own
} Piece;

// An empty batch, from (out, places, sections); holds the first if it gives 1.
int dpi_opened(PyObject *const *args, Batch *batch);
// Has the batch's rows carry of their contexts what `carried` (args: memory or None, prefix) has room for; holds it if it gives 1.
int dpi_carries(PyObject *const *args, Batch *batch);
// One block behind those before it; holds its memory if it gives 1.
int dpi_appended(Batch *batch, PyObject *block, Piece *piece);
// Whether a block is of this layout; and whether all its rows are of its contexts. Else an error is set.
int dpi_laid_out(PyObject *block, PyObject *layout);
int dpi_of_contexts(const Piece *piece);
void dpi_copy_contexts(const Batch *batch, const Piece *p);
void dpi_copy_rows(const Batch *batch, const Piece *p, int64_t first, int64_t rows);
// Bytes of a row's ids and numbers.
int64_t dpi_row_bytes(const Batch *batch);
// Asks for the cache lines of as many rows as the batch has, to be written, if these are at most 32 KB: more would be waited for.
void dpi_own_rows(const Batch *batch);

#endif
