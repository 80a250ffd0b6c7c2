"""A lane's state: words in device memory by which the kernels of a batch tell one another about it (common.cuh)."""

from enum import IntEnum

STATE_WORDS = 8  # int32


class StateWord(IntEnum):
    """The first two between batches too; READY_*, of a lookup that runs ahead of its rows, are 0 then."""

    TRUE_ROWS = 0  # of the batch, from the lookup for the kernels behind it
    GENERATION = 1  # of segment descriptors, which the lookup reads
    READY_ROWS = 2  # that are staged (wait_for_rows.cuh)
    BATCH_NUMBER = 3  # which the lookup counts
    READY_BLOCKS = 4  # whose rows are staged
    CONTEXTS = 5  # of the batch, from a lookup that writes what they share, or histories; 0 where nobody says
