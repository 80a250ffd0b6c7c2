// A client of the direct port, and the bytes of it that are not a whole request yet, or an answer that it has not read yet.

#ifndef DPI_CONNECTION_H
#define DPI_CONNECTION_H

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

#endif
