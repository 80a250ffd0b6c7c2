// Clients that come: out of a listening socket's queue, and into the listener. Many with a call: one by one in Python, with objects of
// their own, each cost 30 us of CPU, and whoever had been served before waited for hundreds of them.

#include "connection.h"

#include <errno.h>
#include <sys/socket.h>
#include <unistd.h>

// accept(listening, most): as descriptors, those that wait there, at most so many; [] if another process was faster.
PyObject *dpi_arrivals_accepted(Listener *Py_UNUSED(l), PyObject *args) {
    int listening, most, fd;
    if (!PyArg_ParseTuple(args, "ii", &listening, &most)) return NULL;
    PyObject *out = PyList_New(0);
    for (int tries = 0; out && tries < most; ++tries) {
        if ((fd = accept4(listening, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) < 0) {
            if (errno == EINTR || errno == ECONNABORTED) continue;  // that client is gone already
            if (errno == EAGAIN || PyList_GET_SIZE(out)) break;
            PyErr_SetFromErrno(PyExc_OSError);
            Py_CLEAR(out);
            break;
        }
        PyObject *one = PyLong_FromLong(fd);
        if (one == NULL || PyList_Append(out, one)) {
            close(fd);
            for (Py_ssize_t i = 0; i < PyList_GET_SIZE(out); ++i) close((int)PyLong_AsLong(PyList_GET_ITEM(out, i)));
            Py_CLEAR(out);
        }
        Py_XDECREF(one);
    }
    return out;
}

static int arrived(Listener *l, int fd) {
    if (!l->vacant_count || l->draining) return 0;
    Connection *c = l->connections + l->vacant[l->vacant_count - 1];
    struct epoll_event event = {.events = WATCHED, .data.u64 = dpi_key_of(l, c)};  // room to write would be a round for nothing
    if (epoll_ctl(l->epoll, EPOLL_CTL_ADD, fd, &event)) return 0;
    --l->vacant_count, ++l->open;
    c->fd = fd, c->state = HEAD, c->unread = c->tells_close = 0;
    c->until = dpi_now_ms() + l->idle_ms;
    return 1;
}

// add([fd]): takes connected sockets over that do not block; how many, from the first on. The others stay the caller's: there are as
// many as may be, or the kernel watches no more of them.
PyObject *dpi_arrivals_added(Listener *l, PyObject *given) {
    PyObject *items = PySequence_Fast(given, "add: expected a sequence of descriptors");
    if (items == NULL) return NULL;
    Py_ssize_t taken = 0;
    for (; taken < PySequence_Fast_GET_SIZE(items); ++taken) {
        const int fd = (int)PyLong_AsLong(PySequence_Fast_GET_ITEM(items, taken));
        if ((fd == -1 && PyErr_Occurred()) || !arrived(l, fd)) break;
    }
    Py_DECREF(items);
    return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(taken);
}
