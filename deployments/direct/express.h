// Scoring requests that C answers from end to end: what they say but for their tensors was seen before, to the byte, and Python,
// which has checked it, has handed over what follows from it. All that is not as ever becomes Python's request after all.

#ifndef DPI_EXPRESS_H
#define DPI_EXPRESS_H

#include "connection.h"

// Why a request that C has sent is Python's to answer, beside the engine's own status.
enum { ENDED_LATE = 100, ENDED_ENGINE_GONE = 101 };

enum { SECTIONS = 5, SAMPLES = 1 << 18, HEADER_BYTES = 64 };

// A section as a form sends it; its place among those of a block, see RowBlock.places.
typedef struct {
    int64_t start, size, columns, rows;
    const void *legal;  // of ids: the columns as blocks.c packs them
    int wide, section;
} Part;

// Requests that go to an engine together: one block, as `layout.offsets` lays it out, whose sections are put together here first.
typedef struct Ask {
    const struct Form *form;  // the first's; NULL: there are none
    int slot, rows, contexts;
    double deadline, arrived;
    char *section[SECTIONS];
} Ask;

// Filled by `learn`; its Python objects are its own.
typedef struct Form {
    int uses;
    uint64_t hash;
    PyObject *known, *rings, *kept;  // what Python calls it; engines; all whose bytes are read here
    const char *head, *envelope, *opening, *headers, *before, *after;
    Py_ssize_t head_size, envelope_size, opening_size, headers_size, before_size, after_size;
    int64_t body_size, widths[SECTIONS];  // bytes of a row or context in each section; odd ones are the contexts'
    const char *block_header;
    int rows, contexts, tasks, priority, parts;
    double deadline_s;  // 0: none
    Part part[SECTIONS - 1];
} Form;

// The form of a request of `head_size` bytes of head and what follows them, of which at most a blank line and `body_size` bytes are read.
Form *dpi_form_of(Listener *l, const char *head, size_t head_size, int64_t body_size);
void dpi_form_let_go(Form *f);
// Bytes of a block; and where its sections begin, if `at` is there.
int64_t dpi_form_laid_out(const Form *f, int rows, int contexts, int64_t *at);
// Adds a request's rows to an ask, whose sections have the room; 0 if a value is not what it should be, which Python can say.
int dpi_form_encoded(const Ask *ask, const Form *f, const char *tensors);

// Takes a whole request that lies at `data`, if it is of a known form and an engine has room for it.
int dpi_express_begun(Listener *l, Connection *c, const char *data);
// Asks an engine for what was begun since.
void dpi_express_asked(Listener *l, EngineRing *r);
// Asks all of them; looks out for the answer to a lone request for a moment.
int dpi_express_flushed(Listener *l);
// Takes what an engine has answered: it has said so, or it is looked for.
int dpi_express_woken(Listener *l, EngineRing *r);
int dpi_express_answered(Listener *l, EngineRing *r);
// Those whose deadline has passed.
int dpi_express_late(Listener *l);
// Nobody waits for a connection's request any more.
void dpi_express_dropped(Listener *l, Connection *c);
void dpi_express_forgotten(Listener *l);

PyObject *dpi_express_learn(Listener *l, PyObject *args);
PyObject *dpi_express_forget(Listener *l, PyObject *none);
PyObject *dpi_express_attach(Listener *l, PyObject *ring);
PyObject *dpi_express_detach(Listener *l, PyObject *ring);
PyObject *dpi_express_ended(Listener *l, PyObject *none);
PyObject *dpi_express_seen(Listener *l, PyObject *none);
PyObject *dpi_express_date(Listener *l, PyObject *line);

#endif
