// Rows of a pass over a batch, shared out among the threads that torch computes with (openmp_pool.py).

#ifndef DPI_OPENMP_POOL_H
#define DPI_OPENMP_POOL_H

#include <stdint.h>

// GOMP_parallel of the OpenMP runtime that torch runs on: work(data) in so many threads of its pool, this one among them. Null:
// in this one alone.
typedef void (*Parallel)(void (*work)(void *), void *data, unsigned threads, unsigned flags);

// Rows of a task, `step` at a time to whichever thread asks next.
typedef struct {
    void (*rows)(void *task, int64_t from, int64_t to);
    void *task;
    int64_t n, step, next;
} Shares;

static void work(void *data) {
    Shares *s = data;
    for (int64_t from; (from = __atomic_fetch_add(&s->next, s->step, __ATOMIC_RELAXED)) < s->n;)
        s->rows(s->task, from, from + s->step < s->n ? from + s->step : s->n);
}

// In this thread alone if there are few pieces: waking the others would take what they save. Never in some of the threads:
// GCC's runtime ends those that a smaller team leaves out, and makes new ones for the next.
static void share_out(Shares s, Parallel parallel, int64_t threads) {
    const int64_t few = threads > 8 ? threads / 4 : 2;
    if (parallel && threads > 1 && s.n > few * s.step) parallel(work, &s, (unsigned)threads, 0);
    else s.rows(s.task, 0, s.n);
}

#endif
