"""What the reference pages show of a docstring: a list for its arguments and attributes, and a configuration's keys in full.

Read by mkdocstrings, which parses the sources and runs nothing of them.
"""

import re
from typing import Any

import griffe

_SECTION = re.compile(r"^(?P<title>Args|Attributes):\n(?P<items>(?:[ ]+.*\n?|\n(?=[ ]+\S))+)", re.MULTILINE)
_ITEM = re.compile(r"^(?P<names>\w+(?:, \w+)*): ")


def listed(text: str) -> str:
    """The sections `Args:` and `Attributes:` of a docstring as lists: one line of ours may tell of several names."""

    def to_list(match: re.Match[str]) -> str:
        items: list[str] = []
        for line in match["items"].splitlines():
            named = _ITEM.match(line.strip()) if line.startswith("    ") and not line.startswith("     ") else None
            if named:
                names = ", ".join(f"`{name}`" for name in named["names"].split(", "))
                items.append(f"- {names}: {line.strip()[named.end() :]}")
            else:
                items.append(f"    {line.strip()}")
        return f"**{match['title']}**\n\n" + "\n".join(items) + "\n"

    return _SECTION.sub(to_list, text)


class Reference(griffe.Extension):
    """Rewrites docstrings as griffe loads them."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Of every object, once it has its members."""
        if obj.docstring is None:
            return
        text = obj.docstring.value
        if isinstance(obj, griffe.Class) and any(str(base) == "Strict" for base in obj.bases):
            own = [a for a in obj.attributes.values() if not a.name.startswith(("_", "model_"))]
            fields = [a for a in own if "property" not in a.labels]
            lines = [f"{a.name}: {a.annotation}" + ("" if a.value is None else f" = {a.value}") for a in fields]
            if lines:
                text = "\n".join([text, "", "```python", *lines, "```"])
        obj.docstring.value = listed(text)
