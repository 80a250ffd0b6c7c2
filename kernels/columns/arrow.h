// Arrow's arrays where they lie, by its C data interface. Their lengths, offsets, indices and text are believed here: whoever
// hands them over has had Arrow validate them in full.

#ifndef DPI_ARROW_H
#define DPI_ARROW_H

#include "columns/cells.h"

// https://arrow.apache.org/docs/format/CDataInterface.html
struct ArrowSchema {
    const char *format, *name, *metadata;
    int64_t flags, n_children;
    struct ArrowSchema **children, *dictionary;
    void (*release)(struct ArrowSchema *);
    void *private_data;
};

struct ArrowArray {
    int64_t length, null_count, offset, n_buffers, n_children;
    const void **buffers;
    struct ArrowArray **children, *dictionary;
    void (*release)(struct ArrowArray *);
    void *private_data;
};

// Opens a column of form ARROW for dpi_cell; gives whether it could, else an error is set. There is nothing to close.
int dpi_arrow_opened(PyObject *column, Py_ssize_t rows, Cells *cells);
void dpi_arrow_cell(const Cells *cells, Py_ssize_t row, Cell *to);
// The values of a list in the place of the column; how many, 0 if it is null or the column has no lists.
Py_ssize_t dpi_arrow_list(const Cells *cells, Py_ssize_t row, Cells *values);

#endif
