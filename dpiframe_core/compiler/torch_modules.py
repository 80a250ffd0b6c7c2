"""torch's own modules where its code does not export as it stands: the same values by what does. Knows no graph of ours."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._decomp import decompositions
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode


@contextmanager
def exportable() -> Iterator[None]:
    """Where a trace runs."""
    from torch._dynamo import config  # takes a second to import, and export does it anyhow

    layer, detect = decompositions.one_layer_lstm, transformer._detect_is_causal_mask
    decompositions.one_layer_lstm = _with_flat_states(layer)
    transformer._detect_is_causal_mask = _is_said_to_be_causal
    try:
        # What each call gave is kept for another with the same shapes, which takes a fifth of a trace and finds few.
        with config.patch(fake_tensor_cache_enabled=False), _Instead():
            yield
    finally:
        decompositions.one_layer_lstm, transformer._detect_is_causal_mask = layer, detect


@contextmanager
def fixing_rows(stacks: list[traceback.StackSummary]) -> Iterator[None]:
    """Where a trace runs: notes the stacks at which it takes a size that it did not know for one number."""
    settle = ShapeEnv._set_replacement

    def noted(self: ShapeEnv, symbol: Any, target: Any, *others: Any) -> Any:
        if getattr(target, "is_number", False):
            stacks.append(traceback.extract_stack())
        return settle(self, symbol, target, *others)

    ShapeEnv._set_replacement = noted  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        ShapeEnv._set_replacement = settle  # type: ignore[method-assign]


class _Instead(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = None
        if func in (torch.take_along_dim, torch.Tensor.take_along_dim):
            found = _taken_along(*args, **kwargs or {})
        elif func in (functional.rrelu, torch.rrelu, torch.rrelu_):
            found = _rectified(*args, **kwargs or {})
        return func(*args, **kwargs or {}) if found is None else found


def _taken_along(input: torch.Tensor, indices: torch.Tensor, dim: int | None = None) -> torch.Tensor | None:
    """torch.take_along_dim, which compares the number of rows with 1. None: it is left to torch."""
    if dim is None or input.ndim != indices.ndim:
        return None
    dim %= input.ndim
    sizes = [n if isinstance(m, int) and m == 1 else m for n, m in zip(input.shape, indices.shape, strict=True)]
    here, there = ([*sizes[:dim], x.shape[dim], *sizes[dim + 1 :]] for x in (input, indices))
    return input.expand(here).gather(dim, indices.expand(there))


def _rectified(
    input: torch.Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, **others: Any
) -> torch.Tensor | None:
    """torch.rrelu, which draws slopes in training alone. None: there."""
    return None if training else functional.leaky_relu(input, (lower + upper) / 2)


def _with_flat_states(kept: Any) -> Any:
    """torch before 2.13 exports an LSTM's last states as [layers, 1, n, hidden] (its issue 151200). Here without the one."""

    def layer(*arguments: Any, **named: Any) -> Any:
        out, states = kept(*arguments, **named)
        return out, tuple(state.flatten(0, -2) for state in states)

    return layer


def _is_said_to_be_causal(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """nn.TransformerEncoder looks at its mask's values to see whether it may go by a flag: by the mask all is the same."""
    return is_causal is True


def _gru(own: torch.Tensor, before: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    of_x, of_h = own.chunk(3, 1), before.chunk(3, 1)
    r, z = torch.sigmoid(of_x[0] + of_h[0]), torch.sigmoid(of_x[1] + of_h[1])
    n = torch.tanh(of_x[2] + r * of_h[2])
    return n + z * (h - n)


def _lstm(own: torch.Tensor, before: torch.Tensor, states: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    i, f, g, o = (own + before).chunk(4, 1)
    kept = torch.sigmoid(f) * states[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(kept), kept


def _cell(step: Callable[[torch.Tensor, torch.Tensor, Any], Any]) -> Callable[..., Any]:
    """A cell of torch's by what the table of operators has: its linear layers of the input and of the last state, and what a
    step makes of both.
    """

    def cell(
        x: torch.Tensor,
        last: Any,
        w: torch.Tensor,
        u: torch.Tensor,
        b: torch.Tensor | None = None,
        c: torch.Tensor | None = None,
    ) -> Any:
        h = last if isinstance(last, torch.Tensor) else last[0]
        return step(functional.linear(x, w, b), functional.linear(h, u, c), last)

    return cell


CELLS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.gru_cell.default: _cell(_gru),
    torch.ops.aten.lstm_cell.default: _cell(_lstm),
    torch.ops.aten.rnn_tanh_cell.default: _cell(lambda own, before, _: torch.tanh(own + before)),
    torch.ops.aten.rnn_relu_cell.default: _cell(lambda own, before, _: torch.relu(own + before)),
}

# What torch can write by calls that `operations` has; the last three are what it writes some of the others by.
_SPELLED_OUT = """absolute addcdiv addcmul arctan celu clip column_stack concat concatenate cosine_similarity diff divide dstack
    fill fix glu greater greater_equal hstack inner isnan lerp less less_equal linalg_vecdot logaddexp logit multiply negative
    not_equal pairwise_distance rms_norm roll select_scatter special_expit special_softmax subtract threshold
    tile tril triu isfinite atleast_1d atleast_3d _fused_rms_norm true_divide frac rot90 aminmax nansum nanmean
    count_nonzero nan_to_num isposinf isneginf softshrink hardshrink diag_embed linalg_matrix_norm heaviside sgn sinc
    special_entr isin upsample_nearest1d linalg_norm outer ger trapezoid tensordot upsample_linear1d pixel_shuffle baddbmm
    logaddexp2 ldexp isclose msort linalg_matrix_power deg2rad rad2deg"""

# What torch has no other calls for in a table, but in its own code.
_OF_OTHERS = """adjoint atleast_2d broadcast_to cartesian_prod dsplit hsplit mH mT matrix_H moveaxis movedim narrow numpy_T
    positive ravel real swapaxes swapdims tensor_split unsafe_chunk vsplit"""


@cache
def spelled_out() -> dict[Any, Any]:
    """How the calls above are written by others: as torch does it, and those of recurrent cells as here."""
    names = set(_SPELLED_OUT.split())
    known = {**torch._decomp.decomposition_table, **torch.export.default_decompositions()}
    named = {call: known[call] for call in known if str(call).removeprefix("aten.").split(".")[0] in names}
    packets = [getattr(torch.ops.aten, name) for name in _OF_OTHERS.split()]
    own = {call: call.decompose for packet in packets for call in (getattr(packet, name) for name in packet.overloads())}
    return named | own | CELLS
