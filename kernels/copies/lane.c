// A GPU lane's batches, one call each: blocks are checked, staged for the smallest graph that holds them, and scored.

#include "copies/staging.h"

enum { ROWS_A_WORD = 8 };  // that a head tells of, workspace.py
enum { MANY = 512 };  // rows, from which on they are copied past the caches (put, in batch.c)

// A bucket's graph, and the same with its rows copied to the device first; NULL: there is none.
typedef struct {
    int64_t rows, ahead;
    void *exec, *copied;
} Graph;

// What is the same for all batches of a lane. batch: empty, over memory that is held.
typedef struct {
    Replay replay;  // exec, words: not set
    const char *(*error)(int code);
    Batch batch;
    PyObject *layout, *scores, *copy, *result;  // of blocks; float32[rows, tasks]; "copy"; a type of named tuples
    int64_t threads, graphs;
    Graph graph[];
} Lane;

static const char LANE[] = "dpiframe.lane";

static void close_lane(Lane *lane) {
    if (lane->batch.out.obj) PyBuffer_Release(&lane->batch.out);
    if (lane->batch.carried_bytes) PyBuffer_Release(&lane->batch.carried);
    Py_XDECREF(lane->layout), Py_XDECREF(lane->scores), Py_XDECREF(lane->copy), Py_XDECREF(lane->result);
    PyMem_Free(lane);
}

static void close_capsule(PyObject *capsule) { close_lane(PyCapsule_GetPointer(capsule, LANE)); }

// The smallest that holds the batch.
static const Graph *graph_of(const Lane *lane, const Batch *batch) {
    const Graph *last = lane->graph + lane->graphs - 1;
    if (batch->rows < 1 || batch->rows > last->rows || batch->contexts > last->rows) {
        PyErr_Format(PyExc_ValueError, "batch: got %lld rows of %lld contexts, expected 1 to %lld of each",
                     (long long)batch->rows, (long long)batch->contexts, (long long)last->rows);
        return NULL;
    }
    const Graph *graph = lane->graph;
    while (graph->rows < batch->rows) ++graph;
    return graph;
}

// result(scores[:rows].copy(), ms, bucket), made as tuples make themselves: the type's own way takes longer, as it is Python's.
static PyObject *result_of(const Lane *lane, int64_t rows, int64_t bucket, int64_t ns) {
    PyObject *view = PySequence_GetSlice(lane->scores, 0, rows);
    PyObject *scores = view ? PyObject_CallMethodNoArgs(view, lane->copy) : NULL;
    PyObject *given = scores ? Py_BuildValue("((NdL))", scores, ns * 1e-6, (long long)bucket) : NULL;
    PyObject *result = given ? PyTuple_Type.tp_new((PyTypeObject *)lane->result, given, NULL) : NULL;
    Py_XDECREF(view), Py_XDECREF(given);
    return result;
}

// run(blocks, copied). Raises before the launch, or when all is over: what is launched ahead waits for all its rows.
static PyObject *run_batch(PyObject *capsule, PyObject *const *args, Py_ssize_t count) {
    const Lane *lane = PyCapsule_GetPointer(capsule, LANE);
    const int64_t begun = dpi_now();
    if (!counted(count, 2)) return NULL;
    Batch batch = lane->batch;
    PyObject *blocks = PySequence_Tuple(args[0]);  // a list might change
    const Py_ssize_t wanted = blocks ? PyTuple_GET_SIZE(blocks) : 0;
    Py_ssize_t held = 0;
    Piece *pieces = PyMem_Malloc(wanted * sizeof *pieces);
    if (pieces == NULL) PyErr_NoMemory();
    int good = blocks && pieces, code = 0;
    while (good && held < wanted) {
        PyObject *block = PyTuple_GET_ITEM(blocks, held);
        good = dpi_laid_out(block, lane->layout) && dpi_appended(&batch, block, &pieces[held]);
        if (good) good = dpi_of_contexts(&pieces[held++]);
    }
    const Graph *graph = good ? graph_of(lane, &batch) : NULL;
    Replay replay = lane->replay;
    good = graph && dpi_set_words((batch.rows + ROWS_A_WORD - 1) / ROWS_A_WORD, &replay);
    good = good && within(&batch.out, batch.at[REQUEST_OF_ROW], 4 * (graph->rows - batch.rows));
    if (good) {
        // No more contexts are copied than rows.
        const int copied = graph->copied && args[1] == Py_True && batch.contexts <= graph->rows;
        const int ahead = graph->ahead && !copied;
        Staging staging;
        replay.exec = copied ? graph->copied : graph->exec;
        batch.past_caches = batch.rows >= MANY;
        Py_BEGIN_ALLOW_THREADS
        dpi_begin_staging(&staging, &batch, pieces, held, graph->rows - batch.rows, (int)lane->threads);
        if (!ahead) dpi_finish_staging(&staging);
        code = dpi_replayed(&replay, ahead ? dpi_finish_staging : NULL, &staging);
        Py_END_ALLOW_THREADS
    }
    while (held) PyBuffer_Release(&pieces[--held].from);
    PyMem_Free(pieces);
    Py_XDECREF(blocks);
    if (code) PyErr_Format(PyExc_RuntimeError, "graph replay: got CUDA error %d: %s", code, lane->error(code));
    return good && !code ? result_of(lane, batch.rows, graph->rows, dpi_now() - begun) : NULL;
}

static PyMethodDef RUN_BATCH = {"run_batch", (PyCFunction)(void (*)(void))run_batch, METH_FASTCALL, NULL};

// (rows, exec, ahead, exec of the copied one), by rows.
static int graphs_of(PyObject *given, Lane *lane) {
    for (int64_t i = 0, before = 0; i < lane->graphs; before = lane->graph[i++].rows) {
        PyObject *each = PyTuple_GET_ITEM(given, i);
        int64_t of[4];
        if (!PyTuple_Check(each) || PyTuple_GET_SIZE(each) != 4)
            return PyErr_SetString(PyExc_TypeError, "graphs: expected tuples of four integers"), 0;
        if (!integers(((PyTupleObject *)each)->ob_item, 4, INT64_MAX, of)) return 0;
        if (of[0] <= before || of[0] > COUNTS)
            return PyErr_Format(PyExc_ValueError, "graphs: got %lld rows behind %lld", (long long)of[0], (long long)before), 0;
        lane->graph[i] = (Graph){of[0], of[2], (void *)of[1], (void *)of[3]};
    }
    return 1;
}

// replay_batches(given, error, graphs, threads, out, places, sections, carried, prefix, layout, scores, result): a function of
// (blocks, copied) that is fill and replay of the smallest graph that holds them, or if it is launched ahead fill once it is;
// rows behind them, up to the graph's, become padding. So many threads more may copy a large batch. given: a Replay, its exec
// left out. error: cudaGetErrorString's address. carried: see Batch; or None. layout: of all blocks. copied: whether rows go to
// the device first where there is such a graph. Gives result(scores[:rows].copy(), ms, rows of the graph).
PyObject *dpi_replay_batches(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t threads;
    if (!counted(count, 12) || !integers(args + 3, 1, COUNTS, &threads)) return NULL;
    if (!PyTuple_Check(args[2]) || !PyTuple_GET_SIZE(args[2]))
        return PyErr_SetString(PyExc_TypeError, "graphs: expected a tuple of at least one"), NULL;
    if (!PyType_Check(args[11]) || !PyType_IsSubtype((PyTypeObject *)args[11], &PyTuple_Type))
        return PyErr_SetString(PyExc_TypeError, "result: expected a type of tuples"), NULL;
    const Py_ssize_t graphs = PyTuple_GET_SIZE(args[2]);
    Lane *lane = PyMem_Calloc(1, sizeof *lane + graphs * sizeof *lane->graph);
    if (lane == NULL) return PyErr_NoMemory();
    lane->graphs = graphs, lane->threads = threads;
    lane->layout = Py_NewRef(args[9]), lane->scores = Py_NewRef(args[10]), lane->result = Py_NewRef(args[11]);
    lane->copy = PyUnicode_InternFromString("copy");
    lane->error = PyLong_AsVoidPtr(args[1]);
    PyObject *capsule = NULL;
    if (lane->copy && !PyErr_Occurred() && graphs_of(args[2], lane) && dpi_replay_of(args[0], &lane->replay) &&
        dpi_opened(args + 4, &lane->batch) && dpi_carries(args + 7, &lane->batch)) {
        const uintptr_t header = (uintptr_t)lane->batch.out.buf;
        if (header % sizeof(int32_t))
            PyErr_Format(PyExc_ValueError, "batch: got memory at %p, expected it at whole words", lane->batch.out.buf);
        else if (within(&lane->batch.out, 0, 4 * HEADER_WORDS))
            capsule = PyCapsule_New(lane, LANE, close_capsule);
    }
    if (capsule == NULL) return close_lane(lane), NULL;
    PyObject *run = PyCFunction_New(&RUN_BATCH, capsule);
    Py_DECREF(capsule);
    return run;
}
