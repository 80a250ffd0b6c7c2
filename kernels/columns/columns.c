// Columns of raw values into arrays: one pass that takes values of the plain kinds alone. Twin of the NumPy way in
// dpiframe_core.features.multi_column_readers; part of the module that blocks.c makes.

#include "columns/arrow.h"

#include <math.h>

// column_numbers(columns, out, missing, at[, lifts]): finite numbers and None into rows `at` of float64[.., values], 0 for None, and into
// bytes as many, 1 where it was None. `lifts`, float64[columns, 2]: of each column the least that a number becomes, and what
// is then added. Gives how many were None; -1 if a value is none of these.
PyObject *dpi_column_numbers(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    Table t;
    Py_buffer mask;
    Py_buffer lifts = {0};
    if ((count != 4 && !counted(count, 5)) || !dpi_table_opened(args[0], args[1], args[3], &t)) return NULL;
    if (PyObject_GetBuffer(args[2], &mask, PyBUF_WRITABLE)) {
        dpi_table_closed(&t);
        return NULL;
    }
    Py_ssize_t missing = 0;
    if (count == 5 && !PyObject_GetBuffer(args[4], &lifts, PyBUF_SIMPLE) && lifts.len != 16 * t.count)
        PyErr_Format(PyExc_ValueError, "lifts: got %zd bytes, expected %zd", lifts.len, 16 * t.count);
    if (PyErr_Occurred()) missing = -1;
    if (8 * mask.len != t.out.len) {
        PyErr_Format(PyExc_ValueError, "missing: got %zd bytes, expected %zd", mask.len, t.out.len / 8);
        missing = -1;
    }
    for (Py_ssize_t i = 0; missing >= 0 && i < t.count; ++i) {
        double *to = dpi_table_row(&t, i);
        uint8_t *gone = (uint8_t *)mask.buf + (to - (double *)t.out.buf);
        const double *lift = lifts.buf ? (const double *)lifts.buf + 2 * i : NULL;
        Cells cells;
        if (!dpi_cells_opened(&t, i, &cells)) break;
        for (Py_ssize_t k = 0; missing >= 0 && k < t.rows; ++k) {
            Cell cell;
            dpi_next(&cells, &cell);
            *to = cell.kind == NUMBER ? cell.number : cell.kind == INTEGER ? (double)cell.integer : 0;
            *gone++ = cell.kind == NOTHING;
            if (cell.kind == OTHER || cell.kind == TEXT || !isfinite(*to)) missing = -1;
            else missing += cell.kind == NOTHING;
            if (lift) *to = (*to > lift[0] ? *to : lift[0]) + lift[1];
            ++to;
        }
        dpi_cells_closed(&cells);
    }
    PyBuffer_Release(&lifts);
    PyBuffer_Release(&mask);
    dpi_table_closed(&t);
    return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(missing);
}

// scaled_numbers(numbers, missing, scales, out, at): float64[columns, values] into rows `at` of float32[.., values], which may lie in any
// way: less scales[column, 0], by scales[column, 1]; where missing, bool[columns, values], says so, it is scales[column, 2]. Gives
// whether all are finite.
PyObject *dpi_scaled_numbers(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    Py_buffer held[5];  // as the arguments are
    int open = 0, finite = 1;
    if (!counted(count, 5)) return NULL;
    for (; open < 5; ++open)
        if (PyObject_GetBuffer(args[open], held + open, open == 3 ? PyBUF_STRIDED : PyBUF_SIMPLE)) break;
    if (open == 5) {
        const Py_buffer *out = held + 3;
        const Py_ssize_t columns = held[4].len / 8, values = out->ndim == 2 ? out->shape[1] : -1;
        int good = values >= 0 && out->itemsize == 4 && held[0].len == 8 * columns * values && held[1].len == columns * values;
        good = good && held[2].len == 24 * columns;
        for (Py_ssize_t i = 0; good && i < columns; ++i) {
            const int64_t row = ((const int64_t *)held[4].buf)[i];
            const double *from = (const double *)held[0].buf + i * values, *scale = (const double *)held[2].buf + 3 * i;
            const uint8_t *gone = (const uint8_t *)held[1].buf + i * values;
            if (!(good = row >= 0 && row < out->shape[0])) break;
            char *to = (char *)out->buf + row * out->strides[0];
            for (Py_ssize_t k = 0; k < values; ++k, to += out->strides[1])
                finite &= !!isfinite(*(float *)to = (float)(gone[k] ? scale[2] : (from[k] - scale[0]) / scale[1]));
        }
        if (!good) PyErr_SetString(PyExc_ValueError, "numbers: got arrays of other shapes than each other's");
    }
    while (open) PyBuffer_Release(held + --open);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(finite);
}

// An integer from 0 to below `bound`, or `mark` in the place of `padding`, if that is one too; gives whether it is such.
static inline int known(int64_t value, int64_t bound, int64_t padding, int64_t mark, int64_t *to) {
    *to = value == padding ? mark : value;
    return value >= 0 && (value == padding || value < bound);
}

static inline int id_of(PyObject *value, int64_t bound, int64_t padding, int64_t mark, int64_t *to) {
    int overflow = 0;
    const int64_t id = value && PyLong_CheckExact(value) ? PyLong_AsLongLongAndOverflow(value, &overflow) : -1;
    return !overflow && known(id, bound, padding, mark, to);
}

// The ids of an array; gives whether all are integers below the bound.
static int array_ids(const Cells *c, uint64_t bound, int64_t *to) {
    int bad = c->form < INT32;
    for (Py_ssize_t k = 0; !bad && k < c->rows; ++k) {
        const uint8_t *at = c->at + k * c->step;
        to[k] = c->form == INT32 ? *(const Id32 *)at : *(const Id64 *)at;
        bad = (uint64_t)to[k] >= bound;
    }
    return !bad;
}

// column_integers(columns, bounds, out, at): integers from 0 to below their column's bound, int64[columns], into rows `at` of
// int64[.., values]. Gives whether all were such.
PyObject *dpi_column_integers(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    Table t;
    Py_buffer bounds;
    if (!counted(count, 4) || !dpi_table_opened(args[0], args[2], args[3], &t)) return NULL;
    int good = !PyObject_GetBuffer(args[1], &bounds, PyBUF_SIMPLE);
    if (good) {
        if (!(good = bounds.len == 8 * t.count))
            PyErr_Format(PyExc_ValueError, "bounds: got %zd bytes, expected %zd", bounds.len, 8 * t.count);
        for (Py_ssize_t i = 0; good && i < t.count; ++i) {
            const int64_t bound = ((const int64_t *)bounds.buf)[i];
            int64_t *to = dpi_table_row(&t, i);
            Cells cells;
            if (!(good = dpi_cells_opened(&t, i, &cells))) break;
            if (dpi_is_array(&cells) && !cells.mask) good = array_ids(&cells, (uint64_t)bound, to);
            else for (Py_ssize_t k = 0; good && k < t.rows; ++k, ++to) {
                Cell cell;
                if (cells.form == OBJECTS) {
                    if (k + 16 < t.rows) __builtin_prefetch(cells.list[k + 16]);
                    good = id_of(cells.list[k], bound, -1, -1, to);
                    continue;
                }
                dpi_next(&cells, &cell);
                good = cell.kind == INTEGER && cell.integer >= 0 && cell.integer < bound;
                *to = cell.integer;
            }
            dpi_cells_closed(&cells);
        }
        PyBuffer_Release(&bounds);
    }
    dpi_table_closed(&t);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(good);
}

// column_bags(bags, numbers, out): lists of 1 to `width` integers each into int64[bags, width], -1 where a list has ended; `numbers`:
// width, the bound above all, the one that is padding (-1: none) and what takes its place, whether lists end at the last place and
// not begin at the first. Gives whether all were such. Bags may be a column of Arrow's lists, too, all of its rows.
PyObject *dpi_column_bags(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    long long width, bound, padding, mark;
    int last, good = 1;
    Py_buffer out;
    if (!counted(count, 3) || !PyArg_ParseTuple(args[1], "LLLLp", &width, &bound, &padding, &mark, &last)) return NULL;
    Cells cells, values;
    const int listed = PyList_Check(args[0]);
    if (!listed && !(PyTuple_Check(args[0]) && PyTuple_GET_SIZE(args[0]) == 4))
        return PyErr_Format(PyExc_TypeError, "bags: expected a list or a column of Arrow");
    if (!listed && !dpi_arrow_opened(args[0], PyLong_AsSsize_t(PyTuple_GET_ITEM(args[0], 1)), &cells)) return NULL;
    const Py_ssize_t bags = listed ? PyList_GET_SIZE(args[0]) : cells.rows;
    if (PyObject_GetBuffer(args[2], &out, PyBUF_WRITABLE)) return NULL;
    if (width < 1 || width > COUNTS || out.len / 8 / width != bags || out.len % (8 * width))
        PyErr_Format(PyExc_ValueError, "out: got %zd bytes, expected %lld a bag", out.len, 8 * width);
    int64_t *to = out.buf;
    for (Py_ssize_t b = 0; good && b < bags && !PyErr_Occurred(); ++b, to += width) {
        PyObject *bag = listed ? PyList_GET_ITEM(args[0], b) : NULL;
        if (listed && b + 16 < bags) __builtin_prefetch(PyList_GET_ITEM(args[0], b + 16));  // thousands lie beyond the caches
        const Py_ssize_t n = !listed ? dpi_arrow_list(&cells, b, &values) : PyList_CheckExact(bag) ? PyList_GET_SIZE(bag) : 0;
        good = n > 0 && n <= width;
        for (Py_ssize_t k = 0; good && k < width; ++k) to[k] = -1;
        int64_t *at = to + (last ? width - n : 0);
        for (Py_ssize_t k = 0; good && k < n; ++k) {
            Cell cell;
            if (listed) good = id_of(PyList_GET_ITEM(bag, k), bound, padding, mark, at + k);
            else dpi_next(&values, &cell), good = cell.kind == INTEGER && known(cell.integer, bound, padding, mark, at + k);
        }
    }
    PyBuffer_Release(&out);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(good);
}
