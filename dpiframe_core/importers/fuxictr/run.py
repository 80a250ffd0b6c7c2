"""FuxiCTR 2.3 runs -> source models. Every parameter of a checkpoint is taken exactly once; hyper-parameters that it does not
hold come from the run's configuration.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from dpiframe_core.errors import InputError
from dpiframe_core.importers.fuxictr.by_name import tell_defaults, zoo_model
from dpiframe_core.importers.fuxictr.files import FuxiFiles, FuxiRun, read_run
from dpiframe_core.importers.fuxictr.models import dcn, dcnv2, deepfm, wide_deep, xdeepfm
from dpiframe_core.importers.fuxictr.sequences import din, dlrm
from dpiframe_core.importers.fuxictr.zoo.models import OF_TASKS, STAYS_OUT, ZOO
from dpiframe_core.importers.networks.net import table_of
from dpiframe_core.importers.source_model import SourceModel, required
from dpiframe_core.importers.state_dict import StateDict, read_checkpoint

_MODELS: Mapping[str, Callable[[FuxiRun, StateDict, Sequence[str]], SourceModel]] = {
    "DeepFM": deepfm,
    "WideDeep": wide_deep,
    "xDeepFM": xdeepfm,
    "DCN": dcn,
    "DCNv2": dcnv2,
    "DIN": din,
    "DLRM": dlrm,
}

# What their constructors have for settings that a configuration does not name: FuxiCTR's own of xDeepFM and DCN leave some out.
_MLP = {"embedding_dim": 10, "hidden_units": [64, 64, 64], "hidden_activations": "ReLU"}
_DNN = {"embedding_dim": 10, "dnn_activations": "ReLU"}
_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "DeepFM": _MLP, "WideDeep": _MLP,
    "xDeepFM": {**_DNN, "dnn_hidden_units": [64, 64, 64], "cin_hidden_units": [16, 16, 16]},
    "DCN": {**_DNN, "dnn_hidden_units": [], "num_cross_layers": 3},
    "DCNv2": {**_DNN, "model_structure": "parallel", "num_cross_layers": 3},
    "DIN": {**_DNN, "dnn_hidden_units": [512, 128, 64], "attention_hidden_units": [64],
            "attention_hidden_activations": "Dice", "attention_output_activation": None},
    "DLRM": {"embedding_dim": 10, "top_mlp_units": [64, 64, 64], "top_mlp_activations": "ReLU", "interaction_op": "dot",
             "bottom_mlp_units": [64, 64, 64], "bottom_mlp_activations": "ReLU"},
}  # fmt: skip

# Every name of a configuration's `model` that is imported.
IMPORTED = tuple(sorted({*_MODELS, *ZOO, *OF_TASKS}, key=str.lower))


def fuxictr(files: FuxiFiles, context: Sequence[str] = ()) -> SourceModel:
    """Reads a run's files; `context`: features that requests give once.

    Raises:
        InputError: a file is damaged or of another run, or holds what a bundle cannot express; with the names.
    """
    run = read_run(files)
    return fuxictr_model(run, read_checkpoint(files.checkpoint), context)


def fuxictr_model(run: FuxiRun, weights: StateDict, context: Sequence[str] = ()) -> SourceModel:
    """As `fuxictr`, of files already read."""
    where = str(run.files.config)
    name = required(run.config, "model", f"{where}: model", (str,))
    if name not in IMPORTED:
        if name in STAYS_OUT:
            expected = f"another model: {STAYS_OUT[name]}; a class of your own goes by --source FILE.py:CLASS"
            raise InputError(f"{where}: model", name, expected)
        raise InputError(f"{where}: model", name, f"one of {', '.join(IMPORTED)}; others by --source FILE.py:CLASS")
    task = run.config.get("task", "binary_classification")
    tasks = task if isinstance(task, list) and name in OF_TASKS else [task]
    if any(one != "binary_classification" for one in tasks):
        raise InputError(f"{where}: task", task, "binary_classification")
    for parameter in weights.remaining():
        feature = table_of(parameter)
        if feature is not None and feature not in run.features:
            expected = f"it, as {weights.where} has {parameter}"
            raise InputError.worded(f"{run.files.feature_map}: features", f"no {feature}", expected)
    if name in _MODELS:
        taken = {key: value for key, value in _DEFAULTS[name].items() if key not in run.config}
        try:
            model = _MODELS[name](replace(run, config={**run.config, **taken}), weights, context)
        except InputError as error:
            tell_defaults(error, run, taken)
            raise
        return replace(model, defaults=taken)
    logit = ZOO.get(name) or OF_TASKS[name]
    return zoo_model(name, logit, run, weights, context)
