// Columns of Arrow: their types from a schema, their values from the buffers of arrays. See arrow.h.

#include "columns/arrow.h"

#include <string.h>

// Types are letters of Arrow's formats; lists are these, and views of text. 0: one that is not read here.
enum { LIST = '[', LARGE_LIST = '{', VIEW = 'v', INLINE_BYTES = 12 };

static int type_of(const char *format) {
    if (format[0] == '+' && format[1] && !format[2]) return format[1] == 'l' ? LIST : format[1] == 'L' ? LARGE_LIST : 0;
    if (!strcmp(format, "vu")) return VIEW;
    return format[0] && !format[1] && strchr("ncCsSiIlLfguU", format[0]) ? format[0] : 0;
}

// A column as one number: its place in the batch, the type of its dictionary's or its lists' values, its type.
static long long packed(const struct ArrowSchema *s, int64_t place) {
    const int type = type_of(s->format), listed = type == LIST || type == LARGE_LIST;
    const struct ArrowSchema *inner = s->dictionary ? s->dictionary : listed && s->n_children == 1 ? s->children[0] : NULL;
    return (place << 8 | (inner && !inner->dictionary ? type_of(inner->format) : 0)) << 8 | type;
}

// arrow_columns(schema, array): the columns of a record batch from the two capsules that it exports: [(ARROW, how many values it has,
// array, the column as a number)]; they keep it.
PyObject *dpi_arrow_columns(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    if (!counted(count, 2)) return NULL;
    const struct ArrowSchema *s = PyCapsule_GetPointer(args[0], "arrow_schema");
    const struct ArrowArray *a = s ? PyCapsule_GetPointer(args[1], "arrow_array") : NULL;
    if (a == NULL) return NULL;
    if (!s->release || !a->release || strcmp(s->format, "+s") || s->n_children != a->n_children || a->offset)
        return PyErr_Format(PyExc_ValueError, "array: expected that of a whole batch, of its schema");
    PyObject *list = PyList_New(0);
    for (int64_t i = 0; list && i < s->n_children; ++i) {
        PyObject *parts = Py_BuildValue("(iLOL)", ARROW, (long long)a->length, args[1], packed(s->children[i], i));
        if (parts == NULL || PyList_Append(list, parts)) Py_CLEAR(list);
        Py_XDECREF(parts);
    }
    return list;
}

int dpi_arrow_opened(PyObject *given, Py_ssize_t rows, Cells *c) {
    const struct ArrowArray *batch = PyCapsule_GetPointer(PyTuple_GET_ITEM(given, 2), "arrow_array");
    const long long column = batch ? PyLong_AsLongLong(PyTuple_GET_ITEM(given, 3)) : -1;
    if (PyErr_Occurred()) return 0;
    const int64_t place = column >> 16;
    if (!batch->release || place < 0 || place >= batch->n_children || batch->children[place]->length < rows) {
        PyErr_Format(PyExc_ValueError, "columns: got Arrow's column %lld, expected one of %zd values", column, rows);
        return 0;
    }
    *c = (Cells){.form = ARROW, .rows = rows, .array = batch->children[place], .type = column & 255, .inner = column >> 8 & 255};
    return 1;
}

static inline int is_null(const struct ArrowArray *a, int64_t i) {
    const uint8_t *bits = a->buffers[0];
    return bits && !(bits[i >> 3] >> (i & 7) & 1);
}

// Bounds of value i in a buffer of offsets.
static inline void bounds(const void *offsets, int wide, int64_t i, int64_t *two) {
    int32_t narrow[2];
    if (wide) memcpy(two, (const char *)offsets + 8 * i, 16);
    else memcpy(narrow, (const char *)offsets + 4 * i, 8), two[0] = narrow[0], two[1] = narrow[1];
}

#define NUMBER_CASE(letter, Type, kind_, field) \
    case letter: { \
        Type number; \
        memcpy(&number, (const char *)a->buffers[1] + i * (int64_t)sizeof number, sizeof number); \
        to->kind = kind_, to->field = number; \
        break; \
    }

// Value i of an array, counted from the begin of its buffers, which need not be aligned.
static inline void value(const struct ArrowArray *a, int type, int64_t i, Cell *to) {
    to->kind = type == 'n' || (type && is_null(a, i)) ? NOTHING : OTHER;
    if (to->kind == NOTHING) return;
    switch (type) {
        NUMBER_CASE('c', int8_t, INTEGER, integer)
        NUMBER_CASE('C', uint8_t, INTEGER, integer)
        NUMBER_CASE('s', int16_t, INTEGER, integer)
        NUMBER_CASE('S', uint16_t, INTEGER, integer)
        NUMBER_CASE('i', int32_t, INTEGER, integer)
        NUMBER_CASE('I', uint32_t, INTEGER, integer)
        NUMBER_CASE('l', int64_t, INTEGER, integer)
        NUMBER_CASE('L', uint64_t, INTEGER, integer)
        NUMBER_CASE('f', float, NUMBER, number)
        NUMBER_CASE('g', double, NUMBER, number)
        case 'u':
        case 'U': {
            int64_t at[2];
            bounds(a->buffers[1], type == 'U', i, at);
            to->kind = TEXT, to->size = at[1] - at[0];
            to->text = to->size ? (const char *)a->buffers[2] + at[0] : "";
            break;
        }
        case VIEW: {  // its bytes, and the text if it is short, else where it begins: which buffer, and where there
            const char *view = (const char *)a->buffers[1] + 16 * i;
            int32_t words[4];
            memcpy(words, view, sizeof words);
            to->kind = TEXT, to->size = words[0];
            to->text = words[0] <= INLINE_BYTES ? view + 4 : (const char *)a->buffers[2 + words[2]] + words[3];
        }
    }
    if (type == 'L' && to->integer < 0) to->kind = NUMBER, to->number = (double)(uint64_t)to->integer;
}

void dpi_arrow_cell(const Cells *c, Py_ssize_t row, Cell *to) {
    const struct ArrowArray *a = c->array;
    value(a, c->type, a->offset + row, to);
    if (!a->dictionary || to->kind == NOTHING) return;
    a = a->dictionary;
    value(a, to->kind == INTEGER ? c->inner : 0, a->offset + to->integer, to);
}

Py_ssize_t dpi_arrow_list(const Cells *c, Py_ssize_t row, Cells *values) {
    const struct ArrowArray *a = c->array;
    const int64_t i = a->offset + row;
    int64_t at[2];
    if ((c->type != LIST && c->type != LARGE_LIST) || is_null(a, i)) return 0;
    bounds(a->buffers[1], c->type == LARGE_LIST, i, at);
    *values = (Cells){.form = ARROW, .rows = at[1], .next = at[0], .array = a->children[0], .type = c->inner};
    return at[1] - at[0];
}
