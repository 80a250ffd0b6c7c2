"""The fan-in without HTTP: ingress processes that keep requests open at one engine process, and what the engine spends on each.

python -m benchmarks.serving.fanin --ingresses 8 --clients 16
python -m benchmarks.serving.fanin --ingresses 8 --clients 16 --bundle models/demo --device cuda

Without a bundle, the device is a stand-in that copies the rows as a lane does, and no more. Ids are zeros, so that a lookup
reads few rows: this measures the way to the device and back, not the device.
"""

import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from deployments.config import parse_config
from deployments.fanin.acceptor import Acceptor
from deployments.fanin.batcher import FanInBatcher
from deployments.fanin.handshake import meeting_place
from deployments.fanin.scorer import FanInScorer
from deployments.serve.loaded_models import load_engine
from dpiframe_core.bundle.encoding_files import read_encoding
from dpiframe_core.features.block_layout import BlockLayout
from dpiframe_core.features.row_block import BatchResult, RowBlock
from kernels.lookup.id_record import IdRecord

_CRITEO = BlockLayout(IdRecord(), IdRecord((1,) * 21 + (2,) * 10 + (4,) * 8), 0, 0)  # a row of 76 bytes
_MAX_BATCH_ROWS, _MAX_QUEUED_ROWS = 4096, 65536
_NAME = "bench"


@dataclass(frozen=True, slots=True)
class Setting:
    """What all processes are told. Without a bundle the device is a stand-in."""

    node: str
    bundle: str | None
    device: str
    rows: int
    clients: int
    seconds: float


class StandIn:
    """Copies the rows as a lane does, and gives the interpreter up once."""

    def __init__(self) -> None:
        self._stages = [RowBlock.allocate(_CRITEO, _MAX_BATCH_ROWS, _MAX_BATCH_ROWS) for _ in range(2)]
        self._scores = np.zeros((_MAX_BATCH_ROWS, 1), np.float32)

    def __call__(self, blocks: Sequence[RowBlock]) -> BatchResult:
        stage = self._stages.pop()
        rows = stage.fill(blocks)
        time.sleep(0)
        self._stages.append(stage)
        return BatchResult(self._scores[:rows].copy(), 0.0, rows)


def serve(setting: Setting, wire: Connection) -> None:
    """The engine process. Sends when it is ready and, when told to stop, CPU seconds and batches since."""
    run: Callable[[Sequence[RowBlock]], BatchResult] = StandIn()
    layout, tasks, lanes, fingerprint = _CRITEO, 1, 2, ""
    if setting.bundle is not None:
        config = parse_config({"models": [{"path": setting.bundle}], "device": setting.device}, "benchmark")
        engine = load_engine(config, config.models[0])
        run, layout, tasks = engine.run_batch, engine.schema.block_layout, len(engine.manifest.tasks)
        lanes, fingerprint = engine.lanes, engine.bundle.fingerprint
    served = FanInBatcher(
        run, layout, tasks, fingerprint, max_batch_rows=_MAX_BATCH_ROWS, lanes=lanes, max_queued_rows=_MAX_QUEUED_ROWS
    )
    keeper = Acceptor(meeting_place(_NAME, setting.node), {_NAME: served})
    wire.send(None)
    wire.recv()
    cpu, batches, busy = time.process_time(), served.board.counts.sum(), served.dispatcher.busy_s
    wire.send(None)
    wire.recv()
    wire.send((time.process_time() - cpu, int(served.board.counts.sum() - batches), served.dispatcher.busy_s - busy))
    keeper.close(5)


def ask(setting: Setting, wire: Connection) -> None:
    """An ingress process: `clients` requests open at all times. Sends the milliseconds of each, and its CPU seconds."""
    layout, tasks, fingerprint = _CRITEO, 1, ""
    if setting.bundle is not None:
        read = read_encoding(setting.bundle)
        layout, tasks, fingerprint = read.manifest.feature_schema.block_layout, len(read.manifest.tasks), read.fingerprint

    async def main() -> None:
        scorer = FanInScorer(meeting_place(_NAME, setting.node), _NAME, fingerprint, layout, tasks, most_rows=_MAX_QUEUED_ROWS)
        await scorer.found(1)
        took: list[float] = []

        async def client(until: float) -> None:
            while (start := time.perf_counter()) < until:
                await scorer.submit(scorer.allocate(layout, setting.rows, 1), time.monotonic() + 10)
                took.append((time.perf_counter() - start) * 1e3)

        async def drive(seconds: float) -> None:
            await asyncio.gather(*(client(time.perf_counter() + seconds) for _ in range(setting.clients)))

        await drive(1.0)
        took.clear()
        wire.send(None)
        await asyncio.to_thread(wire.recv)
        cpu = time.process_time()
        await drive(setting.seconds)
        wire.send((took, time.process_time() - cpu))
        await scorer.close()

    asyncio.run(main())


def main(
    ingresses: Annotated[int, typer.Option(min=1)] = 8,
    clients: Annotated[int, typer.Option(min=1, help="Requests that each ingress has open.")] = 16,
    rows: Annotated[int, typer.Option(min=1)] = 100,
    seconds: Annotated[float, typer.Option(min=0.1)] = 5.0,
    bundle: Annotated[Path | None, typer.Option(help="Serve this model in place of the stand-in.")] = None,
    device: Annotated[str, typer.Option()] = "auto",
) -> None:
    """Prints requests and rows a second, p50 and p99, and the CPU time of a request at both ends."""
    setting = Setting(str(os.getpid()), None if bundle is None else str(bundle), device, rows, clients, seconds)
    context = multiprocessing.get_context("spawn")
    wires: list[Connection] = []
    for target in (serve, *[ask] * ingresses):
        here, there = context.Pipe()
        context.Process(target=target, args=(setting, there), daemon=True).start()
        wires.append(here)
    engine, others = wires[0], wires[1:]
    for wire in wires:  # ready, and warm
        wire.recv()
    engine.send(None)
    engine.recv()
    for wire in others:
        wire.send(None)
    answers = [wire.recv() for wire in others]
    engine.send(None)
    cpu, batches, busy = engine.recv()
    took = np.concatenate([times for times, _ in answers])
    p50, p99 = np.percentile(took, [50, 99])
    ingress_cpu = sum(spent for _, spent in answers)
    typer.echo(
        f"{ingresses} ingresses x {clients} requests of {rows} rows: {len(took) / seconds:,.0f} requests/s, "
        f"{len(took) * rows / seconds:,.0f} rows/s, p50 {p50:.2f} ms, p99 {p99:.2f} ms; "
        f"{len(took) / batches:.1f} requests a batch, device busy {busy / seconds:.0%}; "
        f"CPU a request: engine {cpu / len(took) * 1e6:.1f} us, ingress {ingress_cpu / len(took) * 1e6:.1f} us"
    )


if __name__ == "__main__":
    typer.run(main)
