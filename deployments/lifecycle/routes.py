"""The routes of `/v1/models/...` by which an operator changes what is served. Turns bodies into calls of a `Control`.

Whoever asks for a change needs the scope `admin`. The paths of bundles stay below `models_root`, where this process looks too.
"""

import asyncio
from os.path import normpath
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, ValidationError

from deployments.access.gate import Forbidden, Gate
from deployments.access.models_root import check_below
from deployments.config import DeploymentConfig
from deployments.config_models import ModelRef
from deployments.config_tables import TablesHome
from deployments.http_api.request_body import read_body
from deployments.lifecycle.control import Control
from deployments.lifecycle.desired import CanaryOf
from deployments.lifecycle.refusals import LoadFailed
from deployments.lifecycle.release import Release
from deployments.scoring.catalog import Catalog
from deployments.scoring.faults import first_error
from dpiframe_core.errors import BundleError, ConfigError, InputError, ModelNotFound
from dpiframe_core.strict import Strict, Version

_Body = TypeVar("_Body", bound=BaseModel)


class PutVersion(Strict):
    """`path`: of the bundle, from `models_root` on; may be left out if the version is loaded. `tables`: as in a configuration.

    `live`: whether it answers from then on, or is only loaded. `timeout_s`: for all replicas to be ready.
    """

    path: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    tables: TablesHome | None = None
    live: bool = True
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 600


class PutShadow(Strict):
    version: Version


class ReleaseState(BaseModel):
    version: str
    path: str
    fingerprint: str


class ReplicaState(BaseModel):
    """`current`: it serves what is to be served. `loaded`: MODEL/VERSION. `failed`: why it could not load one."""

    id: str
    node: str
    current: bool
    loaded: list[str]
    failed: dict[str, str]


class VersionsState(BaseModel):
    """A model's versions, who gets its requests, and how far each replica is. `revision` goes up with each change."""

    model: str
    revision: int
    live: str
    previous: str | None
    canary: CanaryOf | None
    shadow: str | None
    versions: list[ReleaseState]
    replicas: list[ReplicaState]


def lifecycle_routes(control: Control, config: DeploymentConfig, gate: Gate | None, models: Catalog) -> APIRouter:
    """To be included in the app, which scores with `models`."""
    router = APIRouter(prefix="/v1/models/{model}", tags=["lifecycle"])
    root, limits = config.models_root, config.limits

    def let_in(asked: Request) -> None:
        if gate is not None:
            gate.require(asked.scope["headers"], "admin")
        elif config.http.host != "127.0.0.1":
            raise Forbidden("access: got open: true, with which anybody may score, expected tokens for who changes models")

    async def body_of(asked: Request, kind: type[_Body]) -> _Body:
        let_in(asked)
        data = await read_body(asked.scope["headers"], asked.receive, limits)
        try:
            return kind.model_validate_json(data or b"{}", strict=True)
        except ValidationError as error:
            raise first_error(error, kind) from None

    @router.get("/versions")
    async def versions(model: str) -> VersionsState:
        """A model's versions, and how far each replica is with them."""
        return _of(model, await control.ask("state"))

    @router.put("/versions/{version}", openapi_extra=_body(PutVersion))
    async def put_version(model: str, version: str, asked: Request) -> VersionsState:
        """Loads a version on every replica, warms it up, checks its golden rows, then has it answer."""
        body = await body_of(asked, PutVersion)
        if body.path is None and root is not None:
            release = await _known(model, version, control)
        else:
            release = await asyncio.to_thread(_release, root, model, version, body.path or "", body.tables)
        return _of(model, await control.ask("put", release, live=body.live, timeout_s=body.timeout_s))

    @router.delete("/versions/{version}")
    async def delete_version(model: str, version: str, asked: Request) -> VersionsState:
        """Unloads a version that is not live, once its last request is answered."""
        let_in(asked)
        return _of(model, await control.ask("drop", model, version))

    @router.delete("")
    async def delete_model(model: str, asked: Request) -> dict[str, Any]:
        """Unloads all versions of a model, unless the service has no other one."""
        let_in(asked)
        return {"models": sorted((await control.ask("drop", model, None))["models"])}

    @router.post("/rollback")
    async def rollback(model: str, asked: Request) -> VersionsState:
        """Has the version answer that did before the live one. Asked for twice, it is as before."""
        let_in(asked)
        return _of(model, await control.ask("roll_back", model))

    @router.put("/canary", openapi_extra=_body(CanaryOf))
    async def put_canary(model: str, asked: Request) -> VersionsState:
        """Gives a loaded version a share of the requests."""
        body = await body_of(asked, CanaryOf)
        if body.by is not None:
            live, own = ([f.name for f in models.find(model, v).info.features] for v in (None, body.version))
            body.check_by(live, own)
        return _of(model, await control.ask("share", model, body))

    @router.delete("/canary")
    async def delete_canary(model: str, asked: Request) -> VersionsState:
        """The live version answers all requests again; the other one stays loaded."""
        let_in(asked)
        return _of(model, await control.ask("share", model, None))

    @router.put("/shadow", openapi_extra=_body(PutShadow))
    async def put_shadow(model: str, asked: Request) -> VersionsState:
        """Has a loaded version score what others answer, for comparison in the metrics."""
        body = await body_of(asked, PutShadow)
        return _of(model, await control.ask("shadow", model, body.version))

    @router.delete("/shadow")
    async def delete_shadow(model: str, asked: Request) -> VersionsState:
        """Ends that; the version stays loaded."""
        let_in(asked)
        return _of(model, await control.ask("shadow", model, None))

    return router


def _release(root: str | None, model: str, version: str, path: str, tables: TablesHome | None) -> Release:
    """Raises InputError for what is no version, LoadFailed for a bundle that leads out of the root or has no manifest."""
    if root is None:
        return Release(model=model, version=version, path=path, fingerprint="")  # refused by the control
    try:
        ref = ModelRef(path=str(Path(root) / normpath(path)), name=model, version=version, tables=tables)
    except InputError as error:
        raise error.at(error.where.removeprefix("ModelRef.")) from None
    try:
        check_below(root, ref.path, ref.tables, "")
        return Release.of(ref)
    except (BundleError, ConfigError) as error:
        raise LoadFailed(str(error)) from None


async def _known(model: str, version: str, control: Control) -> Release:
    """The release of a version that is loaded. Raises InputError if it is not."""
    state = await control.ask("state")
    for release in state["models"].get(model, {"releases": ()})["releases"]:
        if release["version"] == version:
            return Release.model_validate(release)
    raise InputError.worded("path", "nothing", f"the bundle of version {version}, which is not loaded")


def _of(model: str, state: dict[str, Any]) -> VersionsState:
    if model not in state["models"]:
        raise ModelNotFound("model", model, f"one of {sorted(state['models'])}")
    own = state["models"][model]
    return VersionsState.model_validate(
        own | {"model": model, "revision": state["revision"], "versions": own["releases"], "replicas": state["replicas"]}
    )


def _body(kind: type[BaseModel]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": kind.model_json_schema()}}}}
