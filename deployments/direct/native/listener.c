// The sockets of the direct port. One call of `round` reads what has come, and gives Python all requests that are whole now; one
// call of `answer` writes what Python says to them. No call blocks. A connection has one request with Python at a time; what it
// sends behind it (pipelining) waits, at first in the kernel. Calls come from one thread, and hold the GIL: a thread that computes
// would keep it for 5 ms, for each system call that gave it up.

#include "connection.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

enum { EVENTS = 256, LOOK_MS = 100 };

static int looked_at_all(Listener *l, PyObject *to) {
    const int64_t now = dpi_now_ms();
    if (now - l->looked < LOOK_MS) return 1;
    l->looked = now;
    for (Connection *c = l->connections; c < l->connections + l->most; ++c)
        if (c->state != FREE && c->until <= now && !dpi_late(l, c, to)) return 0;
    return 1;
}

static int happened(Listener *l, Connection *c, uint32_t events, PyObject *to) {
    const uint32_t turn = c->turn;
    if (events & EPOLLOUT && c->out_size) dpi_pushed(l, c);
    if (c->turn == turn && events & ~EPOLLOUT) {
        if (c->state == LEAVING) dpi_drained(l, c);
        else if (c->state == BUSY || c->due) c->unread = 1;  // what it has sent before comes first
        else if (!dpi_pulled(l, c, to)) return 0;
    }
    return c->turn != turn || !(events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) || dpi_gone(l, c, to);
}

static PyObject *listener_round(Listener *l, PyObject *Py_UNUSED(none)) {
    struct epoll_event events[EVENTS];
    PyObject *to = PyList_New(0);
    int good = to != NULL;
    const int count = good ? epoll_wait(l->epoll, events, EVENTS, 0) : 0;
    for (int i = 0; good && i < count; ++i) {
        const uint64_t key = events[i].data.u64;
        Connection *c = dpi_found(l, key);
        if (c) good = happened(l, c, events[i].events, to);
        else if (key == TIMER_KEY) good = dpi_express_late(l);
        else if ((uint32_t)key == RING_KEY && key >> 32 < RINGS && l->rings[key >> 32]) good = dpi_express_woken(l, l->rings[key >> 32]);
    }
    const int again = l->due_count;
    l->due_count = 0;
    for (int i = 0; good && i < again; ++i) {  // one that is put there again takes a place of those that were looked at
        Connection *c = l->connections + l->due[i];
        c->due = 0;
        if (c->state == LEAVING) dpi_drained(l, c);
        if (c->state == HEAD && c->in_size) good = dpi_taken(l, c, c->in, c->in_size, to);
        if (good && c->state != FREE && c->state != BUSY && c->state != LEAVING && c->unread) good = dpi_pulled(l, c, to);
    }
    if (good && looked_at_all(l, to) && dpi_asks_flush(l)) return to;
    Py_XDECREF(to);
    return NULL;
}

// answer([(key, bytes, close)]): whether a next request lies here already, for a round soon.
static PyObject *listener_answer(Listener *l, PyObject *given) {
    PyObject *items = PySequence_Fast(given, "answers: expected a sequence");
    if (items == NULL) return NULL;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items); ++i) {
        unsigned long long key;
        const char *data;
        Py_ssize_t size;
        int close_after;
        if (!PyArg_ParseTuple(PySequence_Fast_GET_ITEM(items, i), "Ky#p", &key, &data, &size, &close_after)) {
            Py_DECREF(items);
            return NULL;
        }
        Connection *c = dpi_found(l, key);
        if (c == NULL || c->state != BUSY || c->out_size || c->sent.form) continue;
        c->tells_close |= close_after;
        const struct iovec whole = {(char *)data, size};
        dpi_first_pushed(l, c, &whole, 1);
    }
    Py_DECREF(items);
    return PyBool_FromLong(l->due_count);
}

// drain(): closes the connections that are between two requests, and takes no new ones.
static PyObject *listener_drain(Listener *l, PyObject *Py_UNUSED(none)) {
    l->draining = 1;
    for (Connection *c = l->connections; c < l->connections + l->most; ++c) {
        if (c->state != HEAD || c->in_size || c->unread) continue;
        if (recv(c->fd, l->scratch, 1, MSG_PEEK | MSG_DONTWAIT) < 0) dpi_closed(l, c);  // else a request waits, or an end
    }
    Py_RETURN_NONE;
}

static PyObject *listener_close(Listener *l, PyObject *Py_UNUSED(none)) {
    for (Connection *c = l->connections; l->open && c < l->connections + l->most; ++c)
        if (c->state != FREE) dpi_closed(l, c);
    for (int i = 0; i < RINGS; ++i)
        if (l->rings[i]) dpi_asks_tell(l, l->rings[i]);
    if (l->forms) dpi_express_forgotten(l);
    if (l->epoll >= 0) close(l->epoll);
    if (l->timer >= 0) close(l->timer);
    l->epoll = l->timer = -1;
    l->draining = 1;
    Py_RETURN_NONE;
}

static PyObject *listener_fileno(Listener *l, PyObject *Py_UNUSED(none)) { return PyLong_FromLong(l->epoll); }

static void listener_free(Listener *l) {
    if (l->connections) Py_XDECREF(listener_close(l, NULL));
    free(l->connections);
    free(l->vacant);
    free(l->due);
    free(l->scratch);
    if (l->untold) Py_XDECREF(dpi_express_seen(l, NULL));
    for (int i = 0; i < RINGS; ++i) {
        Py_XDECREF(l->rings[i]);
        for (int k = 0; k < SECTIONS && l->asks; ++k) free(l->asks[i].section[k]);
    }
    free(l->asks);
    Py_XDECREF(l->ended);
    free(l->forms);
    free(l->records);
    free(l->samples);
    Py_TYPE(l)->tp_free(l);
}

// Listener(most, most_body, most_held, head_ms, body_ms, idle_ms, bounds of latency in ms as float64)
static PyObject *listener_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(named)) {
    Listener *l = (Listener *)type->tp_alloc(type, 0);
    if (l == NULL) return NULL;
    l->epoll = l->timer = -1;
    l->timer_at = l->late_at = INFINITY;
    l->sampled_requests.every = 1;
    const char *bounds;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "iLLLLLy#", &l->most, &l->most_body, &l->most_held, &l->head_ms, &l->body_ms, &l->idle_ms, &bounds, &size) ||
        (size > (Py_ssize_t)sizeof l->bounds && PyErr_Format(PyExc_ValueError, "bounds: got %zd bytes", size) == NULL) ||
        (l->most < 1 && PyErr_Format(PyExc_ValueError, "most: got %d, expected at least 1", l->most) == NULL)) {
        Py_DECREF(l);
        return NULL;
    }
    memcpy(l->bounds, bounds, size);
    l->bound_count = (int)(size / sizeof *l->bounds);
    l->connections = calloc(l->most, sizeof(Connection));
    l->vacant = calloc(l->most, sizeof(int));
    l->due = calloc(l->most, sizeof(int));
    l->scratch = malloc(SCRATCH);
    l->forms = calloc(FORM_SETS * FORM_WAYS, sizeof *l->forms);
    l->asks = calloc(RINGS, sizeof *l->asks);
    l->samples = malloc(SAMPLES * sizeof *l->samples);
    l->ended = PyList_New(0);
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = TIMER_KEY};
    if (!l->connections || !l->vacant || !l->due || !l->scratch || !l->forms || !l->asks || !l->samples || !l->ended ||
        (l->epoll = epoll_create1(EPOLL_CLOEXEC)) < 0 || (l->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) < 0 ||
        epoll_ctl(l->epoll, EPOLL_CTL_ADD, l->timer, &event) || getrandom(&l->draw, sizeof l->draw, 0) < 0) {
        Py_DECREF(l);
        return PyErr_NoMemory();
    }
    while (l->vacant_count < l->most) {
        l->vacant[l->vacant_count] = l->most - 1 - l->vacant_count;
        ++l->vacant_count;
    }
    return (PyObject *)l;
}

static PyMethodDef methods[] = {
    {"round", (PyCFunction)listener_round, METH_NOARGS, NULL}, {"answer", (PyCFunction)listener_answer, METH_O, NULL},
    {"drain", (PyCFunction)listener_drain, METH_NOARGS, NULL}, {"close", (PyCFunction)listener_close, METH_NOARGS, NULL},
    {"fileno", (PyCFunction)listener_fileno, METH_NOARGS, NULL},
    {"accept", (PyCFunction)dpi_arrivals_accepted, METH_VARARGS, NULL},
    {"add", (PyCFunction)dpi_arrivals_added, METH_O, NULL},
    {"learn", (PyCFunction)dpi_express_learn, METH_VARARGS, NULL},
    {"forget", (PyCFunction)dpi_express_forget, METH_NOARGS, NULL},
    {"attach", (PyCFunction)dpi_asks_attach, METH_O, NULL},
    {"detach", (PyCFunction)dpi_asks_detach, METH_O, NULL},
    {"ended", (PyCFunction)dpi_express_ended, METH_NOARGS, NULL},
    {"seen", (PyCFunction)dpi_express_seen, METH_NOARGS, NULL},
    {"date", (PyCFunction)dpi_express_date, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"most", T_INT, offsetof(Listener, most), READONLY, NULL},
    {"open", T_INT, offsetof(Listener, open), READONLY, NULL},
    {"due", T_INT, offsetof(Listener, due_count), READONLY, NULL},
    {"ended_count", T_INT, offsetof(Listener, ended_count), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "listener.Listener",
    .tp_basicsize = sizeof(Listener),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = listener_new,
    .tp_dealloc = (destructor)listener_free,
    .tp_methods = methods,
    .tp_members = members,
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "listener_c", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_listener_c(void) {
    PyObject *made = PyType_Ready(&type) || PyType_Ready(&dpi_engine_ring_type) ? NULL : PyModule_Create(&module);
    if (made && (PyModule_AddObjectRef(made, "Listener", (PyObject *)&type) ||
                 PyModule_AddObjectRef(made, "EngineRing", (PyObject *)&dpi_engine_ring_type)))
        Py_CLEAR(made);
    return made;
}
