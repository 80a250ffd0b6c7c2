// Rows copied from where they lie into slots, of groups of tables that are read by the same ids.

#include <stdint.h>
#include <string.h>

typedef struct {
    int64_t first_key, first_slot, first_table;  // each ends where the next group's begins
} Group;

typedef struct {
    const char *rows;
    char *slots;
    int64_t row_bytes;
} Table;

enum { AHEAD = 8 };  // rows: so far ahead memory is asked for one, for each lies by itself

// keys[count], ascending, of rows: ids behind all rows of the groups before; and slots[count], which are numbered so, too.
void dpi_copy_rows(const Group *groups, const Table *tables, const int64_t *keys, const int64_t *slots, long count) {
    const Group *group = groups, *next = groups;
    for (long i = -AHEAD; i < count; ++i) {
        if (i + AHEAD < count) {
            const int64_t key = keys[i + AHEAD];
            while (key >= next[1].first_key) ++next;
            for (const Table *t = tables + next->first_table; t < tables + next[1].first_table; ++t)
                for (int64_t at = 0; at < t->row_bytes; at += 64)
                    __builtin_prefetch(t->rows + (key - next->first_key) * t->row_bytes + at);
        }
        if (i < 0) continue;
        while (keys[i] >= group[1].first_key) ++group;
        for (const Table *t = tables + group->first_table; t < tables + group[1].first_table; ++t)
            memcpy(t->slots + (slots[i] - group->first_slot) * t->row_bytes,
                   t->rows + (keys[i] - group->first_key) * t->row_bytes, t->row_bytes);
    }
}
