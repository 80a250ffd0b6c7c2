"""The words of the header that a row block, and so a batch in pinned memory, begins with. wait_for_rows.cuh and staging.c know
two of them. Knows no torch.
"""

from enum import IntEnum

HEADER_WORDS = 16  # int32; 64 bytes, so that every section starts on a cache line


class HeaderWord(IntEnum):
    MAGIC = 0
    ROWS = 1
    CONTEXTS = 2
    COLUMNS = 3  # five words that tell which columns there are
    OOV_COUNT = 8
    STAGED_ROWS = 10  # of a batch: n >= 0: all its n rows are staged; -1 - k: the first k are, and more will come
    STAGED_CONTEXTS = 11  # of a batch, told before its rows; 0: not told
