"""torch's own modules where its code does not export as it stands: the same values by what does. Knows no graph of ours."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._decomp import decompositions
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


def gru_cell(
    x: torch.Tensor,
    h: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor,
    b: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
) -> torch.Tensor:
    """nn.GRUCell by what the table of operators has."""
    own, before = functional.linear(x, w, b).chunk(3, 1), functional.linear(h, u, c).chunk(3, 1)
    r, z = torch.sigmoid(own[0] + before[0]), torch.sigmoid(own[1] + before[1])
    n = torch.tanh(own[2] + r * before[2])
    return n + z * (h - n)


def lstm_cell(
    x: torch.Tensor,
    states: tuple[torch.Tensor, torch.Tensor],
    w: torch.Tensor,
    u: torch.Tensor,
    b: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """nn.LSTMCell, likewise."""
    h, kept = states
    i, f, g, o = (functional.linear(x, w, b) + functional.linear(h, u, c)).chunk(4, 1)
    kept = torch.sigmoid(f) * kept + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(kept), kept


def _rnn_cell(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """nn.RNNCell, likewise."""

    def cell(
        x: torch.Tensor,
        h: torch.Tensor,
        w: torch.Tensor,
        u: torch.Tensor,
        b: torch.Tensor | None = None,
        c: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return activation(functional.linear(x, w, b) + functional.linear(h, u, c))

    return cell


CELLS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.gru_cell.default: gru_cell,
    torch.ops.aten.lstm_cell.default: lstm_cell,
    torch.ops.aten.rnn_tanh_cell.default: _rnn_cell(torch.tanh),
    torch.ops.aten.rnn_relu_cell.default: _rnn_cell(torch.relu),
}
