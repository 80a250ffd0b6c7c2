// Feeds mutated requests to http_head.c, each in memory of its own size, so that the sanitizers see a byte read too far; and holds
// what it says against what must be true of it.
//
//   http_head_fuzz SEED COUNT

#include "http_head.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const SEEDS[] = {
    "POST /v2/models/demo/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 12\r\nInference-Header-Content-Length: 3\r\n\r\n",
    "POST /v1/score HTTP/1.1\r\nhost:a\r\nX-Request-ID: 1\r\nAuthorization: Bearer x\r\ntransfer-encoding: chunked\r\n\r\n",
    "GET / HTTP/1.0\r\nConnection: keep-alive, close ,x\r\n\r\n",
    "PUT /a?b=c HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nX:\r\nY: \t z\t\r\nX-Request-ID:\r\nX-Request-ID: 2\r\n\r\n",
    "5\r\nhello\r\n10;a=b\r\n0123456789abcdef\r\n0\r\n\r\n",
    "1\r\nx\r\n00000000\r\n\r\n",
    "ffffffff\r\nabc",
};
enum { SEEDS_COUNT = sizeof SEEDS / sizeof *SEEDS, MOST = 20000 };

static unsigned long long state;

static unsigned draw(unsigned below) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (unsigned)(state >> 20) % below;
}

static size_t mutated(char *to) {
    static const char LIKELY[] = "\r\n\r\n: \t,;0aF\0\x7f\xff/";
    const char *seed = SEEDS[draw(SEEDS_COUNT)];
    size_t size = strlen(seed);
    memcpy(to, seed, size);
    if (!draw(40)) {  // long ones: many headers, or one that is
        size = 0;
        const int headers = draw(130), width = draw(300);
        size += sprintf(to, "POST / HTTP/1.1\r\nHost: a\r\n");
        for (int i = 0; i < headers && size + width + 8 < MOST; ++i) size += sprintf(to + size, "H%d: %*s\r\n", i, width, "x");
        size += sprintf(to + size, "\r\n");
    }
    for (int edits = draw(6); edits && size; --edits) {
        const size_t at = draw(size), rest = size - at;
        switch (draw(5)) {
            case 0: to[at] = (char)draw(256); break;
            case 1: to[at] = LIKELY[draw(sizeof LIKELY - 1)]; break;
            case 2: memmove(to + at, to + at + 1, rest - 1), --size; break;
            case 3: size = at + draw(rest + 1); break;
            default:
                if (size + rest < MOST) memmove(to + size, to + at, rest), size += rest;
        }
    }
    return size;
}

static void require(int good, const char *what, const char *data, size_t size) {
    if (good) return;
    fprintf(stderr, "%s: ", what);
    fwrite(data, 1, size, stderr);
    exit(1);
}

static void head_case(const char *data, size_t size) {
    Head head, again;
    const char *fault = NULL;
    const int found = dpi_http_head(data, size, &head, &fault);
    require(found == NEVER || found == WHOLE || found == NOT_YET, "no verdict", data, size);
    if (found == NEVER) require(fault != NULL && fault[0] == '4', "no fault", data, size);
    if (found != WHOLE) return;
    require(head.bytes <= size && head.bytes <= HEAD_BYTES && !memcmp(data + head.bytes - 4, "\r\n\r\n", 4), "end", data, size);
    require(memchr(data, 0, head.bytes) == NULL, "a NUL", data, size);
    require(head.body_bytes >= CHUNKED && (head.minor == 0 || head.minor == 1), "framing", data, size);
    require(head.apart <= APART, "apart", data, size);
    for (uint32_t i = 0, at = 0; i < head.apart; at = head.line[i++].end)
        require(head.line[i].at >= at && head.line[i].end > head.line[i].at && head.line[i].end <= head.bytes, "line", data, size);
    const size_t cut = draw(head.bytes);  // whatever a head's first bytes are, they are no head and no fault yet
    char *part = malloc(cut ? cut : 1);
    memcpy(part, data, cut);
    require(dpi_http_head(part, cut, &again, &fault) == NOT_YET, "a part", data, size);
    free(part);
}

static void chunks_case(const char *data, size_t size) {
    char *whole = malloc(size + 1), *parts = malloc(size + 1);
    size_t whole_size = 0, parts_size = 0;
    const char *fault = NULL, *at = data;
    Chunks one = {0}, many = {0};
    const int verdict = dpi_http_chunks(&one, &at, data + size, whole, &whole_size, &fault);
    const char *other = data;
    int last = NOT_YET;
    while (last == NOT_YET && other < data + size) {
        const char *end = other + 1 + draw(data + size - other);
        last = dpi_http_chunks(&many, &other, end, parts, &parts_size, &fault);
        require(last != NOT_YET || other == end, "bytes left", data, size);
    }
    require(last == verdict && whole_size == parts_size && !memcmp(whole, parts, whole_size), "split chunks", data, size);
    require(verdict != WHOLE || at == other, "the end of chunks", data, size);
    free(whole);
    free(parts);
}

int main(int count, char **given) {
    if (count != 3) return 2;
    state = strtoull(given[1], NULL, 10) * 2654435769u + 88172645463325252u;
    long whole = 0;
    static char bytes[2 * MOST];
    for (long left = atol(given[2]); left; --left) {
        const size_t size = mutated(bytes);
        char *data = malloc(size ? size : 1);
        memcpy(data, bytes, size);
        head_case(data, size);
        chunks_case(data, size);
        Head head;
        const char *fault;
        whole += dpi_http_head(data, size, &head, &fault) == WHOLE;
        free(data);
    }
    printf("%ld\n", whole);
    return 0;
}
