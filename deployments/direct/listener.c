// The sockets of the direct port. One call of `round` reads what has come, and gives Python all requests that are whole now; one
// call of `answer` writes what Python says to them. No call blocks. A connection has one request with Python at a time; what it
// sends behind it (pipelining) waits, at first in the kernel. Calls come from one thread, but give up the GIL to the system's.

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>

#include "connection.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { SCRATCH = 1 << 18, EVENTS = 256, LOOK_MS = 100, LEAVING_MS = 2000 };
// Faults of requests whose head is told with them; all others begin with the status to answer with.
static const char GONE[] = "gone", LONG[] = "long", SLOW[] = "slow", FULL[] = "503 too many bytes of requests in work";

typedef struct {
    PyObject_HEAD
    int epoll, most, open, draining;
    long long head_ms, body_ms, idle_ms, most_body, most_held, held;  // held: bytes of all connections' buffers
    int64_t looked;
    Connection *connections;
    int *vacant, *due, vacant_count, due_count;
    char *scratch;
} Listener;

static int64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000) + t.tv_nsec / 1000000;
}

static unsigned long long key_of(Listener *l, Connection *c) {
    return (unsigned long long)c->turn << 32 | (unsigned long long)(c - l->connections);
}

static Connection *found(Listener *l, unsigned long long key) {
    const uint32_t place = (uint32_t)key;
    Connection *c = place < (uint32_t)l->most ? l->connections + place : NULL;
    return c && c->state != FREE && c->turn == key >> 32 ? c : NULL;
}

static void emptied(Listener *l, char **buffer, size_t *room, size_t *size) {
    free(*buffer);
    l->held -= *room;
    *buffer = NULL, *room = *size = 0;
}

// Room for `size` bytes; 0 if that would be more than all connections together may hold.
static int roomy(Listener *l, char **buffer, size_t *room, size_t size) {
    if (size <= *room) return 1;
    if (l->held + (long long)(size - *room) > l->most_held) return 0;
    char *larger = realloc(*buffer, size);
    if (larger == NULL) return 0;
    l->held += size - *room;
    *buffer = larger, *room = size;
    return 1;
}

static void closed(Listener *l, Connection *c) {
    emptied(l, &c->in, &c->in_room, &c->in_size);
    emptied(l, &c->body, &c->body_room, &c->body_size);
    emptied(l, &c->out, &c->out_room, &c->out_size);
    close(c->fd);
    ++c->turn;
    c->state = FREE;
    l->vacant[l->vacant_count++] = c - l->connections;
    --l->open;
}

static void due(Listener *l, Connection *c) {
    if (!c->due) l->due[l->due_count++] = c - l->connections;
    c->due = 1;
}

// (key, head but for the lines apart, those, body, close, fault), appended to a list. Without `text` there is no head.
static int told(Listener *l, Connection *c, const char *text, const char *body, size_t size, const char *fault, PyObject *to) {
    const Head *h = &c->head;
    size_t apart = 0, at = 0, fixed = text ? h->bytes - 2 : 0;
    for (uint32_t i = 0; text && i < h->apart; ++i) apart += h->line[i].end - h->line[i].at;
    PyObject *head = PyBytes_FromStringAndSize(NULL, fixed - apart), *lines = PyBytes_FromStringAndSize(NULL, apart);
    if (head && lines && text) {
        char *into = PyBytes_AS_STRING(head), *other = PyBytes_AS_STRING(lines);
        for (uint32_t i = 0; i < h->apart; ++i) {
            const Stretch line = h->line[i];
            into = mempcpy(into, text + at, line.at - at);
            other = mempcpy(other, text + line.at, line.end - line.at);
            at = line.end;
        }
        memcpy(into, text + at, fixed - at);
    }
    const int close_after = c->tells_close = fault != NULL || !text || h->close;
    PyObject *item = NULL;
    if (head && lines) {
        item = Py_BuildValue("(KOOy#Os)", key_of(l, c), head, lines, body ? body : "", (Py_ssize_t)size, close_after ? Py_True : Py_False, fault);
    }
    Py_XDECREF(head);
    Py_XDECREF(lines);
    const int good = item && !PyList_Append(to, item);
    Py_XDECREF(item);
    c->state = BUSY;
    return good;
}

// Keeps bytes for later, at the start of `in`.
static int kept(Listener *l, Connection *c, const char *data, size_t size, size_t room) {
    if (!size) emptied(l, &c->in, &c->in_room, &c->in_size);
    else if (data >= c->in && data < c->in + c->in_room) {
        const size_t at = data - c->in;
        if (at) memmove(c->in, data, size);
        if (!roomy(l, &c->in, &c->in_room, room)) return 0;
    } else {
        if (!roomy(l, &c->in, &c->in_room, room > size ? room : size)) return 0;
        memcpy(c->in, data, size);
    }
    c->in_size = size;
    return 1;
}

// Takes what a connection has sent, `in` or bytes of the scratch: a request that is whole, or one that will never be, is told.
static int taken(Listener *l, Connection *c, const char *data, size_t size, PyObject *to) {
    const char *fault = NULL, *text = data, *rest = data;
    if (c->state == HEAD) {
        const int head = dpi_http_head(data, size, &c->head, &fault);
        if (head == NEVER) return told(l, c, NULL, NULL, 0, fault, to);
        if (head == NOT_YET) {
            if (!c->in_size) c->until = now_ms() + l->head_ms;
            return kept(l, c, data, size, HEAD_BYTES) || told(l, c, NULL, NULL, 0, FULL, to);
        }
        c->until = now_ms() + l->body_ms;
        c->chunks = (Chunks){0};
        c->body_size = 0;
        if (c->head.body_bytes > l->most_body) return told(l, c, data, NULL, 0, LONG, to);
        c->state = c->head.body_bytes == CHUNKED ? CHUNKS : BODY;
        rest += c->head.bytes;
        if (c->head.expects && size == c->head.bytes && c->head.body_bytes)
            send(c->fd, "HTTP/1.1 100 Continue\r\n\r\n", 25, MSG_NOSIGNAL | MSG_DONTWAIT);
    } else if (c->state == CHUNKS)
        text = c->in;  // and what came are chunks alone
    if (c->state == BODY) {
        const size_t whole = c->head.bytes + (size_t)c->head.body_bytes;
        if (size < whole) return kept(l, c, data, size, whole) || told(l, c, data, NULL, 0, FULL, to);
        return told(l, c, data, data + c->head.bytes, c->head.body_bytes, NULL, to) && kept(l, c, data + whole, size - whole, 0);
    }
    const char *end = data + size;
    if (!roomy(l, &c->body, &c->body_room, c->body_size + (end - rest))) return told(l, c, text, NULL, 0, FULL, to);
    const int body = dpi_http_chunks(&c->chunks, &rest, end, c->body, &c->body_size, &fault);
    if (c->body_size > (size_t)l->most_body) fault = LONG;
    if (fault) return told(l, c, text, NULL, 0, fault, to);
    if (body == NOT_YET) return kept(l, c, text, c->head.bytes, 0) || told(l, c, text, NULL, 0, FULL, to);
    const int good = told(l, c, text, c->body, c->body_size, NULL, to);
    emptied(l, &c->body, &c->body_room, &c->body_size);
    return good && kept(l, c, rest, end - rest, 0);
}

// The client has closed: whoever works on its request learns that nobody waits.
static int gone(Listener *l, Connection *c, PyObject *to) {
    const int good = c->state == BODY || c->state == CHUNKS ? told(l, c, c->in, NULL, 0, GONE, to)
                     : c->state == BUSY                     ? told(l, c, NULL, NULL, 0, GONE, to)
                                                            : 1;
    closed(l, c);
    return good;
}

static int pulled(Listener *l, Connection *c, PyObject *to) {
    for (;;) {
        const int fresh = c->state == CHUNKS || !c->in_size;
        char *into = fresh ? l->scratch : c->in + c->in_size;
        const size_t room = fresh ? SCRATCH : c->in_room - c->in_size;
        ssize_t n;
        Py_BEGIN_ALLOW_THREADS
        n = recv(c->fd, into, room, MSG_DONTWAIT);
        Py_END_ALLOW_THREADS
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) return 1;
        if (n <= 0) return gone(l, c, to);
        if (!taken(l, c, fresh ? into : c->in, fresh ? (size_t)n : c->in_size + n, to)) return 0;
        c->unread = (size_t)n == room;
        if (c->state == BUSY || !c->unread) return 1;  // whatever comes now is a new event
    }
}

// Throws away what a client that has its last answer still sends.
static void drained(Listener *l, Connection *c) {
    ssize_t n;
    while ((n = recv(c->fd, l->scratch, SCRATCH, MSG_DONTWAIT)) > 0) continue;
    if (n == 0 || errno != EAGAIN) closed(l, c);
}

static void answered(Listener *l, Connection *c) {
    if (c->tells_close) {
        shutdown(c->fd, SHUT_WR);
        c->state = LEAVING;
        c->until = now_ms() + LEAVING_MS;
        drained(l, c);
        return;
    }
    c->state = HEAD;
    c->until = now_ms() + l->idle_ms;
    if (c->in_size || c->unread) due(l, c);
}

static void pushed(Listener *l, Connection *c) {
    while (c->out_at < c->out_size) {
        const ssize_t n = send(c->fd, c->out + c->out_at, c->out_size - c->out_at, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return;  // a full socket tells when it has room, a broken one that it is
        c->out_at += n;
    }
    emptied(l, &c->out, &c->out_room, &c->out_size);
    answered(l, c);
}

static int late(Listener *l, Connection *c, PyObject *to) {
    if (c->state == HEAD && c->in_size) return told(l, c, NULL, NULL, 0, "408 no end of the headers in time", to);
    if (c->state == BODY || c->state == CHUNKS) return told(l, c, c->in, NULL, 0, SLOW, to);
    if (c->state != BUSY || c->out_size) closed(l, c);
    return 1;
}

static int looked_at_all(Listener *l, PyObject *to) {
    const int64_t now = now_ms();
    if (now - l->looked < LOOK_MS) return 1;
    l->looked = now;
    for (Connection *c = l->connections; c < l->connections + l->most; ++c)
        if (c->state != FREE && c->until <= now && !late(l, c, to)) return 0;
    return 1;
}

static int happened(Listener *l, Connection *c, uint32_t events, PyObject *to) {
    const uint32_t turn = c->turn;
    if (events & EPOLLOUT && c->out_size) pushed(l, c);
    if (c->turn == turn && events & ~EPOLLOUT) {
        if (c->state == LEAVING) drained(l, c);
        else if (c->state == BUSY) c->unread = 1;
        else if (!pulled(l, c, to)) return 0;
    }
    return c->turn != turn || !(events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) || gone(l, c, to);
}

static PyObject *listener_round(Listener *l, PyObject *Py_UNUSED(none)) {
    struct epoll_event events[EVENTS];
    PyObject *to = PyList_New(0);
    int good = to != NULL;
    const int again = l->due_count;
    l->due_count = 0;
    for (int i = 0; good && i < again; ++i) {  // none of them is put there again meanwhile: that takes an answer
        Connection *c = l->connections + l->due[i];
        c->due = 0;
        if (c->state == HEAD && c->in_size) good = taken(l, c, c->in, c->in_size, to);
        if (good && c->state != FREE && c->state != BUSY && c->state != LEAVING && c->unread) good = pulled(l, c, to);
    }
    const int count = good ? epoll_wait(l->epoll, events, EVENTS, 0) : 0;
    for (int i = 0; good && i < count; ++i) {
        Connection *c = found(l, events[i].data.u64);
        if (c) good = happened(l, c, events[i].events, to);
    }
    if (good && looked_at_all(l, to)) return to;
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
        Connection *c = found(l, key);
        if (c == NULL || c->state != BUSY || c->out_size) continue;
        c->tells_close |= close_after;
        ssize_t n;
        Py_BEGIN_ALLOW_THREADS
        while ((n = send(c->fd, data, size, MSG_NOSIGNAL | MSG_DONTWAIT)) < 0 && errno == EINTR) continue;
        Py_END_ALLOW_THREADS
        if (n == size) answered(l, c);
        else if ((n < 0 && errno != EAGAIN) || !roomy(l, &c->out, &c->out_room, size)) closed(l, c);
        else {
            memcpy(c->out, data, size);
            c->out_size = size, c->out_at = n < 0 ? 0 : n;
            c->until = now_ms() + l->head_ms;
        }
    }
    Py_DECREF(items);
    return PyBool_FromLong(l->due_count);
}

// add(fd): takes a connected socket over; False, and the socket stays the caller's, if there are as many as may be.
static PyObject *listener_add(Listener *l, PyObject *given) {
    const int fd = PyLong_AsLong(given);
    if (fd == -1 && PyErr_Occurred()) return NULL;
    if (!l->vacant_count || l->draining) Py_RETURN_FALSE;
    Connection *c = l->connections + l->vacant[l->vacant_count - 1];
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);  // of a Unix socket it fails, and need not be
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data.u64 = key_of(l, c)};
    if (epoll_ctl(l->epoll, EPOLL_CTL_ADD, fd, &event)) return PyErr_SetFromErrno(PyExc_OSError);
    --l->vacant_count, ++l->open;
    c->fd = fd, c->state = HEAD, c->unread = c->tells_close = 0;
    c->until = now_ms() + l->idle_ms;
    Py_RETURN_TRUE;
}

// drain(): closes the connections that are between two requests, and takes no new ones.
static PyObject *listener_drain(Listener *l, PyObject *Py_UNUSED(none)) {
    l->draining = 1;
    for (Connection *c = l->connections; c < l->connections + l->most; ++c)
        if (c->state == HEAD && !c->in_size && !c->unread) closed(l, c);
    Py_RETURN_NONE;
}

static PyObject *listener_close(Listener *l, PyObject *Py_UNUSED(none)) {
    for (Connection *c = l->connections; l->open && c < l->connections + l->most; ++c)
        if (c->state != FREE) closed(l, c);
    if (l->epoll >= 0) close(l->epoll);
    l->epoll = -1;
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
    Py_TYPE(l)->tp_free(l);
}

// Listener(most, most_body, most_held, head_ms, body_ms, idle_ms)
static PyObject *listener_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(named)) {
    Listener *l = (Listener *)type->tp_alloc(type, 0);
    if (l == NULL) return NULL;
    l->epoll = -1;
    if (!PyArg_ParseTuple(args, "iLLLLL", &l->most, &l->most_body, &l->most_held, &l->head_ms, &l->body_ms, &l->idle_ms) ||
        (l->most < 1 && PyErr_Format(PyExc_ValueError, "most: got %d, expected at least 1", l->most) == NULL)) {
        Py_DECREF(l);
        return NULL;
    }
    l->connections = calloc(l->most, sizeof(Connection));
    l->vacant = calloc(l->most, sizeof(int));
    l->due = calloc(l->most, sizeof(int));
    l->scratch = malloc(SCRATCH);
    if (!l->connections || !l->vacant || !l->due || !l->scratch || (l->epoll = epoll_create1(EPOLL_CLOEXEC)) < 0) {
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
    {"add", (PyCFunction)listener_add, METH_O, NULL},          {"drain", (PyCFunction)listener_drain, METH_NOARGS, NULL},
    {"close", (PyCFunction)listener_close, METH_NOARGS, NULL}, {"fileno", (PyCFunction)listener_fileno, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {{"open", T_INT, offsetof(Listener, open), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};

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
    PyObject *made = PyType_Ready(&type) ? NULL : PyModule_Create(&module);
    if (made && PyModule_AddObjectRef(made, "Listener", (PyObject *)&type)) Py_CLEAR(made);
    return made;
}
