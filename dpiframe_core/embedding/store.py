"""Owns a model's embedding tables on one device, and tells lookups where the rows lie through segment descriptors.

A table's rows may lie in several segments of device-readable memory (local HBM, a peer's, pinned host memory); today each
table is one segment in local memory. Descriptors are double-buffered and chosen by a word of each lane, so that new addresses
take effect between two batches without a new capture. A lookup keeps a copy of first segments: `DeviceLookup.place` renews it.
"""

from collections.abc import Mapping

import torch

from dpiframe_core.embedding.layout import table_dtype
from dpiframe_core.errors import BundleError
from dpiframe_core.features.schema import FeatureSchema
from kernels.lookup.descriptors import whole


class EmbeddingStore:
    """The tables of one model, in the schema's order.

    Args:
        tables: name -> [rows, dim] as the schema says (memory-mapped is fine).
        device: where they are to live. On a CPU they are used as they come.
        scales: name -> float32[dim], of the int8 tables.

    Attributes:
        tables, scales: in the schema's order; a scale is None where the table is not int8.

    Raises:
        BundleError: a table is missing or differs from the schema.
    """

    def __init__(
        self,
        schema: FeatureSchema,
        tables: Mapping[str, torch.Tensor],
        device: torch.device,
        scales: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        given = [(scales or {}).get(t.name) for t in schema.tables]
        for t, scale in zip(schema.tables, given, strict=True):
            _check(f"tables.{t.name}", tables.get(t.name), (t.rows, t.dim), t.dtype)
            if t.dtype == "int8":
                _check(f"tables.{t.name}.scale", scale, (t.dim,), "float32")
        self.device = device
        self.tables = [tables[t.name].to(device).contiguous() for t in schema.tables]
        self.scales = [None if s is None else s.to(device).contiguous() for s in given]
        self.descriptors = whole(self.tables, self.scales, device) if device.type == "cuda" else None

    @property
    def bytes_used(self) -> int:
        return sum(t.nbytes for t in (*self.tables, *self.scales) if t is not None)

    @property
    def out_of_range(self) -> int:
        """Ids that lookups on a GPU found outside their table since the start. Waits for the device."""
        return int(self.descriptors.out_of_range.item()) if self.descriptors else 0


def _check(where: str, found: torch.Tensor | None, shape: tuple[int, ...], dtype: str) -> None:
    if found is None or tuple(found.shape) != shape or found.dtype != table_dtype(dtype):
        got = None if found is None else (tuple(found.shape), str(found.dtype))
        raise BundleError(f"{where}: got {got}, expected {shape} of {dtype}")
