"""MLPs written as `nn.Sequential`: linear, perhaps batch norm, activation, perhaps dropout, and so on, perhaps a last linear.

Only what has parameters has a name in a checkpoint, so layers are taken in the order of their numbers, whatever lies between.
"""

from collections.abc import Callable, Sequence

from dpiframe_core.errors import InputError
from dpiframe_core.graph.architecture import Activation as ActivationKind
from dpiframe_core.graph.architecture import LeakyReLU
from dpiframe_core.importers.source_layers import Activation, Linear, Mlp
from dpiframe_core.importers.state_dict import StateDict
from dpiframe_core.operators.batch_norm import BatchNorm

NORM_EPSILON = 1e-5  # of nn.BatchNorm1d, which no library here sets otherwise

# Names as torch.nn and the libraries' configurations write them, in lower case.
_KINDS: dict[str, ActivationKind] = {
    "none": "identity", "identity": "identity", "linear": "identity", "relu": "relu", "sigmoid": "sigmoid", "tanh": "tanh",
    "gelu": "gelu", "leakyrelu": LeakyReLU(), "prelu": "prelu", "dice": "dice",
}  # fmt: skip


def activation_kinds(given: object, layers: int, where: str, refused: Sequence[str] = ()) -> list[ActivationKind]:
    """A library's activation (a name, none, or a list of them) as one kind of ours for each layer.

    Raises:
        InputError: one is unknown, `refused`, or there is another number of them.
    """
    names = list(given) if isinstance(given, list | tuple) else [given] * layers
    if len(names) != layers:
        raise InputError(where, given, f"one activation for each of {layers} layers")
    known = [name for name in _KINDS if name not in refused]
    for name in names:
        if str(name or "none").lower() not in known:
            raise InputError(where, name, f"one of {', '.join(known)}")
    return [_KINDS[str(name or "none").lower()] for name in names]


class Places:
    """The numbered children of an `nn.Sequential` that have parameters, one after the other."""

    def __init__(self, weights: StateDict, prefix: str, where: str) -> None:
        self._weights, self._prefix, self._where = weights, prefix, where
        self._left = iter(weights.children(prefix))

    def next(self, what: str) -> str:
        """The next one's full name. Raises InputError, naming what `where` asks for, if there is none."""
        at = next(self._left, None)
        if at is None:
            raise InputError(f"{self._weights.where}: {self._prefix}", "no further layer", f"{what}, as {self._where} says")
        return f"{self._prefix}.{at}"


def read_mlp(
    weights: StateDict, prefix: str, width: int, units: Sequence[int], kinds: Sequence[ActivationKind], where: str, *,
    batch_norm: bool, output: int = 0, dice: Callable[[StateDict, str, int], Activation] | None = None,
) -> tuple[Mlp, Linear | None]:  # fmt: skip
    """Takes the layers below `prefix`: `units` hidden ones, and a last one of `output` units, if that is not 0.

    Args:
        where: what names the hyper-parameters, for errors. dice: takes the parameters of this library's Dice.
    """
    places, layers = Places(weights, prefix, where), []
    for size, kind in zip(units, kinds, strict=True):
        name = places.next(f"a linear layer of {size} units")
        weight, bias = weights.take(f"{name}.weight", size, width), weights.take(f"{name}.bias", size)
        norm = read_norm(weights, places.next("batch norm"), size) if batch_norm else None
        activation = Activation(kind)
        if kind == "prelu":
            activation = read_prelu(weights, places.next("PReLU"), size)
        elif kind == "dice" and dice is not None:
            activation = dice(weights, places.next("Dice"), size)
        layers.append(Linear(weight, bias, norm, activation))
        width = size
    last = read_linear(weights, places.next("the output layer"), width, output) if output else None
    return Mlp(tuple(layers)), last


def hidden_units(weights: StateDict, prefix: str, *, output: bool) -> list[int]:
    """The units of the linear layers below `prefix` as the checkpoint has them, without the last one if it is the `output`."""
    shapes = [weights.shape(f"{prefix}.{at}.weight") for at in weights.children(prefix)]
    units = [shape[0] for shape in shapes if shape is not None and len(shape) == 2]
    return units[:-1] if output else units


def read_linear(weights: StateDict, prefix: str, width: int | None, units: int | None, *, bias: bool = True) -> Linear:
    weight = weights.take(f"{prefix}.weight", units, width)
    return Linear(weight, weights.take(f"{prefix}.bias", len(weight)) if bias else None)


def read_norm(weights: StateDict, name: str, size: int, epsilon: float = NORM_EPSILON, *, affine: bool = True) -> BatchNorm:
    weights.drop(f"{name}.num_batches_tracked")
    mean, variance = (weights.take(f"{name}.{part}", size) for part in ("running_mean", "running_var"))
    weight, bias = (weights.take(f"{name}.{part}", size) if affine else None for part in ("weight", "bias"))
    return BatchNorm(mean, variance, epsilon, weight, bias)


def read_prelu(weights: StateDict, name: str, size: int) -> Activation:
    """Of one slope, or one a unit."""
    shape = weights.shape(f"{name}.weight")
    return Activation("prelu", weights.take(f"{name}.weight", 1 if shape == (1,) else size))
