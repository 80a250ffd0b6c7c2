// Text into ids, by the vocabulary of a column or by its hash, and lists of text from bytes.

#include "columns/cells.h"

#include <string.h>

// Distinct texts by open addressing, at most half of the places taken. The texts lie one behind the other in `data`, text i from
// offsets[i] to offsets[i + 1]; ids[i] is its id.
typedef struct {
    Py_buffer data, offsets, ids;
    uint64_t mask;
    struct {
        uint32_t tag, text;  // of the text's hash; 1 + its number, 0: nothing lies here
    } places[];
} Vocabulary;

static const char VOCABULARY[] = "dpiframe.vocabulary";

static uint64_t hashed(const char *text, Py_ssize_t size) {
    uint64_t hash = (uint64_t)size * 0x9e3779b97f4a7c15u, word;
    for (; size >= 8; text += 8, size -= 8) {
        memcpy(&word, text, 8);
        hash = (hash ^ word) * 0xff51afd7ed558ccdu;
        hash ^= hash >> 32;
    }
    word = 0;
    for (Py_ssize_t i = 0; i < size; ++i) word |= (uint64_t)(uint8_t)text[i] << 8 * i;
    hash = (hash ^ word) * 0xc4ceb9fe1a85ec53u;
    return hash ^ hash >> 29;
}

static void freed(PyObject *capsule) {
    Vocabulary *v = PyCapsule_GetPointer(capsule, VOCABULARY);
    PyBuffer_Release(&v->ids);
    PyBuffer_Release(&v->offsets);
    PyBuffer_Release(&v->data);
    PyMem_RawFree(v);
}

// Most are of few bytes, for which a call takes as long as the rest of a look-up.
static inline int same(const char *a, const char *b, Py_ssize_t size) {
    while (size && *a == *b) ++a, ++b, --size;
    return !size;
}

// The place of a text, or the free one where it would go.
static uint64_t place_of(const Vocabulary *v, const char *text, Py_ssize_t size, uint32_t tag, uint64_t hash) {
    const int64_t *offsets = v->offsets.buf;
    const char *data = v->data.buf;
    uint64_t at = hash & v->mask;
    for (; v->places[at].text; at = (at + 1) & v->mask) {
        const uint32_t i = v->places[at].text - 1;
        if (v->places[at].tag == tag && offsets[i + 1] - offsets[i] == size && same(data + offsets[i], text, size)) break;
    }
    return at;
}

// Whether so many texts lie one behind the other in `data`, at ascending offsets.
static int in_order(const Py_buffer *data, const Py_buffer *offsets, int64_t texts) {
    const int64_t *bounds = offsets->buf;
    int good = offsets->len == 8 * (texts + 1) && bounds[0] >= 0 && bounds[texts] <= data->len;
    for (int64_t i = 0; good && i < texts; ++i) good = bounds[i] <= bounds[i + 1];
    return good;
}

// vocabulary(data, offsets, ids): of texts, int64[n + 1] and int64[n]; keeps all three. Refuses a text that is there twice.
PyObject *dpi_vocabulary(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    Py_buffer data, offsets, ids;
    if (!counted(count, 3) || PyObject_GetBuffer(args[0], &data, PyBUF_SIMPLE)) return NULL;
    if (PyObject_GetBuffer(args[1], &offsets, PyBUF_SIMPLE)) goto no_offsets;
    if (PyObject_GetBuffer(args[2], &ids, PyBUF_SIMPLE)) goto no_ids;
    const int64_t texts = ids.len / 8, *bounds = offsets.buf;
    int good = ids.len % 8 == 0 && texts < COUNTS && in_order(&data, &offsets, texts);
    uint64_t room = 4;
    while (good && room < 2 * (uint64_t)texts) room *= 2;
    Vocabulary *v = good ? PyMem_RawCalloc(1, sizeof *v + room * sizeof v->places[0]) : NULL;
    if (v != NULL) {
        v->data = data, v->offsets = offsets, v->ids = ids, v->mask = room - 1;
        for (int64_t i = 0; good && i < texts; ++i) {
            const char *text = (const char *)data.buf + bounds[i];
            const uint64_t hash = hashed(text, bounds[i + 1] - bounds[i]), at = place_of(v, text, bounds[i + 1] - bounds[i], hash >> 32, hash);
            good = !v->places[at].text;
            v->places[at].tag = hash >> 32, v->places[at].text = i + 1;
        }
        PyObject *capsule = good ? PyCapsule_New(v, VOCABULARY, freed) : PyErr_Format(PyExc_ValueError, "vocabulary: got a text twice");
        if (capsule) return capsule;
        PyMem_RawFree(v);
    } else if (good) PyErr_NoMemory();
    else PyErr_SetString(PyExc_ValueError, "vocabulary: got offsets or ids that do not fit, expected int64[n + 1] and int64[n]");
    PyBuffer_Release(&ids);
no_ids:
    PyBuffer_Release(&offsets);
no_offsets:
    PyBuffer_Release(&data);
    return NULL;
}

// text_hashes(data, offsets, out): uint64[n] of texts, int64[n + 1], whose equal ones have equal hashes.
PyObject *dpi_text_hashes(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    Py_buffer of[3];
    Py_ssize_t opened = 0;
    if (!counted(count, 3)) return NULL;
    while (opened < 3 && !PyObject_GetBuffer(args[opened], of + opened, opened == 2 ? PyBUF_WRITABLE : PyBUF_SIMPLE)) ++opened;
    if (opened == 3) {
        const int64_t texts = of[2].len / 8, *bounds = of[1].buf;
        const int good = of[2].len % 8 == 0 && in_order(of, of + 1, texts);
        for (int64_t i = 0; good && i < texts; ++i)
            ((uint64_t *)of[2].buf)[i] = hashed((const char *)of[0].buf + bounds[i], bounds[i + 1] - bounds[i]);
        if (!good) PyErr_SetString(PyExc_ValueError, "text_hashes: got offsets that do not fit, expected int64[n + 1]");
    }
    for (Py_ssize_t i = 0; i < opened; ++i) PyBuffer_Release(of + i);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

enum { AHEAD = 32 };  // texts that are looked up together, so that their places are on their way from memory at once

// What became of texts: not all were text or None; all got ids from 0 on; some got an id below.
static PyObject *outcome(int good, int64_t lowest) { return PyErr_Occurred() ? NULL : PyLong_FromLong(!good ? 0 : lowest < 0 ? 2 : 1); }

// column_ids(columns, vocabularies, unknown, missing, out, at): text and None into rows `at` of int64[.., values]; `unknown` is the
// id of what a column's vocabulary lacks, `missing` that of None. Gives `outcome`.
PyObject *dpi_column_ids(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    Table t;
    if (!counted(count, 6)) return NULL;
    const int64_t unknown = PyLong_AsLongLong(args[2]), missing = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred() || !dpi_table_opened(args[0], args[4], args[5], &t)) return NULL;
    int64_t lowest = 0;
    int good = PyTuple_Check(args[1]) && PyTuple_GET_SIZE(args[1]) == t.count;
    if (!good) PyErr_SetString(PyExc_TypeError, "vocabularies: expected a tuple, an item a column");
    for (Py_ssize_t i = 0; good && i < t.count; ++i) {
        const Vocabulary *v = PyCapsule_GetPointer(PyTuple_GET_ITEM(args[1], i), VOCABULARY);
        int64_t *to = dpi_table_row(&t, i);
        Cells cells;
        good = v != NULL && dpi_cells_opened(&t, i, &cells);
        for (Py_ssize_t k = 0; good && k < t.rows; k += AHEAD) {
            const Py_ssize_t n = t.rows - k < AHEAD ? t.rows - k : AHEAD;
            Cell cell[AHEAD];
            uint64_t hash[AHEAD];
            for (Py_ssize_t j = 0; good && j < n; ++j) {
                dpi_next(&cells, cell + j);
                good = cell[j].kind == TEXT || cell[j].kind == NOTHING;
                if (!good || cell[j].kind == NOTHING) continue;
                hash[j] = hashed(cell[j].text, cell[j].size);
                __builtin_prefetch(v->places + (hash[j] & v->mask));
            }
            for (Py_ssize_t j = 0; good && j < n; ++j, ++to) {
                *to = missing;
                if (cell[j].kind == TEXT) {
                    const uint32_t text = v->places[place_of(v, cell[j].text, cell[j].size, hash[j] >> 32, hash[j])].text;
                    *to = text ? ((const int64_t *)v->ids.buf)[text - 1] : unknown;
                }
                lowest = *to < lowest ? *to : lowest;
            }
        }
        if (v != NULL && !PyErr_Occurred()) {
            good = good && dpi_cells_ended(&cells);
            dpi_cells_closed(&cells);
        }
    }
    dpi_table_closed(&t);
    return outcome(good, lowest);
}

static inline uint32_t rotated(uint32_t x, int by) { return x << by | x >> (32 - by); }

// MurmurHash3_x86_32, as mmh3 has it.
static uint32_t murmur(const uint8_t *text, Py_ssize_t size, uint32_t hash) {
    const uint32_t a = 0xcc9e2d51, b = 0x1b873593;
    uint32_t word;
    Py_ssize_t left = size;
    for (; left >= 4; text += 4, left -= 4) {
        memcpy(&word, text, 4);
        hash = rotated(hash ^ rotated(word * a, 15) * b, 13) * 5 + 0xe6546b64;
    }
    word = 0;
    for (Py_ssize_t i = 0; i < left; ++i) word |= (uint32_t)text[i] << 8 * i;
    hash ^= rotated(word * a, 15) * b ^ (uint32_t)size;
    hash = (hash ^ hash >> 16) * 0x85ebca6b;
    hash = (hash ^ hash >> 13) * 0xc2b2ae35;
    return hash ^ hash >> 16;
}

// column_hashes(columns, rules, missing, out, at): text and None into rows `at` of int64[.., values]; rules, int64[columns, 3]: the
// seed, how many buckets, the id of the first; `missing` is the id of None. Gives `outcome`.
PyObject *dpi_column_hashes(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    Table t;
    Py_buffer rules;
    if (!counted(count, 5)) return NULL;
    const int64_t missing = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred() || !dpi_table_opened(args[0], args[3], args[4], &t)) return NULL;
    int64_t lowest = 0;
    int good = !PyObject_GetBuffer(args[1], &rules, PyBUF_SIMPLE);
    if (good) {
        if (!(good = rules.len == 24 * t.count))
            PyErr_Format(PyExc_ValueError, "rules: got %zd bytes, expected %zd", rules.len, 24 * t.count);
        for (Py_ssize_t i = 0; good && i < t.count; ++i) {
            const int64_t *rule = (const int64_t *)rules.buf + 3 * i;
            int64_t *to = dpi_table_row(&t, i);
            Cells cells;
            if (rule[1] < 1 && PyErr_Format(PyExc_ValueError, "rules: got %lld buckets", (long long)rule[1]) == NULL) break;
            if (!dpi_cells_opened(&t, i, &cells)) break;
            for (Py_ssize_t k = 0; good && k < t.rows; ++k) {
                Cell cell;
                dpi_next(&cells, &cell);
                good = cell.kind == TEXT || cell.kind == NOTHING;
                if (!good) break;
                const uint32_t hash = cell.kind == TEXT ? murmur((const uint8_t *)cell.text, cell.size, (uint32_t)rule[0]) : 0;
                *to = cell.kind == TEXT ? hash % rule[1] + rule[2] : missing;
                lowest = *to < lowest ? *to : lowest;
                ++to;
            }
            good = good && dpi_cells_ended(&cells);
            dpi_cells_closed(&cells);
        }
        PyBuffer_Release(&rules);
    }
    dpi_table_closed(&t);
    return outcome(good, lowest);
}

// texts(data, count): a list of so many texts, each a little-endian uint32 of its length and so many bytes of UTF-8; None if the
// bytes are not these and no more.
PyObject *dpi_texts(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t given) {
    int64_t count;
    Py_buffer data;
    if (!counted(given, 2) || !integers(args + 1, 1, COUNTS, &count) || PyObject_GetBuffer(args[0], &data, PyBUF_SIMPLE)) return NULL;
    const uint8_t *at = data.buf, *end = at + data.len;
    PyObject *list = count <= data.len / 4 ? PyList_New(count) : NULL;
    int good = list != NULL;
    for (int64_t i = 0; good && i < count; ++i) {
        good = end - at >= 4;
        const uint32_t size = good ? at[0] | at[1] << 8 | at[2] << 16 | (uint32_t)at[3] << 24 : 0;
        good = good && size <= end - at - 4;
        PyObject *text = good ? PyUnicode_DecodeUTF8((const char *)at + 4, size, NULL) : NULL;
        good = text != NULL;
        if (good) PyList_SET_ITEM(list, i, text);
        at += 4 + (size_t)size * good;
    }
    if (!good || at != end) Py_CLEAR(list);
    PyBuffer_Release(&data);
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) PyErr_Clear();
    return list || PyErr_Occurred() ? list : Py_NewRef(Py_None);
}
