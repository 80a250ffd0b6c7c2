// The GIL is held throughout: to give it up for a system call that does not block is to wait for whoever computes meanwhile.

#include "express.h"

#include <errno.h>
#include <math.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "runtime/id_records.h"

static const double LINGER_S = 300e-6, RECENT = 0.25, FAILED_S = 1.0;  // as connection.py and scorer.py have them
enum { PER_SECOND = 500, MOST_OF_A_REQUEST = 64, RECORDS = 1 << 16, HEADER_TEXT = 1024, TELL_EVERY = 16 };

// What is counted of a request that is over.
typedef struct Record {
    Form *form;
    int cancelled, sampled, sample_at;  // scores of so many rows, from there on in `samples`
    float queue_ms, encode_ms, device_ms, total_ms;
} Record;

static uint64_t mixed(const char *data, size_t size) {
    uint64_t hash = size, word;
    for (; size >= 8; data += 8, size -= 8) {
        memcpy(&word, data, 8);
        hash = (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15);
        hash ^= hash >> 29;
    }
    word = 0;
    memcpy(&word, data, size);
    hash = (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ hash >> 32;
}

static uint64_t drawn(Listener *l) {  // splitmix64; ids of requests are no secrets
    uint64_t z = l->draw += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static void let_go(Form *f) {
    if (f == NULL || --f->uses) return;
    Py_XDECREF(f->known);
    Py_XDECREF(f->rings);
    Py_XDECREF(f->kept);
    free(f);
}

static void counted(Listener *l, Connection *c, int cancelled, double now) {
    if (l->record_count == RECORDS) return;  // nobody has asked for them for long
    if (l->record_count == l->record_room) {
        const int room = l->record_room ? 2 * l->record_room : 256;
        Record *more = realloc(l->records, room * sizeof *more);
        if (more == NULL) return;
        l->records = more, l->record_room = room;
    }
    ++c->sent.form->uses;
    l->records[l->record_count++] = (Record){
        c->sent.form, cancelled, 0, 0, c->sent.queue_ms, c->sent.encode_ms, c->sent.device_ms,
        (float)((now - c->sent.started) * 1e3),
    };
}

// As ScoreSample: about PER_SECOND rows a second, each as likely as any other.
static void sampled(Listener *l, EngineRing *r, const float *scores, int rows, int tasks, double now) {
    const double passed = now - r->sample_since;
    if (passed >= 1) {
        r->sample_every = fmax(1, round(r->sample_rows / passed / PER_SECOND));
        r->sample_rows = 0, r->sample_since = now;
    }
    r->sample_rows += rows;
    const int least = (rows + MOST_OF_A_REQUEST - 1) / MOST_OF_A_REQUEST, every = r->sample_every > least ? r->sample_every : least;
    if (!l->record_count) return;
    Record *record = l->records + l->record_count - 1;
    record->sample_at = l->sample_count;
    for (int row = (int)(drawn(l) % (uint64_t)every); row < rows && l->sample_count + tasks <= SAMPLES; row += every) {
        memcpy(l->samples + l->sample_count, scores + (int64_t)row * tasks, tasks * sizeof *scores);
        l->sample_count += tasks, ++record->sampled;
    }
}

// The connection's request is no longer with C.
static void over(Listener *l, Connection *c) {
    --l->flying;
    let_go(c->sent.form);
    Py_CLEAR(c->sent.ring);
    c->sent.form = NULL;
}

// Its slot stays taken until the engine has answered.
static void abandoned(Connection *c) {
    EngineRing *r = c->sent.ring;
    if (r->place < 0) return;
    r->owner[c->sent.slot] = NOBODY;
    dpi_ring_ask(r, ASK_CANCEL, c->sent.slot, 0, 0, 0, 0, 0);
}

// From here on it is Python's: (key, known, ring, request id, why, queue_ms, encode_ms, device_ms, retry_s, started, scores or None).
static int ended(Listener *l, Connection *c, int why, float retry_s, const float *scores) {
    const Form *f = c->sent.form;
    PyObject *item = Py_BuildValue(
        "(KOOs#iffffdy#)", dpi_key_of(l, c), f->known, c->sent.ring, c->sent.id, (Py_ssize_t)16, why, c->sent.queue_ms, c->sent.encode_ms,
        c->sent.device_ms, retry_s, c->sent.started, (const char *)scores, (Py_ssize_t)(scores ? f->rows * f->tasks * 4 : 0)
    );
    over(l, c);
    const int good = item && !PyList_Append(l->ended, item);
    l->ended_count += good;
    Py_XDECREF(item);
    return good;
}

void dpi_express_dropped(Listener *l, Connection *c) {
    if (c->sent.form == NULL) return;
    abandoned(c);
    counted(l, c, 1, dpi_now_s());
    over(l, c);
}

// Those of one engine are cheap to look through, and there is one on most nodes.
static EngineRing *best(const Form *f, double now) {
    EngineRing *found = NULL;
    int64_t least = INT64_MAX;
    const Py_ssize_t count = PyList_GET_SIZE(f->rings);
    for (Py_ssize_t i = 0; i < count; ++i) {
        EngineRing *r = (EngineRing *)PyList_GET_ITEM(f->rings, i);
        if (dpi_ring_leaving(r) || r->failed_at + FAILED_S > now) return NULL;  // who is asked then is Python's to say
        const int64_t load = count > 1 ? dpi_ring_load(r) : 0;
        if (load < least) found = r, least = load;
    }
    const int room = found && found->place >= 0 && found->free_count && f->block_bytes + (int64_t)f->rows * f->tasks * 4 <= found->slot_bytes;
    return room && dpi_ring_waiting(found) + f->rows <= found->most_rows ? found : NULL;
}

static int encoded(const Form *f, const char *tensors, char *block) {
    memcpy(block, f->block_header, 64);
    int32_t *request_of_row = (int32_t *)(block + f->request_of_row_at);
    for (int i = 0; i < f->rows; ++i) request_of_row[i] = f->contexts > 1 ? i : 0;
    for (const Part *p = f->part; p < f->part + f->parts; ++p) {
        const char *given = tensors + p->start;
        const int64_t wrong = p->legal ? dpi_packed(p->legal, p->columns, given, p->wide, p->rows, (uint8_t *)block + p->place, p->record_bytes)
                                       : dpi_copied(given, p->size, block + p->place);
        if (wrong) return 0;
    }
    return 1;
}

static void timed(Listener *l, double at) {
    if (at >= l->timer_at) return;
    l->timer_at = at;
    const int64_t ns = (int64_t)(at * 1e9);
    const struct itimerspec when = {.it_value = {ns / 1000000000, ns % 1000000000}};
    timerfd_settime(l->timer, TFD_TIMER_ABSTIME, &when, NULL);
}

int dpi_express_begun(Listener *l, Connection *c, const char *data) {
    const Head *h = &c->head;
    if (!l->form_count || h->apart || h->body_bytes < 0) return 0;
    const size_t head_size = h->bytes - 2;
    const uint64_t hash = mixed(data, head_size);
    Form **set = l->forms + hash % FORM_SETS * FORM_WAYS, *f = NULL;
    for (int way = 0; way < FORM_WAYS && !f; ++way) {
        Form *one = set[way];
        if (one && one->hash == hash && (size_t)one->head_size == head_size && one->body_size == h->body_bytes &&
            !memcmp(one->head, data, head_size) && !memcmp(one->envelope, data + h->bytes, one->envelope_size))
            f = one;
    }
    if (f == NULL) return 0;
    const double started = dpi_now_s();
    EngineRing *r = best(f, started);
    if (r == NULL) return 0;
    const uint32_t slot = dpi_ring_take(r, dpi_key_of(l, c) + 1);
    if (!encoded(f, data + h->bytes + f->envelope_size, dpi_ring_block(r, slot))) {
        dpi_ring_give(r, slot);  // a value is not what it should be, which Python can say
        return 0;
    }
    const double now = dpi_now_s(), deadline = f->deadline_s ? started + f->deadline_s : INFINITY;
    c->sent = (Sent){.form = f, .ring = r, .slot = slot, .lone = r->open == 1, .started = started, .deadline = deadline,
                     .encode_ms = (float)((now - started) * 1e3)};
    ++f->uses;
    Py_INCREF(r);
    ++l->flying;
    const uint64_t id = drawn(l);
    for (int i = 0; i < 16; ++i) c->sent.id[i] = "0123456789abcdef"[id >> 4 * (15 - i) & 15];
    dpi_ring_ask(r, ASK_SCORE, slot, f->rows, f->contexts, deadline, now, f->priority);
    if (f->deadline_s) timed(l, deadline);
    if (++l->begun % TELL_EVERY == 0) dpi_ring_tell(r);
    c->tells_close = h->close;
    c->state = BUSY;
    return 1;
}

int dpi_express_flushed(Listener *l) {
    for (int i = 0; i < RINGS; ++i) {
        EngineRing *r = l->rings[i];
        if (r == NULL || !r->unsaid) continue;
        dpi_ring_tell(r);
        if (r->open != 1 || l->flying != 1 || r->lone_s > LINGER_S) continue;
        // A GPU needs some 30 us, and an event loop that sleeps 50 us or more to wake up. Others may have the GIL meanwhile.
        Py_BEGIN_ALLOW_THREADS
        for (const double until = dpi_now_s() + LINGER_S; !dpi_ring_answered(r) && dpi_now_s() < until;) sched_yield();
        Py_END_ALLOW_THREADS
        if (dpi_ring_answered(r) && !dpi_express_answered(l, r)) return 0;
    }
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
                               "inference-header-content-length: %zu\r\ncontent-length: %zu\r\nx-request-id: %.16s\r\n%s\r\n", header,
                               header + raw, c->sent.id, c->tells_close ? "connection: close\r\n" : "");
    const struct iovec parts[] = {
        {(char *)f->opening, f->opening_size}, {l->date, l->date_size}, {(char *)f->headers, f->headers_size}, {text, lines},
        {(char *)f->before, f->before_size},   {json, times},           {(char *)f->after, f->after_size},     {(float *)scores, raw},
    };
    dpi_first_pushed(l, c, parts, sizeof parts / sizeof *parts);
}

int dpi_express_answered(Listener *l, EngineRing *r) {
    RingAnswer got;
    int good = 1;
    const double now = dpi_now_s();
    while (good && dpi_ring_next(r, &got)) {
        const uint64_t owner = r->owner[got.slot];
        Connection *c = owner == NOBODY ? NULL : dpi_found(l, owner - 1);
        if (got.status == STATUS_FAILED) r->failed_at = now;
        if (c == NULL || c->sent.ring != r || c->sent.slot != got.slot) {
            dpi_ring_give(r, got.slot);
            continue;
        }
        const Form *f = c->sent.form;
        const float *scores = (const float *)(dpi_ring_block(r, got.slot) + f->block_bytes);
        c->sent.queue_ms = got.queue_ms, c->sent.device_ms = got.device_ms;
        if (c->sent.lone) r->lone_s += RECENT * (now - c->sent.started - r->lone_s);
        if (got.status != STATUS_OK) good = ended(l, c, (int)got.status, got.retry_s, NULL);
        else if (!all_finite(scores, (int64_t)f->rows * f->tasks)) good = ended(l, c, STATUS_OK, 0, scores);
        else {
            counted(l, c, 0, now);
            sampled(l, r, scores, f->rows, f->tasks, now);
            Form *own = c->sent.form;
            ++own->uses;  // until it is sent
            over(l, c);
            answer(l, c, own, scores);
            let_go(own);
        }
        dpi_ring_give(r, got.slot);
    }
    return good;
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
    for (Connection *c = l->connections; l->flying && c < l->connections + l->most; ++c) {
        if (c->state != BUSY || c->sent.form == NULL) continue;
        if (c->sent.deadline > now) next = fmin(next, c->sent.deadline);
        else {
            abandoned(c);
            if (!ended(l, c, ENDED_LATE, 0, NULL)) return 0;
        }
    }
    timed(l, next);
    return 1;
}

PyObject *dpi_express_attach(Listener *l, PyObject *given) {
    if (!Py_IS_TYPE(given, &dpi_engine_ring_type)) return PyErr_SetString(PyExc_TypeError, "ring: expected an EngineRing"), NULL;
    EngineRing *r = (EngineRing *)given;
    int place = 0;
    while (place < RINGS && l->rings[place]) ++place;
    if (place == RINGS || r->place >= 0 || l->epoll < 0) Py_RETURN_FALSE;
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = RING_KEY | (uint64_t)place << 32};
    if (epoll_ctl(l->epoll, EPOLL_CTL_ADD, r->answer_fd, &event)) return PyErr_SetFromErrno(PyExc_OSError);
    Py_INCREF(given);
    l->rings[place] = r, r->place = place;
    Py_RETURN_TRUE;
}

PyObject *dpi_express_detach(Listener *l, PyObject *given) {
    EngineRing *r = (EngineRing *)given;
    if (!Py_IS_TYPE(given, &dpi_engine_ring_type) || r->place < 0 || l->rings[r->place] != r) Py_RETURN_NONE;
    int good = dpi_express_answered(l, r);  // what it has answered before
    if (l->epoll >= 0) epoll_ctl(l->epoll, EPOLL_CTL_DEL, r->answer_fd, NULL);
    l->rings[r->place] = NULL, r->place = -1;
    for (Connection *c = l->connections; good && l->flying && c < l->connections + l->most; ++c)
        if (c->state == BUSY && c->sent.form && c->sent.ring == r) good = ended(l, c, ENDED_ENGINE_GONE, 0, NULL);
    Py_DECREF(r);
    if (!good) return NULL;
    Py_RETURN_NONE;
}

PyObject *dpi_express_ended(Listener *l, PyObject *Py_UNUSED(none)) {
    PyObject *fresh = PyList_New(0), *was = l->ended;
    if (fresh == NULL) return NULL;
    l->ended = fresh, l->ended_count = 0;
    return was;
}

// [(known, whether its client gave it up, queue_ms, encode_ms, device_ms, total_ms, sampled scores as bytes)] since the last time.
PyObject *dpi_express_seen(Listener *l, PyObject *Py_UNUSED(none)) {
    PyObject *out = PyList_New(l->record_count);
    for (int i = 0; out && i < l->record_count; ++i) {
        const Record *r = l->records + i;
        PyObject *item = Py_BuildValue("(OOffffy#)", r->form->known, r->cancelled ? Py_True : Py_False, r->queue_ms, r->encode_ms, r->device_ms,
                                       r->total_ms, (const char *)(l->samples + r->sample_at), (Py_ssize_t)r->sampled * r->form->tasks * 4);
        if (item == NULL) Py_CLEAR(out);
        else PyList_SET_ITEM(out, i, item);
    }
    for (int i = 0; i < l->record_count; ++i) let_go(l->records[i].form);
    l->record_count = l->sample_count = 0;
    return out;
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

void dpi_express_forgotten(Listener *l) {
    for (int i = 0; i < FORM_SETS * FORM_WAYS; ++i) {
        let_go(l->forms[i]);
        l->forms[i] = NULL;
    }
    l->form_count = 0;
}

PyObject *dpi_express_forget(Listener *l, PyObject *Py_UNUSED(none)) {
    dpi_express_forgotten(l);
    Py_RETURN_NONE;
}

static int part_of(const Form *f, PyObject *given, int ids, Part *p) {
    const char *legal = NULL;
    Py_ssize_t legal_size = 0;
    long long start, end, place, rows = 0, bytes = 0;
    const int good = ids ? PyArg_ParseTuple(given, "LLpLLy#L", &start, &end, &p->wide, &rows, &place, &legal, &legal_size, &bytes)
                         : PyArg_ParseTuple(given, "LLL", &start, &end, &place);
    if (!good) return 0;
    const int64_t columns = legal_size / (int64_t)sizeof(Column), size = end - start;
    *p = (Part){start, place, size, columns, rows, bytes, legal, p->wide};
    int right = start >= 0 && size >= 0 && end <= f->body_size - f->envelope_size && place >= 64 && rows >= 0 && rows <= INT32_MAX &&
                bytes >= 0 && bytes <= INT32_MAX && size % 4 == 0;
    if (ids) right = right && columns && size == rows * columns * (p->wide ? 8 : 4) && place + rows * bytes <= f->block_bytes;
    else right = right && place + size <= f->block_bytes;
    for (const Column *c = (const Column *)legal; right && c < (const Column *)legal + columns; ++c)
        right = c->source >= 0 && c->source < columns && c->at >= 0 && c->width >= 1 && c->width <= 8 && c->at + c->width <= bytes;
    if (!right) PyErr_SetString(PyExc_ValueError, "part: got places that do not go together");
    return right;
}

// learn(head, envelope, body_size, known, rings, (rows, contexts, tasks, priority, deadline_s),
//       (block_header, request_of_row_at, block_bytes), ids, numbers, (opening, headers, before, after))
PyObject *dpi_express_learn(Listener *l, PyObject *args) {
    Form *f = calloc(1, sizeof *f);
    if (f == NULL) return PyErr_NoMemory();
    f->uses = 1;
    PyObject *known, *rings, *ids, *numbers;
    Py_ssize_t block_header;
    long long body_size, at, block_bytes;
    if (!PyArg_ParseTuple(args, "y#y#LOO!(iiiid)(y#LL)O!O!(y#y#y#y#)", &f->head, &f->head_size, &f->envelope, &f->envelope_size, &body_size,
                          &known, &PyList_Type, &rings, &f->rows, &f->contexts, &f->tasks, &f->priority, &f->deadline_s,
                          &f->block_header, &block_header, &at, &block_bytes, &PyTuple_Type, &ids, &PyTuple_Type, &numbers, &f->opening,
                          &f->opening_size, &f->headers, &f->headers_size, &f->before, &f->before_size, &f->after, &f->after_size))
        goto bad;
    f->known = Py_NewRef(known), f->rings = Py_NewRef(rings), f->kept = Py_NewRef(args);
    f->body_size = body_size, f->request_of_row_at = at, f->block_bytes = block_bytes;
    if (block_header != 64 || f->rows < 1 || f->contexts < 1 || f->tasks < 1 || f->tasks > 4096 || at < 64 || at % 4 || block_bytes > INT32_MAX ||
        at + 4 * (int64_t)f->rows > block_bytes || f->envelope_size > body_size || f->deadline_s < 0 ||
        PyTuple_GET_SIZE(ids) + PyTuple_GET_SIZE(numbers) > PARTS) {
        PyErr_SetString(PyExc_ValueError, "form: got sizes that do not go together");
        goto bad;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(ids) + PyTuple_GET_SIZE(numbers); ++i) {
        const int is_ids = i < PyTuple_GET_SIZE(ids);
        PyObject *given = is_ids ? PyTuple_GET_ITEM(ids, i) : PyTuple_GET_ITEM(numbers, i - PyTuple_GET_SIZE(ids));
        if (!PyTuple_Check(given) || !part_of(f, given, is_ids, f->part + f->parts++)) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "part: expected a tuple");
            goto bad;
        }
    }
    f->hash = mixed(f->head, f->head_size);
    Form **set = l->forms + f->hash % FORM_SETS * FORM_WAYS;
    int way = (int)(drawn(l) % FORM_WAYS);
    for (int i = 0; i < FORM_WAYS; ++i)
        if (set[i] == NULL) way = i;
    let_go(set[way]);
    l->form_count += set[way] == NULL;
    set[way] = f;
    Py_RETURN_NONE;
bad:
    let_go(f);
    return NULL;
}
