"""The engine: one model of one bundle on one device, from encoded rows to scores. Thread-safe. Knows no Ray and no HTTP.

engine = Engine.load("models/demo")
engine.warmup()
engine.score({"C1": ["68fd1e64", None], ...}, context={"I1": 3, ...})    # float32[2, 1]
"""

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from dpiframe_core.bundle.bundle import Bundle, read_bundle
from dpiframe_core.embedding.home import Home
from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.engine.buckets import Counts, geometric_buckets, padding_waste
from dpiframe_core.engine.golden_check import check_golden_error, golden_tolerance
from dpiframe_core.engine.model_lanes import ModelLanes
from dpiframe_core.engine.options import EngineOptions, WarmupReport, chosen_precision
from dpiframe_core.engine.program import CpuProgram, CudaProgram
from dpiframe_core.errors import InputError, Overloaded, Unavailable
from dpiframe_core.far_rows.far_reads import FarReads
from dpiframe_core.far_rows.lease import Lease, leased
from dpiframe_core.features.candidate_columns import Candidates, encoded_candidates
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.features.row_block import BatchResult, Floats, RowBlock, checked_rows
from dpiframe_core.fusion.passes import fuse
from dpiframe_core.machine.device_name import target_device
from dpiframe_core.machine.out_of_memory import free_bytes, wanting_memory
from dpiframe_core.models.model_graph import model_graph
from dpiframe_core.replan.moving_tables import MovingTables
from dpiframe_core.replan.replanner import TableReads
from kernels.runtime import c_build
from kernels.runtime.host_memory import lock_pages

log = logging.getLogger(__name__)
_COLD = "not warmed up"
_MARGIN = 0.5  # of a tolerance: golden rows are a sample, and other rows deviate more
_TOO_FAR = "%s: golden rows are off by %.2g at %s: serving at %s. `precision: {dense: %s}` in model.yaml spares the attempt"


class Engine:
    """Owns a model's weights on a device and the lanes that run it. Make it with `load`, then `warmup` it.

    Attributes:
        bundle, manifest, schema, encoder: what was loaded. graph: what is computed, after fusion.
        device: "cpu" or "cuda:N". max_batch_rows, lanes: see `EngineOptions`.
        precision: "fp32", "tf32", "bf16" or "fp8". If neither the caller nor the bundle asks for one, a GPU's is tf32;
            fp32 after a warm-up at which the golden rows took more than half of tf32's tolerance.
        home: where rows of tables lie, if the device's memory is not to hold them all.
        reads_ahead: whether rows lie in files alone: `lease` a block before it waits for a batch.
        buckets: rows of the captured graphs; () on a CPU, where a batch runs at its own size.
    """

    def __init__(
        self,
        bundle: Bundle,
        device: str,
        precision: str | None = None,
        options: EngineOptions | None = None,
        home: Home | None = None,
    ) -> None:
        self.options = options = options or EngineOptions()
        target = target_device(device)
        self.device = str(target)
        self.precision, self._fallback = chosen_precision(precision, bundle.manifest.precision.dense, target.type)
        self.bundle, self.manifest = bundle, bundle.manifest
        self.schema = bundle.manifest.feature_schema
        self.encoder = Encoder(self.schema, bundle.vocabularies)
        self.max_batch_rows = options.max_batch_rows
        self.lanes = options.lanes
        self.buckets: tuple[int, ...] = ()
        if target.type == "cuda":
            self.buckets = tuple(sorted({*options.buckets})) or geometric_buckets(self.max_batch_rows)
        self.graph = fuse(model_graph(bundle), options.fusion)
        with wanting_memory(self.device, lambda: f"tables of {bundle.table_bytes:,} bytes"):
            self._store = EmbeddingStore(self.schema, bundle.tables, target, bundle.scales, home)
        self.reads_ahead = self._store.ahead is not None
        self._checks = target.type == "cpu"  # lanes of a GPU check their batches themselves
        self._failure: str | None = _COLD
        self._device_failure: str | None = None
        self._moving = MovingTables(self.schema, self._store, home, self._place_lookups, self._batches_over, self.check)
        with wanting_memory(self.device, self._wanted):
            self._set_up()

    def _wanted(self) -> str:
        buckets = f", and the graphs of {len(self.buckets)} batch sizes" if self.buckets else ""
        held = f"the dense layers and buffers of {self.lanes} lanes for {self.max_batch_rows:,} rows each{buckets}"
        return f"{held} beside tables of {self._store.bytes_used:,} bytes"

    def _set_up(self) -> None:
        """Programs and lanes of `self.precision`."""
        self._model = ModelLanes(self.bundle, self.graph, self._store, self.precision, self.options, self.buckets, self.lanes)
        self._pool = self._model.pool
        # A lane has one user at a time, so its own counts need no lock.
        self._batch_sizes = {lane: [0] * (self.max_batch_rows + 1) for lane in self._pool.lanes}

    @classmethod
    def load(
        cls, path: str | Path, device: str = "auto", precision: str | None = None, *, max_batch_rows: int = 4096, lanes: int = 2
    ) -> Self:
        """Reads and verifies a bundle and puts it on a device ("auto": the GPU if there is one; "cpu", "cuda", "cuda:N").

        Raises:
            BundleError: the bundle is missing, damaged or inconsistent.
            InputError: a device or precision that does not exist here. Unavailable: the device has no room for it.
        """
        return cls(read_bundle(path), device, precision, EngineOptions(max_batch_rows=max_batch_rows, lanes=lanes))

    def compile(self) -> None:
        """Compiles what a warm-up would have to, without the GPU: for who shares it and has to wait for a turn."""
        c_build.request_extension()
        self._model.compile()

    def warmup(self) -> WarmupReport:
        """Captures every bucket on every lane and scores the golden rows on each. The engine serves only after this.

        Raises:
            BundleError: the golden scores do not come out within the precision's tolerance.
            Unavailable: it is warm already, closed, or has failed before; or the device has no room for it.
        """
        if self._failure != _COLD:
            raise Unavailable(f"engine: got a warm-up while {self._failure or 'serving'}, expected one after loading")
        start = time.perf_counter()
        c_build.request_extension()  # built now, not at the first batch of several requests
        try:
            before = free_bytes(self.device)
            error = self._prepare()
            if self._fallback and error > _MARGIN * golden_tolerance(self.bundle, self.precision):
                log.warning(_TOO_FAR, self.bundle.path, error, self.precision, self._fallback, self._fallback)
                self._model.close()
                self.precision, self._fallback = self._fallback, None
                self._set_up()
                error = self._prepare()
            captured = max(0, before - free_bytes(self.device))
            check_golden_error(error, self.bundle, self.precision, self.device)
        except Exception as failure:
            self._failure = f"the warm-up failed: {failure}"
            raise
        if self._failure != _COLD:
            raise Unavailable(f"engine: {self._failure}")
        self._model.tuning.remember()  # not before the golden rows came out: what computes wrongly must not come back
        self._failure = None
        self._moving.start(target_device(self.device))
        return WarmupReport(
            device=self.device, precision=self.precision, buckets=self.buckets, lanes=self.lanes,
            seconds=time.perf_counter() - start, calibrations=self._model.tuning.found, recalled=self._model.recalled,
            golden_error=error, golden_tolerance=golden_tolerance(self.bundle, self.precision),
            table_bytes=self._store.bytes_used, buffer_bytes=self._model.buffer_bytes, captured_bytes=captured,
        )  # fmt: skip

    def _prepare(self) -> float:
        with wanting_memory(self.device, self._wanted):
            return self._model.prepare()

    @property
    def out_of_range(self) -> int:
        """Reads with an id outside its table, which got the out-of-vocabulary row. A GPU may read a context's history once."""
        return self._model.out_of_range

    def program(self, bucket: int) -> CpuProgram | CudaProgram:
        """What runs a bucket's batches (on a CPU: all batches). Settled by the warm-up."""
        return self._model.program(bucket)

    @property
    def batch_sizes(self) -> Counts:
        """int64[max_batch_rows + 1]: how many batches of each number of rows were scored since the start. A copy."""
        counts = np.zeros(self.max_batch_rows + 1, np.int64)
        for own in self._batch_sizes.values():  # lists, as to count in an array takes three times as long
            counts += own
        return counts

    @property
    def padding_waste(self) -> float:
        """Padded rows over computed rows since the start, 0 to 1."""
        return padding_waste(self.buckets, self.batch_sizes)

    def check(self) -> None:
        """Raises Unavailable if the engine cannot serve: closed, not warmed up, or its device failed."""
        if self._failure is not None:
            raise Unavailable(f"engine: {self._failure}")

    def check_device(self) -> None:
        """Raises Unavailable if the device failed. An engine that is not warm yet, or closed, is well."""
        if self._device_failure is not None:
            raise Unavailable(f"engine: {self._device_failure}")

    def run_batch(self, blocks: Sequence[RowBlock], deadline: float | None = None, priority: int = 0) -> BatchResult:
        """Scores the rows of several requests in one run of one lane; blocks until the scores lie in host memory.

        Raises:
            InputError: more rows than max_batch_rows, or none. On a GPU once a lane is free, which looks at them.
            DeadlineExceeded: `deadline` (time.monotonic seconds) passed before a lane was free.
            Unavailable: closed, not warmed up, or the device failed.
        """
        unread = self.reads_ahead and not all(block.staged for block in blocks)
        if self._checks or unread:
            checked_rows(blocks, self.schema.block_layout, self.max_batch_rows)
        if unread:
            with leased(self._store.ahead, blocks) as ready:
                return self.run_batch(ready, deadline, priority)
        lane = self._pool.take(deadline, priority)
        try:
            self.check()
            result = lane.run(blocks, self._store.generation)
            self._batch_sizes[lane][len(result.scores)] += 1
            self._moving.offer(blocks)
            return result
        except (ValueError, TypeError, AttributeError):
            checked_rows(blocks, self.schema.block_layout, self.max_batch_rows)  # the same in words of this class
            raise
        except RuntimeError as error:  # torch and CuPy raise it for every CUDA error; most of those are sticky
            self._failure = self._device_failure = f"device {self.device} failed: {error}"
            raise Unavailable(f"engine: {self._failure}") from error
        finally:
            self._pool.put(lane)

    def lease(self, block: RowBlock) -> Lease:
        """Has the block's rows read that only files hold. `run_batch` takes the lease's block, until it is closed; of a block
        without, it waits for those rows itself.

        Raises:
            InputError: not a block of this model. Overloaded, TooLarge: see `RowsAhead.lease`.
            Unavailable: all rows lie in some memory.
        """
        block.check(self.schema.block_layout)
        if self._store.ahead is None:
            raise Unavailable("engine: got a block to read ahead for, expected a model with rows in files")
        return self._store.ahead.lease(block)

    def read_ahead(self, block: RowBlock) -> None:
        """Begins to read the block's rows that only files hold, if slots are free. A batch that comes soon finds them."""
        if self._store.ahead is not None:
            with contextlib.suppress(Overloaded, InputError):
                self._store.ahead.lease(block).close()

    def submit(self, block: RowBlock, deadline: float | None = None, priority: int = 0) -> Floats:
        """float32[rows, tasks]: the scores of one request of any size, in runs of at most max_batch_rows.

        Args:
            deadline: time.monotonic seconds after which no further run is started.
            priority: among callers that wait for a lane, higher goes first.
        """
        step = self.max_batch_rows
        if block.rows <= step:
            return self.run_batch((block,), deadline, priority).scores
        parts = [block.window(i, min(i + step, block.rows)) for i in range(0, block.rows, step)]
        return np.concatenate([self.run_batch((part,), deadline, priority).scores for part in parts])

    def lock_pages(self, memory: npt.NDArray[np.uint8]) -> None:
        """Locks memory until the array is gone. A GPU reads large blocks there that are a batch alone; others are copied."""
        if self._store.device.type == "cuda":
            lock_pages(memory, self._store.device)

    def replay_us(self, block: RowBlock, repeats: int = 50) -> float | None:
        """Device-only time of one run in microseconds, its graph replayed back to back; None without captured graphs."""
        self.check()
        return self._model.replay_us(block, repeats)

    def score(self, candidates: Candidates, context: Mapping[str, object] | None = None) -> Floats:
        """float32[n, tasks] for raw values of n candidates.

        Args:
            candidates: feature -> n values; a list of n dicts; a pyarrow Table or RecordBatch; a pandas or polars
                DataFrame; or what else gives an Arrow stream.
            context: feature -> one value for all rows.

        Raises:
            InputError: a feature is unknown, lacks or is given twice, or a value breaks its feature's rule.
        """
        return self.submit(encoded_candidates(self.encoder.encode, candidates, {} if context is None else context))

    @property
    def table_reads(self) -> TableReads | None:
        """Where sampled reads of tables were served, and how many rows moved; None unless rows may move."""
        return self._moving.reads

    @property
    def far_reads(self) -> FarReads | None:
        """Where rows were found that only files hold; None: there are none."""
        return None if self._store.ahead is None else self._store.ahead.found

    def _place_lookups(self) -> None:
        self._model.place_lookups()

    def _batches_over(self) -> None:
        self._pool.await_taken(self.check)

    def close(self) -> None:
        """Refuses new runs (Unavailable), waits for those in flight, then releases graphs and buffers."""
        self._failure = "closed"
        self._moving.close()
        self._model.close()
        self._store.close()
