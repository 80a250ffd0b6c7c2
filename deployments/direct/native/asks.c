// What engines are asked: which one, what together, and when it is told. An engine works by asks more than by rows.

#include "connection.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

static const double LINGER_S = 300e-6, FAILED_S = 1.0;  // as connection.py and engine_search.py have them
static const double SOON_MS = 1;                        // a short run, and a moment
enum { TOGETHER_ROWS = 1024 };

static int fits(const EngineRing *r, const Form *f, int rows, int contexts) {
    return dpi_form_laid_out(f, rows, contexts, NULL) + (int64_t)rows * f->tasks * 4 <= r->slot_bytes;
}

int dpi_asks_join(const EngineRing *r, const Ask *ask, const Form *f) {
    const Form *first = ask->form;
    return first->rings == f->rings && !memcmp(first->widths, f->widths, sizeof f->widths) && first->tasks == f->tasks &&
           first->priority == f->priority && first->deadline_s == f->deadline_s &&
           r->members[ask->slot] < MEMBERS && ask->rows + f->rows <= TOGETHER_ROWS &&
           fits(r, f, ask->rows + f->rows, ask->contexts + f->contexts);
}

EngineRing *dpi_asks_best(const Listener *l, const Form *f, double now) {
    EngineRing *found = NULL, *joined = NULL;
    int64_t least = INT64_MAX;
    const Py_ssize_t count = PyList_GET_SIZE(f->rings);
    for (Py_ssize_t i = 0; i < count; ++i) {
        EngineRing *r = (EngineRing *)PyList_GET_ITEM(f->rings, i);
        if (dpi_ring_leaving(r) || r->failed_at + FAILED_S > now) return NULL;  // who is asked then is Python's to say
        if (count == 1) {  // as on most nodes
            found = r;
            break;
        }
        const int64_t load = dpi_ring_load(r);
        if (load < least) found = r, least = load;
        if (r->place >= 0 && l->asks[r->place].form && dpi_asks_join(r, l->asks + r->place, f)) joined = r;
    }
    if (least > 0 && joined) found = joined;
    return found && found->place >= 0 && fits(found, f, f->rows, f->contexts) ? found : NULL;
}

// Puts an ask together and on the ring.
static void put(Listener *l, EngineRing *r) {
    Ask *ask = l->asks + r->place;
    const Form *f = ask->form;
    if (f == NULL) return;
    ask->form = NULL;
    uint64_t waiting = 0;
    for (int i = 0; i < r->members[ask->slot]; ++i) waiting |= dpi_ring_owners(r, ask->slot)[i];
    if (!waiting) {
        dpi_ring_give(r, ask->slot);
        dpi_form_let_go((Form *)f);
        return;
    }
    char *block = dpi_ring_block(r, ask->slot);
    int64_t at[SECTIONS];
    dpi_form_laid_out(f, ask->rows, ask->contexts, at);
    memcpy(block, f->block_header, HEADER_BYTES);
    memcpy(block + 4, &ask->rows, 4);
    memcpy(block + 8, &ask->contexts, 4);
    for (int k = 0; k < SECTIONS; ++k) memcpy(block + at[k], ask->section[k], f->widths[k] * (k & 1 ? ask->contexts : ask->rows));
    dpi_ring_ask(r, ASK_SCORE, ask->slot, ask->rows, ask->contexts, ask->deadline, ask->arrived, f->priority);
    dpi_form_let_go((Form *)f);
}

void dpi_asks_tell(Listener *l, EngineRing *r) {
    put(l, r);
    dpi_ring_tell(r);
}

// What an engine would not read yet may grow, if it has room and runs are short; it is looked at again in a moment, as nothing may
// happen here by then. So may what the engine would not run yet, however long its runs, but for a moment only.
static int held_back(Listener *l, const EngineRing *r, const Ask *next) {
    const Form *first = next->form;
    if (r->unsaid || first->priority > 0 || !dpi_asks_join(r, next, first)) return 0;
    const double now = dpi_now_s(), moment = SOON_MS / 1e3;
    const int unread = r->run_ms < SOON_MS && dpi_ring_behind(r);
    if (!unread && (now >= next->arrived + moment || !dpi_ring_far_behind(r))) return 0;
    dpi_timed(l, unread ? now + moment : next->arrived + moment);
    return 1;
}

int dpi_asks_flush(Listener *l) {
    for (int i = 0; i < RINGS; ++i) {
        EngineRing *r = l->rings[i];
        const Ask *next = l->asks + i;
        if (r == NULL || (!r->unsaid && next->form == NULL) || held_back(l, r, next)) continue;
        dpi_asks_tell(l, r);
        if (r->open != 1 || l->flying != 1 || r->lone_s > LINGER_S) continue;
        // A GPU needs some 30 us, and an event loop that sleeps 50 us or more to wake up. Others may have the GIL meanwhile.
        Py_BEGIN_ALLOW_THREADS
        for (const double until = dpi_now_s() + LINGER_S; !dpi_ring_answered(r) && dpi_now_s() < until;) sched_yield();
        Py_END_ALLOW_THREADS
        if (dpi_ring_answered(r) && !dpi_express_answered(l, r)) return 0;
    }
    return 1;
}

PyObject *dpi_asks_attach(Listener *l, PyObject *given) {
    if (!Py_IS_TYPE(given, &dpi_engine_ring_type)) return PyErr_SetString(PyExc_TypeError, "ring: expected an EngineRing"), NULL;
    EngineRing *r = (EngineRing *)given;
    int place = 0;
    while (place < RINGS && l->rings[place]) ++place;
    if (place == RINGS || r->place >= 0 || l->epoll < 0) Py_RETURN_FALSE;
    for (int k = 0; k < SECTIONS; ++k) {
        char *room = realloc(l->asks[place].section[k], r->slot_bytes);
        if (room == NULL) return PyErr_NoMemory();
        l->asks[place].section[k] = room;
    }
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = RING_KEY | (uint64_t)place << 32};
    if (epoll_ctl(l->epoll, EPOLL_CTL_ADD, r->answer_fd, &event)) return PyErr_SetFromErrno(PyExc_OSError);
    Py_INCREF(given);
    l->rings[place] = r, r->place = place;
    Py_RETURN_TRUE;
}

PyObject *dpi_asks_detach(Listener *l, PyObject *given) {
    EngineRing *r = (EngineRing *)given;
    if (!Py_IS_TYPE(given, &dpi_engine_ring_type) || r->place < 0 || l->rings[r->place] != r) Py_RETURN_NONE;
    int good = dpi_express_answered(l, r);  // what it has answered before
    dpi_form_let_go((Form *)l->asks[r->place].form);
    l->asks[r->place].form = NULL;
    if (l->epoll >= 0) epoll_ctl(l->epoll, EPOLL_CTL_DEL, r->answer_fd, NULL);
    l->rings[r->place] = NULL, r->place = -1;
    for (Connection *c = l->connections; good && l->flying && c < l->connections + l->most; ++c)
        if (c->state == BUSY && c->sent.form && c->sent.ring == r) good = dpi_ended(l, c, ENDED_ENGINE_GONE, 0, NULL);
    Py_DECREF(r);
    if (!good) return NULL;
    Py_RETURN_NONE;
}
