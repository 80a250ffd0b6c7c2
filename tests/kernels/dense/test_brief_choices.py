"""A layer whose program is far behind is chosen for without Triton's ways, which take long to compile; later with them."""

import pytest
import torch

from kernels.dense import linear
from kernels.dense.linear import Linear


@pytest.fixture
def layer(monkeypatch):
    """Of three ways, the later the faster; says what was timed."""
    timed = []
    monkeypatch.setattr(linear, "kernel", lambda *_: None)
    monkeypatch.setattr(linear, "ranked", lambda ways: timed.append([*ways]) or [*ways][::-1])
    made = Linear(torch.ones(8, 8), None, "relu", torch.float32, torch.device("cpu"))
    monkeypatch.setattr(made, "ways", lambda *_: dict.fromkeys(("product", "epilogue", "triton-16x16x128-w2-s4")))
    return made, timed


def tuned(layer, found, rows=4, **how):
    x = torch.zeros(rows, 8)
    return layer.tune(found, x=x, out=torch.zeros_like(x), x0=None, state=x, **how)


def test_a_brief_choice_leaves_triton_out_and_is_made_again_with_it(layer):
    one, timed = layer
    found = {}
    assert tuned(one, found, brief=True) == "epilogue"
    assert (one.rough, one.choices) == ({4}, {4: "epilogue"})
    assert tuned(one, found, brief=True) == "epilogue"
    assert tuned(one, found) == "triton-16x16x128-w2-s4" == tuned(one, found, brief=True)
    assert (one.rough, len(timed)) == (set(), 2)


def test_layers_that_are_alike_are_timed_once(layer):
    one, timed = layer
    found = {}
    tuned(one, found)
    one._choice.clear()  # as another layer of its shapes
    assert tuned(one, found) == "triton-16x16x128-w2-s4"
    assert len(timed) == 1
    tuned(one, found, rows=8)
    assert len(timed) == 2


def test_what_an_earlier_warm_up_chose_is_not_timed(layer):
    one, timed = layer
    one.recalled[4] = "product"
    assert tuned(one, {}, brief=True) == "product"
    assert not timed
    assert not one.rough
