// An ingress's end of a connection to an engine process for requests that C sends and answers: `rings.py`, `board.py` and
// `connection.py` for them. Each slot has a place of its own in the request memory, so there is nothing to allocate.

#ifndef DPI_ENGINE_RING_H
#define DPI_ENGINE_RING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

enum { ASK_SCORE = 1, ASK_CANCEL = 2 };
enum { STATUS_OK = 1, STATUS_FAILED = 5 };

typedef struct {
    uint32_t slot, status;
    float queue_ms, device_ms, retry_s;
    uint32_t unused;
} RingAnswer;

// Of a stream of which about as much is to be seen each second, however much it has: each `every`th; what it had since it was last found.
typedef struct {
    double since;
    int64_t seen, every;
} Sampler;

typedef struct {
    PyObject_HEAD
    Py_buffer rings, beside, board, memory;  // beside: the rings of Python's connection to it
    int answer_fd, wake_fd, most_rows, batch_rows, slots, free_count, open, place;  // open: slots in use; place: of a listener's, or -1
    int64_t slot_bytes, answers_at;
    uint64_t asks, answers, asks_mask, answers_mask;  // written, and read so far
    double failed_at, lone_s, run_ms;                 // when its device last failed; a lone request's time, lately; its last run's
    uint64_t *owner;                                  // MEMBERS of each slot: who waits; 0: nobody any more, or nobody yet
    uint8_t *members;                                 // of each slot; 0: it is free
    int32_t *rows, *contexts;                         // of the block in each slot
    uint32_t *free;
    Sampler sampled_rows;                             // whose scores are shown
    int unsaid;                                       // something was asked since it was told
} EngineRing;

enum { MEMBERS = 16 };  // requests that one ask of an ingress holds

extern PyTypeObject dpi_engine_ring_type;

double dpi_now_s(void);

// Rows that wait there, and those that run besides.
int64_t dpi_ring_waiting(const EngineRing *r);
int64_t dpi_ring_load(const EngineRing *r);
// Whether all its lanes have a run, and an ask of this ring lies there that none has read.
int dpi_ring_behind(const EngineRing *r);
// Whether all its lanes have a run, and a whole batch waits for the next one.
int dpi_ring_far_behind(const EngineRing *r);
// Whether it asks its ingresses to go elsewhere.
int dpi_ring_leaving(const EngineRing *r);

static inline char *dpi_ring_block(const EngineRing *r, uint32_t slot) { return (char *)r->memory.buf + slot * r->slot_bytes; }

static inline uint64_t *dpi_ring_owners(const EngineRing *r, uint32_t slot) { return r->owner + (uint64_t)slot * MEMBERS; }

// Takes a slot, if `free_count` is not 0, or gives one back.
uint32_t dpi_ring_take(EngineRing *r);
void dpi_ring_give(EngineRing *r, uint32_t slot);
// One more request in it.
void dpi_ring_join(EngineRing *r, uint32_t slot, uint64_t owner);
// One of them is given up; gives whether all are.
int dpi_ring_leave(EngineRing *r, uint32_t slot, int member);
// The engine sees it once it is told.
void dpi_ring_ask(EngineRing *r, int kind, uint32_t slot, int rows, int contexts, double deadline, double arrived, int priority);
void dpi_ring_tell(EngineRing *r);
int dpi_ring_answered(const EngineRing *r);
// The next answer to a slot in use; 0 if there is none.
int dpi_ring_next(EngineRing *r, RingAnswer *answer);

#endif
