// What the parts of the CPython module share: blocks.c, which registers its functions, batch.c, lane.c, replay.c
// and those of kernels/columns.

#ifndef DPI_MODULE_H
#define DPI_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#include "copies/id_records.h"

// Counts end at 2^31 - 1, so that a product of two is one of 64 bits, and places so early that such a product can be added.
#define COUNTS INT32_MAX
#define PLACES_END (INT64_MAX / 4)

static inline int counted(Py_ssize_t got, Py_ssize_t expected) {
    if (got != expected) PyErr_Format(PyExc_TypeError, "arguments: got %zd, expected %zd", got, expected);
    return got == expected;
}

// Integers from 0 to `most`; gives whether all were.
static inline int integers(PyObject *const *given, Py_ssize_t count, int64_t most, int64_t *out) {
    for (Py_ssize_t i = 0; i < count; ++i) {
        out[i] = PyLong_AsLongLong(given[i]);
        if (out[i] >= 0 && out[i] <= most) continue;
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "block: got %lld, expected 0 to %lld", (long long)out[i], (long long)most);
        return 0;
    }
    return 1;
}

// Whether [at, at + size) lies in the buffer; else an error is set.
static inline int within(const Py_buffer *buffer, int64_t at, int64_t size) {
    if (at <= buffer->len - size) return 1;
    PyErr_Format(PyExc_ValueError, "block: got bytes %lld to %lld, expected some of %zd", (long long)at, (long long)(at + size),
                 buffer->len);
    return 0;
}

typedef struct {
    int (*launch)(void *exec, void *stream);  // cudaGraphLaunch: 0 or an error's code
    int (*synchronize)(void *stream);         // cudaStreamSynchronize
    void *exec, *stream;
    const uint32_t *done;
    int64_t most;   // words of `done`; 0: there is nothing to look at
    int64_t words;  // to look at; not given
} Replay;

// All but `words`, and these; give whether they are such.
int dpi_replay_of(PyObject *given, Replay *out);
int dpi_set_words(int64_t words, Replay *out);
int64_t dpi_now(void);  // nanoseconds
// Launches the graph, calls `meanwhile` if there is one, whatever the launch gave, and waits; all without the GIL. `idle`, if there
// is one, is called once some microseconds later, if words are still looked at then. Gives CUDA's code.
int dpi_replayed(const Replay *replay, void (*meanwhile)(void *), void (*idle)(void *), void *with);

int dpi_names(void);  // of attributes, for batch.c

PyObject *dpi_arrow_columns(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *dpi_column_bags(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *dpi_column_integers(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *dpi_column_numbers(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *dpi_scaled_numbers(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *dpi_column_ids(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *dpi_column_hashes(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *dpi_json_columns(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *dpi_json_items(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *dpi_vocabulary(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *dpi_text_hashes(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *dpi_texts(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *dpi_context_range(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *dpi_fill(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *dpi_replay(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *dpi_replay_batches(PyObject *module, PyObject *const *args, Py_ssize_t count);

#endif
