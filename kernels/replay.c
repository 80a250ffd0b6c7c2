// Replays a captured CUDA graph and waits for its scores in one call, without the GIL: a poll takes the interpreter from no
// other thread. Words that the device writes to host memory are seen 2 to 3 us before the driver's own wait returns (H200).

#include "module.h"

#include <sched.h>
#include <string.h>
#include <time.h>

typedef struct {
    int (*launch)(void *exec, void *stream);  // cudaGraphLaunch: 0 or an error's code
    int (*synchronize)(void *stream);         // cudaStreamSynchronize
    void *exec, *stream;
    const uint32_t *done;
    int64_t most;  // words of `done`; 0: there is nothing to look at
} Replay;

// Nanoseconds. To offer the core to others takes some hundred if nobody wants it.
static const int64_t PATIENCE = 2000000, CONTENDED = 20000;
enum { LOOKS = 32 };  // before others may have the core

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static void pause_core(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Whether all words were seen to have the value.
static int came(const uint32_t *done, int64_t words, uint32_t wanted) {
    const int64_t begun = now();
    for (int64_t last = begun, seen = 0;;) {
        for (int look = 0; look < LOOKS; ++look) {
            while (seen < words && __atomic_load_n(done + seen, __ATOMIC_ACQUIRE) == wanted) ++seen;
            if (seen == words) return 1;
            pause_core();
        }
        const int64_t before = now();
        sched_yield();
        last = now();
        if (last - before > CONTENDED || last - begun > PATIENCE) return 0;
    }
}

static int replayed(const Replay *r, int64_t words) {
    const uint32_t wanted = r->most ? __atomic_load_n(r->done, __ATOMIC_ACQUIRE) + 1 : 0;
    const int code = r->launch(r->exec, r->stream);
    return code || (r->most && came(r->done, words, wanted)) ? code : r->synchronize(r->stream);
}

// replay(given, words): `given` is a Replay; until so many words of `done` are one more than the first was. Gives CUDA's code.
PyObject *dpi_replay(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    if (!counted(count, 2)) return NULL;
    const int64_t words = PyLong_AsLongLong(args[1]);
    if (words == -1 && PyErr_Occurred()) return NULL;
    Py_buffer given;
    if (PyObject_GetBuffer(args[0], &given, PyBUF_SIMPLE)) return NULL;
    PyObject *result = NULL;
    if (given.len != sizeof(Replay)) {
        PyErr_Format(PyExc_ValueError, "replay: got %zd bytes, expected %zu", given.len, sizeof(Replay));
    } else {
        Replay replay;
        memcpy(&replay, given.buf, sizeof replay);
        if (replay.most && (words < 1 || words > replay.most)) {
            PyErr_Format(PyExc_ValueError, "words: got %lld, expected 1 to %lld", (long long)words, (long long)replay.most);
        } else {
            int code;
            Py_BEGIN_ALLOW_THREADS
            code = replayed(&replay, words);
            Py_END_ALLOW_THREADS
            result = PyLong_FromLong(code);
        }
    }
    PyBuffer_Release(&given);
    return result;
}
