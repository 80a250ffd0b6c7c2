"""What replicas and their coordinator say to each other. Plain data, pickled by Ray."""

from dataclasses import dataclass, field

from deployments.lifecycle.desired import Desired
from deployments.lifecycle.release import Key, Release


@dataclass(frozen=True, slots=True)
class Member:
    """A replica. `scores`: it has engines; `answers`: it has clients. A colocated one does both.

    `digest`: of the `models` of the configuration that it was started with.
    """

    id: str
    node: str
    scores: bool
    answers: bool
    digest: str


@dataclass(frozen=True, slots=True)
class Report:
    """How far a member is.

    Attributes:
        epoch, seen, applied: of the last wish that came, and of the last that is carried out. No epoch: it has just started.
        desired: what it serves, or at first what its configuration says. wished: what it was last told to serve.
        loaded: what it holds. failed: why it could not load what it was to.
    """

    epoch: str
    seen: int
    applied: int
    desired: Desired
    wished: Desired | None = None
    loaded: tuple[Key, ...] = ()
    failed: dict[Key, str] = field(default_factory=dict)

    @property
    def decided(self) -> Desired:
        """The latest that it knows to have been decided, carried out or not."""
        return max(filter(None, (self.desired, self.wished)), key=lambda desired: desired.revision)


@dataclass(frozen=True, slots=True)
class Wish:
    """What a member is to do: hold these releases and no others, and hand requests out as `desired` says.

    `epoch` names the coordinator, `serial` counts its wishes. Without `desired` the member stays as it is.
    """

    epoch: str
    serial: int
    releases: tuple[Release, ...] = ()
    desired: Desired | None = None
