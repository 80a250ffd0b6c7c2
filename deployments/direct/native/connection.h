// The clients of the direct port, and the bytes of theirs that are not a whole request yet, or an answer that they have not read.

#ifndef DPI_CONNECTION_H
#define DPI_CONNECTION_H

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <sys/epoll.h>
#include <sys/uio.h>

#include "../../fanin/engine_ring.h"
#include "http_head.h"

// HEAD: between two requests, or within a head. BODY, CHUNKS: the head is known. BUSY: its request is with Python.
// LEAVING: its last answer is sent; what it still sends is thrown away, as a close with bytes unread would lose that answer.
typedef enum { FREE, HEAD, BODY, CHUNKS, BUSY, LEAVING } State;

enum { ID_BYTES = 128 };  // of a request, as answers.py has it

// A request that C has sent to an engine; without a form there is none, and what is BUSY is Python's.
typedef struct {
    struct Form *form;
    EngineRing *ring;
    uint32_t slot;
    int member, row;  // of its slot, and where its scores begin there
    int lone;         // no other one was there when it was sent
    double started, deadline;
    float queue_ms, encode_ms, device_ms;
    int id_size;
    char id[ID_BYTES];
} Sent;

typedef struct {
    int fd;
    uint32_t turn;  // counts who has had this place, so that an answer never reaches a later one
    State state;
    int unread, due, tells_close;  // bytes may wait in the socket; it is on the list of those to look at; closes when answered
    char *in, *body, *out;
    size_t in_size, in_room, body_size, body_room, out_size, out_room, out_at;
    int64_t until;  // when it is closed, or its request given up, in ms
    Head head;
    Chunks chunks;
    Sent sent;
} Connection;

// Of a connection. EPOLLOUT comes to it with the first answer that its client does not take at once.
enum { WATCHED = EPOLLIN | EPOLLRDHUP | (int)EPOLLET };
enum { SCRATCH = 1 << 18, RINGS = 64, FORM_SETS = 128, FORM_WAYS = 4, DATE_BYTES = 64, BOUNDS = 32 };
// What an epoll event tells of, if it is no connection's key.
#define RING_KEY UINT64_C(0xffffffff)  // with the ring's place above
#define TIMER_KEY UINT64_C(0xfffffffe)

typedef struct {
    PyObject_HEAD
    int epoll, most, open, draining;
    long long head_ms, body_ms, idle_ms, most_body, most_held, held;  // held: bytes of all connections' buffers
    int64_t looked;
    Connection *connections;
    int *vacant, *due, vacant_count, due_count;
    char *scratch;
    // The rest is express.c's.
    struct Form **forms;  // by the hashes of their heads
    struct Ask *asks;     // of each ring: what its engine is asked next
    EngineRing *rings[RINGS];
    PyObject *ended;
    struct Form *untold;  // those whose requests Python has not counted yet
    struct Record *records;
    float *samples;
    Sampler sampled_requests;
    double bounds[BOUNDS];  // of latency in ms, as Python's metrics have them
    int bound_count, form_count, flying, ended_count, record_count, sample_count, timer, date_size;
    uint64_t draw;
    double timer_at, late_at;  // when it rings next; the first deadline of a request
    char date[DATE_BYTES];
} Listener;

int64_t dpi_now_ms(void);
unsigned long long dpi_key_of(Listener *l, Connection *c);
Connection *dpi_found(Listener *l, unsigned long long key);
void dpi_closed(Listener *l, Connection *c);

// Room for `size` bytes; 0 if that would be more than all connections together may hold.
int dpi_roomy(Listener *l, char **buffer, size_t *room, size_t size);

// What follows appends to a list what Python is to know, and gives 0 for an exception of Python's.
// Takes what a connection has sent, its buffer `in` or bytes of the scratch: a request that is whole, or will never be, is told.
int dpi_taken(Listener *l, Connection *c, const char *data, size_t size, PyObject *to);
// Reads some of what its socket has.
int dpi_pulled(Listener *l, Connection *c, PyObject *to);
// The client has closed: whoever works on its request learns that nobody waits.
int dpi_gone(Listener *l, Connection *c, PyObject *to);
// Its time is over.
int dpi_late(Listener *l, Connection *c, PyObject *to);

// Throws away some of what a client that has its last answer still sends.
void dpi_drained(Listener *l, Connection *c);
// Sends an answer, of at most eight parts, or as much of it as the socket takes; the rest is kept, if there is room.
void dpi_first_pushed(Listener *l, Connection *c, const struct iovec *parts, int count);
// Its answer is sent.
void dpi_answered(Listener *l, Connection *c);
// Sends more of an answer that the socket did not take at once.
void dpi_pushed(Listener *l, Connection *c);

// The part of arrivals.c.
PyObject *dpi_arrivals_accepted(Listener *l, PyObject *args);
PyObject *dpi_arrivals_added(Listener *l, PyObject *fds);

// The part of express.c, form.c and asks.c.
// Scoring requests that C answers from end to end: what they say but for their tensors, ids and traces was seen before, to the byte, and
// Python, which has checked it, has handed over what follows from it. All that is not as ever becomes Python's request after all.

// Why a request that C has sent is Python's to answer, beside the engine's own status.
enum { ENDED_LATE = 100, ENDED_ENGINE_GONE = 101, ENDED_FULL = 102 };

enum { SECTIONS = 5, SAMPLES = 1 << 18, HEADER_BYTES = 64 };

// A section as a form sends it; its place among those of a block, see RowBlock.places.
typedef struct {
    int64_t start, size, columns, rows;
    const void *legal;  // of ids: the columns as blocks.c packs them
    int wide, section;
} Part;

// Requests that go to an engine together: one block, as `layout.offsets` lays it out, whose sections are put together here first.
typedef struct Ask {
    const struct Form *form;  // the first's; NULL: there are none
    int slot, rows, contexts;
    double deadline, arrived;
    char *section[SECTIONS];
} Ask;

// Requests that ended within the same bounds of latency, and the sums of their times: queue, encode, device, total.
typedef struct {
    double requests, ms[4];
} Tally;

// Filled by `learn`; its Python objects are its own.
typedef struct Form {
    int uses, untold;
    struct Form *next_untold;
    Tally tally[BOUNDS + 2];  // the last: of requests that their clients gave up
    uint64_t hash;
    PyObject *known, *rings, *kept;  // what Python calls it; engines; all whose bytes are read here
    const char *head, *envelope, *opening, *headers, *before, *after;
    Py_ssize_t head_size, envelope_size, opening_size, headers_size, before_size, after_size;
    int64_t body_size, widths[SECTIONS];  // bytes of a row or context in each section; odd ones are the contexts'
    const char *block_header;
    int rows, contexts, tasks, priority, parts;
    double deadline_s;  // 0: none
    Part part[SECTIONS - 1];
} Form;

// The form of a request by its head, but for the lines apart and the blank one, and its body, of which at most `body_size` bytes are read.
Form *dpi_form_of(Listener *l, const char *head, size_t head_size, const char *body, int64_t body_size);
void dpi_form_let_go(Form *f);
// Bytes of a block; and where its sections begin, if `at` is there.
int64_t dpi_form_laid_out(const Form *f, int rows, int contexts, int64_t *at);
// Adds a request's rows to an ask, whose sections have the room; 0 if a value is not what it should be, which Python can say.
int dpi_form_encoded(const Ask *ask, const Form *f, const char *tensors);

// Takes a whole request that lies at `data`, if it is of a known form: for an engine, or to be refused as the queue there is full.
// 0 if it does not; below 0 with Python's error set.
int dpi_express_begun(Listener *l, Connection *c, const char *data);
// Takes what an engine has answered: it has said so, or it is looked for.
int dpi_express_woken(Listener *l, EngineRing *r);
int dpi_express_answered(Listener *l, EngineRing *r);
// From here on it is Python's: (key, known, ring, request id, why, queue_ms, encode_ms, device_ms, retry_s, started, scores or None).
// retry_s: with ENDED_FULL, the rows that wait. 0 for an exception of Python's.
int dpi_ended(Listener *l, Connection *c, int why, float retry_s, const float *scores);
// Those whose deadline has passed.
int dpi_express_late(Listener *l);
// Has the timer ring then, if that is before it would.
void dpi_timed(Listener *l, double at);
// Nobody waits for a connection's request any more.
void dpi_express_dropped(Listener *l, Connection *c);
void dpi_express_forgotten(Listener *l);

typedef struct Record Record;

// The engine with the least to do, if C may ask one now. While all of them have something, requests that come together go together.
EngineRing *dpi_asks_best(const Listener *l, const Form *f, double now);
// Whether a form's requests may be asked for together with those that an ask holds.
int dpi_asks_join(const EngineRing *r, const Ask *ask, const Form *f);
// Asks an engine for what was begun since.
void dpi_asks_tell(Listener *l, EngineRing *r);
// Asks all of them that would read it soon; looks out for the answer to a lone request for a moment.
int dpi_asks_flush(Listener *l);

// A number of 64 bits that is not a secret: splitmix64.
uint64_t dpi_drawn(Listener *l);
// A request is over. Without scores its client gave it up.
void dpi_counted(Listener *l, const Sent *s, const float *scores, double now);

PyObject *dpi_express_learn(Listener *l, PyObject *args);
PyObject *dpi_express_forget(Listener *l, PyObject *none);
PyObject *dpi_asks_attach(Listener *l, PyObject *ring);
PyObject *dpi_asks_detach(Listener *l, PyObject *ring);
PyObject *dpi_express_ended(Listener *l, PyObject *none);
PyObject *dpi_express_seen(Listener *l, PyObject *none);
PyObject *dpi_express_date(Listener *l, PyObject *line);

#endif
