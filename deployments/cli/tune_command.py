"""What `dpiframe tune` does: recorded batch sizes in, the buckets for a deployment's configuration out."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from deployments.offline.output_file import check_outfile, write_outfile
from dpiframe_core.bundle.bundle import Bundle, read_bundle
from dpiframe_core.engine.buckets import BatchSizes, Counts, geometric_buckets, mean_cost, padding_waste, tuned_buckets
from dpiframe_core.errors import ConfigError, InputError
from dpiframe_core.strict import first_fault


@dataclass(frozen=True, slots=True)
class Buckets:
    """A list of buckets and what it means for the batches recorded. `mean_cost` is in the unit of `Tuning.cost`."""

    sizes: tuple[int, ...]
    padding_waste: float
    mean_cost: float


@dataclass(frozen=True, slots=True)
class Tuning:
    """Filled by `tune`. `cost` is "rows" or "microseconds"; `device` says where those were measured."""

    model: str
    version: str
    fingerprint: str
    max_batch_rows: int
    batches: int
    median_rows: int
    cost: str
    device: str | None
    geometric: Buckets
    tuned: Buckets

    def report(self) -> str:
        """For people."""
        unit = "us" if self.cost == "microseconds" else "rows"
        lines = [f"{self.model} {self.version}: {self.batches:,} batches recorded, of {self.median_rows:,} rows in the median"]
        for name, buckets in (("geometric", self.geometric), ("tuned", self.tuned)):
            lines.append(
                f"{name}: {len(buckets.sizes)} buckets, {buckets.padding_waste:.1%} of the rows computed are padding, "
                f"{buckets.mean_cost:,.1f} {unit} a batch"
            )
        return "\n".join(lines)

    def yaml(self) -> str:
        """The lines for a deployment's configuration."""
        sizes = ", ".join(map(str, self.tuned.sizes))
        return f"batching:\n  max_batch_rows: {self.max_batch_rows}\n  buckets: [{sizes}]"


def read_batch_sizes(files: Sequence[Path]) -> Counts:
    """The counts of several recordings (one a replica, say) together.

    Raises:
        ConfigError: a file is missing or none, they differ in `max_batch_rows`, or no batch was recorded.
    """
    total: Counts | None = None
    for file in files:
        try:
            counts = BatchSizes.model_validate_json(file.read_bytes(), strict=True).array
        except OSError as error:
            raise ConfigError(f"{file}: got {error.strerror!r}, expected a readable file") from None
        except ValidationError as error:
            no_json = error.errors()[0]["type"] == "json_invalid"
            fault = "got something else, expected JSON" if no_json else first_fault(error)
            raise ConfigError(f"{file}: {fault}") from None
        if total is not None and len(counts) != len(total):
            raise ConfigError(f"{file}: max_batch_rows: got {len(counts) - 1}, expected {len(total) - 1} as in {files[0]}")
        total = counts if total is None else total + counts
    if total is None or not total.any():
        raise ConfigError(f"{', '.join(map(str, files))}: counts: got no batches, expected at least one")
    return total


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """float64[max_batch_rows + 1]: microseconds of a batch by its bucket, and the device that took them."""

    costs: npt.NDArray[np.float64]
    device: str


def tune(bundle: Bundle, counts: Counts, how_many: int | None, measured: Measured | None = None) -> Tuning:
    """The best `how_many` buckets for the batches counted; by default as many as the geometric ones, which warm up as fast."""
    rows = len(counts) - 1
    geometric = geometric_buckets(rows)
    costs = np.arange(rows + 1, dtype=np.float64) if measured is None else measured.costs
    tuned = tuned_buckets(counts, how_many or len(geometric), costs)

    def weighed(sizes: tuple[int, ...]) -> Buckets:
        return Buckets(sizes, padding_waste(sizes, counts), mean_cost(sizes, counts, costs))

    return Tuning(
        model=bundle.manifest.name,
        version=bundle.manifest.version,
        fingerprint=bundle.fingerprint,
        max_batch_rows=rows,
        batches=int(counts.sum()),
        median_rows=int(np.searchsorted(np.cumsum(counts), (counts.sum() + 1) // 2)),
        cost="rows" if measured is None else "microseconds",
        device=None if measured is None else measured.device,
        geometric=weighed(geometric),
        tuned=weighed(tuned),
    )


def write_tuning(
    path: Path, files: Sequence[Path], out: Path | None, how_many: int | None, measure_on: tuple[str, str | None] | None
) -> Tuning:
    """Tunes a bundle's buckets to the batch sizes in `files` and writes the figures, if `out` says where.

    Args:
        measure_on: device and precision to measure the cost of buckets on; without it the rows count.

    Raises:
        ConfigError, InputError, BundleError: a file or an option that will not do.
    """
    if out is not None:
        check_outfile("--out", out)
    counts = read_batch_sizes(files)
    bundle = read_bundle(path, verify=measure_on is not None)
    measured = None if measure_on is None else measure(bundle, len(counts) - 1, *measure_on)
    tuning = tune(bundle, counts, how_many, measured)
    if out is not None:
        write_outfile("--out", out, json.dumps(asdict(tuning), indent=1))
    return tuning


def measure(bundle: Bundle, max_rows: int, device: str, precision: str | None) -> Measured:
    """Costs on a GPU of this machine.

    Raises:
        InputError: the device is a CPU, or there is no GPU.
    """
    import torch

    from dpiframe_core.engine.bucket_costs import measured_costs
    from dpiframe_core.engine.engine import Engine
    from dpiframe_core.engine.options import EngineOptions

    if device == "cpu" or not torch.cuda.is_available():
        raise InputError("--measure", "a CPU", "a GPU: on a CPU batches run at their own size, without buckets")
    engine = Engine(bundle, device, precision, EngineOptions(max_batch_rows=max_rows, lanes=1))
    engine.warmup()
    costs = measured_costs(engine)
    engine.close()
    return Measured(costs, f"{torch.cuda.get_device_name(engine.device)} at {engine.precision}")
