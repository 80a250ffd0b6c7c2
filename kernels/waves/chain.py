"""All layers of a model in one launch, for few rows (chain.cu): every link waits for the numbers that it reads, not for the end
of a launch. Each link has its twin in `reference`, as a wave's jobs have.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from kernels.dense.linear import DENSE_DTYPE, padded
from kernels.interaction.pairs import Pairs
from kernels.runtime.launch import check_dense, check_rows, launch, shared_limit
from kernels.runtime.source import KernelSource, loaded
from kernels.waves.chain_links import ChainHead, ChainOperands, Link, check_links, made_columns
from kernels.waves.packed_weights import COLUMNS, CrossWeights, JobWeights, LinearWeights, job_weights, packed
from kernels.waves.wave_arguments import MAX_LINKS, MAX_LOGITS, ChainArguments, fill_job, logit_steps
from kernels.waves.wave_jobs import CrossJob, FmJob, JobKind, LinearJob, NormJob, job_constants
from kernels.waves.wave_tiles import STATIC_BYTES

MOST_ROWS = 8  # of chain.cu
_THREADS, _WARPS = 512, 16


class Chain:
    """The layers of one model, with their weights on one device, and the head that they end in.

    Args:
        links: in an order in which each reads what links before it make.
        precision: "fp32", "tf32" or "bf16", as a wave's.

    Raises:
        ValueError: more links or logits than one launch takes, or one that reads what is not there.
    """

    def __init__(self, links: Sequence[Link], head: ChainHead, precision: str, device: torch.device) -> None:
        if not 1 <= len(links) <= MAX_LINKS or len(head.logits) > MAX_LOGITS:
            got = f"{len(links)} links and {len(head.logits)} logits"
            raise ValueError(f"chain: got {got}, expected 1 to {MAX_LINKS} and at most {MAX_LOGITS}")
        check_links(links, head)
        self.links, self.head, self.tasks = tuple(links), head, len(head.bias)
        self._device, self._dtype = device, DENSE_DTYPE[precision]
        self._bias = head.bias.float().contiguous().to(device)
        self._weights = [
            None if isinstance(link.job, Pairs) else _packed(job_weights(link.job, self.tasks, precision, device))
            for link in links
        ]
        self._outs: dict[int, int] = {}  # where the words begin of each link that has some
        self._pitch: dict[int, int] = {}  # from one row of them to the next
        self._slot: list[int] = []  # the head's first partial sum of each link
        self.words = self._slots = 0
        together = [link.x for link in links if len(link.x) > 1]
        alone = {number for link in links for number in (*link.x, link.xl, link.x0, link.mixed)} | set(head.logits)
        for row in [*together, *((number,) for number in sorted(n for n in alone if n is not None))]:
            if row[0] in self._outs:
                continue
            pitch = sum(self._columns(number) for number in row)
            for k, number in enumerate(row):
                self._outs[number] = self.words + sum(self._columns(before) for before in row[:k])
                self._pitch[number] = pitch
            self.words += pitch * MOST_ROWS
        for own in self._weights:
            self._slot.append(self._slots)
            self._slots += len(own.weight) if isinstance(own, LinearWeights) and len(own.head) else 0
        self._partial = self.words
        self.words += MOST_ROWS * self._slots * self.tasks
        self._constants = job_constants([j for link in links if not isinstance(j := link.job, Pairs)], self.tasks, self._dtype)
        self._constants["MIXES"] = str(int(any(link.mixed is not None for link in links)))
        self._constants["PASSES"] = "3" if precision == "fp32" else "1"
        pairs = next((link.job for link in links if isinstance(link.job, Pairs)), Pairs(0, 1, 0, False))
        self._constants |= {
            "FIELDS": str(pairs.fields), "DIM": str(pairs.dim), "KEEP": str(pairs.keep), "DIAGONAL": str(int(pairs.diagonal)),
        }  # fmt: skip

    def fits(self, rows: int) -> bool:
        """Whether a launch for so many rows is possible on this device."""
        return rows <= MOST_ROWS and self._shared_bytes(_bucket(rows)) + STATIC_BYTES <= shared_limit(self._device)

    def sources(self, rows: int) -> list[KernelSource]:
        """What a bucket of so many rows needs."""
        return [self._source(rows)] if self.fits(rows) else []

    def __call__(
        self,
        given: Sequence[ChainOperands],
        logits: Sequence[torch.Tensor],
        rows: int,
        scores: torch.Tensor,
        done: torch.Tensor,
        words: torch.Tensor,
        state: torch.Tensor,
    ) -> None:
        """Writes the scores of the first state[TRUE_ROWS] rows.

        Args:
            given: one a link.
            logits: float32[rows, 1 or tasks], one for each None of the head's.
            rows: the bucket, at most 8. scores: float32[rows, tasks], pinned. done: int32[>= 1], pinned (common.cuh, announce).
            words: int64[>= self.words] of the device, zeros at first, of one batch in flight.
            state: int32[STATE_WORDS] on the device, see state.py; none of the 2^32 batches before had its BATCH_NUMBER.

        Raises:
            ValueError: an operand does not fit.
        """
        if not self.fits(rows) or words.numel() < self.words or len(given) != len(self.links):
            got = f"{rows} rows, {words.numel()} words, {len(given)} operands"
            raise ValueError(f"chain: got {got}, expected at most {MOST_ROWS}, at least {self.words}, {len(self.links)}")
        chain, base, first = ChainArguments(count=len(self.links)), words.data_ptr(), 0
        for i, (link, operands) in enumerate(zip(self.links, given, strict=True)):
            target, out = chain.links[i], self._outs.get(i)
            target.first, target.out = first, 0 if out is None else base + 8 * out
            target.out_ld = self._pitch.get(i, 0)
            if link.x:
                target.linked, target.x, target.x_ld = 1, base + 8 * self._outs[link.x[0]], self._pitch[link.x[0]]
            else:
                x = self._given_x(i, operands.x, rows)
                target.x, target.x_ld = x.data_ptr(), x.stride(0)
            crosses = isinstance(link.job, LinearJob) and (link.job.cross or link.job.gate != 0)
            if (crosses and link.x0 is None) != (operands.x0 is not None):
                raise ValueError(f"chain link {i}: got {'no ' if crosses else ''}x0, expected the contrary")
            if link.x0 is not None:
                target.x0_linked, target.x0, target.x0_ld = 1, base + 8 * self._outs[link.x0], self._pitch[link.x0]
            if operands.x0 is not None:
                check_rows(f"chain link {i} x0", operands.x0, rows, self._width(i))
                target.x0, target.x0_ld = operands.x0.data_ptr(), operands.x0.stride(0)
            if link.mixed is not None:
                target.mixed, target.mixed_ld = base + 8 * self._outs[link.mixed], self._pitch[link.mixed]
                target.experts = made_columns(self.links[link.mixed].job)
            self._fill_xl(i, target, operands.xl, base, rows)
            first += self._describe(i, target, rows)
        self._fill_head(chain.head, iter(logits), base, scores, done)
        shared = self._shared_bytes(_bucket(rows))
        launch(loaded(self._source(rows), shared), first + 1, _THREADS, (chain, state.data_ptr()), shared_bytes=shared)

    def _fill_xl(self, i: int, target: Any, given: torch.Tensor | None, base: int, rows: int) -> None:
        """A cross layer's last input; without one it is x."""
        link = self.links[i]
        if link.xl is not None:
            target.xl_linked, target.xl, target.xl_ld = 1, base + 8 * self._outs[link.xl], self._pitch[link.xl]
        elif given is not None:
            width = (link.job.fields - 1) * link.job.dim if isinstance(link.job, Pairs) else self._width(i)
            check_dense(f"chain link {i} xl", given, rows, width, self._dtype)
            target.xl, target.xl_ld = given.data_ptr(), given.stride(0)
        elif isinstance(link.job, Pairs):
            raise ValueError(f"chain link {i}: got no xl, expected {link.job.fields - 1} vectors")
        elif isinstance(link.job, LinearJob) and link.job.cross and self._width(i) != self._depth(i):
            raise ValueError(f"chain link {i}: got no xl, expected one as wide as the layer")

    def _fill_head(self, target: Any, given: Any, base: int, scores: torch.Tensor, done: torch.Tensor) -> None:
        target.partial, target.slots, target.bias = base + 8 * self._partial, self._slots, self._bias.data_ptr()
        target.scores, target.done = scores.data_ptr(), done.data_ptr()
        for i, source in enumerate(self.head.logits):
            if source is None:
                logit = next(given)
                target.logits[i], target.steps[i] = logit.data_ptr(), logit_steps(logit, self.tasks)
            else:
                target.logits[i], target.linked[i] = base + 8 * self._outs[source], 1
                target.steps[i] = self.tasks if isinstance(self.links[source].job, CrossJob) and self.tasks > 1 else 0

    def _describe(self, i: int, target: Any, rows: int) -> int:
        """What does not change from launch to launch of so many rows. Returns the link's blocks."""
        job, own = self.links[i].job, self._weights[i]
        if isinstance(job, Pairs):
            target.kind, target.width = JobKind.DOT, self._columns(i)
            return rows
        fill_job(target, job, own)
        match job, own:
            case LinearJob(), LinearWeights():
                target.depth, target.slot, target.number = self._depth(i), self._slot[i], job.gate
                return len(own.weight)
            case FmJob(), _:
                target.x += job.offset * self._dtype.itemsize
            case NormJob(), _:
                target.number = job.eps
        return 1

    def _given_x(self, link: int, x: torch.Tensor | None, rows: int) -> torch.Tensor:
        if x is None:
            raise ValueError(f"chain link {link} x: got none, expected it to be given")
        check_dense(f"chain link {link} x", x, rows, self._depth(link), self._dtype)
        return x

    def _depth(self, link: int) -> int:
        """Columns of x that a link reads."""
        job = self.links[link].job
        assert not isinstance(job, Pairs)  # its x is a link's
        return padded(job.weight.shape[1], self._dtype) if isinstance(job, LinearJob) else job.width

    def _columns(self, link: int) -> int:
        """Words of a row that a link makes."""
        match self.links[link].job:
            case LinearJob():
                return self._width(link)
            case Pairs() as pairs:
                return padded(pairs.columns, self._dtype)
            case NormJob() as norm:
                return norm.width
        return self.tasks

    def _width(self, link: int) -> int:
        """Columns that a layer makes."""
        job = self.links[link].job
        assert isinstance(job, LinearJob)
        return padded(job.weight.shape[0], self._dtype)

    def _shared_bytes(self, rows: int) -> int:
        """Of the block that needs most: a layer's weights, x, and the sums of its warps; or a cross network's weights."""
        groups = max((own.weight.shape[1] for own in self._weights if isinstance(own, LinearWeights)), default=0)
        crosses = [own.weights.nbytes + own.k.nbytes for own in self._weights if isinstance(own, CrossWeights)]
        norms = [rows * link.job.width * self._dtype.itemsize for link in self.links if isinstance(link.job, NormJob)]
        return max((groups * 1024 + rows * (groups | 1) * 64 + _WARPS * rows * COLUMNS * 4, *crosses, *norms))

    def _source(self, rows: int) -> KernelSource:
        return KernelSource.of("waves/chain", "chain", self._constants | {"ROWS": str(_bucket(rows))}, self._device.index)


def _bucket(rows: int) -> int:
    """Rows that the kernel is compiled for."""
    return 1 << (rows - 1).bit_length()


def _packed(own: JobWeights) -> JobWeights:
    """With a layer's weights in the kernel's order alone."""
    return replace(own, weight=packed(own.weight)) if isinstance(own, LinearWeights) else own
