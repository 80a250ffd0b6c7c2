// HTTP/1.1 as the direct port reads it: the head of a request, and a body in chunks. Pure functions of bytes: no sockets, no
// Python, nothing allocated, so that a fuzzer can call them as they are.

#ifndef DPI_HTTP_HEAD_H
#define DPI_HTTP_HEAD_H

#include <stddef.h>
#include <stdint.h>

enum { HEAD_BYTES = 15360, HEADERS = 100, APART = 4 };
enum { NEVER = -1, NOT_YET = 0, WHOLE = 1 };
#define CHUNKED INT64_C(-1)

typedef struct {
    uint32_t at, end;
} Stretch;

typedef struct {
    uint32_t bytes;      // of the head, the empty line at its end included
    int64_t body_bytes;  // by Content-Length, INT64_MAX if that has more than 18 digits; or CHUNKED
    int minor;           // of HTTP/1.x
    int close;           // the connection ends with this request
    int expects;         // 100-continue
    uint32_t apart;
    Stretch line[APART];  // the first lines that differ from request to request or are secret: ids, traces, a token
} Head;

// WHOLE if `data` begins with a head; NEVER if it cannot become one: `fault` says why, behind the status to answer with.
int dpi_http_head(const char *data, size_t size, Head *head, const char **fault);

// Copies a head without its lines apart and the empty one into `fixed`, those lines into `apart` unless it is NULL; the bytes of the first.
size_t dpi_http_fixed(const char *data, const Head *head, char *fixed, char *apart);

typedef struct {
    int state;
    uint32_t line;       // bytes of a chunk's size so far
    uint32_t extension;  // bytes of the extensions of all chunks so far
    uint64_t left;       // bytes of the chunk
} Chunks;                // zeros at the start of a body

// Decodes [*data, end) and moves *data behind what it has read. Appends to `out`, which has room for all of it, at *size.
int dpi_http_chunks(Chunks *chunks, const char **data, const char *end, char *out, size_t *size, const char **fault);

#endif
