"""From what an operator says, how much of a GPU's memory or a plan, to where each row lies."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from dpiframe_core.embedding.hot_rows import place_bytes
from dpiframe_core.embedding.place_rows import place_rows
from dpiframe_core.embedding.placement import Placement
from dpiframe_core.embedding.placement_file import read_placement
from dpiframe_core.embedding.row_counts import zipf_counts
from dpiframe_core.errors import InputError
from dpiframe_core.far_rows.row_source import RowSource
from dpiframe_core.features.schema import FeatureSchema

_EXPONENT = 1.05  # of how often rows are read, where no plan says it


@dataclass(frozen=True, slots=True, eq=False)
class Home:
    """Where a model's rows are to lie.

    name: of its tables, one for each content: processes of one host share the rows in its memory by it. folder: for memory
    files, such as /dev/shm; None: this process keeps them for itself. ahead_bytes: of memory for rows that only files hold.
    source: where those are read; None: in the bundle's files. replan_s: after how long rows that are read often now take the
    places of others in a GPU's memory, None: never; move_bytes: of rows that move then.
    """

    placement: Placement
    name: str
    folder: Path | None = Path("/dev/shm")
    ahead_bytes: int = 256 << 20
    source: RowSource | None = None
    replan_s: float | None = None
    move_bytes: int = 64 << 20


def home_of(
    schema: FeatureSchema,
    name: str,
    *,
    hbm_gib: float | None,
    placement: str | None,
    folder: str | None = None,
    host_gib: float | None = None,
    ahead_mib: float = 256,
    source: RowSource | None = None,
    replan_s: float | None = None,
    replan_mib: float = 64,
) -> Home:
    """A plan's placement; or, without one, ids taken to be by falling frequency, and as many rows hot as `hbm_gib` hold.

    Args:
        name, folder, source, replan_s: see `Home`. host_gib: of the host's memory for rows that are not hot, None: for all;
            others stay in files. ahead_mib: of memory for rows that only files hold. replan_mib: of rows that move at a time.

    Raises:
        InputError: the plan is of another model; or the memory does not hold a row of each table.
    """
    if placement is not None:
        found = read_placement(Path(placement), schema)
    else:
        host = None if host_gib is None else int(host_gib * 2**30)
        found = _placed(schema, int((hbm_gib or 0) * 2**30), host, moves=replan_s is not None)
        found = replace(found, cold_reads=math.inf)  # nobody counted any
    return Home(
        found, name, None if folder is None else Path(folder), int(ahead_mib * 2**20), source, replan_s, int(replan_mib * 2**20)
    )


def _placed(schema: FeatureSchema, hbm_bytes: int, host_bytes: int | None, *, moves: bool) -> Placement:
    """With room for the places of rows, if they move."""
    counts, kept = zipf_counts(schema, _EXPONENT), 0
    while True:
        try:
            found = place_rows(schema, counts, 1, hbm_bytes - kept, host_bytes=host_bytes)
        except InputError as e:
            if not kept:
                raise
            raise InputError("hbm_gib", hbm_bytes / 2**30, f"room for {kept} bytes of places of rows that may move, too") from e
        need = place_bytes(found.tables) if moves else 0
        if need <= kept:
            return found
        kept = need
