"""Where a request's time goes inside our server, one request at a time: the app that a replica serves and the front
before it, called in this process.

What a lone client waits for beyond it is transport: two sockets, HAProxy and the HTTP server.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.records.record import Record, record
from benchmarks.serving.payloads import Payloads
from benchmarks.timing import times_of
from deployments.batching.scorer import Scored
from deployments.config import Limits
from deployments.fanin.batcher import FanInBatcher
from deployments.fanin.own_engine import OwnEngine
from deployments.fanin.scorer import FanInScorer
from deployments.http_api.serve_bypass import BypassMiddleware, ServeBypass
from deployments.scoring.catalog import Catalog
from deployments.scoring.served_model import ServedModel
from deployments.serve.http_app import build_app
from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.engine.engine import Engine
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.machine.one_thread import one_thread

_WARM, _CALLS = 50, 400
_MOST_ROWS = 65_536
_PATHS = {"rows": "/v1/score", "columns": "/v1/score", "binary": "/v2/models/demo/infer"}
STEPS = ("parse", "encode", "queue", "run", "handover", "answer")


class _Watched:
    """A scorer, and when its last request came and left."""

    def __init__(self, scorer: FanInScorer) -> None:
        self._scorer = scorer
        self.came = self.left = 0.0
        self.scored: Scored | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scorer, name)

    async def submit(self, block: RowBlock, deadline: float | None = None, priority: int = 0) -> Scored:
        self.came = time.perf_counter()
        self.scored = await self._scorer.submit(block, deadline, priority)
        self.left = time.perf_counter()
        return self.scored


def run(bundle: Path, device: str, forms: Sequence[str], candidates: Sequence[int], seed: int) -> Iterator[Record]:
    """Yields a record a form and number of candidates. Microseconds, medians.

    parse_us: the app's call until the rows are handed to the scorer, less `encode_us`, which the answer reports. queue_us and
    run_us: until the rows are bound to a batch, and on the device. handover_us: the rest of the scorer, which is the way to a
    lane's thread and back. answer_us: the rest.
    engine_us: `Engine.submit` of the same rows, by itself. p50_us: all of the app. On a CPU with one thread, as the servers of
    suite `serving` have (`process`).
    """
    with one_thread():
        yield from _run(bundle, device, forms, candidates, seed)


def _run(bundle: Path, device: str, forms: Sequence[str], candidates: Sequence[int], seed: int) -> Iterator[Record]:
    read = read_bundle(bundle)
    engine = Engine(read, device)
    engine.warmup()
    try:
        for rows in candidates:
            payloads = Payloads.draw(read, rows, seed)
            engine_us = _median_us(lambda i, blocks=payloads.blocks: engine.submit(blocks[i % len(blocks)]))  # type: ignore[misc]
            for form in forms:
                seconds, steps = asyncio.run(_served(engine, form, *payloads.bodies(form)))
                columns = zip(STEPS, zip(*steps, strict=True), strict=True)
                spent = {f"{step}_us": round(median(times) * 1e6, 1) for step, times in columns}
                yield record(
                    "lone_request", "dpiframe", model="demo", batch=rows, cell={"form": form}, times=times_of(seconds),
                    engine_us=round(engine_us, 1), **spent,
                )  # fmt: skip
    finally:
        engine.close()


async def _served(
    engine: Engine, form: str, headers: dict[str, str], bodies: Sequence[bytes]
) -> tuple[list[float], list[tuple[float, ...]]]:
    own = await OwnEngine.met(FanInBatcher.of(engine, _MOST_ROWS, lambda _: None), "demo/1", _MOST_ROWS)
    try:
        watched = _Watched(own.scorer)
        served = ServedModel.of(engine, watched, Limits(), name="demo", example=engine.bundle.example)
        return await _called(build_app(Catalog({"demo": served}), Limits()), watched, form, headers, bodies)
    finally:
        await own.close(1)


def _median_us(call: Callable[[int], object]) -> float:
    took = []
    for i in range(_WARM + _CALLS):
        begin = time.perf_counter()
        call(i)
        took.append(time.perf_counter() - begin)
    return median(took[_WARM:]) * 1e6


async def _called(
    app: Any, watched: _Watched, form: str, headers: dict[str, str], bodies: Sequence[bytes]
) -> tuple[list[float], list[tuple[float, ...]]]:
    """Seconds of each call of the app, and of its `STEPS`."""
    front = BypassMiddleware(app, ServeBypass(app.state.score, app.state.infer, "", asyncio.get_running_loop()))
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http", "root_path": "",
        "path": _PATHS[form], "raw_path": _PATHS[form].encode(), "query_string": b"", "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000), "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
    }  # fmt: skip
    seconds, steps = [], []
    for i in range(_WARM + _CALLS):
        sent: list[MutableMapping[str, Any]] = []
        unread = [{"type": "http.request", "body": bodies[i % len(bodies)], "more_body": False}]

        async def receive(unread: list[Any] = unread) -> Any:
            return unread.pop() if unread else await asyncio.Event().wait()

        async def send(message: MutableMapping[str, Any], sent: list[Any] = sent) -> None:
            sent.append(message)

        begin = time.perf_counter()
        await front(dict(scope), receive, send)
        end = time.perf_counter()
        if i >= _WARM:
            encode, scored = _encode_s(sent), watched.scored
            assert scored is not None
            queue, device = scored.queue_ms / 1e3, scored.device_ms / 1e3
            handover = watched.left - watched.came - queue - device
            seconds.append(end - begin)
            steps.append((watched.came - begin - encode, encode, queue, device, handover, end - watched.left))
    return seconds, steps


def _encode_s(sent: Sequence[MutableMapping[str, Any]]) -> float:
    """The encoding time that an answer reports."""
    start, *rest = sent
    body = b"".join(message.get("body", b"") for message in rest)
    if start["status"] != 200:
        raise AssertionError(f"stages: got status {start['status']} {body[:300]!r}, expected 200")
    length = dict(start["headers"]).get(b"inference-header-content-length")
    answer = json.loads(body if length is None else body[: int(length)])
    return float(answer["timing_ms"]["encode"] if length is None else answer["parameters"]["encode_ms"]) / 1e3
