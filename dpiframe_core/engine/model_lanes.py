"""A model on a device at one precision: its programs, which of them each bucket runs, and the lanes that run them."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from dpiframe_core.bundle.bundle import Bundle
from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.engine.cpu_lane import CpuLane
from dpiframe_core.engine.cuda_lane import CudaLane
from dpiframe_core.engine.fp8 import FP8, check_fp8, measured_scales
from dpiframe_core.engine.golden_check import golden_error
from dpiframe_core.engine.lane_pool import LanePool
from dpiframe_core.engine.options import AUTO, WAVES, EngineOptions
from dpiframe_core.engine.program import CpuProgram, CudaProgram, cpu_program, cuda_programs
from dpiframe_core.engine.tuning import Tuning, engine_key
from dpiframe_core.errors import ConfigError
from dpiframe_core.far_rows.lease import leased
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.fusion.passes import fuse
from dpiframe_core.graph.graph import Graph
from dpiframe_core.graph.placement import place
from dpiframe_core.graph.waves import group_waves
from dpiframe_core.models.model_graph import model_graph
from kernels.dense.linear import DENSE_DTYPE, column_alignment

log = logging.getLogger(__name__)


class ModelLanes:
    """What an engine computes with; another precision is another one of these.

    Attributes:
        programs: to choose from; of a CPU's there is one. tuning: which of them each bucket runs. pool: the lanes.
        recalled: for how many buckets an earlier warm-up told it.
    """

    def __init__(
        self,
        bundle: Bundle,
        graph: Graph,
        store: EmbeddingStore,
        precision: str,
        options: EngineOptions,
        buckets: Sequence[int],
        lanes: int,
    ) -> None:
        self._bundle, self._store, self._options = bundle, store, options
        self._precision, self._buckets = precision, tuple(buckets)
        with leased(store.ahead, (bundle.golden.block,)) as (rows,):
            self.programs = _programs(bundle, rows, graph, store, precision, options)
        self.tuning = Tuning(self.programs, buckets, engine_key(bundle.fingerprint, precision, store.device, options))
        self.recalled = 0
        self.pool = LanePool([self._lane(several=lanes > 1) for _ in range(lanes)])

    def compile(self) -> None:
        """Compiles what `prepare` would have to, without the GPU."""
        for lane in self.pool.lanes:
            if isinstance(lane, CudaLane):
                lane.compile()

    def prepare(self) -> float:
        """Captures every bucket on every lane, and returns the largest deviation on the golden rows."""
        self.recalled = self.tuning.recall()
        for lane in self.pool.lanes:
            lane.prepare()
        with leased(self._store.ahead, (self._bundle.golden.block,)) as (rows,):
            golden = replace(self._bundle.golden, block=rows)
            return max(golden_error(lane, golden, self._options.max_batch_rows) for lane in self.pool.lanes)

    def program(self, bucket: int) -> CpuProgram | CudaProgram:
        """What runs a bucket's batches (on a CPU: all batches). Settled by `prepare`."""
        known = self.tuning.calibrations.get(bucket)
        return next((p for p in self.programs if known and p.name == known.program), self.programs[0])

    @property
    def out_of_range(self) -> int:
        """As `Engine.out_of_range`."""
        first = self.programs[0]
        return first.operators.out_of_range if isinstance(first, CpuProgram) else self._store.out_of_range

    @property
    def buffer_bytes(self) -> int:
        return sum(lane.bytes_used for lane in self.pool.lanes if isinstance(lane, CudaLane))

    def replay_us(self, block: RowBlock, repeats: int) -> float | None:
        """As `Engine.replay_us`."""
        lane = self.pool.take(None, 0)
        try:
            if not isinstance(lane, CudaLane) or not self._options.capture:
                return None
            with leased(self._store.ahead, (block,)) as ready:
                lane.run(ready, self._store.generation)
            return lane.replay_us(block.rows, repeats)
        finally:
            self.pool.put(lane)

    def place_lookups(self) -> None:
        """Has lookups take over where tables lie, in both generations."""
        for operators in {p.operators for p in self.programs if isinstance(p, CudaProgram)}:
            operators.place()

    def close(self) -> None:
        """Waits for the runs in flight, then releases graphs and buffers."""
        for lane in self.pool.drain():
            try:
                lane.close()
            except RuntimeError:  # a failed device refuses even that
                log.exception("releasing a lane of %s failed", self._store.device)

    def _lane(self, several: bool) -> CpuLane | CudaLane:
        layout, first = self._bundle.manifest.feature_schema.block_layout, self.programs[0]
        if isinstance(first, CpuProgram):
            return CpuLane(first.operators, first.plan, layout, first.graph)
        return CudaLane(
            self.tuning.programs, layout, self._buckets, self._precision, self._store.device, self.tuning.calibrations,
            capture=self._options.capture, overlaps=(lambda: self.pool.crowded) if several else None,
        )  # fmt: skip


def _programs(
    bundle: Bundle, golden: RowBlock, graph: Graph, store: EmbeddingStore, precision: str, options: EngineOptions
) -> tuple[CpuProgram | CudaProgram, ...]:
    """The programs to choose from. fp8 first runs the `golden` rows in bfloat16, to find the scale of each value.

    Raises:
        ConfigError, InputError: fp8 with a policy, a device or a model that does not know it.
    """
    schema, policy = bundle.manifest.feature_schema, options.policy
    if store.device.type == "cpu":
        return (cpu_program(graph, schema, store, bundle.dense, precision, policy),)
    programs = partial(cuda_programs, graph, schema, store, bundle.dense, max_streams=options.max_streams)
    if precision != FP8:
        loose = _loose(bundle, graph, options) if precision == "fp32" else None
        return programs(precision=precision, policy=policy, loose=loose)
    if policy not in (AUTO, WAVES):
        raise ConfigError(f"policy: got {policy!r} with precision fp8, expected {AUTO} or {WAVES}")
    check_fp8(group_waves(place(graph, column_alignment(DENSE_DTYPE[FP8]))), store.device)
    (measured,) = programs(precision="bf16", policy=WAVES)
    scales = measured_scales(measured, schema.block_layout, golden, store.device)
    return programs(precision=FP8, policy=WAVES, scales=scales)


def _loose(bundle: Bundle, graph: Graph, options: EngineOptions) -> Graph | None:
    """The graph with attention as generic operators, if it was found among them. Without tensor cores a step of a history is
    slow: for few rows Inductor's products, which split one over many blocks, take a third of the time (docs/lab-notes.md).
    """
    found = fuse(model_graph(bundle), [name for name in options.fusion if name != "attention"])
    return found if len(found.nodes) != len(graph.nodes) else None
