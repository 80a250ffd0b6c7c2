// One core copies 10 to 20 GB/s, the bus takes 50: batches of hundreds of kilobytes are copied by several (H200 host).
// The threads are the process's own, begun when first asked for. They sleep between copies, so a copy does not wait for them:
// pieces that nobody else has taken its own thread takes.

#include "copies/copy_threads.h"

#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stddef.h>

enum { LOOKS = 64 };  // at what another thread has for some instructions, before the core is offered

static sem_t offers;         // a thread for each may look for a copy
static int held;             // the lock of all below, for some instructions at a time: who sleeps for it wakes up too late
static SharedCopy *copies;   // that others may join
static int begun;            // threads; -1: there is no semaphore

static void lock(void) {
    for (int look = 0; __atomic_exchange_n(&held, 1, __ATOMIC_ACQUIRE); ++look)
        if (look >= LOOKS) sched_yield();
}

static void unlock(void) { __atomic_store_n(&held, 0, __ATOMIC_RELEASE); }

static int take(SharedCopy *c, int64_t *i) { return (*i = __atomic_fetch_add(&c->next, 1, __ATOMIC_RELAXED)) < c->pieces; }

static void copied(SharedCopy *c, int64_t i) {
    c->piece(c->with, i);
    __atomic_store_n(&c->done[i], 1, __ATOMIC_RELEASE);
}

// One that wants another thread, which joins it; under the lock.
static SharedCopy *join(void) {
    for (SharedCopy *c = copies; c; c = c->older)
        if (c->wanted > 0 && __atomic_load_n(&c->next, __ATOMIC_RELAXED) < c->pieces) {
            c->wanted--;
            __atomic_fetch_add(&c->joined, 1, __ATOMIC_RELAXED);
            return c;
        }
    return NULL;
}

static void *help(void *unused) {
    for (;;) {
        while (sem_wait(&offers)) {}  // a signal's handler ran
        lock();
        for (SharedCopy *c; (c = join());) {
            unlock();
            for (int64_t i; take(c, &i);) copied(c, i);
            lock();
            __atomic_fetch_sub(&c->joined, 1, __ATOMIC_RELEASE);  // it may be gone now
        }
        unlock();
    }
    return unused;
}

static void begin_threads(int threads) {  // under the lock
    if (begun == 0 && sem_init(&offers, 0, 0)) begun = -1;
    for (pthread_t made; begun >= 0 && begun < threads && begun < MOST_COPY_THREADS; ++begun) {
        if (pthread_create(&made, NULL, help, NULL)) return;  // fewer, then
        pthread_detach(made);
    }
}

void dpi_offer_copy(SharedCopy *c, int threads, int64_t pieces, void (*piece)(const void *, int64_t), const void *with) {
    c->piece = piece, c->with = with, c->pieces = pieces, c->next = 0, c->joined = 0, c->wanted = threads;
    for (int64_t i = 0; i < pieces; ++i) c->done[i] = 0;
    lock();
    begin_threads(threads);
    c->older = copies, copies = c;
    const int woken = threads < begun ? threads : begun;
    unlock();
    for (int i = 0; i < woken; ++i) sem_post(&offers);
}

static void withdraw(SharedCopy *c) {
    lock();
    SharedCopy **at = &copies;
    while (*at != c) at = &(*at)->older;
    *at = c->older;
    unlock();
    for (int look = 0; __atomic_load_n(&c->joined, __ATOMIC_ACQUIRE); ++look)
        if (look >= LOOKS) sched_yield();
}

void dpi_finish_copy(SharedCopy *c, void (*told)(const void *, int64_t)) {
    int64_t first = 0, before = 0;  // pieces that are done without a gap
    for (int64_t i; first < c->pieces;) {
        if (take(c, &i)) copied(c, i);
        else sched_yield();  // the last pieces are with others
        while (first < c->pieces && __atomic_load_n(&c->done[first], __ATOMIC_ACQUIRE)) ++first;
        if (first > before && first < c->pieces) told(c->with, before = first);
    }
    withdraw(c);
}
