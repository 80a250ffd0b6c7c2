// Blocks staged while the graph that reads them starts (replay_batch), which is told how far the rows are; wait_for_rows.cuh has
// its side.

#include "copies/batch.h"
#include "copies/copy_threads.h"

#include <string.h>

enum { STAGED_ROWS = 10, STAGED_CONTEXTS = 11, HEADER_WORDS = 16 };  // batch_header.py
enum { MANY = 512 };  // rows, from which on they are copied past the caches (put, in batch.c)
enum { CHUNK = 256 };  // rows copied before that is told: 1 us of work (H200 host), about what a read over the bus takes
enum { LARGE = 256 << 10, PIECE = 32 << 10 };  // bytes of rows that several threads copy, and that a thread copies at a time

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
        if (to > from) dpi_copy_rows(plan->batch, p, from, to - from);
    }
}

static void tell_pieces(const void *with, int64_t pieces) {
    const Plan *plan = with;
    tell(plan->staged, -1 - pieces * plan->piece);
}

// Rows a piece, if several threads are to copy them; else 0.
static int64_t piece_of(const Batch *batch) {
    int64_t row = batch->carried_bytes, piece = CHUNK;
    for (Py_ssize_t k = 0; k < batch->sections; ++k)
        if (!(batch->section[k][0] & 1)) row += batch->section[k][1];
    if (row * batch->rows < LARGE) return 0;
    while (piece > 1 && piece * row > PIECE) piece /= 2;
    while ((batch->rows + piece - 1) / piece > MOST_PIECES) piece *= 2;
    return piece;
}

// Before any row, as blocks that write histories wait for the first rows alone (histories.cuh).
static void copy_contexts(const Plan *plan) {
    for (const Piece *p = plan->pieces; p < plan->pieces + plan->count; ++p) dpi_copy_contexts(plan->batch, p);
}

// Has other threads begin, if they are to help: they wake up while the graph is launched.
static void begin_to_stage(const Plan *plan, int threads) {
    if (!plan->piece) return;
    copy_contexts(plan);
    dpi_offer_copy(plan->copy, threads, (plan->batch->rows + plan->piece - 1) / plan->piece, copy_piece, plan);
}

static void stage(const void *with) {
    const Plan *plan = with;
    const Batch *batch = plan->batch;
    int64_t done = 0;
    if (plan->piece) {
        dpi_finish_copy(plan->copy, tell_pieces);
        done = batch->rows;
    } else {
        copy_contexts(plan);
    }
    for (const Piece *p = plan->pieces; !plan->piece && p < plan->pieces + plan->count; ++p) {
        for (int64_t r = 0, n; r < p->rows; r += n) {
            const int64_t left = p->rows - r, room = CHUNK - done % CHUNK;
            n = left < room ? left : room;
            dpi_copy_rows(batch, p, r, n);
            done += n;
            if (done % CHUNK == 0) tell(plan->staged, -1 - done);
        }
    }
    memset((uint8_t *)batch->out.buf + batch->at[REQUEST_OF_ROW], 0xff, 4 * plan->padding);  // -1: padding
    tell(plan->staged, done);
}

// What is the same for all batches of a graph. batch: empty, over memory that is held.
typedef struct {
    Replay replay;  // words: not set
    const char *(*error)(int code);
    Batch batch;
    int64_t bucket, ahead, threads;
} Lane;

static const char LANE[] = "dpiframe.lane";

static void close_lane(PyObject *capsule) {
    Lane *lane = PyCapsule_GetPointer(capsule, LANE);
    PyBuffer_Release(&lane->batch.out);
    if (lane->batch.carried_bytes) PyBuffer_Release(&lane->batch.carried);
    PyMem_Free(lane);
}

// run(words, blocks). Raises before the launch, or when all is over: what is launched ahead waits for all its rows.
static PyObject *run_batch(PyObject *capsule, PyObject *const *args, Py_ssize_t count) {
    const Lane *lane = PyCapsule_GetPointer(capsule, LANE);
    Replay replay = lane->replay;
    if (!counted(count, 2) || !dpi_words_of(args[0], &replay)) return NULL;
    Batch batch = lane->batch;
    PyObject *blocks = PySequence_Tuple(args[1]);  // a list might change
    const Py_ssize_t wanted = blocks ? PyTuple_GET_SIZE(blocks) : 0;
    Py_ssize_t held = 0;
    Piece *pieces = PyMem_Malloc(wanted * sizeof *pieces);
    if (pieces == NULL) PyErr_NoMemory();
    int good = blocks && pieces, code = 0;
    while (good && held < wanted && (good = dpi_appended(&batch, PyTuple_GET_ITEM(blocks, held), &pieces[held]))) ++held;
    int32_t *staged = (int32_t *)batch.out.buf + STAGED_ROWS;
    batch.past_caches = batch.rows >= MANY;
    if (good && batch.rows > lane->bucket) {
        PyErr_Format(PyExc_ValueError, "batch: got %lld rows, expected at most %lld", (long long)batch.rows,
                     (long long)lane->bucket);
        good = 0;
    }
    SharedCopy copy;
    const int threads = (int)lane->threads;
    const Plan plan = {&batch, pieces, held, lane->bucket - batch.rows, staged, good && threads ? piece_of(&batch) : 0, &copy};
    good = good && within(&batch.out, batch.at[REQUEST_OF_ROW], 4 * plan.padding);
    if (good) {
        staged[STAGED_CONTEXTS - STAGED_ROWS] = (int32_t)batch.contexts;
        tell(staged, -1);
        Py_BEGIN_ALLOW_THREADS
        begin_to_stage(&plan, threads);
        if (!lane->ahead) stage(&plan);
        code = dpi_replayed(&replay, lane->ahead ? stage : NULL, &plan);
        Py_END_ALLOW_THREADS
    }
    while (held) PyBuffer_Release(&pieces[--held].from);
    PyMem_Free(pieces);
    Py_XDECREF(blocks);
    if (code) PyErr_Format(PyExc_RuntimeError, "graph replay: got CUDA error %d: %s", code, lane->error(code));
    if (!good || code) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef RUN_BATCH = {"run_batch", (PyCFunction)(void (*)(void))run_batch, METH_FASTCALL, NULL};

// replay_batch(given, error, bucket, ahead, threads, out, places, sections, carried, prefix): a function of (words, blocks) that is
// fill and replay, or if `ahead` fill once the graph is launched; rows behind them, up to the bucket, become padding. So many
// threads more may copy a large batch. error: cudaGetErrorString's address. carried: see Batch; or None.
PyObject *dpi_replay_batch(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t given[3];
    if (!counted(count, 10) || !integers(args + 2, 3, COUNTS, given)) return NULL;
    Lane *lane = PyMem_Calloc(1, sizeof *lane);
    if (lane == NULL) return PyErr_NoMemory();
    lane->error = PyLong_AsVoidPtr(args[1]);
    lane->bucket = given[0], lane->ahead = given[1];
    lane->threads = given[2] < MOST_COPY_THREADS ? given[2] : MOST_COPY_THREADS;
    PyObject *capsule = NULL, *run = NULL;
    if (PyErr_Occurred() || !dpi_replay_of(args[0], &lane->replay) || !dpi_opened(args + 5, &lane->batch)) goto no_buffer;
    if (!dpi_carries(args + 8, &lane->batch)) goto no_lane;
    const uintptr_t header = (uintptr_t)lane->batch.out.buf;
    if (header % sizeof(int32_t))
        PyErr_Format(PyExc_ValueError, "batch: got memory at %p, expected it at whole words", lane->batch.out.buf);
    else if (within(&lane->batch.out, 0, 4 * HEADER_WORDS))
        capsule = PyCapsule_New(lane, LANE, close_lane);
    if (capsule == NULL) goto no_lane;
    run = PyCFunction_New(&RUN_BATCH, capsule);
    Py_DECREF(capsule);
    return run;
no_lane:
    if (lane->batch.carried_bytes) PyBuffer_Release(&lane->batch.carried);
    PyBuffer_Release(&lane->batch.out);
no_buffer:
    PyMem_Free(lane);
    return NULL;
}
