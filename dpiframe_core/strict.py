"""What all parsed data of ours is: frozen, complete, without unknown keys; and how its faults are told."""

import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dpiframe_core.errors import BundleError, InputError, shown

# Names become file names and JSON keys: no separators, no leading dot.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}$")]
# Versions become a segment of a path, percent-encoded, and one line of text. Not of dots alone: clients resolve those in paths.
Version = Annotated[str, Field(pattern=r"^\.*[!-\-0-~][!-.0-~]*$", max_length=64)]

_FAULT = re.compile(r"(?:(?P<where>.*?): )?got (?P<got>.*?), expected (?P<expected>.*)", re.DOTALL)


class Strict(BaseModel):
    """Frozen data; unknown keys and infinite or NaN floats are refused, by a call with an `InputError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as e:
            raise told(e, type(self).__name__, ".") from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # parsed data does not come this way, but all at once


def in_yaml(message: str) -> str:
    """pydantic's words for what it reads as JSON, in those of the files."""
    return message.replace("a valid array", "a list").replace("an object", "a mapping").replace("valid dictionary", "mapping")


def first_fault(error: ValidationError, *, yaml: bool = False) -> str:
    """The first fault in one line, `<where>: got <value>, expected <rule>`, and how many more there are.

    yaml: the file is YAML, which has lists and mappings.
    """
    # A misspelt key comes first: it is missed, too.
    faults = sorted(error.errors(include_url=False), key=lambda f: f["type"] != "extra_forbidden")
    fault = faults[0]
    # pydantic tells of a bad item twice: its tuple is "too short" without it.
    more = sum(f["type"] != "too_short" or f["loc"] != fault["loc"][: len(f["loc"])] for f in faults[1:])
    keys = [str(part) for part in fault["loc"] if not str(part).startswith("literal[")]  # which is pydantic's branch
    where = ".".join(keys) + ": " if keys else ""
    match fault["type"]:
        case "value_error":  # our own validators, which word the whole rule
            line = fault["msg"].removeprefix("Value error, ")
        case "missing":
            line = "got nothing, expected a value"
        case "extra_forbidden":
            line = f"got {shown(fault['input'])}, expected no such key"
        case "union_tag_invalid":  # of a union whose members are told apart by a key
            key, tag, tags = (fault["ctx"][name] for name in ("discriminator", "tag", "expected_tags"))
            kind = key.strip("_()'")
            line = f"got {kind} {tag!r}, expected one of {tags}"
        case _:
            rule = (in_yaml(fault["msg"]) if yaml else fault["msg"]).removeprefix("String should have ")
            rule = rule.removeprefix("Input should be ").replace("String should match pattern", "text of the pattern")
            line = f"got {shown(fault['input'])}, expected {rule}"
    return f"{where}{line}" + (f" ({more} more fault{'s' * (more > 1)})" if more else "")


def told(error: ValidationError | ValueError | BundleError, name: str, joint: str = ": ") -> InputError:
    """The first fault of a call of the class `name`, by its field: `Hash.buckets: got 0, ..`; or of a file, by its key."""
    line = first_fault(error, yaml=joint == ": ") if isinstance(error, ValidationError) else str(error)
    parts = _FAULT.fullmatch(line)
    if parts is None:
        return InputError.worded(name, "fields", line)
    where = parts["where"]
    if joint != "." or error.errors(include_url=False)[0]["loc"] or where is None:  # type: ignore[union-attr]
        where = name if where is None else f"{name}{joint}{where}"
    return InputError.worded(where, parts["got"], parts["expected"])
