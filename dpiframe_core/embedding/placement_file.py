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
from safetensors import SafetensorError, safe_open
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
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise InputError("placement", str(root), f"a path that may be written ({reason})") from None
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
    _check_ranks(root / RANKS_FILE, file)
    ranks = _read_ranks(root / RANKS_FILE) if any(t.ranked for t in file.tables) else {}
    try:
        placement = Placement(
            file.gpus, tuple(_placed(t) for t in file.tables), ranks, math.inf if file.cold_reads is None else file.cold_reads
        )
        placement.check(schema)
        for name, own in ranks.items():
            _check_permutation(f"ranks.{name}", own)
    except InputError as error:
        raise BundleError(f"{root}: {error}") from None
    return placement


def check_placement(path: str | os.PathLike[str], schema: FeatureSchema) -> None:
    """Raises as `read_placement`, but reads no rank: of large tables these are gigabytes."""
    root = Path(path)
    file = _read_file(root / PLACEMENT_FILE)
    found = _check_ranks(root / RANKS_FILE, file)
    try:
        Placement(file.gpus, tuple(_placed(t) for t in file.tables)).check(schema)
    except InputError as error:
        raise BundleError(f"{root}: {error}") from None
    for t in file.tables:
        if t.ranked and found[t.table] != [t.rows]:
            raise BundleError(f"{root}: ranks.{t.table}: got ranks of {found[t.table]} rows, expected of [{t.rows}]")


def _check_ranks(path: Path, file: _File) -> dict[str, list[int]]:
    """The shapes of the ranks there are.

    Raises:
        BundleError: they are not of the tables that are said to have some.
    """
    ranked = sorted(t.table for t in file.tables if t.ranked)
    if not ranked and not path.exists():
        return {}
    try:
        with safe_open(path, framework="np") as ranks:
            found = {name: ranks.get_slice(name).get_shape() for name in sorted(ranks.keys())}
    except (OSError, SafetensorError) as error:
        raise BundleError(f"{path}: got {shown(' '.join(str(error).split()))}, expected a whole safetensors file") from None
    if [*found] != ranked:
        raise BundleError(f"{path}: got ranks of {shown([*found])}, expected of {shown(ranked)}, as {PLACEMENT_FILE}")
    return found


def _placed(t: _Table) -> TablePlacement:
    return TablePlacement(t.table, t.rows, t.hot, t.warm, t.in_files)


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
