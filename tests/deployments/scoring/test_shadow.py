"""Which requests a shadow follows. What clients see of it: `tests/deployments/lifecycle/test_serving.py`."""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deployments.batching.scorer import Scored
from deployments.metrics import ShadowSeen
from deployments.scoring.shadow import Shadows
from dpiframe_core.errors import Overloaded
from tests.deployments.serving_doubles import until


def version(name: str, queued_rows: int = 0, answer: Any = None) -> Any:
    async def submit(block: Any, deadline: float) -> Scored:
        assert deadline == 101
        if isinstance(answer, Exception):
            raise answer
        return Scored(np.float32(answer), 0.0, 0.0)

    scorer = SimpleNamespace(queued_rows=queued_rows, submit=submit)
    return SimpleNamespace(info=SimpleNamespace(name="m", version=name), scorer=scorer, in_use=nullcontext())


@pytest.mark.parametrize(
    ("live_rows", "shadow_rows", "answer", "outcome", "differences"),
    [
        (0, 0, [[0.5, 0.1], [0.25, 0.9]], "ok", [0.25, 0.5]),  # the largest over the tasks
        (1, 0, [[0.5, 0.1], [0.25, 0.9]], "dropped", ()),
        (0, 1, [[0.5, 0.1], [0.25, 0.9]], "dropped", ()),
        (0, 0, [[0.5], [0.5]], "other_tasks", ()),
        (0, 0, Overloaded("queue: got 1", 1.0), "overloaded", ()),
        (0, 0, ZeroDivisionError(), "internal", ()),
    ],
)
def test_a_shadow_is_scored_where_nothing_waits_and_whatever_comes_of_it_is_told(
    live_rows: int, shadow_rows: int, answer: Any, outcome: str, differences: Any
) -> None:
    seen: list[ShadowSeen] = []
    shadow = version("2", shadow_rows, answer)

    async def main() -> None:
        shadows = Shadows(lambda _: shadow, seen.append, lambda: 100.0)
        shadows.after(version("1", live_rows), lambda one: one, np.float32([[0.5, 0.35], [0.5, 0.4]]), True)  # type: ignore[arg-type, return-value]
        await until(lambda: bool(seen))

    asyncio.run(main())
    [one] = seen
    assert (one.model, one.version, one.shadow, one.outcome) == ("m", "1", "2", outcome)
    assert one.differences == pytest.approx(differences, abs=1e-6)


def test_of_a_large_request_an_even_sample_is_compared() -> None:
    seen: list[ShadowSeen] = []
    scores = np.zeros((1000, 1), np.float32)
    shadow = version("2", 0, np.arange(1000)[:, None] / 1000)

    async def main() -> None:
        Shadows(lambda _: shadow, seen.append, lambda: 100.0).after(version("1"), lambda one: one, scores, False)  # type: ignore[arg-type, return-value]
        await until(lambda: bool(seen))

    asyncio.run(main())
    assert seen[0].differences == pytest.approx([i / 1000 for i in range(0, 1000, 16)])
