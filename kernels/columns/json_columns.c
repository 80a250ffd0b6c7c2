// Finds the columns of a JSON body where they lie, so that their values need not become Python's objects.

#include "columns/json_reader.h"

// Over any value, roughly: whether it is right is for whoever reads it. Gives whether it has an end.
static int skipped(Reader *r) {
    Py_ssize_t depth = 0;
    while (r->at < r->end) {
        const uint8_t c = *r->at;
        if (!depth && (c == ',' || c == '}' || c == ']')) return 1;
        ++r->at;
        if (c == '"') {
            while (r->at < r->end && *r->at != '"') r->at += 1 + (*r->at == '\\');
            if (r->at >= r->end) return 0;
            ++r->at;
        }
        depth += (c == '{' || c == '[') - (c == '}' || c == ']');
    }
    return 0;
}

// How many values an array has, from its first bracket to behind its last, if all are null or of the kinds whose bits are set;
// else -1.
static Py_ssize_t array(Reader *r, long kinds) {
    Py_ssize_t count = 0;
    if (!next_is(r, '[')) return -1;
    do {
        blank(r);
        if (!plain_value(r, kinds)) return -1;
        ++count;
    } while (next_is(r, ','));
    return next_is(r, ']') ? count : -1;
}

typedef struct {
    const uint8_t *body;
    PyObject *given, *kinds, *found;  // the body; {name: bits of the kinds that it takes}; {name: its parts, for dpi_cells_opened}
    Py_ssize_t rows, most, most_objects;
    uint8_t *rest;
} Search;

static void copied(Search *s, const uint8_t *from, const uint8_t *to) {
    memcpy(s->rest, from, to - from);
    s->rest += to - from;
}

// The members of the object `candidates`, from behind its first bracket to before its last. What is no column of plain values is
// copied to the rest.
static int members(Reader *r, Search *s) {
    int kept = 0;
    do {
        blank(r);
        const uint8_t *start = r->at;
        if (!next_is(r, '"') || !plain_string(r)) return 0;
        PyObject *name = PyUnicode_DecodeUTF8((const char *)start + 1, r->at - start - 2, NULL);
        if (name == NULL) return 0;
        PyObject *kinds = PyDict_GetItemWithError(s->kinds, name);
        int good = next_is(r, ':');
        blank(r);
        const uint8_t *from = r->at;
        if (good && kinds != NULL) {
            const Py_ssize_t rows = array(r, PyLong_AsLong(kinds));
            good = rows > 0 && rows <= s->most && (!s->rows || rows == s->rows) && PyDict_Contains(s->found, name) == 0;
            s->rows = rows;
            PyObject *parts = good ? dpi_json_parts(rows, s->given, from - s->body, r->at - s->body) : NULL;
            good = parts != NULL && !PyDict_SetItem(s->found, name, parts);
            Py_XDECREF(parts);
        } else if (good) {
            good = skipped(r);
            if (kept) *s->rest++ = ',';
            copied(s, start, r->at);
            kept = 1;
        }
        Py_DECREF(name);
        if (!good || PyErr_Occurred()) return 0;
    } while (next_is(r, ','));
    return r->at < r->end && *r->at == '}';
}

static int searched(Reader *r, Search *s) {
    int seen = 0;
    const uint8_t *close = NULL;
    if (!next_is(r, '{')) return 0;
    do {
        blank(r);
        const uint8_t *start = r->at + 1;
        if (!next_is(r, '"') || !plain_string(r)) return 0;
        const int here = r->at - start == 11 && !memcmp(start, "candidates", 10);
        if (!next_is(r, ':') || (here && seen++)) return 0;
        if (here && next_is(r, '[')) {
            copied(s, s->body, r->at - 1);
            *s->rest++ = '{';
            s->rows = dpi_json_rows(r, s->kinds, s->most_objects, s->found);
            if (s->rows < 1) return 0;
            *s->rest++ = '}';
            close = r->at;
        } else if (here) {
            if (!next_is(r, '{')) return 0;
            copied(s, s->body, r->at);
            if (!members(r, s)) return 0;
            close = r->at++;
        } else {
            blank(r);
            if (!skipped(r)) return 0;
        }
    } while (next_is(r, ','));
    if (!next_is(r, '}') || close == NULL || !s->rows) return 0;
    copied(s, close, r->end);
    return 1;
}

// json_columns(body, kinds, most, most_objects): of a JSON object whose member `candidates` is an object, the arrays whose names are
// in `kinds`, {name: bits of `Kind`}: ({name: (JSON, how many values it has, body, (start, end))}, as C takes columns; how many values
// each has; the body without them). `candidates` may be a list of objects, too, all of the same such names: arrays are made of them,
// in other bytes than the body. All that is left to find wrong with the body is in the rest. None, if any of them has other values,
// escapes, more than `most` values (`most_objects` of a list) or another number of them than the rest, or comes twice.
PyObject *dpi_json_columns(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t most[2];
    Py_buffer body;
    if (!counted(count, 4) || !integers(args + 2, 2, COUNTS, most)) return NULL;
    if (!PyDict_Check(args[1])) return PyErr_Format(PyExc_TypeError, "kinds: expected a dict");
    if (PyObject_GetBuffer(args[0], &body, PyBUF_SIMPLE)) return NULL;
    PyObject *rest = PyBytes_FromStringAndSize(NULL, body.len), *found = PyDict_New(), *result = NULL;
    if (rest && found) {
        Search s = {body.buf, args[0], args[1], found, 0, most[0], most[1], (uint8_t *)PyBytes_AS_STRING(rest)};
        Reader r = {s.body, s.body + body.len};
        uint8_t all = 0;
        for (Py_ssize_t i = 0; i < body.len; ++i) all |= s.body[i];
        PyObject *text = all < 0x80 ? Py_NewRef(Py_None) : PyUnicode_DecodeUTF8(body.buf, body.len, NULL);
        if (text && searched(&r, &s) && !_PyBytes_Resize(&rest, s.rest - (uint8_t *)PyBytes_AS_STRING(rest)))
            result = Py_BuildValue("(OnO)", found, s.rows, rest);
        Py_XDECREF(text);
    }
    Py_XDECREF(rest);
    Py_XDECREF(found);
    PyBuffer_Release(&body);
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) PyErr_Clear();
    return result || PyErr_Occurred() ? result : Py_NewRef(Py_None);
}

// json_items(body, most): the items of a JSON array, each as bytes, of more than `most` the first ones and one more; None if it has
// no such form. What is wrong within an item is for whoever reads it.
PyObject *dpi_json_items(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t most;
    Py_buffer body;
    if (!counted(count, 2) || !integers(args + 1, 1, COUNTS, &most) || PyObject_GetBuffer(args[0], &body, PyBUF_SIMPLE)) return NULL;
    Reader r = {body.buf, (const uint8_t *)body.buf + body.len};
    PyObject *items = PyList_New(0);
    int good = items && next_is(&r, '[');
    if (good && !next_is(&r, ']')) {
        do {
            blank(&r);
            const uint8_t *start = r.at;
            good = skipped(&r) && r.at > start;
            PyObject *item = good ? PyBytes_FromStringAndSize((const char *)start, r.at - start) : NULL;
            good = item && !PyList_Append(items, item);
            Py_XDECREF(item);
        } while (good && PyList_GET_SIZE(items) <= most && next_is(&r, ','));
        good = good && (PyList_GET_SIZE(items) > most || next_is(&r, ']'));
    }
    blank(&r);
    if (!good || (r.at < r.end && PyList_GET_SIZE(items) <= most)) Py_CLEAR(items);
    PyBuffer_Release(&body);
    return items || PyErr_Occurred() ? items : Py_NewRef(Py_None);
}
