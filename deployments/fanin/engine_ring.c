// Everything that an engine writes is checked: a broken one must not have an ingress read or write beyond its memory.

#include "engine_ring.h"

#include <errno.h>
#include <string.h>
#include <structmember.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    uint32_t kind, slot;
    uint64_t at;
    uint32_t rows, contexts;
    double deadline, arrived;
    int32_t priority;
    uint32_t unused;
} RingAsk;

_Static_assert(sizeof(RingAsk) == 48 && sizeof(RingAnswer) == 24, "as rings.py packs them");
enum { LINE = 64, QUEUED = 0, INFLIGHT = 1, LEAVING_WORD = 3, BUSY_WORD = 4, BOARD_BYTES = 40 };
// What no count of rows and no time in ms of a sound engine reaches. A ring that says more is as full as can be.
#define MOST_SAID (INT64_C(1) << 40)

double dpi_now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static double said(const EngineRing *r, int word) { return ((const volatile double *)r->board.buf)[word]; }
static uint64_t *count_at(const EngineRing *r, int64_t at) { return (uint64_t *)((char *)r->rings.buf + at); }

static int64_t rows_said(const EngineRing *r, int word) {
    const double rows = said(r, word);
    return rows >= 0 && rows < MOST_SAID ? (int64_t)rows : MOST_SAID;
}

// The last line of rings: rows that the engine has read, and those that it was asked for.
static int64_t unread(const Py_buffer *rings) {
    const uint64_t *rows = (const uint64_t *)((char *)rings->buf + rings->len - LINE);
    const uint64_t left = rows[1] - __atomic_load_n(rows, __ATOMIC_RELAXED);
    return left < MOST_SAID ? (int64_t)left : MOST_SAID;
}

int64_t dpi_ring_waiting(const EngineRing *r) { return rows_said(r, QUEUED) + unread(&r->rings) + unread(&r->beside); }

static int busy(const EngineRing *r) { return said(r, BUSY_WORD) != 0; }

int dpi_ring_behind(const EngineRing *r) { return busy(r) && unread(&r->rings) > 0; }
int dpi_ring_far_behind(const EngineRing *r) { return busy(r) && dpi_ring_waiting(r) >= r->batch_rows; }
int64_t dpi_ring_load(const EngineRing *r) { return dpi_ring_waiting(r) + rows_said(r, INFLIGHT); }
int dpi_ring_leaving(const EngineRing *r) { return said(r, LEAVING_WORD) != 0; }

uint32_t dpi_ring_take(EngineRing *r) {
    ++r->open;
    return r->free[--r->free_count];
}

void dpi_ring_give(EngineRing *r, uint32_t slot) {
    memset(dpi_ring_owners(r, slot), 0, MEMBERS * sizeof *r->owner);
    r->members[slot] = 0;
    r->free[r->free_count++] = slot;  // the last is the next to be used: its memory is in the caches
    --r->open;
}

void dpi_ring_join(EngineRing *r, uint32_t slot, uint64_t owner) { dpi_ring_owners(r, slot)[r->members[slot]++] = owner; }

int dpi_ring_leave(EngineRing *r, uint32_t slot, int member) {
    uint64_t *owners = dpi_ring_owners(r, slot), left = 0;
    owners[member] = 0;
    for (int i = 0; i < r->members[slot]; ++i) left |= owners[i];
    return !left;
}

void dpi_ring_ask(EngineRing *r, int kind, uint32_t slot, int rows, int contexts, double deadline, double arrived, int priority) {
    RingAsk *ask = (RingAsk *)((char *)r->rings.buf + LINE) + (r->asks++ & r->asks_mask);
    *ask = (RingAsk){kind, slot, slot * r->slot_bytes, rows, contexts, deadline, arrived, priority, 0};
    *count_at(r, r->rings.len - LINE + 8) += rows;
    if (kind == ASK_SCORE) r->rows[slot] = rows, r->contexts[slot] = contexts;
    r->unsaid = 1;
}

void dpi_ring_tell(EngineRing *r) {
    if (!r->unsaid) return;
    r->unsaid = 0;
    __atomic_store_n(count_at(r, 0), r->asks, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);  // before it is seen that all lanes are busy, so that one that goes to sleep sees it
    if (busy(r)) return;
    const uint64_t one = 1;
    while (write(r->wake_fd, &one, sizeof one) < 0 && errno == EINTR) continue;
}

int dpi_ring_answered(const EngineRing *r) {
    return __atomic_load_n(count_at(r, r->answers_at), __ATOMIC_ACQUIRE) != r->answers;
}

static float sound(float figure) { return figure >= 0 && figure < MOST_SAID ? figure : 0; }

int dpi_ring_next(EngineRing *r, RingAnswer *answer) {
    const RingAnswer *entries = (const RingAnswer *)((char *)r->rings.buf + r->answers_at + LINE);
    const uint64_t told = __atomic_load_n(count_at(r, r->answers_at), __ATOMIC_ACQUIRE), most = r->answers_mask + 1;
    if (told - r->answers > most) r->answers = told - most;  // no engine of ours says so: a count of nonsense is no long way
    while (r->answers != told) {
        const RingAnswer *entry = entries + (r->answers++ & r->answers_mask);
        *answer = *entry;
        answer->slot = __atomic_load_n(&entry->slot, __ATOMIC_RELAXED);  // once: what is checked is what is used
        // They go into answers' JSON and sums of metrics, which one NaN would spoil for good.
        answer->queue_ms = sound(answer->queue_ms), answer->device_ms = sound(answer->device_ms), answer->retry_s = sound(answer->retry_s);
        if (answer->slot < (uint32_t)r->slots && r->members[answer->slot]) return 1;
    }
    return 0;
}

static void ring_free(EngineRing *r) {
    for (Py_buffer *b = &r->rings; b <= &r->memory; ++b)
        if (b->obj) PyBuffer_Release(b);
    free(r->owner);
    free(r->members);
    free(r->rows);
    free(r->contexts);
    free(r->free);
    Py_TYPE(r)->tp_free(r);
}

// EngineRing(rings, beside, (asks, answers), board, memory, slot_bytes, most_rows, batch_rows, answer_fd, wake_fd): entries, powers of two.
static PyObject *ring_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(named)) {
    EngineRing *r = (EngineRing *)type->tp_alloc(type, 0);
    long long asks, answers;
    if (r == NULL) return NULL;
    r->place = -1;
    if (!PyArg_ParseTuple(args, "w*w*(LL)y*w*Liiii", &r->rings, &r->beside, &asks, &answers, &r->board, &r->memory, &r->slot_bytes,
                          &r->most_rows, &r->batch_rows, &r->answer_fd, &r->wake_fd))
        goto bad;
    r->answers_at = LINE + (asks * (int64_t)sizeof(RingAsk) + LINE - 1) / LINE * LINE;
    const int64_t whole = r->answers_at + LINE + (answers * (int64_t)sizeof(RingAnswer) + LINE - 1) / LINE * LINE + LINE;
    const int whole_slots = r->slot_bytes >= LINE && r->slot_bytes % LINE == 0;
    const int64_t slots = whole_slots ? r->memory.len / r->slot_bytes : 0;
    if (asks < 1 || asks > 1 << 20 || asks & (asks - 1) || answers < 1 || answers > 1 << 20 || answers & (answers - 1) ||
        r->rings.len != whole || r->beside.len != whole || r->board.len < BOARD_BYTES || slots < 1 || slots > answers || 4 * slots > asks) {
        PyErr_SetString(PyExc_ValueError, "ring: got sizes that do not go together, expected those of rings.py");
        goto bad;
    }
    r->slots = (int)slots, r->asks_mask = asks - 1, r->answers_mask = answers - 1;
    r->failed_at = -1e18, r->sampled_rows.every = 1;
    r->asks = *count_at(r, 0), r->answers = *count_at(r, r->answers_at);
    r->owner = calloc(slots * MEMBERS, sizeof *r->owner);
    r->members = calloc(slots, 1);
    r->rows = calloc(slots, sizeof *r->rows);
    r->contexts = calloc(slots, sizeof *r->contexts);
    r->free = calloc(slots, sizeof *r->free);
    if (!r->owner || !r->members || !r->rows || !r->contexts || !r->free) {
        PyErr_NoMemory();
        goto bad;
    }
    while (r->free_count < r->slots) {
        r->free[r->free_count] = r->slots - 1 - r->free_count;
        ++r->free_count;
    }
    return (PyObject *)r;
bad:
    Py_DECREF(r);
    return NULL;
}

static PyMemberDef members[] = {
    {"open", T_INT, offsetof(EngineRing, open), READONLY, NULL},
    {"slots", T_INT, offsetof(EngineRing, slots), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject dpi_engine_ring_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "listener.EngineRing",
    .tp_basicsize = sizeof(EngineRing),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = ring_new,
    .tp_dealloc = (destructor)ring_free,
    .tp_members = members,
};
