"""The models of a process: every version that is loaded here, and which of them scores a request. Knows no HTTP and no Ray."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass

from deployments.scoring.served_model import ServedModel
from dpiframe_core.errors import InputError, ModelNotFound


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What one version's requests are shared with. `percent` of the keys go to `canary`; `by` names a feature (`Canary`)."""

    canary: ServedModel | None = None
    percent: float = 0.0
    by: str | None = None
    shadow: ServedModel | None = None


_ALONE = Share()


class Catalog:
    """Used on one event loop, which may change it between any two requests.

    Attributes:
        live: by name, the version that answers who asks for none.
        changes: goes up with each change.
    """

    def __init__(self, live: MutableMapping[str, ServedModel] | None = None) -> None:
        self.live: MutableMapping[str, ServedModel] = {} if live is None else live
        self.changes = 0
        self._loaded: dict[tuple[str, str], ServedModel] = {}
        self._shares: dict[str, Share] = {}

    def __iter__(self) -> Iterator[ServedModel]:
        """All versions, the live ones first."""
        yield from self.live.values()
        yield from (served for served in self._loaded.values() if served is not self.live.get(served.info.name))

    def add(self, served: ServedModel) -> None:
        """From now on who asks for this version gets it."""
        self._loaded[served.info.name, served.info.version] = served
        self.changes += 1

    def remove(self, name: str, version: str) -> ServedModel:
        """The version, which nobody finds any more; `route` others first."""
        self.changes += 1
        return self._loaded.pop((name, version))

    def loaded(self, name: str, version: str) -> ServedModel:
        return self._loaded[name, version]

    def route(self, live: Mapping[str, ServedModel], shares: Mapping[str, Share]) -> None:
        """Which versions requests go to from now on, all models at once."""
        self.live, self._shares = dict(live), dict(shares)
        self.changes += 1

    def find(self, name: str | None, version: str | None) -> ServedModel:
        """The model of that name, without a name the only one; the live version unless another is asked for.

        Raises:
            ModelNotFound: none of that name or version is served.
            InputError: several are, and the request names none.
        """
        if name is None:
            if len(self.live) != 1:
                raise InputError.worded("model", "nothing", f"one of {sorted(self.live)}")
            served = next(iter(self.live.values()))
        elif name not in self.live:
            raise ModelNotFound("model", name, f"one of {sorted(self.live)}")
        else:
            served = self.live[name]
        if version is None or version == served.info.version:
            return served
        other = self._loaded.get((served.info.name, version))
        if other is None:
            versions = self.versions(served.info.name)
            rule = f"{versions[0]!r}, the version" if len(versions) == 1 else f"one of {versions}, the versions"
            raise ModelNotFound("version", version, f"{rule} of {served.info.name!r} served here")
        return other

    def versions(self, name: str) -> list[str]:
        """Those of a model that are loaded, the live one first."""
        return [served.info.version for served in self if served.info.name == name]

    def choose(
        self, found: ServedModel, version: str | None, key: str | None, value_of: Callable[[str], object], request_id: str
    ) -> ServedModel:
        """Which version scores a request: the one that it asks for, or the one that its key is shared out to.

        Args:
            found: what `find` returned for it. value_of: its value of a feature, or None.
        """
        share = self._shares.get(found.info.name, _ALONE)
        if version is not None or share.canary is None:
            return found
        if key is None and share.by is not None and (value := value_of(share.by)) is not None:
            key = str(value)
        return share.canary if place_of(found.info.name, key or request_id) < share.percent else found

    def alone(self, served: ServedModel) -> bool:
        """Whether no other version has a part in what is asked of that one."""
        return self._shares.get(served.info.name, _ALONE) == _ALONE

    def shadow_of(self, served: ServedModel) -> ServedModel | None:
        """Who is to score, for comparison, what that version has answered."""
        shadow = self._shares.get(served.info.name, _ALONE).shadow
        return None if shadow is served else shadow


def place_of(model: str, key: str) -> float:
    """Where a key lies between 0 and 100, evenly spread: the same in every process, and for every version of a model."""
    digest = hashlib.blake2b(f"{model}\0{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64 * 100
