"""Golden rows: a few encoded inputs and the source model's scores on them, which every replica must reproduce.

Owns their tensor form and the check that they fit the schema. Does not score.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dpiframe_core.bundle.manifest import GOLDEN_FILE
from dpiframe_core.errors import BundleError
from dpiframe_core.features.block_layout import IdSection
from dpiframe_core.features.row_block import Floats, RowBlock
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.features.vocabulary import id_bound

_IDS: tuple[IdSection, ...] = ("context_ids", "candidate_ids")  # stored widened: a file does not depend on a block's layout
_OTHERS = ("request_of_row", "context_dense", "candidate_dense")
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, eq=False)
class Golden:
    """Encoded rows and float32[rows, tasks] probabilities of the float32 source model. Filled by whoever exports it."""

    block: RowBlock
    scores: Floats

    def tensors(self) -> dict[str, torch.Tensor]:
        arrays = {name: getattr(self.block, name) for name in _OTHERS} | {name: self.block.wide_ids(name) for name in _IDS}
        return {name: torch.from_numpy(np.array(array)) for name, array in {**arrays, "scores": self.scores}.items()}


def golden_from_tensors(tensors: Mapping[str, torch.Tensor], schema: FeatureSchema, rows: int, tasks: int) -> Golden:
    """Checks names, shapes, dtypes and values against the schema.

    Raises:
        BundleError: one of them does not fit.
    """
    layout = schema.block_layout
    contexts = tensors["context_ids"].shape[0] if "context_ids" in tensors and tensors["context_ids"].ndim else 1
    expected: dict[str, tuple[tuple[int, ...], npt.DTypeLike]] = {
        "request_of_row": ((rows,), np.int32),
        "context_ids": ((contexts, len(layout.context_ids.widths)), layout.id_dtype),
        "candidate_ids": ((rows, len(layout.candidate_ids.widths)), layout.id_dtype),
        "context_dense": ((contexts, layout.context_dense), np.float32),
        "candidate_dense": ((rows, layout.candidate_dense), np.float32),
        "scores": ((rows, tasks), np.float32),
    }
    if tensors.keys() != expected.keys():
        raise BundleError(f"{GOLDEN_FILE}: got tensors {sorted(tensors)}, expected {sorted(expected)}")
    for name, (shape, dtype) in expected.items():
        got, want = _described(tensors[name]), f"{np.dtype(dtype).name}{list(shape)}"
        if got != want:
            raise BundleError(f"{GOLDEN_FILE}: {name}: got {got}, expected {want}")
    block = RowBlock.allocate(layout, rows, contexts)
    for name in _OTHERS:
        getattr(block, name)[:] = tensors[name].numpy()
    scores = tensors["scores"].numpy().copy()
    _check_range("request_of_row", block.request_of_row, 0, contexts - 1)
    _check_range("scores", scores, 0, 1)
    for name in ("context_dense", "candidate_dense"):
        _check_range(name, getattr(block, name), -_FLOAT32_MAX, _FLOAT32_MAX)
    for f in schema.features:
        if not f.is_id:
            continue
        column = schema.columns[f.name]
        ids = tensors[column.section].numpy()[:, column.start : column.start + column.width]
        bound = id_bound(schema, f)
        _check_range(f"{column.section}: feature {f.name}", ids, -1 if f.max_values > 1 else 0, bound - 1)
    for name in _IDS:
        block.set_ids(name, tensors[name].numpy())
    return Golden(block, scores)


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _check_range(what: str, values: npt.NDArray[Any], low: float, high: float) -> None:
    good = (values >= low) & (values <= high)  # NaN is not
    if not good.all():
        raise BundleError(f"{GOLDEN_FILE}: {what}: got {values[~good][0]}, expected {low:.9g} to {high:.9g}")
