"""One embedding table as a file of a bundle: `weight`[rows, dim] and, if int8, `scale` float32[dim]: value = weight * scale."""

from pathlib import Path

import torch

from dpiframe_core.bundle.bundle_files import read_tensors, write_tensors
from dpiframe_core.bundle.manifest import table_file
from dpiframe_core.errors import BundleError, shown
from dpiframe_core.features.schema import Table


def write_table(root: Path, name: str, weight: torch.Tensor, scale: torch.Tensor | None) -> None:
    """Writes what it is given; `read_table` checks it."""
    write_tensors(root, table_file(name), {"weight": weight} if scale is None else {"weight": weight, "scale": scale})


def read_table(root: Path, table: Table) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight, memory-mapped, and the scale of an int8 table.

    Raises:
        BundleError: the file is damaged or does not fit the schema.
    """
    file = table_file(table.name)
    tensors = read_tensors(root, file)
    expected = {"weight": f"torch.{table.dtype}{[table.rows, table.dim]}"}
    if table.dtype == "int8":
        expected["scale"] = f"torch.float32{[table.dim]}"
    if tensors.keys() != expected.keys():
        raise BundleError(f"{file}: got tensors {shown(sorted(tensors))}, expected {sorted(expected)}")
    for key, tensor in tensors.items():
        got = f"{tensor.dtype}{list(tensor.shape)}"
        if got != expected[key]:
            raise BundleError(f"{file}: {key}: got {got}, expected {expected[key]}")
    scale = tensors.get("scale")
    if scale is not None and not (usable := (scale > 0) & scale.isfinite()).all():
        raise BundleError(f"{file}: scale: got {scale[~usable][0].item()}, expected finite numbers above 0")
    return tensors["weight"], scale
