// The clients of the direct port, and the bytes of theirs that are not a whole request yet, or an answer that they have not read.

#ifndef DPI_CONNECTION_H
#define DPI_CONNECTION_H

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <sys/uio.h>

#include "../fanin/engine_ring.h"
#include "http_head.h"

// HEAD: between two requests, or within a head. BODY, CHUNKS: the head is known. BUSY: its request is with Python.
// LEAVING: its last answer is sent; what it still sends is thrown away, as a close with bytes unread would lose that answer.
typedef enum { FREE, HEAD, BODY, CHUNKS, BUSY, LEAVING } State;

// A request that C has sent to an engine; without a form there is none, and what is BUSY is Python's.
typedef struct {
    struct Form *form;
    EngineRing *ring;
    uint32_t slot;
    int member, row;  // of its slot, and where its scores begin there
    int lone;         // no other one was there when it was sent
    double started, deadline;
    float queue_ms, encode_ms, device_ms;
    char id[16];
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

enum { SCRATCH = 1 << 18, RINGS = 64, FORM_SETS = 128, FORM_WAYS = 4, DATE_BYTES = 64 };
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
    struct Record *records;
    float *samples;
    int form_count, flying, ended_count, record_count, record_room, sample_count, timer, date_size;
    uint64_t draw;
    double timer_at;
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
// Reads what its socket has.
int dpi_pulled(Listener *l, Connection *c, PyObject *to);
// The client has closed: whoever works on its request learns that nobody waits.
int dpi_gone(Listener *l, Connection *c, PyObject *to);
// Its time is over.
int dpi_late(Listener *l, Connection *c, PyObject *to);

// Throws away what a client that has its last answer still sends.
void dpi_drained(Listener *l, Connection *c);
// Sends an answer, of at most eight parts, or as much of it as the socket takes; the rest is kept, if there is room.
void dpi_first_pushed(Listener *l, Connection *c, const struct iovec *parts, int count);
// Its answer is sent.
void dpi_answered(Listener *l, Connection *c);
// Sends more of an answer that the socket did not take at once.
void dpi_pushed(Listener *l, Connection *c);

#endif
