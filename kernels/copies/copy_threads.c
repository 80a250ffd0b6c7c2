// One core copies 10 GB/s, the bus takes five times that: batches of hundreds of kilobytes are copied by several (H200 host).
// The threads are the process's own, begun when first asked for. They sleep between copies, so a copy does not wait for them:
// pieces that nobody else has taken its own thread takes.

#include "copies/copy_threads.h"

#include <pthread.h>
#include <sched.h>
#include <stddef.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t offered = PTHREAD_COND_INITIALIZER, left = PTHREAD_COND_INITIALIZER;
static SharedCopy *copies;  // that others may join
static int begun;           // threads

static int take(SharedCopy *c, int64_t *i) { return (*i = __atomic_fetch_add(&c->next, 1, __ATOMIC_RELAXED)) < c->pieces; }

static void copied(SharedCopy *c, int64_t i) {
    c->piece(c->with, i);
    __atomic_store_n(&c->done[i], 1, __ATOMIC_RELEASE);
}

static SharedCopy *open_copy(void) {
    for (SharedCopy *c = copies; c; c = c->older)
        if (c->wanted > 0 && __atomic_load_n(&c->next, __ATOMIC_RELAXED) < c->pieces) return c;
    return NULL;
}

static void *help(void *unused) {
    pthread_mutex_lock(&lock);
    for (SharedCopy *c;;) {
        while ((c = open_copy()) == NULL) pthread_cond_wait(&offered, &lock);
        c->wanted--, c->joined++;
        pthread_mutex_unlock(&lock);
        for (int64_t i; take(c, &i);) copied(c, i);
        pthread_mutex_lock(&lock);
        if (--c->joined == 0) pthread_cond_broadcast(&left);
    }
    return unused;
}

static void begin_threads(int threads) {  // under the lock
    for (pthread_t made; begun < threads && begun < MOST_COPY_THREADS; ++begun) {
        if (pthread_create(&made, NULL, help, NULL)) return;  // fewer, then
        pthread_detach(made);
    }
}

void dpi_offer_copy(SharedCopy *c, int threads, int64_t pieces, void (*piece)(const void *, int64_t), const void *with) {
    c->piece = piece, c->with = with, c->pieces = pieces, c->next = 0, c->joined = 0, c->wanted = threads;
    for (int64_t i = 0; i < pieces; ++i) c->done[i] = 0;
    pthread_mutex_lock(&lock);
    begin_threads(threads);
    c->older = copies, copies = c;
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < threads; ++i) pthread_cond_signal(&offered);
}

static void withdraw(SharedCopy *c) {
    pthread_mutex_lock(&lock);
    SharedCopy **at = &copies;
    while (*at != c) at = &(*at)->older;
    *at = c->older;
    while (c->joined) pthread_cond_wait(&left, &lock);
    pthread_mutex_unlock(&lock);
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
