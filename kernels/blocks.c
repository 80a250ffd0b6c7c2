// Row blocks filled from Python objects: ids and numbers that a client sent, checked and copied in one pass, and blocks joined
// into a batch. Twin of IdRecord.pack behind a comparison and of RowBlock.fill; built by native.py as a module of CPython, as
// its calls take a tenth of a microsecond where NumPy's and ctypes' take one each.

#include "module.h"

#include <string.h>

// What was sent begins at any byte, and so may a block in memory that another process laid out.
#define ANYWHERE __attribute__((aligned(1), may_alias))
typedef int32_t ANYWHERE Id32;
typedef int64_t ANYWHERE Id64;
typedef uint16_t ANYWHERE Half;
typedef uint32_t ANYWHERE Word;
typedef uint64_t ANYWHERE Long;

// An id column: its place among the columns sent, its first byte in a record and its bytes there. Legal are `span` ids, from
// `lowest` on.
typedef struct {
    int32_t source, at, width, lowest;
    uint64_t span;
} Column;

enum { ROWS = 64 };  // at once, column by column: what they take stays in the first cache

#define PACK(ID, STORED)                                                      \
    for (int64_t r = 0; r < n; ++r) {                                         \
        const int64_t id = ((const ID *)from)[r * columns];                   \
        illegal += (uint64_t)id - (uint64_t)(int64_t)c->lowest >= c->span;    \
        *(STORED *)(to + r * bytes) = (STORED)id;                             \
    }

#define PACK_ROWS(ID)                                                                       \
    {                                                                                       \
        const uint8_t *from = (const uint8_t *)((const ID *)ids + first * columns + c->source); \
        switch (c->width) {                                                                 \
            case 1: PACK(ID, uint8_t) break;                                                \
            case 2: PACK(ID, Half) break;                                                   \
            case 4: PACK(ID, Word) break;                                                   \
            default: PACK(ID, Long)                                                         \
        }                                                                                   \
    }

static int64_t packed(const Column *column, int64_t columns, const void *ids, int wide, int64_t rows, uint8_t *records,
                      int64_t bytes) {
    int64_t illegal = 0;
    for (int64_t first = 0; first < rows; first += ROWS) {
        const int64_t n = rows - first < ROWS ? rows - first : ROWS;
        for (const Column *c = column; c < column + columns; ++c) {
            uint8_t *to = records + first * bytes + c->at;
            if (wide) PACK_ROWS(Id64) else PACK_ROWS(Id32)
        }
    }
    return illegal;
}

// Whether [at, at + size) lies in the buffer; else an error is set.
static int within(const Py_buffer *buffer, int64_t at, int64_t size) {
    if (at <= buffer->len - size) return 1;
    PyErr_Format(PyExc_ValueError, "block: got bytes %lld to %lld, expected some of %zd", (long long)at, (long long)(at + size),
                 buffer->len);
    return 0;
}

// Counts end at 2^31 - 1, so that a product of two is one of 64 bits, and places so early that such a product can be added.
static const int64_t COUNTS = INT32_MAX, PLACES_END = INT64_MAX / 4;

// Integers from 0 to `most`; gives whether all were.
static int integers(PyObject *const *given, Py_ssize_t count, int64_t most, int64_t *out) {
    for (Py_ssize_t i = 0; i < count; ++i) {
        out[i] = PyLong_AsLongLong(given[i]);
        if (out[i] >= 0 && out[i] <= most) continue;
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "block: got %lld, expected 0 to %lld", (long long)out[i], (long long)most);
        return 0;
    }
    return 1;
}

// pack(columns, ids, wide, rows, out, at, bytes): ids[rows, columns], of 8 bytes each if `wide`, else of 4, into records of so
// many bytes from byte `at` of `out` on. Gives how many ids are not legal; then what the records hold has no meaning.
static PyObject *pack(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t shape[2], at, bytes;
    if (!counted(count, 7) || !integers(args + 2, 2, COUNTS, shape) || !integers(args + 5, 1, PLACES_END, &at) ||
        !integers(args + 6, 1, COUNTS, &bytes))
        return NULL;
    const int64_t wide = shape[0], rows = shape[1];
    Py_buffer columns, ids, out;
    PyObject *result = NULL;
    if (PyObject_GetBuffer(args[0], &columns, PyBUF_SIMPLE)) return NULL;
    if (PyObject_GetBuffer(args[1], &ids, PyBUF_SIMPLE)) goto no_ids;
    if (PyObject_GetBuffer(args[4], &out, PyBUF_WRITABLE)) goto no_out;
    const int64_t width = columns.len / (int64_t)sizeof(Column), size = rows * width * (wide ? 8 : 4);
    if (ids.len != size)
        PyErr_Format(PyExc_ValueError, "ids: got %zd bytes, expected %lld", ids.len, (long long)size);
    else if (within(&out, at, rows * bytes))
        result = PyLong_FromLongLong(packed(columns.buf, width, ids.buf, wide != 0, rows, (uint8_t *)out.buf + at, bytes));
    PyBuffer_Release(&out);
no_out:
    PyBuffer_Release(&ids);
no_ids:
    PyBuffer_Release(&columns);
    return result;
}

// numbers(given, out, at): copies float32s to byte `at` of `out`. Gives how many are infinite or no numbers.
static PyObject *numbers(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t at, found = 0;
    if (!counted(count, 3) || !integers(args + 2, 1, PLACES_END, &at)) return NULL;
    Py_buffer given, out;
    PyObject *result = NULL;
    if (PyObject_GetBuffer(args[0], &given, PyBUF_SIMPLE)) return NULL;
    if (PyObject_GetBuffer(args[1], &out, PyBUF_WRITABLE)) goto no_out;
    if (within(&out, at, given.len)) {
        const uint32_t exponent = 0x7f800000;  // all ones in those, and in those alone
        const Word *number = memcpy((uint8_t *)out.buf + at, given.buf, given.len);
        for (int64_t i = 0; i < given.len / 4; ++i) found += (number[i] & exponent) == exponent;
        result = PyLong_FromLongLong(found);
    }
    PyBuffer_Release(&out);
no_out:
    PyBuffer_Release(&given);
    return result;
}

enum { PLACES = 6, REQUEST_OF_ROW = 0 };  // of RowBlock.places; odd sections have a row a context, even ones a row a row
static PyObject *name_buffer, *name_places, *name_rows, *name_contexts, *name_base;

// RowBlock.places.
static int places_of(PyObject *tuple, int64_t *places) {
    if (PyTuple_CheckExact(tuple) && PyTuple_GET_SIZE(tuple) == PLACES)
        return integers(((PyTupleObject *)tuple)->ob_item, PLACES, PLACES_END, places);
    PyErr_SetString(PyExc_TypeError, "places: expected a tuple of six offsets");
    return 0;
}

static int attribute(PyObject *block, PyObject *name, int64_t *out) {
    PyObject *value = PyObject_GetAttr(block, name);
    if (value == NULL) return 0;
    const int good = integers(&value, 1, COUNTS, out);
    Py_DECREF(value);
    return good;
}

// One block behind those before it. `at`: where in `out` the next row of each section goes; `total`: rows and contexts so far.
static int appended(PyObject *block, const Py_buffer *out, int64_t *at, const int64_t (*section)[2], Py_ssize_t sections,
                    int64_t *total) {
    int64_t places[PLACES], counts[2], base;
    if (!attribute(block, name_rows, &counts[0]) || !attribute(block, name_contexts, &counts[1]) ||
        !attribute(block, name_base, &base))
        return 0;
    PyObject *tuple = PyObject_GetAttr(block, name_places);
    if (tuple == NULL) return 0;
    int good = places_of(tuple, places);
    Py_DECREF(tuple);
    PyObject *memory = good ? PyObject_GetAttr(block, name_buffer) : NULL;
    if (memory == NULL) return 0;
    Py_buffer from;
    good = !PyObject_GetBuffer(memory, &from, PyBUF_SIMPLE);
    Py_DECREF(memory);
    if (!good) return 0;
    for (Py_ssize_t k = 0; good && k < sections; ++k) {
        const int64_t i = section[k][0], size = counts[i & 1] * section[k][1];
        good = within(out, at[i], size) && within(&from, places[i], size);
        if (good) memcpy((uint8_t *)out->buf + at[i], (const uint8_t *)from.buf + places[i], size);
        at[i] += size;
    }
    const int64_t rows = counts[0], size = 4 * rows;
    good = good && within(out, at[REQUEST_OF_ROW], size) && within(&from, places[REQUEST_OF_ROW], size);
    if (good) {
        Id32 *to = (Id32 *)((uint8_t *)out->buf + at[REQUEST_OF_ROW]);
        const Id32 *own = (const Id32 *)((const uint8_t *)from.buf + places[REQUEST_OF_ROW]);
        const int32_t first = (int32_t)total[1], shift = (int32_t)(total[1] - base);
        if (counts[1] > 1)
            for (int64_t r = 0; r < rows; ++r) to[r] = own[r] + shift;
        else  // rows have no choice
            for (int64_t r = 0; r < rows; ++r) to[r] = first;
        at[REQUEST_OF_ROW] += size;
        total[0] += rows;
        total[1] += counts[1];
    }
    PyBuffer_Release(&from);
    return good;
}

// fill(out, places, sections, blocks): RowBlock.fill; `sections` are BlockLayout.sections. Gives the rows.
static PyObject *fill(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t at[PLACES], section[PLACES][2], total[2] = {0, 0};
    if (!counted(count, 4) || !places_of(args[1], at)) return NULL;
    const Py_ssize_t sections = PyTuple_Check(args[2]) ? PyTuple_GET_SIZE(args[2]) : PLACES;
    if (sections >= PLACES) return PyErr_Format(PyExc_TypeError, "sections: expected a tuple of at most four");
    for (Py_ssize_t k = 0; k < sections; ++k) {
        PyObject *pair = PyTuple_GET_ITEM(args[2], k);
        if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2 ||
            !integers(((PyTupleObject *)pair)->ob_item, 2, COUNTS, section[k]))
            return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "sections: expected pairs");
        if (section[k][0] <= REQUEST_OF_ROW || section[k][0] >= PLACES - 1)
            return PyErr_Format(PyExc_ValueError, "sections: got index %lld, expected 1 to 4", (long long)section[k][0]);
    }
    PyObject *blocks = PySequence_Fast(args[3], "blocks: expected a sequence");
    if (blocks == NULL) return NULL;
    Py_buffer out;
    int good = !PyObject_GetBuffer(args[0], &out, PyBUF_WRITABLE);
    if (good) {
        for (Py_ssize_t i = 0; good && i < PySequence_Fast_GET_SIZE(blocks); ++i)
            good = appended(PySequence_Fast_GET_ITEM(blocks, i), &out, at, section, sections, total);
        PyBuffer_Release(&out);
    }
    Py_DECREF(blocks);
    return good ? PyLong_FromLongLong(total[0]) : NULL;
}

static PyMethodDef functions[] = {
    {"floats", (PyCFunction)(void (*)(void))dpi_column_floats, METH_FASTCALL, NULL},
    {"lookup", (PyCFunction)(void (*)(void))dpi_column_lookup, METH_FASTCALL, NULL},
    {"pack", (PyCFunction)(void (*)(void))pack, METH_FASTCALL, NULL},
    {"numbers", (PyCFunction)(void (*)(void))numbers, METH_FASTCALL, NULL},
    {"replay", (PyCFunction)(void (*)(void))dpi_replay, METH_FASTCALL, NULL},
    {"fill", (PyCFunction)(void (*)(void))fill, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "blocks", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_blocks(void) {
    PyObject **names[] = {&name_buffer, &name_places, &name_rows, &name_contexts, &name_base};
    const char *texts[] = {"buffer", "places", "rows", "contexts", "base"};
    for (int i = 0; i < 5; ++i)
        if ((*names[i] = PyUnicode_InternFromString(texts[i])) == NULL) return NULL;
    return PyModule_Create(&module);
}
