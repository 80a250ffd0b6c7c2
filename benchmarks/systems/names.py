"""The names of the systems that a latency cell may hold, as records have them."""

COMPILED = ("compile", "compile-captured", "fbgemm", "fbgemm-captured")
SYSTEMS = ("dpiframe", "eager", "stacked-eager", *COMPILED)


def known_as(system: str) -> str:
    """The name of a system, whatever products it had to choose from."""
    return system.split(" ")[0]


def is_compiled(system: str) -> bool:
    return known_as(system) in COMPILED
