// Copies that several threads share, several at a time, for the thread sanitizer: what a piece wrote is read once `told` of it says so.

#include "copies/copy_threads.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { BYTES = 257, TURNS = 100, CALLERS = 3 };

typedef struct {
    int64_t pieces;
    unsigned char *to, turn;
} Job;

static void piece(const void *with, int64_t i) {
    const Job *j = with;
    for (int k = 0; k < BYTES; ++k) j->to[i * BYTES + k] = (unsigned char)(j->turn + i);
}

static void read_back(const Job *j, int64_t end) {
    for (int64_t i = 0; i < end; ++i)
        for (int k = 0; k < BYTES; ++k)
            if (j->to[i * BYTES + k] != (unsigned char)(j->turn + i)) exit(1);
}

static void told(const void *with, int64_t done) { read_back(with, done); }

static void *caller(void *at) {
    Job j = {.to = malloc(MOST_PIECES * BYTES)};
    for (int turn = 0; turn < TURNS; ++turn) {
        j.turn = (unsigned char)turn, j.pieces = 1 + (turn * 21 + *(int *)at) % MOST_PIECES;
        SharedCopy copy;
        dpi_offer_copy(&copy, 1 + turn % 4, j.pieces, piece, &j);
        dpi_finish_copy(&copy, told);
        read_back(&j, j.pieces);
    }
    free(j.to);
    return NULL;
}

int main(void) {
    pthread_t threads[CALLERS];
    int at[CALLERS];
    for (int i = 0; i < CALLERS; ++i) at[i] = i, pthread_create(threads + i, NULL, caller, at + i);
    for (int i = 0; i < CALLERS; ++i) pthread_join(threads[i], NULL);
    puts("whole");
    return 0;
}
