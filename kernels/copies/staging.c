// Blocks joined into a batch, in memory that a device reads in place: at once (fill, the twin of RowBlock.fill), or while the
// graph that reads them starts (replay_batch), which is told how far the rows are; wait_for_rows.cuh has its side.

#include "copies/copy_threads.h"
#include "runtime/module.h"

#include <string.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

enum { PLACES = 6, REQUEST_OF_ROW = 0 };  // of RowBlock.places; odd sections have a row a context, even ones a row a row
enum { STAGED_ROWS = 10, STAGED_CONTEXTS = 11, HEADER_WORDS = 16 };  // batch_header.py
enum { MANY = 512 };  // rows, from which on they are copied past the caches (put)
enum { CHUNK = 256 };  // rows copied before that is told: 1 us of work (H200 host), about what a read over the bus takes
enum { LARGE = 256 << 10, PIECE = 32 << 10 };  // bytes of rows that several threads copy, and that a thread copies at a time

static PyObject *name_buffer, *name_places, *name_rows, *name_contexts, *name_base;

typedef struct {
    Py_buffer out;
    Py_ssize_t sections;
    int64_t section[PLACES][2];  // index among places, and bytes a row or context
    int64_t at[PLACES];          // where the next row or context goes
    int64_t rows, contexts;      // so far
    int past_caches;             // whether rows go to memory past the host's caches, see put
} Batch;

// A block whose bytes were checked, and where in the batch they go.
typedef struct {
    Py_buffer from;
    int64_t places[PLACES], at[PLACES], begin, rows, contexts;  // begin: its first row in the batch
    int32_t first, shift;  // context of the batch; and what makes such a one of the block's own
} Piece;

int dpi_names(void) {
    PyObject **names[] = {&name_buffer, &name_places, &name_rows, &name_contexts, &name_base};
    const char *texts[] = {"buffer", "places", "rows", "contexts", "base"};
    for (int i = 0; i < 5; ++i)
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

// An empty batch, from (out, places, sections); holds the first if it gives 1.
static int opened(PyObject *const *args, Batch *batch) {
    if (!places_of(args[1], batch->at)) return 0;
    batch->rows = batch->contexts = batch->past_caches = 0;
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

// One block behind those before it; holds its memory if it gives 1.
static int appended(Batch *batch, PyObject *block, Piece *piece) {
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
    piece->first = (int32_t)batch->contexts, piece->shift = (int32_t)(batch->contexts - base);
    batch->rows += piece->rows, batch->contexts += piece->contexts;
    if (!good) PyBuffer_Release(&piece->from);
    return good;
}

static void copy_contexts(const Batch *batch, const Piece *p) {
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
    _mm_sfence();  // what is told after this is not seen before it
#else
    memcpy(to, from, size);
#endif
}

static void copy_rows(const Batch *batch, const Piece *p, int64_t first, int64_t rows) {
    uint8_t *out = batch->out.buf;
    const uint8_t *from = p->from.buf;
    for (Py_ssize_t k = 0; k < batch->sections; ++k) {
        const int64_t i = batch->section[k][0], width = batch->section[k][1], before = first * width;
        if (i & 1) continue;
        if (batch->past_caches) put(out + p->at[i] + before, from + p->places[i] + before, rows * width);
        else memcpy(out + p->at[i] + before, from + p->places[i] + before, rows * width);
    }
    Id32 *to = (Id32 *)(out + p->at[REQUEST_OF_ROW]) + first;
    const Id32 *own = (const Id32 *)(from + p->places[REQUEST_OF_ROW]) + first;
    if (p->contexts > 1)
        for (int64_t r = 0; r < rows; ++r) to[r] = own[r] + p->shift;
    else  // rows have no choice
        for (int64_t r = 0; r < rows; ++r) to[r] = p->first;
}

// fill(out, places, sections, blocks): RowBlock.fill; `sections` are BlockLayout.sections. Gives the rows.
PyObject *dpi_fill(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    Batch batch;
    Piece piece;
    if (!counted(count, 4) || !opened(args, &batch)) return NULL;
    PyObject *blocks = PySequence_Fast(args[3], "blocks: expected a sequence");
    int good = blocks != NULL;
    for (Py_ssize_t i = 0; good && i < PySequence_Fast_GET_SIZE(blocks); ++i) {
        good = appended(&batch, PySequence_Fast_GET_ITEM(blocks, i), &piece);
        if (!good) break;
        copy_contexts(&batch, &piece);
        copy_rows(&batch, &piece, 0, piece.rows);
        PyBuffer_Release(&piece.from);
    }
    Py_XDECREF(blocks);
    PyBuffer_Release(&batch.out);
    return good ? PyLong_FromLongLong(batch.rows) : NULL;
}

// context_range(buffer, at, rows): the least and the greatest of so many int32 from byte `at` on, of at least one.
PyObject *dpi_context_range(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t at, rows;
    Py_buffer from;
    if (!counted(count, 3) || !integers(args + 1, 1, PLACES_END, &at) || !integers(args + 2, 1, COUNTS, &rows)) return NULL;
    if (PyObject_GetBuffer(args[0], &from, PyBUF_SIMPLE)) return NULL;
    Id32 least = INT32_MAX, greatest = INT32_MIN;
    const int good = within(&from, at, 4 * rows);
    const Id32 *own = (const Id32 *)((const uint8_t *)from.buf + at);
    for (int64_t r = 0; good && r < rows; ++r) {
        least = own[r] < least ? own[r] : least;
        greatest = own[r] > greatest ? own[r] : greatest;
    }
    PyBuffer_Release(&from);
    if (good && !rows) PyErr_SetString(PyExc_ValueError, "rows: got none, expected at least one");
    return good && rows ? Py_BuildValue("ii", (int)least, (int)greatest) : NULL;
}

typedef struct {
    const Batch *batch;
    const Piece *pieces;
    Py_ssize_t count;
    int64_t padding;  // rows behind the batch's
    int32_t *staged;  // the word that tells
    int64_t piece;    // rows that a thread copies at a time; 0: this one copies all
    SharedCopy *copy; // of these pieces
} Plan;

static void tell(int32_t *staged, int64_t value) { __atomic_store_n(staged, (int32_t)value, __ATOMIC_RELEASE); }

// Rows of the batch, of whichever blocks.
static void copy_piece(const void *with, int64_t i) {
    const Plan *plan = with;
    const int64_t first = i * plan->piece, end = first + plan->piece;
    const Piece *p = plan->pieces;
    for (Py_ssize_t low = 0, high = plan->count; high - low > 1;) {  // the last block that begins no later
        const Py_ssize_t middle = low + (high - low) / 2;
        if (plan->pieces[middle].begin <= first) p = plan->pieces + (low = middle);
        else high = middle;
    }
    for (; p < plan->pieces + plan->count && p->begin < end; ++p) {
        const int64_t from = first > p->begin ? first - p->begin : 0, to = end - p->begin < p->rows ? end - p->begin : p->rows;
        if (to > from) copy_rows(plan->batch, p, from, to - from);
    }
}

static void tell_pieces(const void *with, int64_t pieces) {
    const Plan *plan = with;
    tell(plan->staged, -1 - pieces * plan->piece);
}

// Rows a piece, if several threads are to copy them; else 0.
static int64_t piece_of(const Batch *batch) {
    int64_t row = 0, piece = CHUNK;
    for (Py_ssize_t k = 0; k < batch->sections; ++k)
        if (!(batch->section[k][0] & 1)) row += batch->section[k][1];
    if (row * batch->rows < LARGE) return 0;
    while (piece > 1 && piece * row > PIECE) piece /= 2;
    while ((batch->rows + piece - 1) / piece > MOST_PIECES) piece *= 2;
    return piece;
}

// Has other threads begin, if they are to help: they wake up while the graph is launched.
static void begin_to_stage(const Plan *plan, int threads) {
    if (!plan->piece) return;
    for (const Piece *p = plan->pieces; p < plan->pieces + plan->count; ++p) copy_contexts(plan->batch, p);
    dpi_offer_copy(plan->copy, threads, (plan->batch->rows + plan->piece - 1) / plan->piece, copy_piece, plan);
}

static void stage(const void *with) {
    const Plan *plan = with;
    const Batch *batch = plan->batch;
    int64_t done = 0;
    if (plan->piece) {
        dpi_finish_copy(plan->copy, tell_pieces);
        done = batch->rows;
    }
    for (const Piece *p = plan->pieces; !plan->piece && p < plan->pieces + plan->count; ++p) {
        copy_contexts(batch, p);
        for (int64_t r = 0, n; r < p->rows; r += n) {
            const int64_t left = p->rows - r, room = CHUNK - done % CHUNK;
            n = left < room ? left : room;
            copy_rows(batch, p, r, n);
            done += n;
            if (done % CHUNK == 0) tell(plan->staged, -1 - done);
        }
    }
    memset((uint8_t *)batch->out.buf + batch->at[REQUEST_OF_ROW], 0xff, 4 * plan->padding);  // -1: padding
    tell(plan->staged, done);
}

// replay_batch(given, words, bucket, ahead, threads, out, places, sections, blocks): fill and replay, or if `ahead` fill once the
// graph is launched; rows behind them, up to the bucket, become padding. So many threads more may copy a large batch. Raises before the launch or not at all: what is launched ahead
// waits for all its rows.
PyObject *dpi_replay_batch(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    Replay replay;
    Batch batch;
    int64_t given[3];
    if (!counted(count, 9) || !dpi_replay_of(args[0], args[1], &replay) || !integers(args + 2, 3, COUNTS, given) ||
        !opened(args + 5, &batch))
        return NULL;
    const int64_t bucket = given[0], ahead = given[1];
    PyObject *blocks = PySequence_Tuple(args[8]), *result = NULL;  // a list might change
    const Py_ssize_t wanted = blocks ? PyTuple_GET_SIZE(blocks) : 0;
    Py_ssize_t held = 0;
    Piece *pieces = PyMem_Malloc(wanted * sizeof *pieces);
    if (pieces == NULL) PyErr_NoMemory();
    int good = blocks && pieces && within(&batch.out, 0, 4 * HEADER_WORDS);
    while (good && held < wanted && (good = appended(&batch, PyTuple_GET_ITEM(blocks, held), &pieces[held]))) ++held;
    int32_t *staged = (int32_t *)batch.out.buf + STAGED_ROWS;
    batch.past_caches = batch.rows >= MANY;
    if (good && (batch.rows > bucket || (uintptr_t)staged % sizeof *staged)) {
        PyErr_Format(PyExc_ValueError, "batch: got %lld rows at %p, expected at most %lld at whole words",
                     (long long)batch.rows, batch.out.buf, (long long)bucket);
        good = 0;
    }
    const int threads = given[2] < MOST_COPY_THREADS ? (int)given[2] : MOST_COPY_THREADS;
    const int64_t piece = good && threads ? piece_of(&batch) : 0;
    SharedCopy copy;
    const Plan plan = {&batch, pieces, held, bucket - batch.rows, staged, piece, &copy};
    if (good && within(&batch.out, batch.at[REQUEST_OF_ROW], 4 * plan.padding)) {
        int code;
        staged[STAGED_CONTEXTS - STAGED_ROWS] = (int32_t)batch.contexts;
        tell(staged, -1);
        Py_BEGIN_ALLOW_THREADS
        begin_to_stage(&plan, threads);
        if (!ahead) stage(&plan);
        code = dpi_replayed(&replay, ahead ? stage : NULL, &plan);
        Py_END_ALLOW_THREADS
        result = PyLong_FromLong(code);
    }
    while (held) PyBuffer_Release(&pieces[--held].from);
    PyMem_Free(pieces);
    Py_XDECREF(blocks);
    PyBuffer_Release(&batch.out);
    return result;
}
