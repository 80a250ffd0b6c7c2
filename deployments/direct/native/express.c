// The GIL is held throughout: to give it up for a system call that does not block is to wait for whoever computes meanwhile.

#include "connection.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

static const double RECENT = 0.25;  // as connection.py has it
enum { HEADER_TEXT = 1024, FORM_HEAD = 4096 };  // the last as express.py has it

// The connection's request is no longer with C.
static void over(Listener *l, Connection *c) {
    --l->flying;
    dpi_form_let_go(c->sent.form);
    Py_CLEAR(c->sent.ring);
    c->sent.form = NULL;
}

// Its slot stays taken until the engine has answered.
static void abandoned(Listener *l, Connection *c) {
    EngineRing *r = c->sent.ring;
    if (r->place < 0 || !dpi_ring_leave(r, c->sent.slot, c->sent.member)) return;
    const Ask *next = l->asks + r->place;
    if (next->form == NULL || next->slot != (int)c->sent.slot) dpi_ring_ask(r, ASK_CANCEL, c->sent.slot, 0, 0, 0, 0, 0);
}

int dpi_ended(Listener *l, Connection *c, int why, float retry_s, const float *scores) {
    const Form *f = c->sent.form;
    PyObject *item = Py_BuildValue(
        "(KOOs#iffffdy#)", dpi_key_of(l, c), f->known, c->sent.ring, c->sent.id, (Py_ssize_t)c->sent.id_size, why, c->sent.queue_ms, c->sent.encode_ms,
        c->sent.device_ms, retry_s, c->sent.started, (const char *)scores, scores ? (Py_ssize_t)f->rows * f->tasks * 4 : 0
    );
    over(l, c);
    const int good = item && !PyList_Append(l->ended, item);
    l->ended_count += good;
    Py_XDECREF(item);
    return good;
}

void dpi_express_dropped(Listener *l, Connection *c) {
    if (c->sent.form == NULL) return;
    abandoned(l, c);
    dpi_counted(l, &c->sent, NULL, dpi_now_s());
    over(l, c);
}

void dpi_timed(Listener *l, double at) {
    if (at >= l->timer_at || at > INT64_MAX / 2e9) return;  // beyond what its ns can say: never
    l->timer_at = at;
    const int64_t ns = (int64_t)(at * 1e9);
    const struct itimerspec when = {.it_value = {ns / 1000000000, ns % 1000000000}};
    timerfd_settime(l->timer, TFD_TIMER_ABSTIME, &when, NULL);
}

// The id that the client gave its request, as answers.py takes one; 0 if it gave none.
static int own_id(const Head *h, const char *data, char *id) {
    static const char NAME[] = "x-request-id:";
    for (uint32_t i = 0; i < h->apart; ++i) {
        const char *at = data + h->line[i].at, *end = data + h->line[i].end;
        if ((size_t)(end - at) < sizeof NAME - 1 || strncasecmp(at, NAME, sizeof NAME - 1)) continue;
        at += sizeof NAME - 1;
        while (at < end && (*at == ' ' || *at == '\t')) ++at;
        while (at < end && strchr(" \t\r\n", end[-1])) --end;
        if (at == end || end - at > ID_BYTES) continue;
        int size = 0;
        for (; at < end && *at >= ' ' && *at <= '~'; ++at) id[size++] = *at;
        if (at == end) return size;
    }
    return 0;
}

static void sent(Listener *l, Connection *c, const char *data, Sent as) {
    c->sent = as;
    ++as.form->uses;
    Py_INCREF(as.ring);
    ++l->flying;
    c->tells_close = c->head.close;
    c->state = BUSY;
    if ((c->sent.id_size = own_id(&c->head, data, c->sent.id))) return;
    const uint64_t id = dpi_drawn(l);
    for (int i = 0; i < 16; ++i) c->sent.id[i] = "0123456789abcdef"[id >> 4 * (15 - i) & 15];
    c->sent.id_size = 16;
}

int dpi_express_begun(Listener *l, Connection *c, const char *data) {
    const Head *h = &c->head;
    if (!l->form_count || h->body_bytes < 0 || h->apart == APART) return 0;  // of so many lines apart others may be in the head
    char fixed[FORM_HEAD];
    if (h->apart && h->bytes > sizeof fixed) return 0;
    const size_t size = h->apart ? dpi_http_fixed(data, h, fixed, NULL) : h->bytes - 2;
    Form *f = dpi_form_of(l, h->apart ? fixed : data, size, data + h->bytes, h->body_bytes);
    if (f == NULL) return 0;
    const double started = dpi_now_s();
    EngineRing *r = dpi_asks_best(l, f, started);
    if (r == NULL) return 0;
    Ask *ask = l->asks + r->place;
    if (ask->form && !dpi_asks_join(r, ask, f)) dpi_asks_tell(l, r);
    const int alone = ask->form == NULL;
    const int64_t waiting = dpi_ring_waiting(r) + (alone ? 0 : ask->rows);
    if (waiting + f->rows > r->most_rows && f->rows <= r->most_rows) {  // refused before it is encoded, which costs more than all else
        sent(l, c, data, (Sent){.form = f, .ring = r, .started = started});
        return dpi_ended(l, c, ENDED_FULL, (float)waiting, NULL) ? 1 : -1;
    }
    if (f->rows > r->most_rows || (alone && !r->free_count)) return 0;
    if (alone) ask->rows = ask->contexts = 0;
    if (!dpi_form_encoded(ask, f, data + h->bytes + f->envelope_size)) return 0;
    const double now = dpi_now_s(), deadline = f->deadline_s ? started + f->deadline_s : INFINITY;
    if (alone) {
        ask->slot = dpi_ring_take(r), ask->form = f, ask->arrived = now;
        ++f->uses;
    }
    sent(l, c, data, (Sent){.form = f, .ring = r, .slot = ask->slot, .member = r->members[ask->slot], .row = ask->rows,
                            .lone = r->open == 1 && alone, .started = started, .deadline = deadline, .encode_ms = (float)((now - started) * 1e3)});
    dpi_ring_join(r, ask->slot, dpi_key_of(l, c) + 1);
    ask->rows += f->rows, ask->contexts += f->contexts, ask->deadline = deadline;
    if (deadline < l->late_at) dpi_timed(l, l->late_at = deadline);
    return 1;
}

static int all_finite(const float *scores, int64_t count) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < count; ++i) wrong += !isfinite(scores[i]);
    return !wrong;
}

static void answer(Listener *l, Connection *c, const Form *f, const float *scores) {
    char text[HEADER_TEXT], json[160];
    const size_t raw = (size_t)f->rows * f->tasks * 4;
    const int times = snprintf(json, sizeof json, "\"queue_ms\":%.3f,\"encode_ms\":%.3f,\"device_ms\":%.3f", c->sent.queue_ms,
                               c->sent.encode_ms, c->sent.device_ms);
    const size_t header = f->before_size + times + f->after_size;
    c->tells_close |= l->draining;
    const int lines = snprintf(text, sizeof text,
                               "inference-header-content-length: %zu\r\ncontent-length: %zu\r\nx-request-id: %.*s\r\n%s\r\n", header,
                               header + raw, c->sent.id_size, c->sent.id, c->tells_close ? "connection: close\r\n" : "");
    const struct iovec parts[] = {
        {(char *)f->opening, f->opening_size}, {l->date, l->date_size}, {(char *)f->headers, f->headers_size}, {text, lines},
        {(char *)f->before, f->before_size},   {json, times},           {(char *)f->after, f->after_size},     {(float *)scores, raw},
    };
    dpi_first_pushed(l, c, parts, sizeof parts / sizeof *parts);
}

// Where an ask's scores are: the engine has them lie behind its block, whose rows and contexts are as they were written here.
static const char *behind_block(const EngineRing *r, const Form *f, uint32_t slot) {
    return dpi_ring_block(r, slot) + dpi_form_laid_out(f, r->rows[slot], r->contexts[slot], NULL);
}

static int answered(Listener *l, Connection *c, const RingAnswer *got, const float *scores, double now) {
    Form *f = c->sent.form;
    EngineRing *r = c->sent.ring;
    c->sent.queue_ms = got->queue_ms, c->sent.device_ms = got->device_ms;
    if (c->sent.lone) r->lone_s += RECENT * (now - c->sent.started - r->lone_s);
    if (got->status != STATUS_OK) return dpi_ended(l, c, (int)got->status, got->retry_s, NULL);
    if (!all_finite(scores, (int64_t)f->rows * f->tasks)) return dpi_ended(l, c, STATUS_OK, 0, scores);
    dpi_counted(l, &c->sent, scores, now);
    ++f->uses;  // until it is sent
    over(l, c);
    answer(l, c, f, scores);
    dpi_form_let_go(f);
    return 1;
}

int dpi_express_answered(Listener *l, EngineRing *r) {
    RingAnswer got;
    int good = 1;
    const double now = dpi_now_s();
    while (dpi_ring_next(r, &got)) {
        const Ask *next = l->asks + r->place;
        if (next->form && next->slot == (int)got.slot) continue;  // it was not asked for yet
        if (got.status == STATUS_FAILED) r->failed_at = now;
        if (got.status == STATUS_OK) r->run_ms = got.device_ms;
        const char *behind = NULL;
        for (int i = 0; good && i < r->members[got.slot]; ++i) {
            const uint64_t owner = dpi_ring_owners(r, got.slot)[i];
            Connection *c = owner ? dpi_found(l, owner - 1) : NULL;
            // Its request may be another one by now: a ring that was detached, and is attached again, has its old owners.
            if (c == NULL || c->sent.form == NULL || c->sent.ring != r || c->sent.slot != got.slot || c->sent.member != i) continue;
            if (behind == NULL) behind = behind_block(r, c->sent.form, got.slot);
            good = answered(l, c, &got, (const float *)behind + (int64_t)c->sent.row * c->sent.form->tasks, now);
        }
        dpi_ring_give(r, got.slot);
        if (!good) return 0;
    }
    return 1;
}

int dpi_express_woken(Listener *l, EngineRing *r) {
    uint64_t times;
    while (read(r->answer_fd, &times, sizeof times) < 0 && errno == EINTR) continue;
    return dpi_express_answered(l, r);
}

int dpi_express_late(Listener *l) {
    uint64_t times;
    while (read(l->timer, &times, sizeof times) < 0 && errno == EINTR) continue;
    const double now = dpi_now_s();
    double next = INFINITY;
    l->timer_at = INFINITY;
    if (l->late_at > now) return dpi_timed(l, l->late_at), 1;
    l->late_at = INFINITY;
    for (Connection *c = l->connections; l->flying && c < l->connections + l->most; ++c) {
        if (c->state != BUSY || c->sent.form == NULL) continue;
        if (c->sent.deadline > now) next = fmin(next, c->sent.deadline);
        else {
            abandoned(l, c);
            if (!dpi_ended(l, c, ENDED_LATE, 0, NULL)) return 0;
        }
    }
    dpi_timed(l, l->late_at = next);
    return 1;
}

PyObject *dpi_express_ended(Listener *l, PyObject *Py_UNUSED(none)) {
    PyObject *fresh = PyList_New(0), *was = l->ended;
    if (fresh == NULL) return NULL;
    l->ended = fresh, l->ended_count = 0;
    return was;
}

PyObject *dpi_express_date(Listener *l, PyObject *line) {
    char *text;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(line, &text, &size)) return NULL;
    if (size > (Py_ssize_t)sizeof l->date) return PyErr_SetString(PyExc_ValueError, "date: got a line too long"), NULL;
    memcpy(l->date, text, size);
    l->date_size = size;
    Py_RETURN_NONE;
}
