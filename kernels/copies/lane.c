// A GPU lane's batches, one call each: blocks are checked, staged for the smallest graph that holds them, and scored.

#include "copies/in_place.h"
#include "copies/staging.h"

enum { ROWS_A_WORD = 8 };  // that a head tells of, workspace.py
enum { MANY = 512 };  // rows, from which on they are copied past the caches (put, in batch.c)

// A bucket's graph, and the same with its rows copied to the device first; NULL: there is none.
typedef struct {
    int64_t rows, ahead;
    void *exec, *copied;
    RowReader reader;
} Graph;

// What is the same for all batches of a lane. batch: empty, over memory that is held.
typedef struct {
    Replay replay;  // exec, words: not set
    Driver driver;
    const char *(*error)(int code);
    Batch batch;
    PyObject *layout, *scores, *copy, *result;  // of blocks; float32[rows, tasks]; "copy"; a type of named tuples
    PyObject *view;  // scores[:viewed], of the last batch: the next one often has as many
    int64_t viewed;
    int64_t threads, graphs;
    Graph graph[];
} Lane;

static const char LANE[] = "dpiframe.lane";

static void close_lane(Lane *lane) {
    if (lane->batch.out.obj) PyBuffer_Release(&lane->batch.out);
    if (lane->batch.carried_bytes) PyBuffer_Release(&lane->batch.carried);
    Py_XDECREF(lane->layout), Py_XDECREF(lane->scores), Py_XDECREF(lane->copy), Py_XDECREF(lane->result);
    Py_XDECREF(lane->view);
    PyMem_Free(lane);
}

static void close_capsule(PyObject *capsule) { close_lane(PyCapsule_GetPointer(capsule, LANE)); }

// The smallest that holds the batch.
static Graph *graph_of(Lane *lane, const Batch *batch) {
    const Graph *last = lane->graph + lane->graphs - 1;
    if (batch->rows < 1 || batch->rows > last->rows || batch->contexts > last->rows) {
        PyErr_Format(PyExc_ValueError, "batch: got %lld rows of %lld contexts, expected 1 to %lld of each",
                     (long long)batch->rows, (long long)batch->contexts, (long long)last->rows);
        return NULL;
    }
    Graph *graph = lane->graph;
    while (graph->rows < batch->rows) ++graph;
    return graph;
}

// result(scores[:rows].copy(), ms, bucket), made as tuples make themselves: the type's own way takes longer, as it is Python's.
static PyObject *result_of(Lane *lane, int64_t rows, int64_t bucket, int64_t ns) {
    if (!lane->view || lane->viewed != rows) {
        Py_XSETREF(lane->view, PySequence_GetSlice(lane->scores, 0, rows));
        lane->viewed = rows;
    }
    PyObject *scores = lane->view ? PyObject_CallMethodNoArgs(lane->view, lane->copy) : NULL;
    PyObject *given = scores ? Py_BuildValue("((NdL))", scores, ns * 1e-6, (long long)bucket) : NULL;
    PyObject *result = given ? PyTuple_Type.tp_new((PyTypeObject *)lane->result, given, NULL) : NULL;
    Py_XDECREF(given);
    return result;
}

// A batch on its way, for what is to be done once its graph is launched.
typedef struct {
    Lane *lane;
    Graph *graph;
    Staging staging;
    int ahead, code;
} Running;

static void meanwhile(void *with) {
    Running *r = with;
    if (r->ahead) dpi_finish_staging(&r->staging);
    if (r->staging.batch->in_place)  // what is launched keeps its place
        r->code = dpi_read_batch(&r->lane->driver, r->graph->exec, &r->graph->reader, r->staging.batch);
}

// What the device has read is the core's again when the next batch comes, whose copy would wait for each line: of 256 rows for
// 0.6 to 1 us (H200 host). More rows go past the caches.
static void take_back(void *with) {
    const Batch *batch = ((Running *)with)->staging.batch;
    if (!batch->past_caches && !batch->in_place) dpi_own_rows(batch);
}

// run(blocks, copied). Raises before the launch, or when all is over: what is launched ahead waits for all its rows.
static PyObject *run_batch(PyObject *capsule, PyObject *const *args, Py_ssize_t count) {
    Lane *lane = PyCapsule_GetPointer(capsule, LANE);
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
    Graph *graph = good ? graph_of(lane, &batch) : NULL;
    Replay replay = lane->replay;
    good = graph && dpi_set_words((batch.rows + ROWS_A_WORD - 1) / ROWS_A_WORD, &replay);
    good = good && within(&batch.out, batch.at[REQUEST_OF_ROW], 4 * (graph->rows - batch.rows));
    if (good) {
        // No more contexts are copied than rows.
        const int copied = graph->copied && args[1] == Py_True && batch.contexts <= graph->rows;
        Running running;  // not cleared: it has a kilobyte of marks
        running.lane = lane, running.graph = graph, running.code = 0, running.ahead = graph->ahead && !copied;
        replay.exec = copied ? graph->copied : graph->exec;
        batch.past_caches = batch.rows >= MANY;
        Py_BEGIN_ALLOW_THREADS
        if (graph->reader.moved) code = dpi_read_batch(&lane->driver, graph->exec, &graph->reader, &batch);
        if (!code && !copied && held == 1 && dpi_readable(&lane->driver, &graph->reader, &batch, pieces, graph->rows))
            batch.in_place = !dpi_read_in_place(&lane->driver, graph->exec, &graph->reader, pieces);
        if (!code) {
            dpi_begin_staging(&running.staging, &batch, pieces, held, graph->rows - batch.rows, (int)lane->threads);
            if (!running.ahead) dpi_finish_staging(&running.staging);
            code = dpi_replayed(&replay, meanwhile, take_back, &running);
            if (!code) code = running.code;
        }
        Py_END_ALLOW_THREADS
    }
    while (held) PyBuffer_Release(&pieces[--held].from);
    PyMem_Free(pieces);
    Py_XDECREF(blocks);
    if (code) PyErr_Format(PyExc_RuntimeError, "graph replay: got CUDA error %d: %s", code, lane->error(code));
    return good && !code ? result_of(lane, batch.rows, graph->rows, dpi_now() - begun) : NULL;
}

static PyMethodDef RUN_BATCH = {"run_batch", (PyCFunction)(void (*)(void))run_batch, METH_FASTCALL, NULL};

// (rows, exec, ahead, exec of the copied one, see dpi_reader_of), by rows.
static int graphs_of(PyObject *given, Lane *lane) {
    for (int64_t i = 0, before = 0; i < lane->graphs; before = lane->graph[i++].rows) {
        PyObject *each = PyTuple_GET_ITEM(given, i);
        int64_t of[4];
        if (!PyTuple_Check(each) || PyTuple_GET_SIZE(each) != 5)
            return PyErr_SetString(PyExc_TypeError, "graphs: expected tuples of four integers and a reader"), 0;
        if (!integers(((PyTupleObject *)each)->ob_item, 4, INT64_MAX, of)) return 0;
        if (of[0] <= before || of[0] > COUNTS)
            return PyErr_Format(PyExc_ValueError, "graphs: got %lld rows behind %lld", (long long)of[0], (long long)before), 0;
        lane->graph[i] = (Graph){.rows = of[0], .ahead = of[2], .exec = (void *)of[1], .copied = (void *)of[3]};
        if (!dpi_reader_of(PyTuple_GET_ITEM(each, 4), &lane->graph[i].reader)) return 0;
    }
    return 1;
}

// replay_batches(given, error, graphs, threads, out, places, sections, carried, prefix, layout, scores, result, driver): a
// function of (blocks, copied) that is fill and replay of the smallest graph that holds them, or if it is launched ahead fill
// once it is; rows behind them, up to the graph's, become padding. So many threads more may copy a large batch. given: a Replay,
// its exec left out. error: cudaGetErrorString's address. carried: see Batch; or None. layout: of all blocks. copied: whether
// rows go to the device first where there is such a graph. driver: a Driver. Gives result(scores[:rows].copy(), ms, rows of the
// graph).
PyObject *dpi_replay_batches(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    int64_t threads;
    if (!counted(count, 13) || !integers(args + 3, 1, COUNTS, &threads)) return NULL;
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
        dpi_driver_of(args[12], &lane->driver) &&
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
