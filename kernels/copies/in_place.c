// Reading rows in place spares a large request's copy: 4,096 rows of 76 bytes take a core 16 us, and to tell the kernel another
// place 0.35 (H200 host). What is small stays as it is: of rows, who belongs to which context, and what they carry of it.

#include "copies/in_place.h"

#include <string.h>

enum { LEAST = 16 << 10 };                     // bytes of rows: for fewer a copy takes no longer
enum { RANGE_START = 11, RANGE_SIZE = 12 };    // CU_POINTER_ATTRIBUTE_RANGE_*: of what was locked at once

int dpi_driver_of(PyObject *given, Driver *driver) {
    if (PyBytes_Check(given) && PyBytes_GET_SIZE(given) == sizeof *driver)
        return memcpy(driver, PyBytes_AS_STRING(given), sizeof *driver), 1;
    return PyErr_SetString(PyExc_TypeError, "driver: expected the bytes of three functions and a context"), 0;
}

int dpi_reader_of(PyObject *given, RowReader *reader) {
    int64_t of[4] = {0};
    *reader = (RowReader){0};
    if (!PyTuple_Check(given) || (PyTuple_GET_SIZE(given) && PyTuple_GET_SIZE(given) != 4))
        return PyErr_SetString(PyExc_TypeError, "reader: expected a tuple of four integers, or of none"), 0;
    if (!integers(((PyTupleObject *)given)->ob_item, PyTuple_GET_SIZE(given), INT64_MAX, of)) return 0;
    reader->node = (void *)of[0], reader->params = (void *)of[1];
    reader->ids = (uint64_t *)of[2], reader->numbers = (uint64_t *)of[3];
    return 1;
}

static int locked(const Driver *driver, uint64_t at, uint64_t size) {
    static const int which[] = {RANGE_START, RANGE_SIZE};
    uint64_t start = 0, length = 0;  // of other memory both stay 0
    void *out[] = {&start, &length};
    if (driver->attributes(2, which, out, at)) return 0;
    return at >= start && at - start <= length && size <= length - (at - start);
}

int dpi_readable(const Driver *driver, const RowReader *reader, const Batch *batch, const Piece *p, int64_t rows) {
    if (!driver->set || !reader->node || batch->rows * dpi_row_bytes(batch) < LEAST || driver->enter(driver->context)) return 0;
    for (Py_ssize_t k = 0; k < batch->sections; ++k) {
        const int64_t i = batch->section[k][0];
        const uint64_t at = (uint64_t)(uintptr_t)p->from.buf + p->places[i];
        if (!(i & 1) && (at % 4 || !locked(driver, at, rows * batch->section[k][1]))) return 0;
    }
    return 1;
}

static int set_place(const Driver *driver, void *exec, RowReader *reader, const void *memory, const int64_t *places) {
    const uint64_t from = (uint64_t)(uintptr_t)memory;
    if (reader->ids) *reader->ids = from + places[CANDIDATE_IDS];
    if (reader->numbers) *reader->numbers = from + places[CANDIDATE_NUMBERS];
    const int code = driver->enter(driver->context);
    return code ? code : driver->set(exec, reader->node, reader->params);
}

int dpi_read_in_place(const Driver *driver, void *exec, RowReader *reader, const Piece *p) {
    const int code = set_place(driver, exec, reader, p->from.buf, p->places);
    reader->moved = !code;
    return code;
}

int dpi_read_batch(const Driver *driver, void *exec, RowReader *reader, const Batch *batch) {
    const int code = set_place(driver, exec, reader, batch->out.buf, batch->first);
    reader->moved = !!code;
    return code;
}
