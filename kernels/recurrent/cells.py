"""The plain torch version of GRU and LSTM: short, obvious, any float dtype. The CPU takes it where there is no C."""

import torch

Cell = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]  # W_ih, W_hh, b_ih, b_hh


def gru(
    x: torch.Tensor, scale: torch.Tensor | None, cell: Cell, replaced: bool = False, backwards: bool = False
) -> torch.Tensor:
    """h_t = h + u (n - h), u = 1 - z; r, z = sigmoid(W x + b + U h + c), n = tanh(W x + b + r (U h + c)) (Cho et al. 2014).

    With scale[B, steps] u is a_t (1 - z), or a_t itself if `replaced`: the cell then has no z (Zhou et al. 2019, eq. 12 to 14).
    x[B, steps, inputs], gates of the cell r, z, n, one above the other -> [B, steps, hidden].
    """
    w, u, b, c = cell
    h, states = x.new_zeros(len(x), u.shape[1]), list[torch.Tensor]()
    for t in _order(x.shape[1], backwards):
        own, before = torch.nn.functional.linear(x[:, t], w, b), torch.nn.functional.linear(h, u, c)
        parts, last = (own.chunk(2 if replaced else 3, 1), before.chunk(2 if replaced else 3, 1))
        n = torch.tanh(parts[-1] + torch.sigmoid(parts[0] + last[0]) * last[-1])
        update = x.new_ones(len(x), 1) if scale is None else scale[:, t, None]
        h = h + (update if replaced else update * torch.sigmoid(-parts[1] - last[1])) * (n - h)
        states.append(h)
    return torch.stack(states[::-1] if backwards else states, 1)


def lstm(x: torch.Tensor, cell: Cell, backwards: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """c_t = f c + i g, h_t = o tanh(c_t) (Hochreiter and Schmidhuber 1997, with forget gates); i, f, o are sigmoids and g the
    tanh of W x + b + U h + c. x[B, steps, inputs], gates i, f, g, o, one above the other -> [B, steps, hidden] and the last c.
    """
    w, u, b, bias = cell
    h = c = x.new_zeros(len(x), u.shape[1])
    states = list[torch.Tensor]()
    for t in _order(x.shape[1], backwards):
        gates = torch.nn.functional.linear(x[:, t], w, b) + torch.nn.functional.linear(h, u, bias)
        i, f, g, o = gates.chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        states.append(h)
    return torch.stack(states[::-1] if backwards else states, 1), c


def _order(steps: int, backwards: bool) -> range:
    return range(steps - 1, -1, -1) if backwards else range(steps)
