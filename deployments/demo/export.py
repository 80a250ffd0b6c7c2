"""From nothing to a bundle: draws the log, trains on it, and exports the model with golden rows and an example request."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import torch
from rich.console import Console

from deployments.demo.features import feature_columns, first_order_name, learn_features
from deployments.demo.synthetic import write_click_log
from deployments.demo.train import DeepFM, EncodedRows, TrainingPlan, train, training_progress
from dpiframe_core.bundle.bundle import Golden, Manifest, Provenance, write_bundle
from dpiframe_core.errors import BundleError, InputError
from dpiframe_core.evaluation.quality import auc, log_loss
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.files.click_logs import CRITEO, read_table
from dpiframe_core.graph.architecture import DeepFM as DeepFMArchitecture

_EMBEDDING_DIM = 16
_GOLDEN_REQUESTS, _GOLDEN_CANDIDATES = 8, 8
_EXAMPLE_CANDIDATES = 5
_MIN_ROWS = 1000  # a tenth is held out, golden rows are taken from there


def build_demo_bundle(
    path: str | Path, *, rows: int = 300_000, seed: int = 7, progress: bool = True, plan: TrainingPlan | None = None
) -> Manifest:
    """Makes the demo bundle at `path`: half a minute on one core, and 6 MB. The same seed gives the same log.

    Raises:
        BundleError: there is something at `path`.
        InputError: so few rows that the held-out part would hold no golden rows.
    """
    path, plan = Path(path), plan or TrainingPlan()
    if path.exists():  # `write_bundle` says so too, but only after the training
        raise BundleError(f"{path}: got an existing path, expected a new one")
    if rows < _MIN_ROWS:
        raise InputError("rows", rows, f"at least {_MIN_ROWS}")
    console = Console(quiet=not progress, soft_wrap=True)
    with TemporaryDirectory(prefix="dpiframe-demo-") as folder:
        log = write_click_log(Path(folder) / "train.txt", rows=rows, seed=seed)
        console.print(
            f"click log: {rows:,} rows in Criteo's format, {log.click_rate:.1%} clicks, {log.held_out:,} rows held out"
        )
        table = read_table(log.path)
    training = rows - log.held_out
    schema, vocabularies = learn_features(table.slice(0, training), _EMBEDDING_DIM)
    encoder = Encoder(schema, vocabularies)
    encoded = EncodedRows.of(encoder.encode(feature_columns(table)), schema)
    labels = table[CRITEO.label].to_numpy()

    with training_progress(progress) as bar:
        model = train(encoded.part(0, training), labels[:training], schema, plan, seed=seed, progress=bar)
    scores, clicks = model.predict(encoded.part(training, rows))[:, 0], labels[training:]
    metrics = {
        "auc": auc(clicks, scores),
        "planted_auc": log.planted_auc,
        "log_loss": log_loss(clicks, scores),
        "planted_log_loss": log.planted_log_loss,
    }
    console.print(
        f"held-out AUC {metrics['auc']:.4f} of {metrics['planted_auc']:.4f} that the planted model reaches; "
        f"log-loss {metrics['log_loss']:.4f} of {metrics['planted_log_loss']:.4f}"
    )

    held_out = table.slice(training)
    block = _joined(
        [encoder.encode(**request) for request in _requests(held_out, schema, _GOLDEN_CANDIDATES, _GOLDEN_REQUESTS)]
    )
    manifest = write_bundle(
        path,
        name="demo",
        version="1",
        architecture=DeepFMArchitecture(hidden_units=plan.hidden_units),
        feature_schema=schema,
        dense=dense_parameters(model),
        tables=table_weights(model),
        vocabularies=vocabularies,
        golden=Golden(block=block, scores=model.predict(EncodedRows.of(block, schema))),
        provenance=Provenance(
            source=f"synthetic click log in Criteo's format: {rows} rows, seed {seed}; DeepFM trained in PyTorch",
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            metrics=metrics,
        ),
        example=next(_requests(held_out, schema, _EXAMPLE_CANDIDATES, 1)),
    )
    console.print(f"bundle: {path}, {sum(f.stat().st_size for f in path.rglob('*') if f.is_file()) / 1e6:.1f} MB")
    return manifest


def dense_parameters(model: DeepFM) -> dict[str, torch.Tensor]:
    """The bundle's names are those of the module: `deep.{i}.weight`, `deep.{i}.bias`, `head.weight`, `head.bias`."""
    return {name: tensor for name, tensor in model.state_dict().items() if name.split(".")[0] in ("deep", "head")}


def table_weights(model: DeepFM) -> dict[str, torch.Tensor]:
    weights = model.state_dict()
    names = (*model.numeric, *model.categorical)
    return {name: weights[f"embedding.{name}.weight"] for name in names} | {
        first_order_name(name): weights[f"first_order.{name}.weight"] for name in names
    }


def _requests(table: pa.Table, schema: FeatureSchema, candidates: int, count: int) -> Iterator[dict[str, Any]]:
    """Raw requests as a client sends them: the user of one row of the log, and the ads of that row and the next ones."""
    scope = {f.name: f.scope for f in schema.features}
    for start in range(0, count * candidates, candidates):
        columns = table.slice(start, candidates).select(list(scope)).to_pydict()
        yield {
            "context": {name: values[0] for name, values in columns.items() if scope[name] == "context"},
            "candidates": {name: values for name, values in columns.items() if scope[name] == "candidate"},
        }


def _joined(blocks: list[RowBlock]) -> RowBlock:
    rows, unknown = sum(b.rows for b in blocks), sum(b.oov_count for b in blocks)
    out = RowBlock.allocate(blocks[0].layout, rows, sum(b.contexts for b in blocks), unknown)
    out.fill(blocks)
    return out
