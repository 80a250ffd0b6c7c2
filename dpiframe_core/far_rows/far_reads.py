"""Where rows that no memory held at first were found."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FarReads:
    """Filled by `RowsAhead.found`: since the start, each row once a request; and how it is now.

    Attributes:
        promoted: lay in a memory nearer than the slots. memory: lay in a slot, or were being read. file: had to be read.
        near: rows that lie nearer now. staying: rows that are to stay in their slots.
    """

    promoted: int = 0
    memory: int = 0
    file: int = 0
    near: int = 0
    staying: int = 0
