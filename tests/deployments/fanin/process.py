"""The engine or an ingress of the fan-in as a process, for tests: `python -m tests.deployments.fanin.process ROLE NODE`.

engine: scores rows by their numbers; "stuck" runs no batch to its end. Answers "state" on its input; any other line closes it.
ingress: has ten requests of 30 rows open at all times.
"""

import asyncio
import json
import sys
from typing import Any

from deployments.fanin.acceptor import Acceptor
from deployments.fanin.batcher import FanInBatcher
from deployments.fanin.handshake import meeting_place
from deployments.fanin.scorer import FanInScorer
from tests.deployments.fanin.doubles import FINGERPRINT
from tests.deployments.serving_doubles import LAYOUT, FakeDevice, numbered


def serve(node: str, stuck: bool) -> None:
    device = FakeDevice(open_=not stuck)
    engine = FanInBatcher(device, LAYOUT, 1, FINGERPRINT, max_batch_rows=16, lanes=2, max_queued_rows=10_000)
    acceptor = Acceptor(meeting_place("test", node), {"m": engine})
    say({"state": "ready"})
    for line in sys.stdin:
        if line != "state\n":
            break
        rows = {"queued_rows": engine.dispatcher.queued_rows, "inflight_rows": engine.dispatcher.inflight_rows}
        say({"peers": engine.peers, **rows, "batches": int(engine.board.counts.sum())})
    acceptor.close(drain_s=10)
    say({"state": "closed"})


async def ask(node: str) -> None:
    scorer = FanInScorer(meeting_place("test", node), "m", FINGERPRINT, LAYOUT, 1, most_rows=2000)
    await scorer.found(1)

    async def client(number: int) -> None:
        while True:
            await scorer.submit(numbered(number, 30))

    say({"state": "ready"})
    await asyncio.gather(*(client(i) for i in range(10)))


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    role, node = sys.argv[1:3]
    if role == "ingress":
        asyncio.run(ask(node))
    else:
        serve(node, stuck=role == "stuck")
