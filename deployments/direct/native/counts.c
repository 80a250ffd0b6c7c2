// What is counted of the requests that C has answered, until Python asks for it: sums by form and latency, and a sample.

#include "connection.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PER_SECOND = 200, RECORDS = 1 << 12, CANCELLED = BOUNDS + 1, STEPS = 4 };

// A request of the sample: its times, if it was drawn itself, and the scores of those of its rows that were, from `scores_at` on.
struct Record {
    const Form *form;
    int timed, scores_at, scores;
    double ms[STEPS];
};

uint64_t dpi_drawn(Listener *l) {
    uint64_t z = l->draw += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

// How far it is from the first one of `more` that is drawn to the next. As ScoreSample: about PER_SECOND a second, each as likely as any other.
static uint64_t apart(Sampler *s, int64_t more, double now) {
    const double passed = now - s->since;
    if (passed >= 1) {
        s->every = (int64_t)fmax(1, round(s->seen / passed / PER_SECOND));
        s->seen = 0, s->since = now;
    }
    s->seen += more;
    const int64_t so_far = s->seen / PER_SECOND;
    return (uint64_t)(s->every > so_far ? s->every : so_far);
}

static void sampled(Listener *l, EngineRing *r, const Form *f, const double *ms, const float *scores, double now) {
    const uint64_t requests = apart(&l->sampled_requests, 1, now), rows = apart(&r->sampled_rows, f->rows, now);
    if (l->record_count == RECORDS || (!l->records && !(l->records = malloc(RECORDS * sizeof *l->records)))) return;
    Record record = {.form = f, .timed = !(dpi_drawn(l) % requests), .scores_at = l->sample_count};
    memcpy(record.ms, ms, sizeof record.ms);
    for (uint64_t row = dpi_drawn(l) % rows; row < (uint64_t)f->rows && l->sample_count + f->tasks <= SAMPLES; row += rows) {
        memcpy(l->samples + l->sample_count, scores + row * f->tasks, f->tasks * sizeof *scores);
        l->sample_count += f->tasks, record.scores += f->tasks;
    }
    if (record.timed || record.scores) l->records[l->record_count++] = record;
}

void dpi_counted(Listener *l, const Sent *s, const float *scores, double now) {
    Form *f = s->form;
    const double ms[STEPS] = {s->queue_ms, s->encode_ms, s->device_ms, (now - s->started) * 1e3};
    int at = scores ? 0 : CANCELLED;
    while (at < l->bound_count && l->bounds[at] < ms[STEPS - 1]) ++at;
    Tally *tally = f->tally + at;
    ++tally->requests;
    for (int k = 0; k < STEPS; ++k) tally->ms[k] += ms[k];
    if (!f->untold) {
        f->untold = 1, f->next_untold = l->untold, l->untold = f;
        ++f->uses;
    }
    if (scores) sampled(l, s->ring, f, ms, scores, now);
}

static int appended(PyObject *list, PyObject *item) {
    const int good = item && !PyList_Append(list, item);
    Py_XDECREF(item);
    return good;
}

// Since the last time: [(known, its tallies as float64[BOUNDS + 2, 5])], and of the sample [(known, its times as float64[4] or nothing,
// scores of its rows as float32)].
PyObject *dpi_express_seen(Listener *l, PyObject *Py_UNUSED(none)) {
    PyObject *tallies = PyList_New(0), *samples = PyList_New(0);
    int good = tallies && samples;
    for (const Record *r = l->records; good && r < l->records + l->record_count; ++r)
        good = appended(samples, Py_BuildValue("(Oy#y#)", r->form->known, (const char *)r->ms, r->timed ? (Py_ssize_t)sizeof r->ms : 0,
                                               (const char *)(l->samples + r->scores_at), r->scores * (Py_ssize_t)sizeof *l->samples));
    for (Form *f = l->untold, *next; f; f = next) {
        next = f->next_untold;
        good = good && appended(tallies, Py_BuildValue("(Oy#)", f->known, (const char *)f->tally, (Py_ssize_t)sizeof f->tally));
        memset(f->tally, 0, sizeof f->tally);
        f->untold = 0;
        dpi_form_let_go(f);
    }
    l->untold = NULL;
    l->record_count = l->sample_count = 0;
    if (good) return Py_BuildValue("(NN)", tallies, samples);
    Py_XDECREF(tallies);
    Py_XDECREF(samples);
    return NULL;
}
