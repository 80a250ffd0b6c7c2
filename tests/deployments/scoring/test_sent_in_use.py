"""A version is in use by what was sent to it until that has really ended, also where its scorer needs a task for it."""

import asyncio
from types import SimpleNamespace
from typing import Any

from deployments.config import Limits
from deployments.scoring.job import Job
from deployments.scoring.scoring import Scoring
from deployments.scoring.served_model import InUse
from tests.deployments.serving_doubles import numbered


def test_a_request_that_is_given_up_keeps_its_version_until_its_task_has_ended() -> None:
    order: list[str] = []

    async def reads_rows() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            order.append("rows given back")

    async def main() -> None:
        scorer = SimpleNamespace(send=lambda *_: asyncio.create_task(reads_rows()), over=lambda sent: sent.cancel())
        served: Any = SimpleNamespace(scorer=scorer, in_use=InUse())
        scoring = Scoring(Limits(), lambda seen: None, clock=lambda: 1.0)
        reply: Any = None
        sent = scoring.send(Job("r", 0.0), served, lambda _: numbered(1, 2), 3_600_000.0, 0, reply)
        await asyncio.sleep(0)
        scoring.left(served, sent)
        await served.in_use.over()
        order.append("unloaded")

    asyncio.run(main())
    assert order == ["rows given back", "unloaded"]
