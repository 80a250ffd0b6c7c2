"""What a schema once took for granted: the row of a null or unknown value, and the first id of buckets.

A bundle now says each of these, null where such a value is refused. One that says nothing was written before, and scores as it
did then.
"""

from collections.abc import Iterator
from typing import Any


def fill_former_defaults(fields: object) -> list[str]:
    """Puts the former defaults where the parsed `model.yaml` says nothing; returns them, `missing_id (0) of user` and so on."""
    schema = fields.get("schema") if isinstance(fields, dict) else None
    features = schema.get("features") if isinstance(schema, dict) else None
    filled: dict[tuple[str, object], list[str]] = {}
    for feature in features if isinstance(features, list) else ():
        for owner, key, former in said(feature):
            if key not in owner:
                owner[key] = former
                filled.setdefault((key, former), []).append(str(feature.get("name")))
    return [f"{key} ({former}) of {', '.join(names)}" for (key, former), names in filled.items()]


def said(feature: object) -> Iterator[tuple[dict[str, Any], str, object]]:
    """What a feature, as parsed or to be written, must say: (the mapping that says it, its key, the former default)."""
    if not isinstance(feature, dict):
        return
    if feature.get("kind", "categorical") == "numeric":
        transforms = feature.get("transforms")
        last = transforms[-1] if isinstance(transforms, list) and transforms else None
        if isinstance(last, dict) and last.get("type") == "bucketize":
            yield feature, "missing_id", 0
            yield last, "first_id", 1
        else:
            yield feature, "missing_value", 0.0
        return
    encoder = feature.get("encoder")
    if not isinstance(encoder, dict):
        return
    yield feature, "missing_id", 0
    match encoder.get("type"):
        case "hash":
            yield encoder, "first_id", 2
        case "vocabulary":
            yield feature, "oov_id", 1
        case "identity" if encoder.get("out_of_range") == "oov":
            yield feature, "oov_id", 1
