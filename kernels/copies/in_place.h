// Rows that a device reads where their block lies. The one kernel of a graph that reads rows is told so for one launch.

#ifndef DPI_IN_PLACE_H
#define DPI_IN_PLACE_H

#include "copies/batch.h"

// Of CUDA's driver: cuGraphExecKernelNodeSetParams, cuPointerGetAttributes and cuCtxSetCurrent, 0 or an error's code, and the
// device's context, which a thread may not have that has called CUDA's runtime alone, or nothing yet. NULL: rows are always copied.
typedef struct {
    int (*set)(void *exec, void *node, const void *params);
    int (*attributes)(unsigned count, const int *which, void **out, uint64_t at);
    int (*enter)(void *context);
    void *context;
} Driver;

// That kernel, and its arguments that say where ids and numbers are; node: NULL where there is none, as of what it does not read.
typedef struct {
    void *node;
    const void *params;
    uint64_t *ids, *numbers;
    int moved;  // it could not be told of the batch again
} RowReader;

// Its bytes; gives whether they are such.
int dpi_driver_of(PyObject *given, Driver *driver);
// (node, params, address of the ids' argument, of the numbers') or (); gives whether it is such.
int dpi_reader_of(PyObject *given, RowReader *reader);
// Whether so many rows, from the block's first on, are worth it and in memory that is locked for the device. The reader's graph
// has `rows` rows, and may read as many.
int dpi_readable(const Driver *driver, const RowReader *reader, const Batch *batch, const Piece *piece, int64_t rows);
// Later launches read the rows of the block; of the batch. Gives CUDA's code.
int dpi_read_in_place(const Driver *driver, void *exec, RowReader *reader, const Piece *piece);
int dpi_read_batch(const Driver *driver, void *exec, RowReader *reader, const Batch *batch);

#endif
