// Columns of raw values, and their values one after the other, wherever they lie. Twin of PackedColumn in
// dpiframe_core.features.packed_column.

#ifndef DPI_CELLS_H
#define DPI_CELLS_H

#include "runtime/module.h"

// OBJECTS: a list of Python's, or an array of NumPy's of such. TEXTS: each after its length, a little-endian uint32. JSON: an array
// of text without escapes, of numbers and null. ARROW: an array that Arrow exports (arrow.h). UNREAD: an array of NumPy's of
// another type, whose values are all OTHER.
typedef enum { OBJECTS, TEXTS, JSON, FLOAT32, FLOAT64, INT32, INT64, ARROW, UNREAD } Form;
typedef enum { NOTHING, TEXT, INTEGER, NUMBER, OTHER } Kind;

typedef struct {
    Kind kind;
    const char *text;  // UTF-8
    Py_ssize_t size;
    int64_t integer;
    double number;
} Cell;

// Of one column. `mask`: a byte a value, not 0 where it is missing; or NULL. `type`, `inner`: of the values of an array of Arrow's,
// and of those of its dictionary or its lists. `step`: bytes from a value of an array to the next.
typedef struct {
    Form form;
    Py_ssize_t rows, next, step;
    PyObject *const *list;
    const uint8_t *at, *end, *mask;
    Py_buffer data, missing;
    const struct ArrowArray *array;
    int type, inner;
} Cells;

// Columns of as many values each, and where their values go: 8 bytes each, those of column i in row at[i] of an array.
typedef struct {
    PyObject *columns;
    Py_ssize_t count, rows;
    Py_buffer out, at;
} Table;

// Both give whether it is open, and is to be closed; else an error is set.
int dpi_table_opened(PyObject *columns, PyObject *out, PyObject *at, Table *table);
int dpi_cells_opened(const Table *table, Py_ssize_t column, Cells *cells);
void dpi_table_closed(Table *table);
// Where the values of a column go.
static inline void *dpi_table_row(const Table *t, Py_ssize_t column) {
    return (int64_t *)t->out.buf + ((const int64_t *)t->at.buf)[column] * t->rows;
}
void dpi_cells_closed(Cells *cells);
// Whether every value was taken, and its bytes ended with the last.
int dpi_cells_ended(const Cells *cells);
// The next value; one that is none of the plain kinds, or cut short, is OTHER.
void dpi_cell(Cells *cells, Cell *to);

typedef float ANYWHERE Float32;
typedef double ANYWHERE Float64;

static inline int dpi_is_array(const Cells *c) { return c->form >= FLOAT32 && c->form <= INT64; }

static inline void dpi_array_cell(Cells *c, Cell *to) {
    to->kind = c->form < INT32 ? NUMBER : INTEGER;
    if (to->kind == NUMBER) to->number = c->form == FLOAT32 ? *(const Float32 *)c->at : *(const Float64 *)c->at;
    else to->integer = c->form == INT32 ? *(const Id32 *)c->at : *(const Id64 *)c->at;
    c->at += c->step;
}

// As dpi_cell; without a call for what most values are.
static inline void dpi_next(Cells *c, Cell *to) {
    PyObject *value = c->form == OBJECTS ? c->list[c->next] : NULL;
    if (value && PyUnicode_CheckExact(value) && PyUnicode_IS_COMPACT_ASCII(value)) {
        to->kind = TEXT, to->text = PyUnicode_DATA(value), to->size = PyUnicode_GET_LENGTH(value);
        const uintptr_t ahead = (uintptr_t)c->list[++c->next + 15 < c->rows ? c->next + 15 : 0];  // thousands lie beyond the caches
        __builtin_prefetch((const void *)ahead), __builtin_prefetch((const void *)(ahead + sizeof(PyASCIIObject)));
    } else if (dpi_is_array(c) && !c->mask) ++c->next, dpi_array_cell(c, to);
    else dpi_cell(c, to);
}

// A number of JSON from `at` on, and where it ends; NULL if it is none. OTHER: it is one that takes more care.
const uint8_t *dpi_json_number(const uint8_t *at, const uint8_t *end, Cell *to);

#endif
