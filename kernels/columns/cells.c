// The values of a column, taken from Python's objects or from bytes: see cells.h.

#include "columns/arrow.h"
#include "columns/json_reader.h"

#include <math.h>
#include <string.h>

int dpi_table_opened(PyObject *columns, PyObject *out, PyObject *at, Table *t) {
    t->columns = PySequence_Fast(columns, "columns: expected a sequence");
    if (t->columns == NULL) return 0;
    t->count = PySequence_Fast_GET_SIZE(t->columns);
    t->rows = 0;
    int good = 1;
    for (Py_ssize_t i = 0; good && i < t->count; ++i) {
        PyObject *column = PySequence_Fast_GET_ITEM(t->columns, i);
        const int packed = PyTuple_Check(column) && PyTuple_GET_SIZE(column) == 4;
        const Py_ssize_t rows = packed ? PyLong_AsSsize_t(PyTuple_GET_ITEM(column, 1)) : PyTuple_Check(column) ? -1 : PyObject_Size(column);
        good = rows >= 0 && rows <= COUNTS && (!i || rows == t->rows);
        t->rows = rows;
    }
    if (!good && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "columns: expected lists or packed columns of one length");
    if (!good || PyObject_GetBuffer(out, &t->out, PyBUF_WRITABLE)) goto no_out;
    if (PyObject_GetBuffer(at, &t->at, PyBUF_SIMPLE)) goto no_at;
    good = t->at.len == 8 * t->count;
    for (Py_ssize_t i = 0; good && i < t->count; ++i) {
        const int64_t row = ((const int64_t *)t->at.buf)[i];
        good = row >= 0 && row < COUNTS && t->rows * (row + 1) <= t->out.len / 8;  // in values: bytes might not fit
    }
    if (good) return 1;
    PyErr_Format(PyExc_ValueError, "out: got %zd bytes, expected a row of %zd values for each column", t->out.len, t->rows);
    PyBuffer_Release(&t->at);
no_at:
    PyBuffer_Release(&t->out);
no_out:
    Py_DECREF(t->columns);
    return 0;
}

void dpi_table_closed(Table *t) {
    PyBuffer_Release(&t->at);
    PyBuffer_Release(&t->out);
    Py_DECREF(t->columns);
}

// An array of NumPy's, in whatever steps it lies.
static int array_opened(PyObject *array, Cells *c) {
    c->form = UNREAD;
    if (PyObject_GetBuffer(array, &c->data, PyBUF_FORMAT | PyBUF_STRIDES)) return PyErr_Clear(), c->data.obj = NULL, 1;  // of times
    const Py_buffer *b = &c->data;
    if (b->ndim != 1 || b->shape[0] != c->rows || b->format[1]) return 1;
    c->at = b->buf, c->step = b->strides[0];
    switch (*b->format) {
        case 'f': c->form = FLOAT32; break;
        case 'd': c->form = FLOAT64; break;
        case 'i': case 'l': case 'q': c->form = b->itemsize == 4 ? INT32 : INT64; break;
        case 'O': if (c->step == sizeof(PyObject *) || c->rows < 2) c->form = OBJECTS, c->list = b->buf;
    }
    return 1;
}

int dpi_cells_opened(const Table *t, Py_ssize_t column, Cells *c) {
    PyObject *given = PySequence_Fast_GET_ITEM(t->columns, column);
    *c = (Cells){.form = OBJECTS, .rows = t->rows};
    if (PyList_Check(given)) return c->list = ((PyListObject *)given)->ob_item, 1;
    if (!PyTuple_Check(given)) return array_opened(given, c);
    const long form = PyLong_AsLong(PyTuple_GET_ITEM(given, 0));
    if (form == ARROW) return dpi_arrow_opened(given, t->rows, c);
    if (form < TEXTS || form > INT64) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "columns: got form %ld, expected a packed one", form);
        return 0;
    }
    c->form = form;
    if (PyObject_GetBuffer(PyTuple_GET_ITEM(given, 2), &c->data, PyBUF_SIMPLE)) return 0;
    PyObject *missing = PyTuple_GET_ITEM(given, 3);
    c->at = c->data.buf;
    c->end = c->at + c->data.len;
    if (form == JSON && PyTuple_Check(missing) && PyTuple_GET_SIZE(missing) == 2) {  // one array of a body
        const Py_ssize_t from = PyLong_AsSsize_t(PyTuple_GET_ITEM(missing, 0)), to = PyLong_AsSsize_t(PyTuple_GET_ITEM(missing, 1));
        if (PyErr_Occurred()) goto no_mask;
        if (from >= 0 && from < to - 1 && to <= c->data.len) return c->at += from + 1, c->end -= c->data.len - to + 1, 1;
        PyErr_Format(PyExc_ValueError, "columns: got bytes %zd to %zd, expected some of %zd", from, to, c->data.len);
        goto no_mask;
    }
    if (missing != Py_None && PyObject_GetBuffer(missing, &c->missing, PyBUF_SIMPLE)) goto no_mask;
    c->mask = c->missing.buf;
    const Py_ssize_t width = c->step = form == FLOAT32 || form == INT32 ? 4 : form == FLOAT64 || form == INT64 ? 8 : 0;
    if ((!width || c->data.len == width * c->rows) && (!c->mask || c->missing.len == c->rows)) {
        if (form == JSON && c->data.len > 1) ++c->at, --c->end;  // its brackets
        return 1;
    }
    PyErr_Format(PyExc_ValueError, "columns: got %zd bytes, expected those of %zd values", c->data.len, c->rows);
    if (c->mask) PyBuffer_Release(&c->missing);
no_mask:
    PyBuffer_Release(&c->data);
    return 0;
}

void dpi_cells_closed(Cells *c) {
    if (c->data.obj == NULL) return;
    if (c->mask) PyBuffer_Release(&c->missing);
    PyBuffer_Release(&c->data);
}

int dpi_cells_ended(const Cells *c) { return c->next == c->rows && (c->form != TEXTS || c->at == c->end); }

static void of_object(PyObject *value, Cell *to) {
    to->kind = OTHER;
    if (value == Py_None) to->kind = NOTHING;
    else if (PyFloat_CheckExact(value)) to->kind = NUMBER, to->number = PyFloat_AS_DOUBLE(value);
    else if (PyLong_CheckExact(value)) {
        int overflow;
        to->integer = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (!overflow) to->kind = INTEGER;
        else if ((to->number = PyLong_AsDouble(value)) != -1) to->kind = NUMBER;
    } else if (PyUnicode_CheckExact(value) && (to->text = PyUnicode_AsUTF8AndSize(value, &to->size)))
        to->kind = TEXT;
    if (to->kind == OTHER) PyErr_Clear();  // too large, or a lone surrogate
}

static int is_utf8(const char *text, Py_ssize_t size) {
    unsigned char all = 0;
    for (Py_ssize_t i = 0; i < size; ++i) all |= (unsigned char)text[i];
    if (all < 0x80) return 1;
    PyObject *made = PyUnicode_DecodeUTF8(text, size, NULL);
    Py_XDECREF(made);
    if (made == NULL) PyErr_Clear();
    return made != NULL;
}

static void of_texts(Cells *c, Cell *to) {
    const Py_ssize_t left = c->end - c->at;
    const uint8_t *at = c->at;
    const uint32_t size = left >= 4 ? at[0] | at[1] << 8 | at[2] << 16 | (uint32_t)at[3] << 24 : 0;
    to->kind = left >= 4 && size <= left - 4 && is_utf8((const char *)at + 4, size) ? TEXT : OTHER;
    to->text = (const char *)at + 4, to->size = size;
    if (to->kind == TEXT) c->at += 4 + (size_t)size;
}

static void of_json(Cells *c, Cell *to) {
    const uint8_t *at = c->at, *end;
    while (at < c->end && (*at <= ' ' || *at == ',')) ++at;
    to->kind = OTHER;
    if (at == c->end) return;
    if (*at == '"') {
        Reader r = {at + 1, c->end};
        if (!plain_string(&r)) return;
        to->kind = TEXT, to->text = (const char *)at + 1, to->size = r.at - at - 2;
        c->at = r.at;
    } else if (*at == 'n') {
        to->kind = NOTHING;
        c->at = c->end - at < 4 ? c->end : at + 4;
    } else if ((end = dpi_json_number(at, c->end, to)) != NULL)
        c->at = end;
    else
        to->kind = OTHER;
}

void dpi_cell(Cells *c, Cell *to) {
    const Py_ssize_t k = c->next++;
    switch (c->form) {
        case OBJECTS:
            if (k + 16 < c->rows) __builtin_prefetch(c->list[k + 16]);  // thousands lie beyond the caches
            of_object(c->list[k] ? c->list[k] : Py_None, to);
            break;
        case TEXTS: of_texts(c, to); break;
        case JSON: of_json(c, to); break;
        case ARROW: dpi_arrow_cell(c, k, to); break;
        case UNREAD: to->kind = OTHER; break;
        default: dpi_array_cell(c, to);
    }
    if (c->mask && c->mask[k] && to->kind != OTHER) to->kind = NOTHING;
}

static const uint8_t *digits(const uint8_t *at, const uint8_t *end, uint64_t *value) {
    for (; at < end && (unsigned)(*at - '0') < 10; ++at) *value = *value * 10 + (*at - '0');
    return at;
}

// Up to 15 digits are a double exactly, and so are these powers: one division of the two rounds as it should.
static const double POWERS[] = {1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15};

const uint8_t *dpi_json_number(const uint8_t *at, const uint8_t *end, Cell *to) {
    const uint8_t *start = at, *from;
    uint64_t word;
    if (end - at >= 8) {  // one to seven digits in one look, however many, so that no branch has to guess
        memcpy(&word, at, 8);
        word ^= 0x3030303030303030u;
        const uint64_t others = (word | (word + 0x0606060606060606u)) & 0xf0f0f0f0f0f0f0f0u;
        const int count = others ? __builtin_ctzll(others) >> 3 : 8;
        const int no_more = count < 8 && at[count] != '.' && (at[count] | 32) != 'e';
        if (count && no_more && (count == 1 || *at != '0')) {
            word <<= 64 - 8 * count;
            word = word * 10 + (word >> 8);
            word = (word & 0xff000000ffu) * 0xf424000000064u + (word >> 16 & 0xff000000ffu) * 0x271000000001u;
            to->kind = INTEGER, to->integer = word >> 32;
            return at + count;
        }
    }
    const int minus = at < end && *at == '-';
    uint64_t value = 0, ignored = 0;
    from = at + minus;
    at = digits(from, end, &value);
    const Py_ssize_t whole = at - from;
    if (!whole || (whole > 1 && *from == '0')) return NULL;
    Py_ssize_t fraction = 0;
    int exponent = 0;
    if (at < end && *at == '.') {
        from = at + 1;
        at = digits(from, end, &value);
        if ((fraction = at - from) == 0) return NULL;
    }
    if (at < end && (*at | 32) == 'e') {
        from = at + 1;
        if (from < end && (*from == '+' || *from == '-')) ++from;
        at = digits(from, end, &ignored);
        if (at == from) return NULL;
        exponent = 1;
    }
    to->kind = OTHER;
    if (!fraction && !exponent) {
        if (whole > 18) return at;
        to->kind = INTEGER, to->integer = minus ? -(int64_t)value : (int64_t)value;
        return at;
    }
    char copy[64];
    const size_t size = at - start;
    if (!exponent && whole + fraction <= 15) to->number = (minus ? -1.0 : 1.0) * ((double)value / POWERS[fraction]);
    else if (size < sizeof copy) {
        memcpy(copy, start, size);
        copy[size] = 0;
        to->number = PyOS_string_to_double(copy, NULL, NULL);
        if (PyErr_Occurred()) {
            PyErr_Clear();
            return at;
        }
    } else
        return at;
    if (isfinite(to->number)) to->kind = NUMBER;
    return at;
}
