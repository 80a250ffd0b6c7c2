// A strict reader: where RFC 9112 lets a server be lenient, this one refuses, since whatever two readers of one stream understand
// differently can smuggle a request past the first of them.

#include "http_head.h"

#include <string.h>
#include <strings.h>

typedef struct {
    const char *at;
    size_t size;
} Text;

static const uint8_t TOKEN[256] = {
    ['!'] = 1, ['#' ... '\''] = 1, ['*'] = 1, ['+'] = 1, ['-'] = 1, ['.'] = 1, ['0' ... '9'] = 1,
    ['A' ... 'Z'] = 1, ['^' ... 'z'] = 1, ['|'] = 1, ['~'] = 1,
};
enum { METHOD_BYTES = 20, EXTENSION_BYTES = 1 << 14 };  // of all chunks of a body

static int is(Text text, const char *wanted) {
    return text.size == strlen(wanted) && !strncasecmp(text.at, wanted, text.size);
}

static Text trimmed(Text text) {
    while (text.size && (*text.at == ' ' || *text.at == '\t')) ++text.at, --text.size;
    while (text.size && (text.at[text.size - 1] == ' ' || text.at[text.size - 1] == '\t')) --text.size;
    return text;
}

static const char *request_line(Text line, Head *head) {
    size_t at = 0;
    while (at < line.size && TOKEN[(uint8_t)line.at[at]]) ++at;
    if (!at || at > METHOD_BYTES || at == line.size || line.at[at] != ' ') return "400 a request line without a method";
    const size_t target = ++at;
    while (at < line.size && line.at[at] > ' ' && line.at[at] < 127 && line.at[at] != '#') ++at;
    if (at == target || line.at[target] != '/' || (at < line.size && line.at[at] == '#')) return "400 a target that is no path";
    const Text version = {line.at + at, line.size - at};
    if (version.size != 9 || memcmp(version.at, " HTTP/1.", 8) || (version.at[8] != '0' && version.at[8] != '1'))
        return "400 a request line that does not end in HTTP/1.1 or HTTP/1.0";
    head->minor = version.at[8] - '0';
    return NULL;
}

// What a head has said so far of the headers that frame its request.
typedef struct {
    int hosts, lengths, codings, close;
} Said;

static const char *framing(Text name, Text value, Head *head, Said *said) {
    if (is(name, "host")) {
        if (said->hosts++) return "400 two Host headers";
        for (size_t i = 0; i < value.size; ++i)
            if ((uint8_t)value.at[i] <= ' ' || (uint8_t)value.at[i] > 126 || strchr("/\\@?#<>\"{}|^`", value.at[i]))
                return "400 a Host that is no host";
    } else if (is(name, "content-length")) {
        if (said->lengths++) return "400 two Content-Length headers";
        if (!value.size) return "400 a Content-Length that is no number";
        while (value.size > 1 && *value.at == '0') ++value.at, --value.size;
        head->body_bytes = value.size > 18 ? INT64_MAX : 0;
        for (size_t i = 0; i < value.size; ++i) {
            if (value.at[i] < '0' || value.at[i] > '9') return "400 a Content-Length that is no number";
            if (value.size <= 18) head->body_bytes = head->body_bytes * 10 + (value.at[i] - '0');
        }
    } else if (is(name, "transfer-encoding")) {
        if (said->codings++ || !is(value, "chunked")) return "400 a transfer encoding other than chunked";
    } else if (is(name, "expect")) {
        if (!is(value, "100-continue")) return "417 an expectation other than 100-continue";
        head->expects = 1;
    } else if (is(name, "connection")) {
        while (value.size) {
            const char *comma = memchr(value.at, ',', value.size);
            const size_t size = comma ? (size_t)(comma - value.at) : value.size;
            const Text option = trimmed((Text){value.at, size});
            said->close |= is(option, "close");
            value.at += size + !!comma, value.size -= size + !!comma;
        }
    }
    return NULL;
}

static int differs(Text name) {
    return is(name, "x-request-id") || is(name, "traceparent") || is(name, "tracestate");
}

static const char *header(Text line, Head *head, Said *said, Stretch whole) {
    size_t colon = 0;
    while (colon < line.size && TOKEN[(uint8_t)line.at[colon]]) ++colon;
    if (!colon || colon == line.size || line.at[colon] != ':') return "400 a header line that does not begin with a name and a colon";
    for (size_t i = colon + 1; i < line.size; ++i) {
        const uint8_t c = line.at[i];
        if ((c < ' ' && c != '\t') || c == 127) return "400 a control byte in a header";
    }
    const Text name = {line.at, colon};
    if (head->apart < APART && differs(name)) head->line[head->apart++] = whole;
    return framing(name, trimmed((Text){line.at + colon + 1, line.size - colon - 1}), head, said);
}

static const char *settled(Head *head, const Said *said) {
    if (head->minor && !said->hosts) return "400 no Host header";
    if (said->codings && (said->lengths || !head->minor)) return "400 a transfer encoding beside a Content-Length or in HTTP/1.0";
    if (said->codings) head->body_bytes = CHUNKED;
    head->close = said->close || !head->minor;  // HTTP/1.0 keeps a connection only if the answer says so too
    head->expects &= head->minor;
    return NULL;
}

size_t dpi_http_fixed(const char *data, const Head *head, char *fixed, char *apart) {
    size_t size = 0, at = 0;
    for (uint32_t i = 0; i <= head->apart; ++i) {
        const Stretch line = i < head->apart ? head->line[i] : (Stretch){head->bytes - 2, head->bytes - 2};
        memcpy(fixed + size, data + at, line.at - at);
        size += line.at - at, at = line.end;
        if (apart) memcpy(apart, data + line.at, line.end - line.at), apart += line.end - line.at;
    }
    return size;
}

int dpi_http_head(const char *data, size_t size, Head *head, const char **fault) {
    Said said = {0};
    *head = (Head){0};
    size_t at = 0;
    for (int lines = 0;; ++lines) {
        const size_t most = size < HEAD_BYTES ? size : HEAD_BYTES;
        const char *end = at < most ? memchr(data + at, '\n', most - at) : NULL;
        if (end == NULL) {
            *fault = "431 more than 15360 bytes of headers";
            return most == HEAD_BYTES ? NEVER : NOT_YET;
        }
        const size_t next = end + 1 - data;
        if (next - at < 2 || end[-1] != '\r') {
            *fault = "400 a line feed without a carriage return";
            return NEVER;
        }
        const Text line = {data + at, next - 2 - at};
        if (!lines) *fault = request_line(line, head);
        else if (!line.size) *fault = settled(head, &said);
        else if (lines > HEADERS) *fault = "431 more than 100 headers";
        else *fault = header(line, head, &said, (Stretch){at, next});
        if (*fault) return NEVER;
        at = next;
        if (lines && !line.size) {
            head->bytes = at;
            return WHOLE;
        }
    }
}

enum { SIZE, EXTENSION, SIZE_END, DATA, DATA_CR, DATA_LF, LAST_CR, LAST_LF };

static int digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    c |= 32;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

int dpi_http_chunks(Chunks *k, const char **data, const char *end, char *out, size_t *size, const char **fault) {
    const char *at = *data;
    *fault = NULL;
    while (at < end && !*fault) {
        if (k->state == DATA) {
            const size_t take = (uint64_t)(end - at) < k->left ? (size_t)(end - at) : k->left;
            memcpy(out + *size, at, take);
            *size += take, at += take, k->left -= take;
            if (!k->left) k->state = DATA_CR;
            continue;
        }
        const char c = *at++;
        const int value = digit(c);
        switch (k->state) {
            case SIZE:
                if (value >= 0 && k->line < 8) k->left = k->left * 16 + value;
                else if (!k->line || (c != '\r' && c != ';')) *fault = "400 a chunk without its size";
                else k->state = c == ';' ? EXTENSION : SIZE_END;
                ++k->line;
                break;
            case EXTENSION:
                if (c == '\r') k->state = SIZE_END;
                else if ((uint8_t)c < ' ' || c == 127 || ++k->extension > EXTENSION_BYTES) *fault = "400 a chunk with a broken extension";
                break;
            case SIZE_END:
                k->state = k->left ? DATA : LAST_CR;
                k->line = 0;
                if (c != '\n') *fault = "400 a chunk's size without a line end";
                break;
            case DATA_CR: case LAST_CR:
                if (c != '\r') *fault = k->state == DATA_CR ? "400 a chunk longer than its size" : "400 trailers after the last chunk";
                ++k->state;
                break;
            default:
                if (c != '\n') *fault = "400 a chunk without a line end";
                if (k->state == LAST_LF) {
                    *data = at;
                    return *fault ? NEVER : WHOLE;
                }
                k->state = SIZE;
        }
    }
    *data = at;
    return *fault ? NEVER : NOT_YET;
}
