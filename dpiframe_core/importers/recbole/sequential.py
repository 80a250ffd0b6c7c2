"""RecBole's DIN and DIEN as functions of their parameters, to the logit, [n, 1].

Names are those of recbole/model/sequential_recommender. Their MLPs are of linear layers, batch norms and Dice, whose alpha is a
zero that no training moves: x sigmoid(x). A feature that shares another one's table is the history of that one, an item's.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dpiframe_core.importers.networks.histories import against, gru, gru_of_scores, last_state, masks, softmax_over
from dpiframe_core.importers.networks.layers import stack
from dpiframe_core.importers.networks.net import Embedded, Logit, Net

_CELL = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
_EXTRACTOR, _EVOLUTION = "interset_extractor", "interest_evolution"  # sic


def din(m: Net) -> Tensor:
    """Zhou et al. 2018. The library embeds the user's features, too, and does not read them."""
    history, target = _history(m), m.joined([_item(f) for f in _histories(m.features)])
    there, _ = masks(m, _histories(m.features)[0].name, history)
    interest = _pooled(_scores(m, "attention", target, history) * there, history)
    return _head(m, torch.cat([interest, target, interest * target], 1), "dnn_predict_layers")


def dien(m: Net) -> Tensor:
    """Zhou et al. 2019."""
    histories = _histories(m.features)
    target, user = m.joined([_item(f) for f in histories]), m.joined([f.name for f in of_user(m.features)])
    history = _history(m)
    there, read = masks(m, histories[0].name, history)
    interests = gru(m, f"{_EXTRACTOR}.gru", history) * read.unsqueeze(2)
    m.skip(f"{_EXTRACTOR}.auxiliary_net")
    evolved = _evolved(m, interests, target, there, read)
    return _head(m, torch.cat([evolved, target, user], 1), "dnn_predict_layer")


def of_user(features: Sequence[Embedded]) -> list[Embedded]:
    """Neither a history nor what one is of."""
    items = {_item(f) for f in _histories(features)}
    return [f for f in features if f.shares is None and f.name not in items]


def _histories(features: Sequence[Embedded]) -> list[Embedded]:
    return [f for f in features if f.shares is not None]


def _item(history: Embedded) -> str:
    assert history.shares is not None
    return history.shares


def _history(m: Net) -> Tensor:
    return m.joined([f.name for f in _histories(m.features)])


def _evolved(m: Net, interests: Tensor, target: Tensor, there: Tensor, read: Tensor) -> Tensor:
    name, kind = f"{_EVOLUTION}.dynamic_rnn", m.choice("gru_type", "AUGRU", "GRU", "AIGRU", "AGRU", "AUGRU")
    x = gru(m, name, interests) if kind == "GRU" else interests
    scores = softmax_over(_scores(m, f"{_EVOLUTION}.attention_layer", target, x), there)
    if kind == "GRU":
        return _pooled(scores, x * read.unsqueeze(2))
    if kind == "AIGRU":
        return last_state(gru(m, name, x * scores.unsqueeze(2)), read)
    return last_state(gru_of_scores(m, [f"{name}.rnn.{part}" for part in _CELL], "run", x, scores * read, kind), read)


def _scores(m: Net, name: str, target: Tensor, x: Tensor) -> Tensor:
    """[n, steps], over the root of the target's width."""
    hidden = stack(m, f"{name}.att_mlp_layers.mlp_layers", against(target, x), "sigmoid", "", output=False)
    return m.linear(f"{name}.dense", hidden).squeeze(2) / math.sqrt(target.shape[1])


def _pooled(scores: Tensor, x: Tensor) -> Tensor:
    return (scores.unsqueeze(2) * x).sum(1)


def _head(m: Net, x: Tensor, name: str) -> Tensor:
    return m.linear(name, stack(m, "dnn_mlp_layers.mlp_layers", x, "silu", "", output=False))


SEQUENTIAL: Mapping[str, Logit] = {"DIEN": dien, "DIN": din}
