// What becomes of one client's bytes: from its socket to a request for Python, and from an answer to its socket.

#include "connection.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { LEAVING_MS = 2000 };
// Faults of requests whose head is told with them; all others begin with the status to answer with.
static const char GONE[] = "gone", LONG[] = "long", SLOW[] = "slow", FULL[] = "503 too many bytes of requests in work";

int64_t dpi_now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000) + t.tv_nsec / 1000000;
}

unsigned long long dpi_key_of(Listener *l, Connection *c) {
    return (unsigned long long)c->turn << 32 | (unsigned long long)(c - l->connections);
}

static void emptied(Listener *l, char **buffer, size_t *room, size_t *size) {
    free(*buffer);
    l->held -= *room;
    *buffer = NULL, *room = *size = 0;
}

int dpi_roomy(Listener *l, char **buffer, size_t *room, size_t size) {
    if (size <= *room) return 1;
    if (l->held + (long long)(size - *room) > l->most_held) return 0;
    char *larger = realloc(*buffer, size);
    if (larger == NULL) return 0;
    l->held += size - *room;
    *buffer = larger, *room = size;
    return 1;
}

Connection *dpi_found(Listener *l, unsigned long long key) {
    const uint32_t place = (uint32_t)key;
    Connection *c = place < (uint32_t)l->most ? l->connections + place : NULL;
    return c && c->state != FREE && c->turn == key >> 32 ? c : NULL;
}

void dpi_closed(Listener *l, Connection *c) {
    dpi_express_dropped(l, c);
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
    size_t apart = 0, fixed = text ? h->bytes - 2 : 0;
    for (uint32_t i = 0; text && i < h->apart; ++i) apart += h->line[i].end - h->line[i].at;
    PyObject *head = PyBytes_FromStringAndSize(NULL, fixed - apart), *lines = PyBytes_FromStringAndSize(NULL, apart);
    if (head && lines && text) dpi_http_fixed(text, h, PyBytes_AS_STRING(head), PyBytes_AS_STRING(lines));
    const int close_after = c->tells_close = fault != NULL || !text || h->close;
    PyObject *item = NULL;
    if (head && lines) {
        item = Py_BuildValue("(KOOy#Os)", dpi_key_of(l, c), head, lines, body ? body : "", (Py_ssize_t)size, close_after ? Py_True : Py_False, fault);
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
        if (!dpi_roomy(l, &c->in, &c->in_room, room)) return 0;
    } else {
        if (!dpi_roomy(l, &c->in, &c->in_room, room > size ? room : size)) return 0;
        memcpy(c->in, data, size);
    }
    c->in_size = size;
    return 1;
}

// What came behind a request that is told. Without room for it, the connection ends with the answer.
static int followed(Listener *l, Connection *c, const char *data, size_t size) {
    if (!kept(l, c, data, size, 0)) emptied(l, &c->in, &c->in_room, &c->in_size), c->tells_close = 1;
    return 1;
}

int dpi_taken(Listener *l, Connection *c, const char *data, size_t size, PyObject *to) {
    const char *fault = NULL, *text = data, *rest = data;
    if (c->state == HEAD) {
        const int head = dpi_http_head(data, size, &c->head, &fault);
        if (head == NEVER) return told(l, c, NULL, NULL, 0, fault, to);
        if (head == NOT_YET) {
            if (!c->in_size) c->until = dpi_now_ms() + l->head_ms;
            return kept(l, c, data, size, HEAD_BYTES) || told(l, c, NULL, NULL, 0, FULL, to);
        }
        c->until = dpi_now_ms() + l->body_ms;
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
        // Room for what has come and as much again, not for what a head announces: heads alone must not fill the memory.
        const size_t room = whole < 2 * size + HEAD_BYTES ? whole : 2 * size + HEAD_BYTES;
        if (size < whole) return kept(l, c, data, size, room) || told(l, c, data, NULL, 0, FULL, to);
        const int begun = dpi_express_begun(l, c, data);
        const int good = begun ? begun > 0 : told(l, c, data, data + c->head.bytes, c->head.body_bytes, NULL, to);
        return good && followed(l, c, data + whole, size - whole);
    }
    const char *end = data + size;
    if (!dpi_roomy(l, &c->body, &c->body_room, c->body_size + (end - rest))) return told(l, c, text, NULL, 0, FULL, to);
    const int body = dpi_http_chunks(&c->chunks, &rest, end, c->body, &c->body_size, &fault);
    if (c->body_size > (size_t)l->most_body) fault = LONG;
    if (fault) return told(l, c, text, NULL, 0, fault, to);
    if (body == NOT_YET) return kept(l, c, text, c->head.bytes, 0) || told(l, c, text, NULL, 0, FULL, to);
    const int good = told(l, c, text, c->body, c->body_size, NULL, to);
    emptied(l, &c->body, &c->body_room, &c->body_size);
    return good && followed(l, c, rest, end - rest);
}

int dpi_gone(Listener *l, Connection *c, PyObject *to) {
    const int good = c->state == BODY || c->state == CHUNKS ? told(l, c, c->in, NULL, 0, GONE, to)
                     : c->state == BUSY && !c->sent.form    ? told(l, c, NULL, NULL, 0, GONE, to)
                                                            : 1;
    dpi_closed(l, c);
    return good;
}

int dpi_pulled(Listener *l, Connection *c, PyObject *to) {
    const int fresh = c->state == CHUNKS || !c->in_size;
    char *into = fresh ? l->scratch : c->in + c->in_size;
    const size_t room = fresh ? SCRATCH : c->in_room - c->in_size;
    ssize_t n;
    while ((n = recv(c->fd, into, room, MSG_DONTWAIT)) < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return c->unread = 0, 1;
    if (n <= 0) return dpi_gone(l, c, to);
    if (!dpi_taken(l, c, fresh ? into : c->in, fresh ? (size_t)n : c->in_size + n, to)) return 0;
    c->unread = (size_t)n == room;                 // whatever comes else is a new event
    if (c->unread && c->state != BUSY) due(l, c);  // in turns: who sends faster than it is read would have all of them
    return 1;
}

void dpi_drained(Listener *l, Connection *c) {
    const ssize_t n = recv(c->fd, l->scratch, SCRATCH, MSG_DONTWAIT);
    if (n > 0) due(l, c);  // in turns too
    else if (n == 0 || errno != EAGAIN) dpi_closed(l, c);
}

void dpi_answered(Listener *l, Connection *c) {
    if (c->tells_close || (l->draining && !c->in_size && !c->unread)) {
        shutdown(c->fd, SHUT_WR);
        c->state = LEAVING;
        c->until = dpi_now_ms() + LEAVING_MS;
        dpi_drained(l, c);
        return;
    }
    c->state = HEAD;
    c->until = dpi_now_ms() + (c->in_size ? l->head_ms : l->idle_ms);
    if (c->in_size || c->unread) due(l, c);
}

void dpi_first_pushed(Listener *l, Connection *c, const struct iovec *parts, int count) {
    const struct msghdr message = {.msg_iov = (struct iovec *)parts, .msg_iovlen = count};
    size_t size = 0;
    for (int i = 0; i < count; ++i) size += parts[i].iov_len;
    ssize_t n;
    while ((n = sendmsg(c->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT)) < 0 && errno == EINTR) continue;
    if (n == (ssize_t)size) return dpi_answered(l, c);
    if ((n < 0 && errno != EAGAIN) || !dpi_roomy(l, &c->out, &c->out_room, size)) return dpi_closed(l, c);
    struct epoll_event event = {.events = WATCHED | EPOLLOUT, .data.u64 = dpi_key_of(l, c)};
    if (epoll_ctl(l->epoll, EPOLL_CTL_MOD, c->fd, &event)) return dpi_closed(l, c);
    char *at = c->out;
    for (int i = 0; i < count; ++i) at = mempcpy(at, parts[i].iov_base, parts[i].iov_len);
    c->out_size = size, c->out_at = n < 0 ? 0 : n;
    c->until = dpi_now_ms() + l->head_ms;
}

void dpi_pushed(Listener *l, Connection *c) {
    while (c->out_at < c->out_size) {
        const ssize_t n = send(c->fd, c->out + c->out_at, c->out_size - c->out_at, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return;  // a full socket tells when it has room, a broken one that it is
        c->out_at += n;
    }
    emptied(l, &c->out, &c->out_room, &c->out_size);
    dpi_answered(l, c);
}

int dpi_late(Listener *l, Connection *c, PyObject *to) {
    if (c->state == HEAD && c->in_size) return told(l, c, NULL, NULL, 0, "408 no end of the headers in time", to);
    if (c->state == BODY || c->state == CHUNKS) return told(l, c, c->in, NULL, 0, SLOW, to);
    if (c->state != BUSY || c->out_size) dpi_closed(l, c);
    return 1;
}
