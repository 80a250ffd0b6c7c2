// JSON as it lies in a body, read from its begin to its end: what json_columns.c and json_rows.c have in common.

#ifndef DPI_JSON_READER_H
#define DPI_JSON_READER_H

#include "columns/cells.h"

#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

typedef struct {
    const uint8_t *at, *end;
} Reader;

static inline void blank(Reader *r) {
    while (r->at < r->end && (*r->at == ' ' || *r->at == '\n' || *r->at == '\r' || *r->at == '\t')) ++r->at;
}

static inline int next_is(Reader *r, uint8_t what) {
    blank(r);
    if (r->at == r->end || *r->at != what) return 0;
    ++r->at;
    return 1;
}

// A string without escapes, from behind its first quote to behind its last; gives whether it is such.
static inline int plain_string(Reader *r) {
#ifdef __SSE2__
    while (r->end - r->at >= 16) {  // a look at 16 bytes: most texts end within one
        const __m128i text = _mm_loadu_si128((const __m128i *)r->at);
        const __m128i marks = _mm_or_si128(_mm_cmpeq_epi8(text, _mm_set1_epi8('"')), _mm_cmpeq_epi8(text, _mm_set1_epi8('\\')));
        const int found = _mm_movemask_epi8(_mm_or_si128(marks, _mm_cmpeq_epi8(_mm_min_epu8(text, _mm_set1_epi8(31)), text)));
        if (found) return r->at += __builtin_ctz(found) + 1, r->at[-1] == '"';
        r->at += 16;
    }
#endif
    while (r->at < r->end && *r->at != '"' && *r->at != '\\' && *r->at >= ' ') ++r->at;
    if (r->at == r->end || *r->at != '"') return 0;
    ++r->at;
    return 1;
}

// Null, or a value of the kinds whose bits are set, from its first byte to behind its last; gives whether it is such.
static inline int plain_value(Reader *r, long kinds) {
    Cell cell = {.kind = TEXT};
    if (r->at == r->end) return 0;
    if (*r->at == '"') {
        ++r->at;
        return kinds >> TEXT & 1 && plain_string(r);
    }
    if (*r->at == 'n') {
        const int whole = r->end - r->at >= 4 && !memcmp(r->at, "null", 4);
        r->at += whole ? 4 : 0;
        return whole;
    }
    const uint8_t *end = dpi_json_number(r->at, r->end, &cell);
    if (end == NULL || cell.kind == OTHER) return 0;
    r->at = end;
    return kinds >> cell.kind & 1;
}

// Of an array's, for dpi_cells_opened: it lies in bytes `from` to `to` of `body`. NULL, and an error is set, without memory.
static inline PyObject *dpi_json_parts(Py_ssize_t rows, PyObject *body, Py_ssize_t from, Py_ssize_t to) {
    PyObject *form = PyLong_FromLong(JSON), *count = PyLong_FromSsize_t(rows);
    PyObject *first = PyLong_FromSsize_t(from), *end = PyLong_FromSsize_t(to);
    PyObject *place = first && end ? PyTuple_Pack(2, first, end) : NULL;
    PyObject *parts = form && count && place ? PyTuple_Pack(4, form, count, body, place) : NULL;  // a third of Py_BuildValue's time
    PyObject *held[] = {form, count, first, end, place};
    for (int i = 0; i < 5; ++i) Py_XDECREF(held[i]);
    return parts;
}

// A list of objects, from behind its first bracket to behind its last, as arrays: {name: its parts, for dpi_cells_opened} into
// `found`. Gives how many objects it has; 0, if one has other names than the first or values that are not plain, a name is not in
// `kinds` or comes twice, there are more objects than `most`, or an error is set.
Py_ssize_t dpi_json_rows(Reader *r, PyObject *kinds, Py_ssize_t most, PyObject *found);

#endif
