// Replays a captured CUDA graph and waits for its scores in one call, without the GIL: a poll takes the interpreter from no
// other thread. Words that the device writes to host memory are seen 2 to 3 us before the driver's own wait returns (H200).

#include "runtime/module.h"

#include <sched.h>
#include <stddef.h>
#include <string.h>
#include <time.h>

// Nanoseconds. To offer the core to others takes some hundred if nobody wants it.
static const int64_t PATIENCE = 2000000, CONTENDED = 20000, IDLE = 6000;
enum { LOOKS = 32 };  // before others may have the core

int64_t dpi_now(void) {
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
static int came(const uint32_t *done, int64_t words, uint32_t wanted, void (*idle)(void *), void *with) {
    const int64_t begun = dpi_now();
    for (int64_t last = begun, seen = 0;;) {
        for (int look = 0; look < LOOKS; ++look) {
            while (seen < words && __atomic_load_n(done + seen, __ATOMIC_ACQUIRE) == wanted) ++seen;
            if (seen == words) return 1;
            pause_core();
        }
        int64_t before = dpi_now();
        if (idle && before - begun > IDLE) idle(with), idle = NULL, before = dpi_now();  // what that took nobody else had
        sched_yield();
        last = dpi_now();
        if (last - before > CONTENDED || last - begun > PATIENCE) return 0;
    }
}

int dpi_replayed(const Replay *r, void (*meanwhile)(void *), void (*idle)(void *), void *with) {
    const uint32_t wanted = r->most ? __atomic_load_n(r->done, __ATOMIC_ACQUIRE) + 1 : 0;
    const int code = r->launch(r->exec, r->stream);
    if (meanwhile) meanwhile(with);
    return code || (r->most && came(r->done, r->words, wanted, idle, with)) ? code : r->synchronize(r->stream);
}

int dpi_replay_of(PyObject *given, Replay *out) {
    const Py_ssize_t size = offsetof(Replay, words);
    Py_buffer bytes;
    if (PyObject_GetBuffer(given, &bytes, PyBUF_SIMPLE)) return 0;
    const Py_ssize_t got = bytes.len;
    if (got == size) memcpy(out, bytes.buf, size);
    PyBuffer_Release(&bytes);
    if (got != size) PyErr_Format(PyExc_ValueError, "replay: got %zd bytes, expected %zd", got, size);
    return got == size;
}

int dpi_set_words(int64_t words, Replay *out) {
    out->words = words;
    const int good = !out->most || (words >= 1 && words <= out->most);
    if (!good) PyErr_Format(PyExc_ValueError, "words: got %lld, expected 1 to %lld", (long long)words, (long long)out->most);
    return good;
}

// replay(given, words): `given` is a Replay; until so many words of `done` are one more than the first was. Gives CUDA's code.
PyObject *dpi_replay(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    Replay replay;
    if (!counted(count, 2) || !dpi_replay_of(args[0], &replay)) return NULL;
    const int64_t words = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred() || !dpi_set_words(words, &replay)) return NULL;
    int code;
    Py_BEGIN_ALLOW_THREADS
    code = dpi_replayed(&replay, NULL, NULL, NULL);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(code);
}
