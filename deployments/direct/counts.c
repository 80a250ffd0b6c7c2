// What is counted of the requests that C has answered, until Python asks for it.

#include "connection.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PER_SECOND = 200, RECORDS = 1 << 16 };

// What is counted of a request that is over.
struct Record {
    Form *form;
    int cancelled, sampled, sample_at;  // scores of so many rows, from there on in `samples`
    float queue_ms, encode_ms, device_ms, total_ms;
};

uint64_t dpi_drawn(Listener *l) {
    uint64_t z = l->draw += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

Record *dpi_counted(Listener *l, Connection *c, int cancelled, double now) {
    if (l->record_count == RECORDS) return NULL;  // nobody has asked for them for long
    if (l->record_count == l->record_room) {
        const int room = l->record_room ? 2 * l->record_room : 256;
        Record *more = realloc(l->records, room * sizeof *more);
        if (more == NULL) return NULL;
        l->records = more, l->record_room = room;
    }
    ++c->sent.form->uses;
    Record *record = l->records + l->record_count++;
    *record = (Record){
        c->sent.form, cancelled, 0, 0, c->sent.queue_ms, c->sent.encode_ms, c->sent.device_ms,
        (float)((now - c->sent.started) * 1e3),
    };
    return record;
}

// As ScoreSample: about PER_SECOND rows a second, each as likely as any other.
void dpi_sampled(Listener *l, EngineRing *r, Record *record, const float *scores, int rows, int tasks, double now) {
    const double passed = now - r->sample_since;
    if (passed >= 1) {
        r->sample_every = fmax(1, round(r->sample_rows / passed / PER_SECOND));
        r->sample_rows = 0, r->sample_since = now;
    }
    r->sample_rows += rows;
    const int64_t so_far = r->sample_rows / PER_SECOND, every = r->sample_every > so_far ? r->sample_every : so_far;
    if (record == NULL) return;
    record->sample_at = l->sample_count;
    for (int64_t row = (int64_t)(dpi_drawn(l) % (uint64_t)every); row < rows && l->sample_count + tasks <= SAMPLES; row += every) {
        memcpy(l->samples + l->sample_count, scores + row * tasks, tasks * sizeof *scores);
        l->sample_count += tasks, ++record->sampled;
    }
}

// [(known, whether its client gave it up, queue_ms, encode_ms, device_ms, total_ms, sampled scores as bytes)] since the last time.
PyObject *dpi_express_seen(Listener *l, PyObject *Py_UNUSED(none)) {
    PyObject *out = PyList_New(l->record_count);
    for (int i = 0; out && i < l->record_count; ++i) {
        const Record *r = l->records + i;
        PyObject *item = Py_BuildValue("(OOffffy#)", r->form->known, r->cancelled ? Py_True : Py_False, r->queue_ms, r->encode_ms, r->device_ms,
                                       r->total_ms, (const char *)(l->samples + r->sample_at), (Py_ssize_t)r->sampled * r->form->tasks * 4);
        if (item == NULL) Py_CLEAR(out);
        else PyList_SET_ITEM(out, i, item);
    }
    for (int i = 0; i < l->record_count; ++i) dpi_form_let_go(l->records[i].form);
    l->record_count = l->sample_count = 0;
    return out;
}
