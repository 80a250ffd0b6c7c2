// What is known of requests that are the same to the byte but for tensors, ids and traces: found by their heads, checked when it is learned.

#include "connection.h"

#include <stdlib.h>
#include <string.h>

#include "copies/id_records.h"

enum { ALIGN = 64 };  // of sections, as block_layout.py has it

static uint64_t mixed(const char *data, size_t size) {
    uint64_t hash = size, word;
    for (; size >= 8; data += 8, size -= 8) {
        memcpy(&word, data, 8);
        hash = (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15);
        hash ^= hash >> 29;
    }
    word = 0;
    memcpy(&word, data, size);
    hash = (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ hash >> 32;
}

void dpi_form_let_go(Form *f) {
    if (f == NULL || --f->uses) return;
    Py_XDECREF(f->known);
    Py_XDECREF(f->rings);
    Py_XDECREF(f->kept);
    free(f);
}

Form *dpi_form_of(Listener *l, const char *head, size_t head_size, const char *body, int64_t body_size) {
    const uint64_t hash = mixed(head, head_size);
    Form **set = l->forms + hash % FORM_SETS * FORM_WAYS;
    for (int way = 0; way < FORM_WAYS; ++way) {
        Form *f = set[way];
        if (f && f->hash == hash && (size_t)f->head_size == head_size && f->body_size == body_size && !memcmp(f->head, head, head_size) &&
            !memcmp(f->envelope, body, f->envelope_size))
            return f;
    }
    return NULL;
}

int64_t dpi_form_laid_out(const Form *f, int rows, int contexts, int64_t *at) {
    int64_t end = HEADER_BYTES;
    for (int k = 0; k < SECTIONS; ++k) {
        if (at) at[k] = end;
        end += (f->widths[k] * (k & 1 ? contexts : rows) + ALIGN - 1) / ALIGN * ALIGN;
    }
    return end;
}

int dpi_form_encoded(const Ask *ask, const Form *f, const char *tensors) {
    int32_t *request_of_row = (int32_t *)ask->section[0] + ask->rows;
    for (int i = 0; i < f->rows; ++i) request_of_row[i] = ask->contexts + (f->contexts > 1 ? i : 0);
    for (const Part *p = f->part; p < f->part + f->parts; ++p) {
        const int64_t width = f->widths[p->section];
        char *to = ask->section[p->section] + width * (p->section & 1 ? ask->contexts : ask->rows);
        const char *given = tensors + p->start;
        if (p->legal ? dpi_packed(p->legal, p->columns, given, p->wide, p->rows, (uint8_t *)to, width) : dpi_copied(given, p->size, to))
            return 0;
    }
    return 1;
}

void dpi_express_forgotten(Listener *l) {
    for (int i = 0; i < FORM_SETS * FORM_WAYS; ++i) {
        dpi_form_let_go(l->forms[i]);
        l->forms[i] = NULL;
    }
    l->form_count = 0;
}

PyObject *dpi_express_forget(Listener *l, PyObject *Py_UNUSED(none)) {
    dpi_express_forgotten(l);
    Py_RETURN_NONE;
}

static int part_of(const Form *f, PyObject *given, int ids, Part *p) {
    const char *legal = NULL;
    Py_ssize_t legal_size = 0;
    long long start, end, rows = 0;
    const int good = ids ? PyArg_ParseTuple(given, "LLpLiy#", &start, &end, &p->wide, &rows, &p->section, &legal, &legal_size)
                         : PyArg_ParseTuple(given, "LLi", &start, &end, &p->section);
    if (!good) return 0;
    int right = p->section >= 1 && p->section < SECTIONS;
    const int64_t high = right && p->section & 1 ? f->contexts : f->rows, width = right ? f->widths[p->section] : 0;
    p->start = start, p->size = end - start, p->rows = rows, p->columns = legal_size / (int64_t)sizeof(Column), p->legal = legal;
    right = right && start >= 0 && end >= start && end <= f->body_size - f->envelope_size;
    if (ids) right = right && p->columns && rows == high && p->size == rows * p->columns * (p->wide ? 8 : 4);
    else right = right && p->size == high * width;
    for (const Column *c = (const Column *)legal; right && c < (const Column *)legal + p->columns; ++c)
        right = c->source >= 0 && c->source < p->columns && c->at >= 0 && c->at + c->width <= width &&
                (c->width == 1 || c->width == 2 || c->width == 4 || c->width == 8);
    if (!right) PyErr_SetString(PyExc_ValueError, "part: got places that do not go together");
    return right;
}

// learn(head, envelope, body_size, known, rings, (rows, contexts, tasks, priority, deadline_s),
//       (block_header, bytes of a row or context in each section), ids, numbers, (opening, headers, before, after))
PyObject *dpi_express_learn(Listener *l, PyObject *args) {
    Form *f = calloc(1, sizeof *f);
    if (f == NULL) return PyErr_NoMemory();
    f->uses = 1;
    PyObject *known, *rings, *ids, *numbers;
    Py_ssize_t block_header;
    long long body_size, *w = (long long[SECTIONS]){0};
    if (!PyArg_ParseTuple(args, "y#y#LOO!(iiiid)(y#(LLLLL))O!O!(y#y#y#y#)", &f->head, &f->head_size, &f->envelope, &f->envelope_size, &body_size,
                          &known, &PyList_Type, &rings, &f->rows, &f->contexts, &f->tasks, &f->priority, &f->deadline_s,
                          &f->block_header, &block_header, w, w + 1, w + 2, w + 3, w + 4, &PyTuple_Type, &ids, &PyTuple_Type, &numbers, &f->opening,
                          &f->opening_size, &f->headers, &f->headers_size, &f->before, &f->before_size, &f->after, &f->after_size))
        goto bad;
    f->known = Py_NewRef(known), f->rings = Py_NewRef(rings), f->kept = Py_NewRef(args);
    f->body_size = body_size;
    int right = w[0] == 4;
    for (int k = 0; k < SECTIONS; ++k) right = right && w[k] >= 0 && w[k] <= 1 << 20, f->widths[k] = w[k];
    if (!right || block_header != HEADER_BYTES || f->rows < 1 || f->rows > 1 << 20 || (f->contexts != 1 && f->contexts != f->rows) ||
        f->tasks < 1 || f->tasks > 4096 || f->envelope_size > body_size || !(f->deadline_s >= 0) ||
        PyTuple_GET_SIZE(ids) + PyTuple_GET_SIZE(numbers) >= SECTIONS) {
        PyErr_SetString(PyExc_ValueError, "form: got sizes that do not go together");
        goto bad;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(ids) + PyTuple_GET_SIZE(numbers); ++i) {
        const int is_ids = i < PyTuple_GET_SIZE(ids);
        PyObject *given = is_ids ? PyTuple_GET_ITEM(ids, i) : PyTuple_GET_ITEM(numbers, i - PyTuple_GET_SIZE(ids));
        if (!PyTuple_Check(given) || !part_of(f, given, is_ids, f->part + f->parts++)) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "part: expected a tuple");
            goto bad;
        }
    }
    f->hash = mixed(f->head, f->head_size);
    Form **set = l->forms + f->hash % FORM_SETS * FORM_WAYS;
    int way = (int)(f->hash >> 32 & (FORM_WAYS - 1));
    for (int i = 0; i < FORM_WAYS; ++i)
        if (set[i] == NULL) way = i;
    dpi_form_let_go(set[way]);
    l->form_count += set[way] == NULL;
    set[way] = f;
    Py_RETURN_NONE;
bad:
    dpi_form_let_go(f);
    return NULL;
}
