"""An ingress looks out for the answer to a lone request instead of sleeping, as long as that pays."""

import asyncio
import threading
import time

import pytest

from deployments import fanin_link
from tests.deployments.fanin_doubles import connect, engine_of, scorer_of
from tests.deployments.serving_doubles import FakeDevice, numbered, numbers


def test_a_lone_request_is_looked_out_for_only_if_that_was_enough_lately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fanin_link, "_LINGER_S", 20.0)
    engine = engine_of(FakeDevice(), time.monotonic)
    over = threading.Event()

    def lane() -> None:
        while not over.wait(0.001):
            engine.lanes.step()

    async def main() -> None:
        scorer = scorer_of(time.monotonic)
        link, peer = connect(scorer, engine)
        asyncio.get_running_loop().remove_reader(link._answer_fd)  # nobody wakes the loop now
        scored = await scorer.submit(numbered(3, 5))
        assert scored.scores[:, 0].tolist() == numbers(3, 5)
        assert 0 < link._lone_s < 20

        link._lone_s = 21.0
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(scorer.submit(numbered(4, 5)), 0.2)
        link._answers()
        link._lone_s = 0.0
        link.send(*scorer._placed(numbered(5, 5)), None, time.monotonic(), 0)  # with another one there, they sleep
        sent = [asyncio.create_task(scorer.submit(numbered(i, 5))) for i in (6, 7)]
        await asyncio.wait(sent, timeout=0.2)
        assert not any(task.done() for task in sent)
        link._answers()
        assert [(await task).scores[0, 0] for task in sent] == [6000, 7000]
        await scorer.close()
        peer.connection.close()

    thread = threading.Thread(target=lane)
    thread.start()
    try:
        asyncio.run(main())
    finally:
        over.set()
        thread.join()
        engine.close(0)
