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

// `values`: row by row, `count` each.
typedef struct {
    Member *columns;
    Span *values;
    Py_ssize_t count, rows, room;
} Rows;

static int named(const Member *column, Span name) {
    return column->name.size == name.size && !memcmp(column->name.from, name.from, name.size);
}

// The column of a name, which is most often that of the row before in this place; -1: there is none.
static Py_ssize_t column_of(const Rows *s, Py_ssize_t place, Span name) {
    if (place < s->count && named(s->columns + place, name)) return place;
    for (Py_ssize_t i = 0; i < s->count; ++i)
        if (named(s->columns + i, name)) return i;
    return -1;
}

// A column more, of the first row; its place, or -1.
static Py_ssize_t opened(Rows *s, Span name, PyObject *kinds) {
    PyObject *text = PyUnicode_DecodeUTF8((const char *)name.from + 1, name.size - 2, NULL);
    PyObject *bits = text ? PyDict_GetItemWithError(kinds, text) : NULL;
    if (bits == NULL || s->count == PyDict_GET_SIZE(kinds)) {
        Py_XDECREF(text);
        return -1;
    }
    s->columns[s->count] = (Member){name, text, PyLong_AsLong(bits), 0, 0};
    return s->count++;
}

static int roomy(Rows *s) {
    const Py_ssize_t room = s->room ? 2 * s->room : 64;
    Span *values = PyMem_Realloc(s->values, room * s->count * sizeof *values);
    if (values == NULL) return 0;
    s->values = values, s->room = room;
    return 1;
}

// One object, from its first bracket to behind its last. The first row's values lie in `first` until its columns are counted.
static int row(Reader *r, Rows *s, PyObject *kinds, Span *first) {
    Py_ssize_t place = 0;
    if (!next_is(r, '{')) return 0;
    do {
        blank(r);
        Span name = {r->at, 0};
        if (!next_is(r, '"') || !plain_string(r)) return 0;
        name.size = r->at - name.from;
        Py_ssize_t i = column_of(s, place, name);
        if (i < 0 && !s->rows) i = opened(s, name, kinds);
        if (i < 0 || s->columns[i].seen++ != s->rows || !next_is(r, ':')) return 0;
        blank(r);
        const uint8_t *from = r->at;
        if (!plain_value(r, s->columns[i].kinds)) return 0;
        (s->rows ? s->values + s->rows * s->count : first)[i] = (Span){from, r->at - from};
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
        PyObject *parts = Py_BuildValue("(inO(nn))", JSON, s->rows, bytes, at, to - start);
        good = parts && !PyDict_SetItem(found, s->columns[i].text, parts);
        Py_XDECREF(parts);
        at = to - start;
    }
    Py_XDECREF(bytes);
    return good;
}

Py_ssize_t dpi_json_rows(Reader *r, PyObject *kinds, Py_ssize_t most, PyObject *found) {
    const Py_ssize_t names = PyDict_GET_SIZE(kinds);
    Rows s = {.columns = PyMem_Malloc((names + 1) * sizeof(Member))};
    Span *first = PyMem_Malloc((names + 1) * sizeof *first);
    int good = s.columns && first;
    do {
        good = good && s.rows < most && (s.rows < 2 || s.rows < s.room || roomy(&s)) && row(r, &s, kinds, first) && s.count;
        if (good && ++s.rows == 1 && (good = roomy(&s))) memcpy(s.values, first, s.count * sizeof *first);
    } while (good && next_is(r, ','));
    good = good && next_is(r, ']') && written(&s, found);
    for (Py_ssize_t i = 0; i < s.count; ++i) Py_DECREF(s.columns[i].text);
    PyMem_Free(s.columns);
    PyMem_Free(s.values);
    PyMem_Free(first);
    return good ? s.rows : 0;
}
