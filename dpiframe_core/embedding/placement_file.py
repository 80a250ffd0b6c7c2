"""A placement as a directory: `placement.json`, and `ranks.safetensors` (uint32[rows] by table) where tables need ranks."""

import json
import math
import os
import secrets
import shutil
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dpiframe_core.embedding.frequency import Ranks
from dpiframe_core.embedding.placement import Placement, TablePlacement
from dpiframe_core.errors import BundleError, InputError, shown
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.strict import Name, Strict, first_fault

FORMAT: Literal["dpiframe-placement/1"] = "dpiframe-placement/1"
PLACEMENT_FILE, RANKS_FILE = "placement.json", "ranks.safetensors"

_Rows = Annotated[int, Field(ge=0)]


class _Table(Strict):
    """See `TablePlacement`; `ranked`: `ranks.safetensors` holds its rows' ranks."""

    table: Name
    rows: _Rows
    hot: _Rows
    warm: _Rows
    in_files: _Rows = 0
    ranked: bool = False


class _File(Strict):
    """All of `placement.json`."""

    format: Literal["dpiframe-placement/1"] = FORMAT
    gpus: Annotated[int, Field(ge=1)]
    tables: tuple[_Table, ...]
    cold_reads: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


def write_placement(path: str | os.PathLike[str], placement: Placement) -> None:
    """Writes the directory beside its place and renames it there, whole.

    Raises:
        InputError: something lies there already, or nothing may be written.
    """
    root = Path(path).absolute()
    check_free(root, "placement")
    tables = tuple(
        _Table(table=t.table, rows=t.rows, hot=t.hot, warm=t.warm, in_files=t.in_files, ranked=t.table in placement.ranks)
        for t in placement.tables
    )
    staging = root.with_name(f".{root.name}-{secrets.token_hex(4)}.new")
    try:
        staging.mkdir(parents=True)
        known = placement.cold_reads if math.isfinite(placement.cold_reads) else None
        file = _File(gpus=placement.gpus, tables=tables, cold_reads=known)
        (staging / PLACEMENT_FILE).write_text(json.dumps(file.model_dump(mode="json", exclude_none=True), indent=1) + "\n")
        if placement.ranks:
            save_file({name: np.ascontiguousarray(own) for name, own in placement.ranks.items()}, staging / RANKS_FILE)
            (staging / RANKS_FILE).chmod((staging / PLACEMENT_FILE).stat().st_mode)  # safetensors lets its owner alone read it
        staging.rename(root)
    except OSError as error:
        raise InputError("placement", str(root), f"a path that may be written ({error.strerror})") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_free(path: Path, where: str) -> None:
    """Raises InputError, about `where`, if something lies at the path where a placement is to be written."""
    if path.exists() or path.is_symlink():
        raise InputError(where, str(path), "a path where nothing is yet")


def read_placement(path: str | os.PathLike[str], schema: FeatureSchema) -> Placement:
    """Reads a placement of this schema's tables.

    Raises:
        BundleError: missing, damaged, or of other tables; one line, which file and why.
    """
    root = Path(path)
    file = _read_file(root / PLACEMENT_FILE)
    ranked = sorted(t.table for t in file.tables if t.ranked)
    ranks = _read_ranks(root / RANKS_FILE) if ranked else {}
    if sorted(ranks) != ranked:
        raise BundleError(
            f"{root / RANKS_FILE}: got ranks of {shown(sorted(ranks))}, expected of {shown(ranked)}, as {PLACEMENT_FILE}"
        )
    try:
        placement = Placement(
            file.gpus,
            tuple(TablePlacement(t.table, t.rows, t.hot, t.warm, t.in_files) for t in file.tables),
            ranks,
            math.inf if file.cold_reads is None else file.cold_reads,
        )
        placement.check(schema)
        for name, own in ranks.items():
            _check_permutation(f"ranks.{name}", own)
    except InputError as error:
        raise BundleError(f"{root}: {error}") from None
    return placement


def _read_file(path: Path) -> _File:
    try:
        text = path.read_bytes()
        fields = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(f"{path}: got {shown(str(error))}, expected JSON") from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:  # told first: another format's other keys are no faults
        found = fields.get("format") if isinstance(fields, dict) else fields
        raise BundleError(f"{path}: format: got {shown(found)}, expected {FORMAT!r}")
    try:
        return _File.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise BundleError(f"{path}: {first_fault(error)}") from None


def _read_ranks(path: Path) -> dict[str, Ranks]:
    try:
        ranks: dict[str, Ranks] = load_file(path)
        return ranks
    except (OSError, SafetensorError) as error:
        raise BundleError(f"{path}: got {shown(' '.join(str(error).split()))}, expected a whole safetensors file") from None


def _check_permutation(where: str, ranks: Ranks) -> None:
    """Raises InputError unless each of 0, 1, .. is there, and so once."""
    highest = int(ranks.max())
    if highest >= len(ranks):
        raise InputError(where, highest, f"ranks below {len(ranks)}")
    seen = np.zeros(len(ranks), np.bool_)
    seen[ranks] = True
    if not seen.all():
        raise InputError(where, f"no rank {int(np.argmin(seen))}", f"each of the {len(ranks)} ranks once")
