// How many threads take part in a copy, of which each piece takes a millisecond; -1: some piece was not copied once.

#include "copies/copy_threads.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    pthread_mutex_t mutex;
    pthread_t seen[64];
    int count, times[MOST_PIECES];
} Count;

static void piece(const void *with, int64_t i) {
    Count *c = (Count *)with;
    pthread_mutex_lock(&c->mutex);
    int k = 0;
    while (k < c->count && !pthread_equal(c->seen[k], pthread_self())) ++k;
    if (k == c->count) c->seen[c->count++] = pthread_self();
    c->times[i]++;
    pthread_mutex_unlock(&c->mutex);
    usleep(1000);
}

static void told(const void *with, int64_t done) { (void)with, (void)done; }

int taking_part(int threads, int pieces) {
    SharedCopy copy;
    Count count;
    memset(&count, 0, sizeof count);
    pthread_mutex_init(&count.mutex, NULL);
    dpi_offer_copy(&copy, threads, pieces, piece, &count);
    dpi_finish_copy(&copy, told);
    for (int i = 0; i < pieces; ++i)
        if (count.times[i] != 1) return -1;
    return count.count;
}
