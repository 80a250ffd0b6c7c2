"""What `dpiframe compress` did: tables before and after, and how far scores are off, in numbers and for people."""

from dataclasses import dataclass

from deployments.offline.scored_file import Quality
from dpiframe_core.bundle.manifest import DensePrecision
from dpiframe_core.features.schema import Table


@dataclass(frozen=True, slots=True)
class Changed:
    """A table before and after, and the largest difference of a value that is left."""

    old: Table
    new: Table
    error: float

    @property
    def text(self) -> str:
        """For people."""
        parts = [f"{self.old.bytes_used:,} -> {self.new.bytes_used:,} bytes"]
        if self.new.rows < self.old.rows:
            parts.append(f"{self.old.rows:,} -> {self.new.rows:,} rows")
        if self.new.dtype != self.old.dtype:
            parts.append(f"{self.old.dtype} -> {self.new.dtype}, off by at most {self.error:.3g}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Compression:
    """Filled by `write_compressed`. The deviations are those of the golden rows' probabilities from the source model's.

    bytes_used: of all tables, before and after. frequencies: where they came from, if rows were dropped. quality: of each
    task, before and after.
    """

    model: str
    version: str
    tables: tuple[Changed, ...]
    bytes_used: tuple[int, int]
    frequencies: str
    max_before: float
    max_deviation: float
    mean_deviation: float
    tolerance: dict[DensePrecision, float]
    quality: tuple[tuple[Quality, Quality], ...]

    @property
    def summary(self) -> str:
        """What was done, in a line."""
        old, new = (sum(getattr(t, side).rows for t in self.tables) for side in ("old", "new"))
        dropped = f", {old - new:,} of their {old:,} rows dropped (frequencies {self.frequencies})" if self.frequencies else ""
        before, after = self.bytes_used
        return f"{len(self.tables)} tables changed{dropped}; all tables {before:,} -> {after:,} bytes"

    def report(self) -> str:
        """For people."""
        wide = max(len(t.new.name) for t in self.tables)
        tolerances = ", ".join(f"{precision} {value:.2g}" for precision, value in self.tolerance.items())
        return "\n".join(
            (
                *(f"{t.new.name:{wide}}  {t.text}" for t in self.tables),
                f"{self.model} {self.version}: {self.summary}",
                f"golden rows, fp32: probabilities off by {self.max_deviation:.3g} at most and {self.mean_deviation:.3g} on "
                f"average; before by {self.max_before:.3g} at most",
                f"golden.tolerance: {tolerances} (what it was, and what a new dtype adds)",
                *(_told(old, new) for old, new in self.quality),
            )
        )


def _told(old: Quality, new: Quality) -> str:
    auc = "AUC none, as all labels are alike"
    if old.auc is not None and new.auc is not None:
        auc = f"AUC {old.auc:.6f} -> {new.auc:.6f} ({new.auc - old.auc:+.6f})"
    return f"{old.score}: {auc}, log-loss {old.log_loss:.6f} -> {new.log_loss:.6f} ({new.log_loss - old.log_loss:+.6f})"
