"""The names of systems and models: as records have them, and as papers write them."""

COMPILED = ("compile", "compile-captured", "fbgemm", "fbgemm-captured")
MODEL_TITLES = {"wide_deep": "Wide&Deep", "deepfm": "DeepFM", "dcn": "DCN", "dcnv2": "DCN-V2"}
SYSTEMS = ("dpiframe", "eager", "stacked-eager", *COMPILED)


def known_as(system: str) -> str:
    """The name of a system, whatever products it had to choose from."""
    return system.split(" ")[0]


def is_compiled(system: str) -> bool:
    return known_as(system) in COMPILED
