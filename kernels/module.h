// What the parts of the CPython module share: blocks.c, which registers its functions, columns.c and replay.c.

#ifndef DPI_MODULE_H
#define DPI_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

static inline int counted(Py_ssize_t got, Py_ssize_t expected) {
    if (got != expected) PyErr_Format(PyExc_TypeError, "arguments: got %zd, expected %zd", got, expected);
    return got == expected;
}

PyObject *dpi_column_floats(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *dpi_column_lookup(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *dpi_replay(PyObject *module, PyObject *const *args, Py_ssize_t count);

#endif
