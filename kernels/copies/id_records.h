// Ids and numbers as they were sent -> the records of a row block, each checked on the way. Twin of IdRecord.pack behind a
// comparison. Knows no Python, and no bounds: whoever calls it has checked them.

#ifndef DPI_ID_RECORDS_H
#define DPI_ID_RECORDS_H

#include <stdint.h>
#include <string.h>

// What was sent begins at any byte, and so may a block in memory that another process laid out.
#define ANYWHERE __attribute__((aligned(1), may_alias))
typedef int32_t ANYWHERE Id32;
typedef int64_t ANYWHERE Id64;
typedef uint16_t ANYWHERE Half;
typedef uint32_t ANYWHERE Word;
typedef uint64_t ANYWHERE Long;

// An id column: its place among the columns sent, its first byte in a record and its bytes there. Legal are `span` ids, from
// `lowest` on.
typedef struct {
    int32_t source, at, width, lowest;
    uint64_t span;
} Column;

enum { ROWS = 64 };  // at once, column by column: what they take stays in the first cache

#define PACK(ID, STORED)                                                      \
    for (int64_t r = 0; r < n; ++r) {                                         \
        const int64_t id = ((const ID *)from)[r * columns];                   \
        illegal += (uint64_t)id - (uint64_t)(int64_t)c->lowest >= c->span;    \
        *(STORED *)(to + r * bytes) = (STORED)id;                             \
    }

#define PACK_ROWS(ID)                                                                       \
    {                                                                                       \
        const uint8_t *from = (const uint8_t *)((const ID *)ids + first * columns + c->source); \
        switch (c->width) {                                                                 \
            case 1: PACK(ID, uint8_t) break;                                                \
            case 2: PACK(ID, Half) break;                                                   \
            case 4: PACK(ID, Word) break;                                                   \
            default: PACK(ID, Long)                                                         \
        }                                                                                   \
    }

// ids[rows, columns], of 8 bytes each if `wide`, else of 4, into records of so many bytes. Gives how many ids are not legal; then
// what the records hold has no meaning.
static inline int64_t dpi_packed(const Column *column, int64_t columns, const void *ids, int wide, int64_t rows,
                                 uint8_t *records, int64_t bytes) {
    int64_t illegal = 0;
    for (int64_t first = 0; first < rows; first += ROWS) {
        const int64_t n = rows - first < ROWS ? rows - first : ROWS;
        for (const Column *c = column; c < column + columns; ++c) {
            uint8_t *to = records + first * bytes + c->at;
            if (wide) PACK_ROWS(Id64) else PACK_ROWS(Id32)
        }
    }
    return illegal;
}

enum { UNKNOWN = -2 };  // a mark among ids that are below all others; another mark, below it, is of a missing value

#define SETTLE(STORED)                                                              \
    for (int64_t r = 0; r < rows; ++r) {                                            \
        int64_t id = from[r];                                                       \
        if (id <= UNKNOWN) {                                                        \
            found += id == UNKNOWN;                                                 \
            id = stand_ins[(id == UNKNOWN ? 0 : columns) + c->source];              \
        }                                                                           \
        *(STORED *)(to + r * bytes) = (STORED)id;                                   \
    }

// ids[columns, rows] into records of so many bytes, marks replaced by their column's of stand_ins[2, columns]: of an unknown and of
// a missing value. Gives how many were unknown.
static inline int64_t dpi_settled(const Column *column, int64_t columns, const int64_t *ids, const int64_t *stand_ins, int64_t rows,
                                  uint8_t *records, int64_t bytes) {
    int64_t found = 0;
    for (const Column *c = column; c < column + columns; ++c) {
        const int64_t *from = ids + c->source * rows;
        uint8_t *to = records + c->at;
        switch (c->width) {
            case 1: SETTLE(uint8_t) break;
            case 2: SETTLE(Half) break;
            case 4: SETTLE(Word) break;
            default: SETTLE(Long)
        }
    }
    return found;
}

// Copies float32s. Gives how many are infinite or no numbers.
static inline int64_t dpi_copied(const void *given, int64_t size, void *out) {
    const uint32_t exponent = 0x7f800000;  // all ones in those, and in those alone
    const Word *number = memcpy(out, given, size);
    int64_t found = 0;
    for (int64_t i = 0; i < size / 4; ++i) found += (number[i] & exponent) == exponent;
    return found;
}

#endif
