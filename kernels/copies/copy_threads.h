// Pieces of a large copy, taken in turn by whoever is free: the thread that has the copy, and a few that wait for such work.

#ifndef DPI_COPY_THREADS_H
#define DPI_COPY_THREADS_H

#include <stdint.h>

enum { MOST_COPY_THREADS = 8, MOST_PIECES = 1024 };

// Calls piece(with, i) once for each i below `pieces` (at most MOST_PIECES), this thread and up to `threads` others; returns when
// all are done. Meanwhile this thread calls told(with, n) with how many of the first pieces are done: n grows, `pieces` is not
// told. What a piece wrote is seen by whoever sees that told.
void dpi_share_copy(int threads, int64_t pieces, void (*piece)(const void *, int64_t), void (*told)(const void *, int64_t),
                    const void *with);

#endif
