// Pieces of a large copy, taken in turn by whoever is free: the thread that has the copy, and a few that wait for such work.

#ifndef DPI_COPY_THREADS_H
#define DPI_COPY_THREADS_H

#include <stdint.h>

enum { MOST_COPY_THREADS = 8, MOST_PIECES = 1024 };

// Its owner keeps it where it is from the offer until it is finished, and reads none of it.
typedef struct SharedCopy {
    void (*piece)(const void *, int64_t);
    const void *with;
    int64_t pieces, next;
    int joined, wanted;         // threads at work on it, and how many more may come
    uint8_t done[MOST_PIECES];  // 1 behind the piece's writes
    struct SharedCopy *older;
} SharedCopy;

// Has up to `threads` others begin to call piece(with, i), once for each i below `pieces`, of which there are at most MOST_PIECES.
// They take some microseconds to wake up, for which the caller may have other work.
void dpi_offer_copy(SharedCopy *copy, int threads, int64_t pieces, void (*piece)(const void *, int64_t), const void *with);

// Takes part; returns when all pieces are done. Meanwhile this thread calls told(with, n) with how many of the first pieces are
// done: n grows, `pieces` is not told. What a piece wrote is seen by whoever sees that told.
void dpi_finish_copy(SharedCopy *copy, void (*told)(const void *, int64_t));

#endif
