"""Float64 logits of AutoInt, MaskNet and FinalMLP from their papers' formulas.

module: holds the weights; e: float64[rows, fields, dim].
"""

import numpy as np


def _weight(parameter):
    return parameter.detach().double().numpy()


def _linear(layer, x):
    y = x @ _weight(layer.weight).T
    return y if layer.bias is None else y + _weight(layer.bias)


def _mlp(layers, x):
    """Linear layers and what stands between them, by their names."""
    for layer in layers:
        kind = type(layer).__name__
        x = {"Linear": lambda x, own=layer: _linear(own, x), "ReLU": lambda x: np.maximum(x, 0),
             "Sigmoid": lambda x: 1 / (1 + np.exp(-x))}[kind](x)  # fmt: skip
    return x


def _norm(layer, x):
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    return centred / np.sqrt(variance + layer.eps) * _weight(layer.weight) + _weight(layer.bias)


def autoint(module, e):
    for layer in module.projections:
        width = layer.weight.shape[0] // 4
        of_q, of_k, of_v, of_residual = (_weight(layer.weight)[i * width : (i + 1) * width] for i in range(4))
        out = e @ of_residual.T
        for h in range(module.heads):
            own = slice(h * width // module.heads, (h + 1) * width // module.heads)
            for row in range(len(e)):
                scores = (e[row] @ of_q[own].T) @ (e[row] @ of_k[own].T).T
                shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
                out[row, :, own] += shares @ (e[row] @ of_v[own].T)
        e = np.maximum(out, 0)
    return _linear(module.out, e.reshape(len(e), -1))


def masknet(module, e):
    x, normed = e.reshape(len(e), -1), _norm(module.of_fields, e).reshape(len(e), -1)
    blocks = [
        np.maximum(_norm(norm, _linear(layer, normed * _mlp(mask, x))), 0)
        for mask, layer, norm in zip(module.masks, module.layers, module.norms, strict=True)
    ]
    return _mlp(module.deep, np.concatenate(blocks, 1))


def finalmlp(module, e):
    x, n = e.reshape(len(e), -1), module.given
    given = e[:, :n].reshape(len(e), -1), e[:, n : 2 * n].reshape(len(e), -1)
    a, b = (_mlp(s, x * 2 * _mlp(g, own)) for s, g, own in zip(module.streams, module.gates, given, strict=True))
    logit = _linear(module.linear[0], a) + _linear(module.linear[1], b)
    size = a.shape[1] // module.heads
    for h in range(module.heads):
        own = slice(h * size, (h + 1) * size)
        logit += ((a[:, own] @ _weight(module.between[h])) * b[:, own]).sum(1, keepdims=True)
    return logit


LOGITS = {"autoint": autoint, "masknet": masknet, "finalmlp": finalmlp}
