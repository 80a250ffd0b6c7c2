"""YAML read strictly: plain values only, no key given twice, no aliases. Knows nothing of what the file means."""

from contextlib import suppress

import yaml

_FAULTS = yaml.YAMLError, AttributeError, LookupError, TypeError, ValueError  # PyYAML lets the last four through


def load_yaml(data: bytes) -> object:
    """Parses one YAML document.

    Raises:
        ValueError: it is not YAML, or breaks a rule of this module; one line, with the position.
    """
    try:
        if yaml.__with_libyaml__:
            with suppress(*_FAULTS):  # PyYAML's own parser finds more words for them
                return yaml.load(data, _ByLibyaml)
        return yaml.load(data, _ByPython)
    except RecursionError:
        raise ValueError("got values nested too deeply, expected YAML of a few levels") from None
    except _FAULTS as e:
        raise ValueError(f"got {' '.join(str(e).split())}, expected plain YAML") from None


class _Strict(yaml.composer.Composer, yaml.constructor.SafeConstructor, yaml.resolver.Resolver):
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[attr-defined]
        if isinstance(event, yaml.AliasEvent):  # a few nested ones make a small file enormous
            raise yaml.composer.ComposerError(None, None, f"the alias *{event.anchor}", event.start_mark)  # type: ignore[arg-type]
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise yaml.constructor.ConstructorError(None, None, "a key that is no text", key.start_mark)
            if key.value in seen:  # PyYAML would let the last one win
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _ByPython(_Strict, yaml.SafeLoader):
    pass


if yaml.__with_libyaml__:  # five times as fast

    class _ByLibyaml(_Strict, yaml.CSafeLoader):
        def __init__(self, data: bytes) -> None:
            yaml.CSafeLoader.__init__(self, data)
            yaml.composer.Composer.__init__(self)
