// JSON as it lies in a body, read from its begin to its end: what json_columns.c and json_rows.c have in common.

#ifndef DPI_JSON_READER_H
#define DPI_JSON_READER_H

#include "columns/cells.h"

#include <string.h>

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

// A list of objects, from behind its first bracket to behind its last, as arrays: {name: its parts, for dpi_cells_opened} into
// `found`. Gives how many objects it has; 0, if one has other names than the first or values that are not plain, a name is not in
// `kinds` or comes twice, there are more objects than `most`, or an error is set.
Py_ssize_t dpi_json_rows(Reader *r, PyObject *kinds, Py_ssize_t most, PyObject *found);

#endif
