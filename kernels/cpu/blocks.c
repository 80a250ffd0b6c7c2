// Row blocks filled from Python objects: ids and numbers that a client sent, checked and copied in one pass. Twin of
// IdRecord.pack behind a comparison; built by c_build.py as a module of CPython, as its calls take a tenth of a microsecond
// where NumPy's and ctypes' take one each.

#include "copies/id_records.h"
#include "runtime/module.h"

// pack_ids(columns, ids, wide, rows, out, at, bytes): ids[rows, columns], of 8 bytes each if `wide`, else of 4, into records of so
// many bytes from byte `at` of `out` on. Gives how many ids are not legal; then what the records hold has no meaning.
static PyObject *pack_ids(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
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
        result = PyLong_FromLongLong(dpi_packed(columns.buf, width, ids.buf, wide != 0, rows, (uint8_t *)out.buf + at, bytes));
    PyBuffer_Release(&out);
no_out:
    PyBuffer_Release(&ids);
no_ids:
    PyBuffer_Release(&columns);
    return result;
}

// settle_ids(columns, ids, stand_ins, rows, out, at, bytes): `dpi_settled` of int64[columns, rows] into records from byte `at` of
// `out` on.
static PyObject *settle_ids(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t rows, place[2];
    if (!counted(count, 7) || !integers(args + 3, 1, COUNTS, &rows) || !integers(args + 5, 1, PLACES_END, place) ||
        !integers(args + 6, 1, COUNTS, place + 1))
        return NULL;
    Py_buffer held[4];
    PyObject *result = NULL;
    int open = 0;
    for (; open < 4; ++open)
        if (PyObject_GetBuffer(args[open < 3 ? open : 4], held + open, open < 3 ? PyBUF_SIMPLE : PyBUF_WRITABLE)) break;
    if (open == 4) {
        const int64_t columns = held[0].len / (int64_t)sizeof(Column);
        if (held[1].len != 8 * columns * rows || held[2].len != 16 * columns)
            PyErr_Format(PyExc_ValueError, "ids: got %zd and %zd bytes, expected 8 an id and 16 a column", held[1].len, held[2].len);
        else if (within(held + 3, place[0], rows * place[1]))
            result = PyLong_FromLongLong(dpi_settled(held[0].buf, columns, held[1].buf, held[2].buf, rows,
                                                     (uint8_t *)held[3].buf + place[0], place[1]));
    }
    while (open) PyBuffer_Release(held + --open);
    return result;
}

// copy_numbers(given, out, at): copies float32s to byte `at` of `out`. Gives how many are infinite or no numbers.
static PyObject *copy_numbers(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t at, found;
    if (!counted(count, 3) || !integers(args + 2, 1, PLACES_END, &at)) return NULL;
    Py_buffer given, out;
    PyObject *result = NULL;
    if (PyObject_GetBuffer(args[0], &given, PyBUF_SIMPLE)) return NULL;
    if (PyObject_GetBuffer(args[1], &out, PyBUF_WRITABLE)) goto no_out;
    if (within(&out, at, given.len)) {
        found = dpi_copied(given.buf, given.len, (uint8_t *)out.buf + at);
        result = PyLong_FromLongLong(found);
    }
    PyBuffer_Release(&out);
no_out:
    PyBuffer_Release(&given);
    return result;
}

static PyMethodDef functions[] = {
    {"arrow_columns", (PyCFunction)(void (*)(void))dpi_arrow_columns, METH_FASTCALL, NULL},
    {"column_bags", (PyCFunction)(void (*)(void))dpi_column_bags, METH_FASTCALL, NULL},
    {"column_integers", (PyCFunction)(void (*)(void))dpi_column_integers, METH_FASTCALL, NULL},
    {"column_numbers", (PyCFunction)(void (*)(void))dpi_column_numbers, METH_FASTCALL, NULL},
    {"scaled_numbers", (PyCFunction)(void (*)(void))dpi_scaled_numbers, METH_FASTCALL, NULL},
    {"column_ids", (PyCFunction)(void (*)(void))dpi_column_ids, METH_FASTCALL, NULL},
    {"column_hashes", (PyCFunction)(void (*)(void))dpi_column_hashes, METH_FASTCALL, NULL},
    {"json_columns", (PyCFunction)(void (*)(void))dpi_json_columns, METH_FASTCALL, NULL},
    {"json_items", (PyCFunction)(void (*)(void))dpi_json_items, METH_FASTCALL, NULL},
    {"vocabulary", (PyCFunction)(void (*)(void))dpi_vocabulary, METH_FASTCALL, NULL},
    {"text_hashes", (PyCFunction)(void (*)(void))dpi_text_hashes, METH_FASTCALL, NULL},
    {"texts", (PyCFunction)(void (*)(void))dpi_texts, METH_FASTCALL, NULL},
    {"pack_ids", (PyCFunction)(void (*)(void))pack_ids, METH_FASTCALL, NULL},
    {"settle_ids", (PyCFunction)(void (*)(void))settle_ids, METH_FASTCALL, NULL},
    {"copy_numbers", (PyCFunction)(void (*)(void))copy_numbers, METH_FASTCALL, NULL},
    {"replay", (PyCFunction)(void (*)(void))dpi_replay, METH_FASTCALL, NULL},
    {"context_range", (PyCFunction)(void (*)(void))dpi_context_range, METH_FASTCALL, NULL},
    {"fill", (PyCFunction)(void (*)(void))dpi_fill, METH_FASTCALL, NULL},
    {"replay_batches", (PyCFunction)(void (*)(void))dpi_replay_batches, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "blocks", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_blocks(void) { return dpi_names() ? PyModule_Create(&module) : NULL; }
