"""What pydantic finds wrong with a configuration, in our words: a line a fault, with the key's path. Knows no keys."""

import re
from collections.abc import Iterable
from typing import get_args

from pydantic import BaseModel, ValidationError

from dpiframe_core.errors import shown
from dpiframe_core.strict import in_yaml


def fault_lines(source: str, error: ValidationError, model: type[BaseModel]) -> list[str]:
    """`<source>: <key path>: got <value>, expected <rule>` for each fault of what should be a `model`, each line once."""
    return list(dict.fromkeys(_lines(source, error, model)))


def _lines(source: str, error: ValidationError, model: type[BaseModel]) -> Iterable[str]:
    faults = error.errors(include_url=False)
    inner = {fault["loc"][:i] for fault in faults for i in range(len(fault["loc"]))}
    for fault in faults:
        if fault["loc"] in inner and fault["loc"]:  # a list that lost a faulty item is then too short, which helps nobody
            continue
        where = [str(step) for step in fault["loc"]]
        if fault["type"] == "value_error":  # our own validators word the whole rule
            yield f"{source}: {'.'.join([*where, fault['msg'].removeprefix('Value error, ')])}"
        elif fault["type"] == "extra_forbidden":
            yield f"{source}: {'.'.join(where)}: got an unknown key, expected one of {', '.join(keys_at(model, where[:-1]))}"
        elif fault["type"] == "missing":
            yield f"{source}: {'.'.join(where)}: got nothing, expected a value"
        else:
            rule = re.sub(r"^(Input|Tuple|String) should (be |have )?", "", in_yaml(fault["msg"]))
            yield f"{source}: {'.'.join(where)}: got {shown(fault['input'])}, expected {rule}"


def keys_at(model: type[BaseModel], where: list[str]) -> list[str]:
    """The keys of the model that lies at `where`."""
    for step in where:
        if step in model.model_fields:
            annotation = model.model_fields[step].annotation
            found = [a for a in (annotation, *get_args(annotation)) if isinstance(a, type) and issubclass(a, BaseModel)]
            model = found[0] if found else model
    return sorted(model.model_fields)
