// Objects of a JSON list that have the same names, turned into arrays by name: each value is copied once, as it is written.

#include "columns/json_reader.h"

typedef struct {
    const uint8_t *from;
    Py_ssize_t size;
} Span;

// `name`: as it is written, with its quotes. `bytes`: of all its values. `seen`: rows that have it.
typedef struct {
    Span name;
    PyObject *text;
    long kinds;
    Py_ssize_t bytes, seen;
} Member;

// `values`: row by row, `count` each. `places`: 1 + the columns by the hashes of their names, at most half of them taken.
typedef struct {
    Member *columns;
    Span *values;
    uint32_t *places;
    Py_ssize_t count, rows, room, mask;
} Rows;

static int named(const Member *column, Span name) {
    return column->name.size == name.size && !memcmp(column->name.from, name.from, name.size);
}

// Where 1 + the column of a name is, or 0, if there is none.
static uint32_t *place_of(const Rows *s, Span name) {
    uint32_t hash = 0;
    for (Py_ssize_t k = 0; k < name.size; ++k) hash = (hash ^ name.from[k]) * 0x01000193u;
    hash ^= hash >> 15;
    while (s->places[hash & s->mask] && !named(s->columns + s->places[hash & s->mask] - 1, name)) ++hash;
    return s->places + (hash & s->mask);
}

// A column more, of the first row; its place, or -1.
static Py_ssize_t opened(Rows *s, Span name, PyObject *kinds, uint32_t *place) {
    PyObject *text = PyUnicode_DecodeUTF8((const char *)name.from + 1, name.size - 2, NULL);
    PyObject *bits = text ? PyDict_GetItemWithError(kinds, text) : NULL;
    if (bits == NULL || s->count == PyDict_GET_SIZE(kinds)) {
        Py_XDECREF(text);
        return -1;
    }
    s->columns[s->count] = (Member){name, text, PyLong_AsLong(bits), 0, 0};
    *place = ++s->count;
    return s->count - 1;
}

static int roomy(Rows *s) {
    const Py_ssize_t room = s->room < 64 ? 64 : 2 * s->room;
    Span *values = PyMem_Realloc(s->values, room * s->count * sizeof *values);
    if (values == NULL) return 0;
    s->values = values, s->room = room;
    return 1;
}

// One object, from its first bracket to behind its last. A name is most often that of the first row in the same place.
static int row(Reader *r, Rows *s, PyObject *kinds) {
    Py_ssize_t place = 0;
    if (!next_is(r, '{')) return 0;
    do {
        blank(r);
        Span name = {r->at, 0};
        if (!next_is(r, '"') || !plain_string(r)) return 0;
        name.size = r->at - name.from;
        Py_ssize_t i = place;
        if (place >= s->count || !named(s->columns + place, name)) {
            uint32_t *at = place_of(s, name);
            i = *at || s->rows ? (Py_ssize_t)*at - 1 : opened(s, name, kinds, at);
        }
        if (i < 0 || s->columns[i].seen++ != s->rows || !next_is(r, ':')) return 0;
        blank(r);
        const uint8_t *from = r->at;
        if (!plain_value(r, s->columns[i].kinds)) return 0;
        s->values[s->rows * s->count + i] = (Span){from, r->at - from};  // of the first row, before its columns are counted, too
        s->columns[i].bytes += r->at - from;
        ++place;
    } while (next_is(r, ','));
    return place == s->count && next_is(r, '}');
}

static int written(const Rows *s, PyObject *found) {
    Py_ssize_t size = 0, at = 0;
    for (Py_ssize_t i = 0; i < s->count; ++i) size += s->columns[i].bytes + s->rows + 1;  // commas and brackets
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, size);
    int good = bytes != NULL;
    for (Py_ssize_t i = 0; good && i < s->count; ++i) {
        uint8_t *start = (uint8_t *)PyBytes_AS_STRING(bytes), *to = start + at;
        for (Py_ssize_t k = 0; k < s->rows; ++k) {
            const Span value = s->values[k * s->count + i];
            *to++ = k ? ',' : '[';
            memcpy(to, value.from, value.size);
            to += value.size;
        }
        *to++ = ']';
        PyObject *parts = dpi_json_parts(s->rows, bytes, at, to - start);
        good = parts && !PyDict_SetItem(found, s->columns[i].text, parts);
        Py_XDECREF(parts);
        at = to - start;
    }
    Py_XDECREF(bytes);
    return good;
}

Py_ssize_t dpi_json_rows(Reader *r, PyObject *kinds, Py_ssize_t most, PyObject *found) {
    const Py_ssize_t names = PyDict_GET_SIZE(kinds);
    Rows s = {PyMem_Malloc((names + 1) * sizeof(Member)), PyMem_Malloc((names + 1) * sizeof(Span)), .room = 1, .mask = 1};
    while (s.mask < 2 * names) s.mask = 2 * s.mask + 1;
    s.places = PyMem_Calloc(s.mask + 1, sizeof *s.places);
    int good = s.columns && s.values && s.places;
    do {
        good = good && s.rows < most && (s.rows < s.room || roomy(&s)) && row(r, &s, kinds);
        s.rows += good;
    } while (good && next_is(r, ','));
    good = good && next_is(r, ']') && written(&s, found);
    for (Py_ssize_t i = 0; i < s.count; ++i) Py_DECREF(s.columns[i].text);
    PyMem_Free(s.columns);
    PyMem_Free(s.values);
    PyMem_Free(s.places);
    return good ? s.rows : 0;
}
