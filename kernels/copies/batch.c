// Blocks joined into a batch: each checked, and copied at once (fill, the twin of RowBlock.fill) or by who stages it (staging.c).

#include "copies/batch.h"

#include <string.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

static PyObject *name_buffer, *name_places, *name_rows, *name_contexts, *name_base, *name_layout;

int dpi_names(void) {
    PyObject **names[] = {&name_buffer, &name_places, &name_rows, &name_contexts, &name_base, &name_layout};
    const char *texts[] = {"buffer", "places", "rows", "contexts", "base", "layout"};
    for (int i = 0; i < 6; ++i)
        if ((*names[i] = PyUnicode_InternFromString(texts[i])) == NULL) return 0;
    return 1;
}

// RowBlock.places.
static int places_of(PyObject *tuple, int64_t *places) {
    if (PyTuple_CheckExact(tuple) && PyTuple_GET_SIZE(tuple) == PLACES)
        return integers(((PyTupleObject *)tuple)->ob_item, PLACES, PLACES_END, places);
    PyErr_SetString(PyExc_TypeError, "places: expected a tuple of six offsets");
    return 0;
}

static int attribute(PyObject *block, PyObject *name, int64_t *out) {
    PyObject *value = PyObject_GetAttr(block, name);
    if (value == NULL) return 0;
    const int good = integers(&value, 1, COUNTS, out);
    Py_DECREF(value);
    return good;
}

int dpi_opened(PyObject *const *args, Batch *batch) {
    if (!places_of(args[1], batch->at)) return 0;
    memcpy(batch->first, batch->at, sizeof batch->at);
    batch->rows = batch->contexts = batch->past_caches = batch->in_place = 0;
    batch->carried_bytes = 0;
    batch->sections = PyTuple_Check(args[2]) ? PyTuple_GET_SIZE(args[2]) : PLACES;
    if (batch->sections >= PLACES) return PyErr_SetString(PyExc_TypeError, "sections: expected a tuple of at most four"), 0;
    for (Py_ssize_t k = 0; k < batch->sections; ++k) {
        PyObject *pair = PyTuple_GET_ITEM(args[2], k);
        int64_t *section = batch->section[k];
        if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2)
            return PyErr_SetString(PyExc_TypeError, "sections: expected pairs"), 0;
        if (!integers(((PyTupleObject *)pair)->ob_item, 2, COUNTS, section)) return 0;
        if (section[0] <= REQUEST_OF_ROW || section[0] >= PLACES - 1) {
            PyErr_Format(PyExc_ValueError, "sections: got index %lld, expected 1 to 4", (long long)section[0]);
            return 0;
        }
    }
    return !PyObject_GetBuffer(args[0], &batch->out, PyBUF_WRITABLE);
}

static int64_t bytes_of(const Batch *batch, int64_t section) {
    for (Py_ssize_t k = 0; k < batch->sections; ++k)
        if (batch->section[k][0] == section) return batch->section[k][1];
    return 0;
}

int dpi_carries(PyObject *const *args, Batch *batch) {
    if (args[0] == Py_None) return 1;
    if (!integers(args + 1, 1, COUNTS, &batch->prefix)) return 0;
    const int64_t size = batch->prefix + bytes_of(batch, CONTEXT_NUMBERS);
    if (batch->prefix % 4 || batch->prefix > bytes_of(batch, CONTEXT_IDS) || !size || size > MOST_CARRIED) {
        PyErr_Format(PyExc_ValueError, "carried: got %lld bytes of ids and %lld in all, expected whole words, at most the %lld of a "
                     "context, and 1 to %d in all", (long long)batch->prefix, (long long)size,
                     (long long)bytes_of(batch, CONTEXT_IDS), MOST_CARRIED);
        return 0;
    }
    if (PyObject_GetBuffer(args[0], &batch->carried, PyBUF_WRITABLE)) return 0;
    batch->carried_bytes = size;
    return 1;
}

int dpi_appended(Batch *batch, PyObject *block, Piece *piece) {
    int64_t base;
    if (!attribute(block, name_rows, &piece->rows) || !attribute(block, name_contexts, &piece->contexts) ||
        !attribute(block, name_base, &base))
        return 0;
    PyObject *tuple = PyObject_GetAttr(block, name_places);
    if (tuple == NULL) return 0;
    int good = places_of(tuple, piece->places);
    Py_DECREF(tuple);
    PyObject *memory = good ? PyObject_GetAttr(block, name_buffer) : NULL;
    if (memory == NULL) return 0;
    good = !PyObject_GetBuffer(memory, &piece->from, PyBUF_SIMPLE);
    Py_DECREF(memory);
    if (!good) return 0;
    memcpy(piece->at, batch->at, sizeof batch->at);
    piece->begin = batch->rows;
    for (Py_ssize_t k = -1; good && k < batch->sections; ++k) {
        const int64_t i = k < 0 ? REQUEST_OF_ROW : batch->section[k][0];
        const int64_t size = k < 0 ? 4 * piece->rows : (i & 1 ? piece->contexts : piece->rows) * batch->section[k][1];
        good = within(&batch->out, piece->at[i], size) && within(&piece->from, piece->places[i], size);
        batch->at[i] += size;
    }
    const int64_t carried = batch->carried_bytes;
    good = good && (!carried || within(&batch->carried, piece->begin * carried, piece->rows * carried));
    piece->first = (int32_t)batch->contexts, piece->shift = (int32_t)(batch->contexts - base);
    batch->rows += piece->rows, batch->contexts += piece->contexts;
    if (!good) PyBuffer_Release(&piece->from);
    return good;
}

void dpi_copy_contexts(const Batch *batch, const Piece *p) {
    for (Py_ssize_t k = 0; k < batch->sections; ++k) {
        const int64_t i = batch->section[k][0], size = p->contexts * batch->section[k][1];
        if (i & 1) memcpy((uint8_t *)batch->out.buf + p->at[i], (const uint8_t *)p->from.buf + p->places[i], size);
    }
}

// A copy that leaves nothing in the caches. The device has taken a batch's lines out of them, so that to write there again waits
// for each; and it reads faster from memory than out of a cache. For some 1,000 rows that makes a call 4 us shorter, for 4,096
// 8 us (H200 host); for few rows it does not pay.
static void put(void *to, const void *from, int64_t size) {
#if defined(__AVX512F__)
    enum { WIDTH = sizeof(__m512i) };
#define PUT(at) _mm512_stream_si512((__m512i *)(out + at), _mm512_loadu_si512(in + at))
#elif defined(__SSE2__)
    enum { WIDTH = sizeof(__m128i) };
#define PUT(at) _mm_stream_si128((__m128i *)(out + at), _mm_loadu_si128((const __m128i *)(in + at)))
#endif
#ifdef PUT
    char *out = to;
    const char *in = from;
    const int64_t skew = -(uintptr_t)out & (WIDTH - 1), before = skew < size ? skew : size;
    memcpy(out, in, before);
    int64_t at = before;
    for (; at + WIDTH <= size; at += WIDTH) PUT(at);
    memcpy(out + at, in + at, size - at);
#else
    memcpy(to, from, size);
#endif
}

static void copy_some(const Batch *batch, void *to, const void *from, int64_t size) {
    if (batch->past_caches) put(to, from, size);
    else memcpy(to, from, size);
}

// What is told after this is not seen before what was put.
static void end_puts(void) {
#ifdef PUT
    _mm_sfence();
#endif
}

// Of a row by what its block says, which may have changed since it was checked: then the first of the block's contexts.
static int64_t context_of(const Piece *p, Id32 said) {
    const uint32_t context = (uint32_t)said + (uint32_t)p->shift - (uint32_t)p->first;
    return context < (uint32_t)p->contexts ? context : 0;
}

// Beside each row what it carries of its context.
static void carry(const Batch *batch, const Piece *p, const Id32 *request, int64_t first, int64_t rows) {
    enum { SOME = 128 };
    const int64_t size = batch->carried_bytes, ids = batch->prefix / 4, words = size / 4;
    const int64_t record = bytes_of(batch, CONTEXT_IDS), numbers = bytes_of(batch, CONTEXT_NUMBERS);
    const uint8_t *from = p->from.buf;
    uint8_t *to = (uint8_t *)batch->carried.buf + (p->begin + first) * size;
    uint32_t some[SOME * MOST_CARRIED / 4];
    for (int64_t r = 0, n; r < rows; r += n) {
        n = rows - r < SOME ? rows - r : SOME;
        for (int64_t k = 0, same; k < n && (r == 0 || p->contexts > 1); k += same) {
            const int64_t context = p->contexts > 1 ? context_of(p, request[r + k]) : 0;
            for (same = 1; k + same < n && (p->contexts == 1 || request[r + k + same] == request[r + k]);) ++same;
            const Word *id = (const Word *)(from + p->places[CONTEXT_IDS] + context * record);
            const Word *number = (const Word *)(from + p->places[CONTEXT_NUMBERS] + context * numbers) - ids;
            uint32_t *own = some + k * words;
            for (int64_t w = 0; w < ids; ++w) own[w] = id[w];
            for (int64_t w = ids; w < words; ++w) own[w] = number[w];
            for (int64_t has = 1, more; has < same; has += more) {
                more = has < same - has ? has : same - has;
                memcpy(own + has * words, own, more * size);
            }
        }
        copy_some(batch, to + r * size, some, n * size);
    }
}

void dpi_copy_rows(const Batch *batch, const Piece *p, int64_t first, int64_t rows) {
    uint8_t *out = batch->out.buf;
    const uint8_t *from = p->from.buf;
    for (Py_ssize_t k = 0; k < batch->sections; ++k) {
        const int64_t i = batch->section[k][0], width = batch->section[k][1], before = first * width;
        if (i & 1 || batch->in_place) continue;
        copy_some(batch, out + p->at[i] + before, from + p->places[i] + before, rows * width);
    }
    Id32 *to = (Id32 *)(out + p->at[REQUEST_OF_ROW]) + first;
    const Id32 *own = (const Id32 *)(from + p->places[REQUEST_OF_ROW]) + first;
    enum { SOME = 256 };
    int32_t some[SOME];
    for (int64_t r = 0, n; r < rows; r += n) {
        n = rows - r < SOME ? rows - r : SOME;
        if (p->contexts > 1)
            for (int64_t k = 0; k < n; ++k) some[k] = p->first + (int32_t)context_of(p, own[r + k]);
        else if (r == 0)  // rows have no choice
            for (int64_t k = 0; k < n; ++k) some[k] = p->first;
        copy_some(batch, to + r, some, 4 * n);
    }
    if (batch->carried_bytes) carry(batch, p, own, first, rows);
    if (batch->past_caches) end_puts();
}

int64_t dpi_row_bytes(const Batch *batch) {
    int64_t bytes = 0;
    for (Py_ssize_t k = 0; k < batch->sections; ++k)
        if (!(batch->section[k][0] & 1)) bytes += batch->section[k][1];
    return bytes;
}

static void own_lines(const void *memory, int64_t size) {
    enum { LINE = 64 };
    for (int64_t at = 0; at < size; at += LINE) __builtin_prefetch((const uint8_t *)memory + at, 1);
}

void dpi_own_rows(const Batch *batch) {
    enum { MOST = 32 << 10 };
    const uint8_t *out = batch->out.buf;
    if ((4 + batch->carried_bytes + dpi_row_bytes(batch)) * batch->rows > MOST) return;
    own_lines(out + batch->first[REQUEST_OF_ROW], 4 * batch->rows);
    for (Py_ssize_t k = 0; k < batch->sections; ++k) {
        const int64_t i = batch->section[k][0];
        if (!(i & 1)) own_lines(out + batch->first[i], batch->rows * batch->section[k][1]);
    }
    if (batch->carried_bytes) own_lines(batch->carried.buf, batch->rows * batch->carried_bytes);
}

// fill(out, places, sections, blocks): RowBlock.fill; `sections` are BlockLayout.sections. Gives the rows.
PyObject *dpi_fill(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    Batch batch;
    Piece piece;
    if (!counted(count, 4) || !dpi_opened(args, &batch)) return NULL;
    PyObject *blocks = PySequence_Fast(args[3], "blocks: expected a sequence");
    int good = blocks != NULL;
    for (Py_ssize_t i = 0; good && i < PySequence_Fast_GET_SIZE(blocks); ++i) {
        good = dpi_appended(&batch, PySequence_Fast_GET_ITEM(blocks, i), &piece);
        if (!good) break;
        dpi_copy_contexts(&batch, &piece);
        dpi_copy_rows(&batch, &piece, 0, piece.rows);
        PyBuffer_Release(&piece.from);
    }
    Py_XDECREF(blocks);
    PyBuffer_Release(&batch.out);
    return good ? PyLong_FromLongLong(batch.rows) : NULL;
}

int dpi_laid_out(PyObject *block, PyObject *layout) {
    PyObject *own = PyObject_GetAttr(block, name_layout);
    if (own == NULL) return 0;
    const int same = PyObject_RichCompareBool(own, layout, Py_EQ);  // at once where it is the very same
    if (!same) PyErr_Format(PyExc_ValueError, "block: got layout %R, expected %R", own, layout);
    Py_DECREF(own);
    return same > 0;
}

static void range_of(const Id32 *own, int64_t rows, Id32 *least, Id32 *greatest) {
    *least = INT32_MAX, *greatest = INT32_MIN;
    for (int64_t r = 0; r < rows; ++r) {
        *least = own[r] < *least ? own[r] : *least;
        *greatest = own[r] > *greatest ? own[r] : *greatest;
    }
}

int dpi_of_contexts(const Piece *p) {
    if (p->contexts == 1) return 1;  // rows have no choice
    const int64_t base = p->rows ? (int64_t)p->first - p->shift : 0;
    Id32 least = 0, greatest = 0;
    if (p->rows) range_of((const Id32 *)((const uint8_t *)p->from.buf + p->places[REQUEST_OF_ROW]), p->rows, &least, &greatest);
    if (least >= base && greatest - base < p->contexts) return 1;
    PyErr_Format(PyExc_ValueError, "block: got rows of contexts %lld to %lld, expected 0 to %lld", (long long)(least - base),
                 (long long)(greatest - base), (long long)(p->contexts - 1));
    return 0;
}

// context_range(buffer, at, rows): the least and the greatest of so many int32 from byte `at` on, of at least one.
PyObject *dpi_context_range(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t at, rows;
    Py_buffer from;
    if (!counted(count, 3) || !integers(args + 1, 1, PLACES_END, &at) || !integers(args + 2, 1, COUNTS, &rows)) return NULL;
    if (PyObject_GetBuffer(args[0], &from, PyBUF_SIMPLE)) return NULL;
    Id32 least = 0, greatest = 0;
    const int good = within(&from, at, 4 * rows);
    if (good) range_of((const Id32 *)((const uint8_t *)from.buf + at), rows, &least, &greatest);
    PyBuffer_Release(&from);
    if (good && !rows) PyErr_SetString(PyExc_ValueError, "rows: got none, expected at least one");
    return good && rows ? Py_BuildValue("ii", (int)least, (int)greatest) : NULL;
}
