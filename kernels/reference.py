"""The plain torch version of every kernel: short, obvious, any float dtype. `kernels.cpu` takes what it does not do better.
Those of recurrences are in `kernels.recurrent.cells`.
"""

from collections.abc import Sequence

import torch

from kernels.lookup.plan import ALWAYS_ROW_0, Batch, Kind, LookupPlan, Slot


def lookup(
    plan: LookupPlan, tables: Sequence[torch.Tensor], batch: Batch, rows: int, scales: Sequence[torch.Tensor | None] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """x float32[rows, x_width] and total float32[rows, 1] of a planned lookup, one slot at a time.

    scales: float32[dim] of each int8 table, None for the others; (): no table is int8.
    """
    request = batch.request_of_row[:rows].long()

    def slot_value(slot: Slot) -> torch.Tensor:
        number = torch.ones(rows, 1)
        if slot.kind in (Kind.SCALE, Kind.COPY):
            side = batch.candidate_numbers[:rows] if slot.number >= 0 else batch.context_numbers[request]
            number = side[:, [slot.number if slot.number >= 0 else -1 - slot.number]]
        if slot.kind == Kind.COPY:
            return number
        pooled, found = torch.full((rows, slot.dim), -torch.inf if slot.largest else 0.0), torch.zeros(rows, 1)
        for column in plan.columns[slot.first : slot.first + slot.columns]:
            ids = torch.zeros(rows, dtype=torch.int64)
            if column.source != ALWAYS_ROW_0:
                side = batch.candidate_ids[:rows] if column.source >= 0 else batch.context_ids[request]
                ids = side[:, column.source if column.source >= 0 else -1 - column.source].long()
            table = tables[column.table]
            padded = (ids == -1) & column.may_pad
            if slot.kind == Kind.MASK:
                return (~padded).float()[:, None]
            ids = torch.where((ids < 0) | (ids >= table.shape[0]), column.oov, ids)
            scale = scales[column.table] if scales else None
            value = table[ids].float() if scale is None else table[ids].float() * scale
            if slot.largest:
                pooled = torch.where(padded[:, None], pooled, torch.maximum(pooled, value))
            else:
                pooled += torch.where(padded[:, None], 0.0, value)
            found += ~padded[:, None]
        if slot.largest:
            return torch.where(found > 0, pooled, 0.0)
        return pooled / found.clamp(min=1) if slot.mean else pooled * number

    x = torch.zeros(rows, plan.x_width)
    for slot in plan.x_slots:
        x[:, slot.out : slot.out + slot.dim] = slot_value(slot)
    total = torch.cat([slot_value(s) for s in plan.total_slots], 1).sum(1, keepdim=True) if plan.total_slots else None
    return x, torch.zeros(rows, 1) if total is None else total


def fm(x: torch.Tensor, offset: int, fields: int, dim: int) -> torch.Tensor:
    """1/2 sum_d ((sum_i v_id)^2 - sum_i v_id^2) (Rendle 2010). x[B, w] -> [B, 1]."""
    v, norm = x[:, offset : offset + fields * dim], torch.linalg.vector_norm  # norms make no temporaries
    summed, each = norm(v.reshape(-1, fields, dim).sum(1), dim=1, keepdim=True), norm(v, dim=1, keepdim=True)
    pairs: torch.Tensor = summed.square_().addcmul_(each, each, value=-1).mul_(0.5)
    return pairs


def folded_cross(
    weights: torch.Tensor, biases: torch.Tensor, head: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(vectors[dots, width], k[dots], c_L[width]) of a cross network in one pass, float64, as row_interactions.cuh explains;
    the vectors of `head` [tasks, width] come behind the layers'.
    """
    w, b = weights.double().cpu(), biases.double().cpu()
    c = torch.cat([torch.zeros_like(b[:1]), b.cumsum(0)])  # c_0 .. c_L
    k = (c[:-1] * w).sum(1)
    if head is None:
        return w, k, c[-1]
    v = head.double().cpu()
    return torch.cat([w, v]), torch.cat([k, v @ c[-1]]), c[-1]


def dot(x: torch.Tensor, fields: int, dim: int, keep: int, diagonal: bool) -> torch.Tensor:
    """x[:, :keep], then <v_i, v_j>, j < i (`diagonal`: j <= i), row by row (Naumov et al. 2019). x[B, fields * dim]."""
    v = x.view(-1, fields, dim)
    i, j = torch.tril_indices(fields, fields, 0 if diagonal else -1)
    products = torch.bmm(v, v.transpose(1, 2)).flatten(1)
    return torch.cat([x[:, :keep], products.index_select(1, i * fields + j)], 1)


_CIN_ROWS = 32  # at a time: all products of a layer lie in memory, 10 MB of float32 for 128 maps of 39 fields of dim 16


def cin(
    x: torch.Tensor,
    fields: int,
    dim: int,
    layers: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    activation: str,
    slope: float,
    halves: bool,
) -> torch.Tensor:
    """X^k[n] = act(sum_ij W^k[n, i m + j] X^{k-1}[i] * X^0[j] + b^k[n]), summed over dim (Lian et al. 2018, eq. 6 and 7).

    x[B, fields * dim], layers (weight [maps, maps before * fields], bias [maps]) -> [B, summed maps of all layers]; with
    `halves` the first half of a layer's maps is X^k and the second half is summed, but for the last layer: all of it.
    """
    return torch.cat(
        [_cin(part.reshape(-1, fields, dim), layers, activation, slope, halves) for part in torch.split(x, _CIN_ROWS)]
    )


def _cin(
    x0: torch.Tensor, layers: Sequence[tuple[torch.Tensor, torch.Tensor | None]], activation: str, slope: float, halves: bool
) -> torch.Tensor:
    """The same for x0[rows, fields, dim], a layer as one product of [maps, *] and [*, rows * dim], not a small one a row."""
    rows, fields, dim = x0.shape
    x0 = x0.transpose(0, 1).reshape(fields, rows * dim)
    xk, pooled = x0, []
    for k, (weight, bias) in enumerate(layers):
        y = weight @ (xk[:, None] * x0).flatten(0, 1)
        y = activate_(y if bias is None else y + bias[:, None], activation, slope=slope)
        next_maps = len(weight) // 2 if halves else len(weight)
        summed = y[next_maps:] if halves and k < len(layers) - 1 else y
        pooled.append(summed.view(-1, rows, dim).sum(2).t())
        xk = y[:next_maps]
    return torch.cat(pooled, 1)


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    mask: torch.Tensor | None,
    layers: Sequence[tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]]],
    out: tuple[torch.Tensor, torch.Tensor],
    activation: str,
    slope: float,
    output: str,
    softmax: bool,
) -> torch.Tensor:
    """sum_l w_l k_l with w_l = MLP([q, k_l, q - k_l, q * k_l]) (Zhou et al. 2018, eq. 3). -> [B, d].

    The first layer is split by its columns, so that nothing of 4 d is made: W_q q + W_k k + W_d (q - k) + W_p (q * k) =
    (W_q + W_d) q + (W_k - W_d) k + W_p (q * k), the first part once a row.

    Args:
        query: [B, d]. keys: [B, L, d]. mask: [B, L] of 1 and 0, or None.
        layers: (weight, bias, parameters of the activation) of each. out: weight[1, units], bias[1].
        output: the activation of a weight. softmax: of the weights over the sequence, what is masked left out.
    """
    (first, bias, params), *others = layers
    of_query, of_key, of_product = split_attention(first)
    h = keys @ of_key.t() + (keys * query[:, None]) @ of_product.t() + (query @ of_query.t() + bias)[:, None]
    h = activate_(h, activation, params, slope)
    for weight, bias, params in others:
        h = activate_(h @ weight.t() + bias, activation, params, slope)
    weights = activate_((h @ out[0].t() + out[1])[:, :, 0], output)
    if mask is not None:
        weights = weights * mask
    if softmax:
        weights = torch.softmax(weights if mask is None else weights - 1e9 * (1 - mask), 1)
    return torch.bmm(weights[:, None], keys)[:, 0]


def split_attention(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a layer of [q, k, q - k, q * k], weight [units, 4 d], multiplies q, k and q * k with: W_q + W_d, W_k - W_d, W_p."""
    q, k, difference, product = weight.double().chunk(4, 1)
    return (q + difference).to(weight.dtype), (k - difference).to(weight.dtype), product.to(weight.dtype)


def field_attention(
    x: torch.Tensor,
    fields: int,
    heads: int,
    projections: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    scale: float,
    activation: str,
) -> torch.Tensor:
    """activation(softmax(scale Q K^T) V + R), head by head (Song et al. 2019, eq. 5 to 8); R is nothing without its projection.

    x[B, fields * dim], projections (weight[heads * size, dim], bias) of Q, K, V (and R) -> [B, fields * heads * size].
    """
    v = x.reshape(len(x), fields, -1)
    q, k, values, *rest = (torch.nn.functional.linear(v, w, b) for w, b in projections)
    q, k, values = (t.view(len(x), fields, heads, -1).transpose(1, 2) for t in (q, k, values))
    y = (torch.softmax((q @ k.transpose(2, 3)) * scale, 3) @ values).transpose(1, 2).reshape(len(x), fields, -1)
    return activate_(y + rest[0] if rest else y, activation).flatten(1)


def mixture(x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """softmax(gates[B, n])[i] times the i-th of n equal parts of x[B, n * r]."""
    return (x.view(len(x), gates.shape[1], -1) * torch.softmax(gates, 1)[:, :, None]).view(x.shape)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    params: Sequence[torch.Tensor] = (),
    slope: float = 0.0,
) -> torch.Tensor:
    """activation(x W^T + b). x[B, in], weight[out, in] -> [B, out]."""
    y = x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())
    return activate_(y, activation, params, slope)


ACTIVATIONS = ("identity", "relu", "sigmoid", "tanh", "gelu", "gelu_tanh", "leaky_relu", "prelu", "dice")


def activate_(y: torch.Tensor, activation: str, params: Sequence[torch.Tensor] = (), slope: float = 0.0) -> torch.Tensor:
    """Applies an activation and returns the result; y may be overwritten.

    Args:
        params: prelu: alpha[w]; dice: alpha, scale, shift, each [w]. slope: of leaky_relu.

    Raises:
        ValueError: an unknown activation.
    """
    match activation:
        case "identity":
            return y
        case "relu":
            return y.relu_()
        case "sigmoid":
            return y.sigmoid_()
        case "tanh":
            return y.tanh_()
        case "gelu":
            return torch.nn.functional.gelu(y)
        case "gelu_tanh":
            return torch.nn.functional.gelu(y, approximate="tanh")
        case "leaky_relu":
            return torch.where(y < 0, slope * y, y)
        case "prelu":
            return torch.where(y < 0, params[0].to(y.dtype) * y, y)
        case "dice":
            alpha, scale, shift = params
            p = torch.sigmoid(torch.addcmul(shift, y.float(), scale))
            return (y * (p + alpha * (1 - p))).to(y.dtype)
    raise ValueError(f"activation: got {activation!r}, expected one of {', '.join(ACTIVATIONS)}")


def head(
    parts: Sequence[torch.Tensor],
    columns: Sequence[int],
    logits: Sequence[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor,
) -> torch.Tensor:
    """sigmoid(sum_p part_p W[:, column_p :]^T + b + sum(logits)). -> [B, tasks]."""
    z = bias.expand(logits[0].shape[0] if not parts else parts[0].shape[0], -1)
    for part, column in zip(parts, columns, strict=True):
        z = torch.addmm(z, part, weight[:, column : column + part.shape[1]].t())
    for logit in logits:
        z = z + logit
    return torch.sigmoid(z)
