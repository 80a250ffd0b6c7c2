"""What all parsed data of ours is: frozen, complete, without unknown keys."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# Names become file names and JSON keys: no separators, no leading dot.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}$")]
# Versions become a segment of a path, percent-encoded, and one line of text.
Version = Annotated[str, Field(pattern=r"^[!-.0-~]{1,64}$")]


class Strict(BaseModel):
    """Frozen data; unknown keys and infinite or NaN floats are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
