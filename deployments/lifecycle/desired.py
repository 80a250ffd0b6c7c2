"""What a service is to serve: models, versions, and who gets which requests. Frozen data; a change is another value."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Self

from pydantic import Field, model_validator

from deployments.config_models import Canary, ModelRef
from deployments.lifecycle.refusals import Conflict
from deployments.lifecycle.release import Key, Release
from dpiframe_core.errors import ConfigError, InputError, ModelNotFound
from dpiframe_core.strict import Name, Strict, Version


class CanaryOf(Canary):
    """Of a version."""

    version: Version

    def check_by(self, live: Sequence[str], own: Sequence[str]) -> None:
        """Raises InputError if `by` is no feature of both versions, whose names are given: one would refuse it in a request."""
        both = [name for name in live if name in own]
        if self.by is not None and self.by not in both:
            raise InputError("by", self.by, f"a feature of both versions: {', '.join(both) or 'they share none'}")


class ModelState(Strict):
    """One model. `live` answers; `previous` did before it, and a rollback returns to it. All of them are in `releases`."""

    releases: tuple[Release, ...]
    live: Version
    previous: Version | None = None
    canary: CanaryOf | None = None
    shadow: Version | None = None

    @model_validator(mode="after")
    def _parts_are_loaded(self) -> Self:
        parts = {"live": self.live, "previous": self.previous, "shadow": self.shadow}
        for part, version in (parts | {"canary": self.canary and self.canary.version}).items():
            if version is not None and version not in self.versions:
                raise ValueError(f"{part}: got {version!r}, expected a version among releases: {', '.join(self.versions)}")
        return self

    @property
    def versions(self) -> tuple[str, ...]:
        return tuple(release.version for release in self.releases)

    def release(self, version: str) -> Release:
        """Raises ModelNotFound if there is none."""
        for release in self.releases:
            if release.version == version:
                return release
        raise ModelNotFound("version", version, f"one of {list(self.versions)}, which are loaded")

    def with_live(self, version: str) -> Self:
        """That version answers. The one that did is kept, the one before that is not, unless it has a part of its own."""
        release = self.release(version)
        if version == self.live:
            return self
        canary = None if self.canary is not None and self.canary.version == version else self.canary
        shadow = None if self.shadow == version else self.shadow
        kept = {version, self.live, shadow, canary and canary.version}
        releases = tuple(r for r in self.releases if r.version != self.previous or r.version in kept)
        parts = {"live": release.version, "previous": self.live, "canary": canary, "shadow": shadow}
        return self.model_copy(update=parts | {"releases": releases})

    def without(self, version: str) -> Self:
        """That version is unloaded; a share or a shadow of it ends.

        Raises:
            ModelNotFound, Conflict: there is none, or it is live.
        """
        self.release(version)
        if version == self.live:
            rule = "another one to be made live first, or the model to be deleted"
            raise Conflict(f"version: got {version!r}, which is live, expected {rule}")
        parts = {
            "releases": tuple(r for r in self.releases if r.version != version),
            "previous": None if self.previous == version else self.previous,
            "canary": None if self.canary is not None and self.canary.version == version else self.canary,
            "shadow": None if self.shadow == version else self.shadow,
        }
        return self.model_copy(update=parts)

    def with_canary(self, canary: CanaryOf | None) -> Self:
        """Raises ModelNotFound, Conflict: the version is not loaded, or is live."""
        if canary is not None:
            self._beside(canary.version)
        return self.model_copy(update={"canary": canary})

    def with_shadow(self, version: str | None) -> Self:
        """As `with_canary`."""
        if version is not None:
            self._beside(version)
        return self.model_copy(update={"shadow": version})

    def rolled_back(self) -> Self:
        """Raises Conflict if no version was live before, or it is gone."""
        if self.previous is None:
            raise Conflict(f"rollback: got no version before {self.live!r}, expected one that was live and is still loaded")
        return self.with_live(self.previous)

    def serves(self, other: Self) -> bool:
        """Whether the same versions are loaded as there, and do the same, but for one kept for a rollback."""
        own, there = ({release.key: release for release in state.releases} for state in (self, other))
        kept = {key for key in own.keys() - there.keys() if own[key].version == self.previous}
        return own == there | {key: own[key] for key in kept} and all(
            getattr(self, part) == getattr(other, part) for part in ("live", "canary", "shadow")
        )

    def _beside(self, version: str) -> None:
        self.release(version)
        if version == self.live:
            raise Conflict(f"version: got {version!r}, which is live, expected another one beside it")


class Desired(Strict):
    """All models by name. `revision` goes up with each change. `configured`: of the configuration that it began with."""

    models: dict[Name, ModelState]
    revision: Annotated[int, Field(ge=0)] = 0
    configured: str = ""

    @property
    def releases(self) -> dict[Key, Release]:
        return {release.key: release for state in self.models.values() for release in state.releases}

    def model(self, name: str) -> ModelState:
        """Raises ModelNotFound if there is none."""
        if name not in self.models:
            raise ModelNotFound("model", name, f"one of {sorted(self.models)}")
        return self.models[name]

    def changed(self, name: str, state: ModelState | None) -> Self:
        """With another state of a model, or without the model.

        Raises:
            Conflict: nothing would be left.
        """
        models = {**self.models, name: state} if state is not None else {k: v for k, v in self.models.items() if k != name}
        if not models:
            raise Conflict(f"model: got {name!r}, the only one of this service, expected another one to be loaded first")
        return self.model_copy(update={"models": models, "revision": self.revision + 1})

    def with_release(self, release: Release, *, live: bool) -> Self:
        """A version is loaded, and answers from then on if it is to be `live` or is the model's first.

        Raises:
            Conflict: the version is there, with another bundle.
        """
        state = self.models.get(release.model)
        if state is None:
            return self.changed(release.model, ModelState(releases=(release,), live=release.version))
        known = next((r for r in state.releases if r.version == release.version), None)
        if known is not None and known != release:
            other = "another bundle" if known.fingerprint != release.fingerprint else "other tables or another path"
            got = f"{release.version!r} of {other} than the one loaded ({known.fingerprint[:16]}, {known.path})"
            raise Conflict(f"version: got {got}, expected a version of its own")
        if known is None:
            state = state.model_copy(update={"releases": (*state.releases, release)})
        state = state.with_live(release.version) if live else state
        return self if state == self.models[release.model] else self.changed(release.model, state)

    def serves(self, configured: Self) -> bool:
        """Whether it is what a configuration says, but for versions that are kept for a rollback."""
        return self.models.keys() == configured.models.keys() and all(
            self.models[name].serves(state) for name, state in configured.models.items()
        )

    def reconfigured(self, configured: Self) -> Self:
        """What another configuration says. A version that was live and is no more is kept for a rollback.

        Raises:
            Conflict: a version is there, with another bundle.
        """
        models = dict(configured.models)
        for name, was in self.models.items():
            if (state := models.get(name)) is None:
                continue
            for release in state.releases:
                if release.version in was.versions and was.release(release.version) != release:
                    got = f"{release.version!r} of {name!r} with another bundle than the one loaded"
                    raise Conflict(f"version: got {got}, expected a version of its own")
            if state.live != was.live and was.live not in state.versions:
                state = state.model_copy(update={"releases": (*state.releases, was.release(was.live))})
            models[name] = state.model_copy(update={"previous": was.live if state.live != was.live else None})
        return configured.model_copy(update={"models": models, "revision": self.revision + 1})


def desired_of(refs: Iterable[ModelRef]) -> Desired:
    """What a configuration asks for. Reads each bundle's manifest.

    Raises:
        BundleError: a bundle has none. ConfigError: a name or a version comes twice, or a model has no live version, or a
            canary is shared out by what is no feature.
    """
    models: dict[str, ModelState] = {}
    others: list[tuple[ModelRef, Release]] = []
    for ref in refs:
        release = Release.of(ref)
        if ref.canary is not None or ref.shadow:
            others.append((ref, release))
        elif release.model in models:
            rule = "distinct names (give one of them another `name`, or make it a canary or a shadow)"
            raise ConfigError(f"models: got {release.model!r} twice, expected {rule}")
        else:
            models[release.model] = ModelState(releases=(release,), live=release.version)
    for ref, release in others:
        state = models.get(release.model)
        part = "canary" if ref.canary is not None else "shadow"
        if state is None:
            raise ConfigError(f"models: got {release.model!r} as {part} alone, expected a version of it that is live")
        if release.version in state.versions or getattr(state, part) is not None:
            got = f"version {release.version!r}" if release.version in state.versions else f"a {part}"
            raise ConfigError(f"models: got {got} of {release.model!r} twice, expected it once")
        state = state.model_copy(update={"releases": (*state.releases, release)})
        if ref.canary is not None:
            canary = CanaryOf(version=release.version, **ref.canary.model_dump())
            state = state.with_canary(canary)
            if canary.by is not None:
                try:
                    canary.check_by(state.release(state.live).features(), release.features())
                except InputError as error:
                    raise ConfigError(f"models: canary.{error}") from None
        models[release.model] = state if ref.canary is not None else state.with_shadow(release.version)
    text = Desired(models=models).model_dump_json()
    return Desired(models=models, configured=hashlib.sha256(text.encode()).hexdigest())
