"""The names of systems and models: as records have them, and as papers write them."""

COMPILED = ("compile", "compile-captured", "compile-mapped", "fbgemm", "fbgemm-captured")
OURS = ("dpiframe", "dpiframe-in-place")
SYSTEMS = (*OURS, "eager", "stacked-eager", *COMPILED)
MODEL_TITLES = {
    "wide_deep": "Wide&Deep", "deepfm": "DeepFM", "dcn": "DCN", "dcnv2": "DCN-V2", "dcnv2-stacked": "DCN-V2 stacked",
    "dcnv2-low-rank": "DCN-V2 low rank", "dcnv2-mixture": "DCN-V2 mixture", "xdeepfm": "xDeepFM", "dlrm": "DLRM",
    "din-50": "DIN, 50 items", "din-200": "DIN, 200 items", "mlperf": "MLPerf's DLRM-DCNv2", "autoint": "AutoInt",
    "masknet": "MaskNet", "finalmlp": "FinalMLP",
}  # fmt: skip
PAPER_MODELS = ("wide_deep", "deepfm", "dcn", "dcnv2")  # of DPIFrame's paper
WITH_CONTEXTS = ("din-50", "din-200")
BATCHES = (1, 64, 256, 1024, 4096)
CONTEXTS = (1, 4, 32)  # in a batch, of the models whose rows share features


def known_as(system: str) -> str:
    """The name of a system, whatever products it had to choose from."""
    return system.split(" ")[0]


def is_compiled(system: str) -> bool:
    return known_as(system) in COMPILED


def architecture_of(model: str) -> str:
    """What models of several sizes or forms have in common: `din` of `din-50`."""
    return model.partition("-")[0]


def cells_of(model: str, batches: tuple[int, ...] = BATCHES) -> int:
    """Cells of a model in one precision: no batch has more contexts than rows."""
    if model not in WITH_CONTEXTS:
        return len(batches)
    return sum(contexts <= rows for rows in batches for contexts in CONTEXTS)
