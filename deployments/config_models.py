"""What a deployment says of its models: which bundle is served under which name and version, and which requests it gets."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from deployments.config_tables import Place, TablesHome
from dpiframe_core.strict import Name, Strict, Version


class Canary(Strict):
    """A share of a model's requests. Whether a request is among them is decided by its key, hence always in the same way.

    The key is the request's own (`options.key`), or else the value of the feature `by` in its context, or else its id.
    """

    percent: Annotated[float, Field(ge=0, le=100)]
    by: Annotated[str, Field(min_length=1)] | None = None


class ModelRef(Strict):
    """A model to serve: the bundle's directory, and the name and version to serve it under if not the bundle's own.

    Several versions may have one name. One of them is live: the one without `canary` and `shadow`. `canary` gives another one a
    share of its requests; `shadow` has one score what others answer, for comparison.
    `tables`: where its rows lie; by default all in the memory of each device.
    """

    path: Place
    name: Name | None = None
    version: Version | None = None
    tables: TablesHome | None = None
    canary: Canary | None = None
    shadow: bool = False

    @model_validator(mode="after")
    def _one_part(self) -> Self:
        if self.canary is not None and self.shadow:
            raise ValueError("canary: got both it and shadow, expected one of the two")
        return self

    def with_absolute_paths(self) -> Self:
        """As `DeploymentConfig.with_absolute_paths`: of the bundle, and of its tables' placement."""
        tables = self.tables
        if tables is not None and tables.placement is not None:
            tables = tables.model_copy(update={"placement": str(Path(tables.placement).absolute())})
        return self.model_copy(update={"path": str(Path(self.path).absolute()), "tables": tables})
