// Columns of raw values, as JSON has them, into arrays: one pass that takes values of the plain types alone. Twin of the NumPy
// way in dpiframe_core.features.multi_column_readers; part of the module that blocks.c makes.

#include "runtime/module.h"

// A sequence of lists of one length, and where their values go: 8 bytes each, list after list. `lists` is to be given back.
typedef struct {
    PyObject *lists;
    Py_ssize_t count, length;
    Py_buffer out;
} Table;

static int opened(PyObject *given, PyObject *out, Table *t) {
    t->lists = PySequence_Fast(given, "columns: expected a sequence");
    if (t->lists == NULL) return 0;
    t->count = PySequence_Fast_GET_SIZE(t->lists);
    t->length = 0;
    int good = 1;
    for (Py_ssize_t i = 0; good && i < t->count; ++i) {
        PyObject *list = PySequence_Fast_GET_ITEM(t->lists, i);
        good = PyList_Check(list) && (!i || PyList_GET_SIZE(list) == t->length);
        if (good) t->length = PyList_GET_SIZE(list);
    }
    if (!good) PyErr_SetString(PyExc_ValueError, "columns: expected lists of one length");
    if (good && !PyObject_GetBuffer(out, &t->out, PyBUF_WRITABLE)) {
        if (t->out.len == 8 * t->count * t->length) return 1;
        PyErr_Format(PyExc_ValueError, "out: got %zd bytes, expected %zd", t->out.len, 8 * t->count * t->length);
        PyBuffer_Release(&t->out);
    }
    Py_DECREF(t->lists);
    return 0;
}

static void closed(Table *t) {
    PyBuffer_Release(&t->out);
    Py_DECREF(t->lists);
}

// column_numbers(columns, out): lists of numbers and None, which becomes NaN, into float64[columns, values]. Gives how many were None;
// -1 if a value is of another type or too large.
PyObject *dpi_column_numbers(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    Table t;
    if (!counted(count, 2) || !opened(args[0], args[1], &t)) return NULL;
    double *to = t.out.buf;
    Py_ssize_t missing = 0;
    for (Py_ssize_t i = 0; missing >= 0 && i < t.count; ++i) {
        PyObject *list = PySequence_Fast_GET_ITEM(t.lists, i);
        for (Py_ssize_t k = 0; missing >= 0 && k < t.length; ++k) {
            PyObject *value = PyList_GET_ITEM(list, k);
            if (PyFloat_CheckExact(value)) *to++ = PyFloat_AS_DOUBLE(value);
            else if (value == Py_None) *to++ = Py_NAN, ++missing;
            else if (!PyLong_CheckExact(value)) missing = -1;
            else if ((*to++ = PyLong_AsDouble(value)) == -1 && PyErr_Occurred()) {
                PyErr_Clear();
                missing = -1;
            }
        }
    }
    closed(&t);
    return PyLong_FromSsize_t(missing);
}

// column_ids(columns, dicts, unknown, out): lists of text and None into int64[columns, values], by a dict and an id for what it
// lacks, both a column's own. Gives whether all was text or None.
PyObject *dpi_column_ids(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    Table t;
    if (!counted(count, 4) || !opened(args[0], args[3], &t)) return NULL;
    int64_t *to = t.out.buf;
    int good = PyTuple_Check(args[1]) && PyTuple_Check(args[2]) && PyTuple_GET_SIZE(args[1]) == t.count &&
               PyTuple_GET_SIZE(args[2]) == t.count;
    if (!good) PyErr_SetString(PyExc_TypeError, "dicts, unknown: expected tuples, an item a column");
    for (Py_ssize_t i = 0; good && i < t.count; ++i) {
        PyObject *list = PySequence_Fast_GET_ITEM(t.lists, i), *ids = PyTuple_GET_ITEM(args[1], i);
        int64_t unknown = PyLong_AsLongLong(PyTuple_GET_ITEM(args[2], i));
        good = PyDict_CheckExact(ids);
        for (Py_ssize_t k = 0; good && k < t.length; ++k) {
            PyObject *value = PyList_GET_ITEM(list, k), *id = NULL;
            good = PyUnicode_CheckExact(value) || value == Py_None;
            if (good) id = PyDict_GetItemWithError(ids, value);
            *to++ = id == NULL ? unknown : PyLong_AsLongLong(id);
        }
    }
    closed(&t);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(good);
}

// texts(data, count): a list of so many texts, each a little-endian uint32 of its length and so many bytes of UTF-8; None if the
// bytes are not these and no more.
PyObject *dpi_texts(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t given) {
    int64_t count;
    Py_buffer data;
    if (!counted(given, 2) || !integers(args + 1, 1, COUNTS, &count) || PyObject_GetBuffer(args[0], &data, PyBUF_SIMPLE)) return NULL;
    const uint8_t *at = data.buf, *end = at + data.len;
    PyObject *list = count <= data.len / 4 ? PyList_New(count) : NULL;
    int good = list != NULL;
    for (int64_t i = 0; good && i < count; ++i) {
        good = end - at >= 4;
        const uint32_t size = good ? at[0] | at[1] << 8 | at[2] << 16 | (uint32_t)at[3] << 24 : 0;
        good = good && size <= end - at - 4;
        PyObject *text = good ? PyUnicode_DecodeUTF8((const char *)at + 4, size, NULL) : NULL;
        good = text != NULL;
        if (good) PyList_SET_ITEM(list, i, text);
        at += 4 + (size_t)size * good;
    }
    if (!good || at != end) Py_CLEAR(list);
    PyBuffer_Release(&data);
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) PyErr_Clear();
    return list || PyErr_Occurred() ? list : Py_NewRef(Py_None);
}
