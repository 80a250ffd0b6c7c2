// The clients of the direct port, and the bytes of theirs that are not a whole request yet, or an answer that they have not read.

#ifndef DPI_CONNECTION_H
#define DPI_CONNECTION_H

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>

#include "http_head.h"

// HEAD: between two requests, or within a head. BODY, CHUNKS: the head is known. BUSY: its request is with Python.
// LEAVING: its last answer is sent; what it still sends is thrown away, as a close with bytes unread would lose that answer.
typedef enum { FREE, HEAD, BODY, CHUNKS, BUSY, LEAVING } State;

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
} Connection;

enum { SCRATCH = 1 << 18 };

typedef struct {
    PyObject_HEAD
    int epoll, most, open, draining;
    long long head_ms, body_ms, idle_ms, most_body, most_held, held;  // held: bytes of all connections' buffers
    int64_t looked;
    Connection *connections;
    int *vacant, *due, vacant_count, due_count;
    char *scratch;
} Listener;

int64_t dpi_now_ms(void);
unsigned long long dpi_key_of(Listener *l, Connection *c);
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
// Its answer is sent.
void dpi_answered(Listener *l, Connection *c);
// Sends more of an answer that the socket did not take at once.
void dpi_pushed(Listener *l, Connection *c);

#endif
