"""One wave of a model's graph in one launch (wave.cu): linear and DCN-V2 layers, FM, folded cross network, and the head behind
the last one. Every member has its twin in `reference`; what computes a wave is chosen by measurement: a tile, or for one plain
layer of many rows cuBLAS.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from kernels.dense.library import ACTIVATIONS, LIBRARY, run_by_library
from kernels.dense.linear import DENSE_DTYPE
from kernels.runtime.fastest import Found, ranked
from kernels.runtime.launch import check_dense, check_rows, launch, overlapping, shared_limit, tensor_map
from kernels.runtime.source import KernelSource, loaded
from kernels.waves.packed_weights import LinearWeights, job_weights, share_weights, tf32_halves
from kernels.waves.wave_arguments import (
    MAX_JOBS,
    MapArguments,
    WaveArguments,
    crossed_arguments,
    crossed_operands,
    fill_head,
    fill_job,
    fill_layer,
    fill_share,
)
from kernels.waves.wave_jobs import (
    FmJob,
    HeadOperands,
    Job,
    LinearJob,
    NormJob,
    Operands,
    chunk_columns,
    job_constants,
    shape_of,
)
from kernels.waves.wave_tiles import (
    CROSSED_TILES,
    EXACT_TILES,
    LEAST_SHARED_COLUMNS,
    LONE_TILES,
    MANY_ROWS,
    MOST_HEAD_COLUMNS,
    STATIC_BYTES,
    TILES,
    WIDE_TILES,
    AnyTile,
    CrossedTile,
    WideTile,
    clustered,
    tiles_for,
)


class Wave:
    """The operators of one wave with their weights on one device.

    Args:
        bias: float[tasks] of the head that this wave ends in, or None.
        precision: "fp32" (products of float32 in three tf32 parts: as exact as float32 arithmetic), "tf32", "bf16", or "fp8"
            (e4m3 values and weights, one scale a value and a row of weights; sums and biases stay float32).

    Raises:
        ValueError: more jobs than one launch takes.
    """

    def __init__(self, jobs: Sequence[Job], bias: torch.Tensor | None, precision: str, device: torch.device) -> None:
        shared = sum(isinstance(job, LinearJob) and job.shared is not None for job in jobs)
        if len(jobs) + shared > MAX_JOBS:
            raise ValueError(f"wave: got {len(jobs)} jobs and {shared} of shares, expected at most {MAX_JOBS}")
        self.jobs, self._device = tuple(jobs), device
        self._dtype = DENSE_DTYPE[precision]
        self._bias = None if bias is None else bias.float().contiguous().to(device)
        self.tasks = 1 if bias is None else len(bias)
        self._weights = [job_weights(job, self.tasks, precision, device) for job in self.jobs]
        self._constants = job_constants(jobs, self.tasks, self._dtype)
        self._constants |= {"HEAD": str(int(bias is not None)), "PASSES": "3" if precision == "fp32" else "1"}
        self._constants |= {"SHARES": str(int(shared > 0))}
        self._shared_limit = shared_limit(device)
        alone = len(jobs) == 1 and bias is None
        crosses = any(isinstance(job, LinearJob) and job.cross for job in jobs)
        lone = [t for t in LONE_TILES if crosses and alone and not shared and t.holds(self._dtype.itemsize)]
        wide = EXACT_TILES if precision == "fp32" else (*WIDE_TILES, *(CROSSED_TILES if crosses else ()), *lone)
        self._wide = wide if torch.cuda.get_device_capability(device)[0] == 9 else ()
        weights = [own.weight for own in self._weights if isinstance(own, LinearWeights)]
        self._layers = [(len(w), -(-w.shape[1] // chunk_columns(w.dtype))) for w in weights]
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        linear = {i: own.weight for i, own in enumerate(self._weights) if self._wide and isinstance(own, LinearWeights)}
        # As wave_wgmma.cu takes them.
        self._wide_weights = {i: tf32_halves(w) if precision == "fp32" else w for i, w in linear.items()}
        self._shares = share_weights(self.jobs, self._weights, self._wide_weights)
        self._library_bias = self._for_library(precision) if alone and not shared else None
        self._choice: dict[int, str] = {}
        self.recalled: dict[int, str] = {}  # names of choices made before, by rows; `tune` takes those that exist
        self.tied: dict[int, list[str]] = {}  # by rows, the ways that `tune` found as good as the one chosen

    @property
    def has_head(self) -> bool:
        return self._bias is not None

    @property
    def most_slots(self) -> int:
        """Partial sums of the head a row, at most: with the narrowest tiles."""
        narrowest = min(t.columns for t in TILES)
        return sum(-(-len(own.bias) // narrowest) for own in self._weights if isinstance(own, LinearWeights) and len(own.head))

    def tiles_for(self, rows: int) -> list[AnyTile]:
        """See `wave_tiles.tiles_for`; those that this GPU's shared memory holds, and whose rows a warp sums up for a head."""
        tiles = tiles_for(rows, self._wide)
        if self._shares:
            tiles = [t for t in tiles if t.columns >= LEAST_SHARED_COLUMNS]
        elif self._layers and self._wide:
            tiles += clustered(tiles, rows, self._layers, self._processors)
        tiles = [
            t
            for t in tiles
            if t.shared_bytes + STATIC_BYTES <= self._shared_limit and not (self.has_head and t.columns > MOST_HEAD_COLUMNS)
        ]
        return tiles if self._layers else tiles[:1]  # what goes by rows or fields does so, whatever the tile

    def ways(self, rows: int) -> dict[str, AnyTile | None]:
        """By name, the tiles for a number of rows, and None: a product by cuBLAS, for many rows and one layer alone."""
        ways: dict[str, AnyTile | None] = {t.name: t for t in self.tiles_for(rows)}
        return ways | ({LIBRARY: None} if self._library_bias is not None and rows >= MANY_ROWS else {})

    @property
    def choices(self) -> dict[int, str]:
        """By rows, the name of the way chosen."""
        return dict(self._choice)

    def sources(self, rows: int) -> list[KernelSource]:
        """What a bucket of so many rows may need."""
        tiles = [t for t in self.tiles_for(rows) if self.recalled.get(rows) in (None, t.name)]
        return [self._source(tile) for tile in tiles]

    def tune(
        self, found: Found, operands: Sequence[Operands], rows: int, head: HeadOperands | None, state: torch.Tensor
    ) -> str:
        """Times the ways on these operands and keeps the fastest for this number of rows. Returns its name.

        found: of waves that were timed in this warm-up: models repeat their layers, and programs their waves.
        """
        if rows not in self._choice:
            ways, known = self.ways(rows), self.recalled.get(rows, "")
            like = "wave", rows, tuple(self._constants.items()), *map(shape_of, self.jobs, operands)
            if known not in ways and like not in found:
                with overlapping():
                    found[like] = ranked({name: self.bound(operands, rows, head, state, way) for name, way in ways.items()})
            self._choice[rows], *self.tied[rows] = [known] if known in ways else found[like]
        return self._choice[rows]

    def choose(self, rows: int, name: str) -> str:
        """Takes another way for so many rows. Returns the one before."""
        before, self._choice[rows] = self._choice[rows], name
        return before

    def __call__(self, operands: Sequence[Operands], rows: int, head: HeadOperands | None, state: torch.Tensor) -> None:
        """Writes every job's out for the first state[TRUE_ROWS] rows, and the scores if the wave ends in the head.

        Args:
            operands: one a job; matrices in the dense dtype, widths padded as `linear.padded`, rows 16-byte aligned.
            rows: of the launch grid: the bucket. state: int32[STATE_WORDS] on the device, see state.py.
        """
        ways = self.ways(rows)
        known = self.recalled.get(rows, "")
        name = self._choice.get(rows, known if known in ways else next(iter(ways)))
        self.run(operands, rows, head, state, ways[name])

    def run(
        self, operands: Sequence[Operands], rows: int, head: HeadOperands | None, state: torch.Tensor, tile: AnyTile | None
    ) -> None:
        """One launch with a given tile, or with None by cuBLAS. See `bound`."""
        self.bound(operands, rows, head, state, tile)()

    def bound(
        self, operands: Sequence[Operands], rows: int, head: HeadOperands | None, state: torch.Tensor, tile: AnyTile | None
    ) -> Callable[[], None]:
        """A call that launches on these operands, any number of times: to describe them takes longer than a launch.

        Raises:
            ValueError: an operand does not fit.
        """
        if tile is None:
            return partial(self._run_by_library, operands[0])
        if isinstance(tile, CrossedTile):
            return self._alone(operands[0], rows, state, tile)
        if (head is None) != (self._bias is None):
            raise ValueError(f"wave: got {'no ' if head is None else ''}operands of a head, expected the contrary")
        shares, wide, cluster = len(self._shares), isinstance(tile, WideTile), tile.cluster
        wave, maps = WaveArguments(count=shares + len(self.jobs), cluster=cluster), MapArguments()
        first = slot = 0
        for at, share in enumerate(self._shares):  # first, as others wait for them
            target = wave.jobs[at]
            own_shares = operands[share.job].shares
            if own_shares is None:
                raise ValueError("wave: got no operands of shares, expected some")
            fill_share(target, wave.jobs[shares + share.job], share, own_shares, rows, tile.columns)
            if wide:
                assert share.wide_weight is not None
                maps.x[at] = tensor_map(own_shares.x[: target.most], tile.rows)
                maps.weight[at] = tensor_map(share.wide_weight, tile.columns)
            target.first, first = first, first + target.tiles * -(-target.most // tile.rows)
        for i, (job, given, own) in enumerate(zip(self.jobs, operands, self._weights, strict=True)):
            target = wave.jobs[shares + i]
            target.x, target.x_ld = given.x.data_ptr(), given.x.stride(0)
            target.out, target.out_ld = (0, 0) if given.out is None else (given.out.data_ptr(), given.out.stride(0))
            target.first = first
            fill_job(target, job, own)
            match job:
                case LinearJob():
                    assert isinstance(own, LinearWeights)
                    fill_layer(target, job, given, own, rows)
                    target.tiles, target.slot = -(-target.width // tile.columns), slot
                    if wide:
                        maps.x[shares + i] = tensor_map(given.x[:rows, : target.depth], tile.rows)
                        maps.weight[shares + i] = tensor_map(self._wide_weights[i], tile.columns)
                    slot += target.tiles if len(own.head) else 0
                    blocks = target.tiles * -(-rows // tile.rows) * cluster
                case NormJob():
                    check_dense("wave norm x", given.x, rows, job.width, self._dtype)
                    if given.out is None:
                        raise ValueError("wave norm: got no out, expected one")
                    check_dense("wave norm out", given.out, rows, job.width, self._dtype)
                    target.x_scale, blocks = job.eps, job.blocks(rows, 32 * tile.row_warps)
                case FmJob():
                    check_rows("wave fm x", given.x, rows, job.width)
                    target.x_scale, blocks = job.x_scale, -(-rows // tile.row_warps)
                    target.x += job.offset * given.x.element_size()
                case _:
                    check_rows("wave cross x", given.x, rows, job.width)
                    blocks = -(-rows // tile.row_warps)
            first += -(-blocks // cluster) * cluster  # in whole clusters
        if head is not None and self._bias is not None:
            fill_head(wave.head, head, self._bias, rows, slot, self.tasks)
        function = loaded(self._source(tile), tile.shared_bytes)
        args = (maps, wave, state.data_ptr()) if wide else (wave, state.data_ptr(), np.int32(rows))
        shared_bytes = tile.shared_bytes if self._layers else 0
        return partial(launch, function, first, tile.threads, args, shared_bytes=shared_bytes, cluster=cluster)

    def _for_library(self, precision: str) -> torch.Tensor | None:
        """The bias as cuBLAS takes it, if the wave is one layer that it computes in one call."""
        job, own = self.jobs[0], self._weights[0]
        if precision == "fp8" or not isinstance(job, LinearJob) or job.cross or job.gate or job.activation not in ACTIVATIONS:
            return None
        assert isinstance(own, LinearWeights)
        return own.bias.to(self._dtype)

    def _run_by_library(self, given: Operands) -> None:
        """All rows, padding too."""
        job, own = self.jobs[0], self._weights[0]
        assert isinstance(job, LinearJob)
        assert isinstance(own, LinearWeights)
        assert given.out is not None
        assert self._library_bias is not None
        width, depth = own.weight.shape
        run_by_library(given.x[:, :depth], own.weight, self._library_bias, job.activation, given.out[:, :width])

    def _alone(self, given: Operands, rows: int, state: torch.Tensor, tile: CrossedTile) -> Callable[[], None]:
        job, own = self.jobs[0], self._weights[0]
        assert isinstance(job, LinearJob)
        assert isinstance(own, LinearWeights)
        assert given.out is not None
        width, depth = own.weight.shape
        check_dense("wave x", given.x, rows, depth, self._dtype)
        check_dense("wave out", given.out, rows, width, self._dtype)
        x0, xl = crossed_operands(given, rows, width, self._dtype)
        by_rows = given.x[:rows, :depth], x0[:rows, :width], xl[:rows, :width], given.out[:rows, :width]
        x, *others = (tensor_map(matrix, tile.rows) for matrix in by_rows)
        layer = crossed_arguments((x, tensor_map(own.weight, tile.columns), *others), job, own, tile)
        function = loaded(self._source(tile), tile.shared_bytes)
        blocks, args = layer.tiles * -(-rows // tile.rows), (layer, state.data_ptr())
        return partial(launch, function, blocks, tile.threads, args, shared_bytes=tile.shared_bytes)

    def _source(self, tile: AnyTile) -> KernelSource:
        name, constants = "wave_wgmma" if isinstance(tile, WideTile) else "wave", self._constants
        if isinstance(tile, CrossedTile):
            name, outer = "crossed_wgmma", str(int(constants["CROSSED"] == "3"))
            constants = {"X": constants["X"], "OUTER": outer}
        return KernelSource.of(f"waves/{name}", name, constants | tile.constants, self._device.index)
