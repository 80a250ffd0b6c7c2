"""YAML read strictly: plain values only, no key given twice, no aliases. Knows nothing of what the file means."""

import yaml


def load_yaml(data: bytes) -> object:
    """Parses one YAML document.

    Raises:
        ValueError: it is not YAML, or breaks a rule of this module; one line, with the position.
    """
    try:
        return yaml.load(data, _StrictLoader)
    except RecursionError:
        raise ValueError("got values nested too deeply, expected YAML of a few levels") from None
    except (yaml.YAMLError, AttributeError, LookupError, TypeError, ValueError) as e:  # PyYAML lets the last four through
        raise ValueError(f"got {' '.join(str(e).split())}, expected plain YAML") from None


class _StrictLoader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):  # a few nested ones make a small file enormous
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, f"the alias *{event.anchor}", event.start_mark)
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
