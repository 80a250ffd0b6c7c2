"""A small engine and small blocks for the serving tests: scores that a test can predict without the code under test."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

import numpy as np

from dpiframe_core.engine.buckets import Counts
from dpiframe_core.features.block_layout import BlockLayout
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.features.row_block import BatchResult, RowBlock
from dpiframe_core.features.schema import Categorical, FeatureSchema, Hash, Identity, Numeric, Table
from dpiframe_core.features.transforms import Log
from dpiframe_core.graph.architecture import DeepFM
from kernels.lookup.id_record import IdRecord

SCHEMA = FeatureSchema(
    features=(
        Categorical(name="user", scope="context", values="int", encoder=Identity(), table="users", missing_id=0),
        Categorical(name="item", values="int", encoder=Identity(), table="items", missing_id=0),
        Categorical(name="site", encoder=Hash(buckets=98, first_id=2), table="sites", missing_id=0),
        Categorical(name="tags", encoder=Hash(buckets=98, first_id=2), table="sites", max_values=3, missing_id=0),
        Numeric(name="price", transforms=(Log(),), missing_value=0.0),
        Numeric(name="bias", missing_value=0.0),
    ),
    tables=(Table(name="users", rows=1000, dim=4), Table(name="items", rows=1000, dim=4), Table(name="sites", rows=100, dim=4)),
)
LAYOUT = BlockLayout(IdRecord((4,)), IdRecord((4,)), context_dense=0, candidate_dense=0)


class FakeEngine:
    """Scores are item / 1000 + bias, one column a task (task t adds t). A test may hold runs back or make them fail."""

    def __init__(self, tasks: tuple[str, ...] = ("click",), name: str = "fake", version: str = "7") -> None:
        self.manifest = SimpleNamespace(name=name, version=version, tasks=tasks, architecture=DeepFM(hidden_units=(4,)))
        self.schema = SCHEMA
        self.encoder = Encoder(SCHEMA, {})
        self.device, self.precision, self.lanes, self.max_batch_rows = "cpu", "fp32", 1, 64
        self.buckets: tuple[int, ...] = (8, 64)
        self.go = threading.Event()
        self.go.set()
        self.fault: Exception | None = None
        self.batches: list[int] = []

    @property
    def batch_sizes(self) -> Counts:
        return np.bincount(self.batches, minlength=self.max_batch_rows + 1)

    def run_batch(self, blocks: Sequence[RowBlock]) -> BatchResult:
        self.batches.append(sum(block.rows for block in blocks))
        assert self.go.wait(30)
        if self.fault is not None:
            raise self.fault
        items = np.concatenate([block.column(SCHEMA.columns["item"])[:, 0] for block in blocks])
        biases = np.concatenate([block.candidate_dense[:, SCHEMA.columns["bias"].start] for block in blocks])
        first = items.astype(np.float32) / np.float32(1000) + biases
        scores = np.stack([first + np.float32(t) for t in range(len(self.manifest.tasks))], axis=1)
        return BatchResult(scores.astype(np.float32), 0.5, len(items))


class FakeDevice:
    """Gives each row the number that its block carries. Runs wait for `release`, unless it is open.

    Every batch runs at `bucket`, or without one at its own size. `threads` tells where each batch ran.
    """

    def __init__(self, *, open_: bool = True, bucket: int = 0) -> None:
        self.bucket = bucket
        self.batches: list[list[int]] = []
        self.threads: list[int] = []
        self.fail_on: int | None = None
        self._turns = threading.Semaphore(0)
        self._open = open_

    def release(self, runs: int = 1) -> None:
        self._turns.release(runs)

    def __call__(self, blocks: Sequence[RowBlock]) -> BatchResult:
        rows = [int(i) for block in blocks for i in block.wide_ids("candidate_ids")[:, 0]]
        self.threads.append(threading.get_ident())
        self.batches.append(rows)
        if not self._open:
            assert self._turns.acquire(timeout=30)
        if self.fail_on in rows:
            raise RuntimeError("the fake device failed")
        # A part must bring its own context: each row's context holds its request's number, rows count from 1000 times that.
        contexts = [int(block.wide_ids("context_ids")[q, 0]) for block in blocks for q in block.request_of_row]
        assert contexts == [row // 1000 for row in rows]
        return BatchResult(np.array(rows, np.float32)[:, None], 1.0, self.bucket or len(rows))


def numbered(request: int, rows: int) -> RowBlock:
    """A block whose rows carry 1000 * request + 0, 1, 2, ..."""
    block = RowBlock.allocate(LAYOUT, rows)
    block.set_ids("context_ids", np.array([[request]]))
    block.set_ids("candidate_ids", 1000 * request + np.arange(rows)[:, None])
    return block


def numbers(request: int, rows: int) -> list[int]:
    return [1000 * request + i for i in range(rows)]


async def until(true: Callable[[], bool]) -> None:
    """Waits for what other threads are about to do."""
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.001)


def columns(rows: int, first_item: int = 0) -> Mapping[str, list[object]]:
    return {
        "item": [first_item + i for i in range(rows)],
        "site": ["a"] * rows,
        "tags": [["x", "y"]] * rows,
        "price": [1.5] * rows,
        "bias": [0.25] * rows,
    }
