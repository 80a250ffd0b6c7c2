"""What pydantic finds wrong with a body, in our words: one InputError with the path of the value. Knows no model."""

import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from itertools import islice

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from deployments.config_faults import keys_at
from dpiframe_core.errors import InputError, TooLarge

_SHOWN_KEY = 64  # characters of an unknown key that a path repeats
_MOST_NEAR = 256


class NotJson(InputError):
    """The body is not JSON at all."""

    status = 400
    code = "not_json"


class Words(str):
    """Text that an error message shows without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def refuse_unknown(where: str, given: Mapping[str, object], known: Collection[str]) -> None:
    """Raises InputError, with the key's path, if there is a key that nobody knows."""
    if all(map(known.__contains__, given)):  # at the speed of C
        return
    for name in given:
        if name not in known:
            rule = f"one of {', '.join(known)}" if where in ("", "options.") else "a feature of the model"
            rule += "".join(f"; perhaps {near!r}" for near in _near(name, known))
            raise InputError(where + key_shown(name), Words("an unknown key"), rule)


def _near(name: str, known: Iterable[str]) -> list[str]:
    """The one that is most like the name, or none. Of a bounded number: a long list takes milliseconds of the event loop."""
    return get_close_matches(key_shown(name), list(islice(known, _MOST_NEAR)), 1, 0.75)


_RULES = {
    "string_type": "text",
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "missing": "an object of columns or a list of objects",
}


def first_error(error: ValidationError, model: type[BaseModel] | None = None) -> InputError:
    """The first fault that pydantic found, in our words and with the path of the value. With the `model` that was wanted, an
    unknown key is told together with those that there are."""
    errors = error.errors(include_url=False)
    # `candidates` may be one of two things: of the errors that this gives, those of the thing that was sent count.
    first = next((e for e in errors if not _of_other_form(e)), None)
    if first is None:
        return InputError("candidates", _got(errors[0]["input"]), _RULES["missing"])
    kind, where, value = first["type"], _path(first["loc"]), _got(first["input"])
    if kind == "json_invalid":
        return NotJson("body", Words(f"invalid JSON ({first['ctx']['error']})"), "a JSON object in UTF-8")
    if kind == "too_long":
        return TooLarge(where, value, f"at most {first['ctx']['max_length']}")
    if kind == "too_short":
        return InputError(where, value, "at least one candidate" if first["loc"][0] == "candidates" else "at least one")
    if kind == "missing":
        near = _near(where, first["input"]) if isinstance(first["input"], dict) else []
        value = Words("nothing" + "".join(f", but {name!r}" for name in near))
        return InputError(where, value, _RULES["missing"] if where == "candidates" else "a value")
    if kind == "extra_forbidden":
        keys = keys_at(model, [str(step) for step in first["loc"][:-1]]) if model else []
        rule = f"one of {', '.join(keys)}" if keys else "those that the API's description (/openapi.json) names"
        return InputError(where, Words("an unknown key"), rule)
    rule = _RULES.get(kind) or re.sub(r"^(Input|String) should (be |have )?", "", first["msg"])
    nullable = kind in ("string_type", "int_type", "float_type", "finite_number") and first["loc"][0] in (
        "context",
        "candidates",
    )
    return InputError(where, value, rule + " or null" * nullable)


def _of_other_form(e: ErrorDetails) -> bool:
    return len(e["loc"]) == 2 and e["loc"][0] == "candidates" and e["type"] in ("dict_type", "list_type")


def _path(loc: tuple[int | str, ...]) -> str:
    steps = loc[:1] + loc[2:] if loc[:1] == ("candidates",) else loc  # the second step names the form, not a key
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{key_shown(step)}" for step in steps)
    return path[1:] if path else "body"


def key_shown(name: str) -> str:
    return name if len(name) <= _SHOWN_KEY else name[:_SHOWN_KEY] + "..."


def _got(value: object) -> object:
    """Never the whole of a large value: making its text could take longer than the request."""
    match value:
        case list():
            return Words(f"a list of {len(value)} values")
        case dict():
            return Words(f"an object of {len(value)} keys")
        case str() | bytes():
            return value[:200]
    return value
