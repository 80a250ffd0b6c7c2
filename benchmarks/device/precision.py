"""Suite `precision`: what lower precision does to the demo model's scores on its held-out clicks. Deviation of the probability,
ranking (Kendall's tau, pairs swapped) and AUC, each against our own float32 on the same device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks.records.record import Record, record
from benchmarks.systems.cells import Failed, offered
from benchmarks.timing import interleaved
from dpiframe_core.bundle.bundle import Bundle
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from dpiframe_core.features.row_block import RowBlock

BATCH = 1024


@dataclass(frozen=True, slots=True, eq=False)
class HeldOut:
    """Encoded rows that the model was not trained on, and int64[rows] whether each was clicked."""

    block: RowBlock
    clicks: np.ndarray


def held_out(bundle: Bundle, file: Path | None = None, *, rows: int = 300_000, seed: int = 7) -> HeldOut:
    """The held-out tail of the demo's log, drawn anew from its seed, or read from `file`, which is written if it is not there.

    Args:
        rows, seed: as the bundle was made (`build_demo_bundle`).
    """
    if file and file.exists():
        with np.load(file) as stored:
            return HeldOut(
                RowBlock.from_bytes(stored["block"].tobytes(), bundle.manifest.feature_schema.block_layout), stored["clicks"]
            )
    from deployments.demo.features import feature_columns
    from deployments.demo.synthetic import write_click_log
    from dpiframe_core.features.encoder import Encoder
    from dpiframe_core.files.click_logs import CRITEO, read_table

    with TemporaryDirectory(prefix="dpiframe-held-out-") as folder:
        log = write_click_log(Path(folder) / "train.txt", rows=rows, seed=seed)
        table = read_table(log.path).slice(rows - log.held_out)
    # Every row is a request of its own: user and ad come from the same line of the log.
    encoder = Encoder(bundle.manifest.feature_schema, bundle.vocabularies)
    flat = encoder.encode(feature_columns(table))
    found = HeldOut(flat, table[CRITEO.label].to_numpy())
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, block=found.block.buffer, clicks=found.clicks)
    return found


def run(
    bundle: Bundle,
    data: HeldOut,
    precisions: Sequence[str],
    device: torch.device,
    failed: Failed,
    *,
    seconds: float,
) -> Iterator[Record]:
    """Yields a record a precision, fp32 first."""
    parts = [data.block.part(i, min(i + BATCH, data.block.rows)) for i in range(0, data.block.rows, BATCH)]
    exact: np.ndarray | None = None
    for precision in ["fp32", *(p for p in offered(precisions, device) if p != "fp32")]:
        try:
            engine = Engine(bundle, str(device), precision, EngineOptions(max_batch_rows=BATCH, buckets=(64, BATCH), lanes=1))
            engine.warmup()
            scores = np.concatenate([engine.submit(p) for p in parts])[:, 0]
            exact = scores if exact is None else exact
            times = interleaved({"dpiframe": lambda i, e=engine: e.submit(parts[i % (len(parts) - 1)])}, seconds)["dpiframe"]
            engine.close()
        except Exception as error:
            failed(f"precision {precision}", error)
            continue
        yield record(
            "precision", "dpiframe", model=bundle.manifest.name, batch=BATCH, precision=precision,
            cell={"rows": data.block.rows}, times=times, max_abs_err=float(np.abs(scores - exact).max()),
            **compared(scores, exact, data.clicks, device),
        )  # fmt: skip


def compared(scores: np.ndarray, exact: np.ndarray, clicks: np.ndarray, device: torch.device) -> dict[str, float]:
    """Mean deviation, Kendall's tau and AUC of `scores` against those that are exact."""
    from dpiframe_core.evaluation.quality import auc

    own, other = auc(clicks, scores), auc(clicks, exact)
    return {
        "mean_abs_err": float(np.abs(scores - exact).mean()),
        "kendall_tau": kendall_tau(exact, scores, device),
        "auc": own,
        "auc_delta": own - other,
    }


def kendall_tau(a: np.ndarray, b: np.ndarray, device: torch.device) -> float:
    """tau-b: the mean agreement in order over all pairs, pairs tied in either left out of its share of the norm."""
    x, y = (torch.from_numpy(np.ascontiguousarray(v)).to(device) for v in (a, b))
    agree = of_x = of_y = 0.0
    for start in range(0, len(x), 1024):
        dx, dy = (torch.sign(v[start : start + 1024, None] - v) for v in (x, y))
        agree += float((dx * dy).sum(dtype=torch.float64))
        of_x += float(dx.square().sum(dtype=torch.float64))
        of_y += float(dy.square().sum(dtype=torch.float64))
    return agree / (of_x * of_y) ** 0.5
