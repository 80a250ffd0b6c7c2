"""Who makes the coordinator's actor, and when. Ray is a double here; test_live.py and test_two_nodes.py have the real one."""

import asyncio
from typing import Any

import pytest

from deployments.lifecycle import actor
from deployments.lifecycle.actor import RayLink
from dpiframe_core.errors import Unavailable


class FakeRay:
    """One node, "here". Of the actors that are made there the first `lost` end with their first call."""

    def __init__(self, *, alive: bool = True, lost: int = 0) -> None:
        self.alive, self.lost = alive, lost
        self.made: list[float] = []  # settle_s of each

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": "elsewhere", "Alive": True}, {"NodeID": "here", "Alive": self.alive}]

    def get_actor(self, name: str, namespace: str) -> Any:
        raise ValueError(f"there is no {name} in {namespace}")

    def remote(self, of: Any) -> Any:
        return self

    def options(self, **given: Any) -> Any:
        made = self

        class Maker:
            def remote(self, state_file: str | None, settle_s: float) -> Any:
                made.made.append(settle_s)
                return Made(lost=len(made.made) <= made.lost)

        return Maker()


class Made:
    def __init__(self, lost: bool) -> None:
        self.call, self._lost = self, lost

    async def remote(self, method: str) -> str:
        if self._lost:
            raise ConnectionError("its node is gone")
        return method


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FakeRay:
    double = FakeRay(**getattr(request, "param", {}))
    monkeypatch.setattr(actor, "ray", double)
    monkeypatch.setattr(actor, "NodeAffinitySchedulingStrategy", lambda *given, **named: None)
    return double


def test_the_first_coordinator_of_a_service_waits_for_nobody(ray: FakeRay) -> None:
    link = RayLink("app", node="here")
    assert asyncio.run(link.ask("state")) == asyncio.run(link.ask("state")) == "state"
    assert ray.made == [0.0]


@pytest.mark.parametrize("ray", [{"lost": 1}], indirect=True)
def test_a_coordinator_waits_for_those_who_may_have_followed_one_that_was_lost_before_it_answered(ray: FakeRay) -> None:
    link = RayLink("app", node="here")
    with pytest.raises(Unavailable, match="coordinator of models: got ConnectionError, expected an answer: ask again"):
        asyncio.run(link.ask("state"))
    assert asyncio.run(link.ask("state")) == "state"
    assert ray.made == [0.0, 3.0]


@pytest.mark.parametrize("ray", [{"alive": False}], indirect=True)
def test_a_replica_of_a_node_that_ray_has_given_up_makes_none(ray: FakeRay) -> None:
    with pytest.raises(Unavailable, match="coordinator of models: got ValueError"):
        asyncio.run(RayLink("app", node="here").ask("state"))
    assert ray.made == []
