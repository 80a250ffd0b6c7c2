"""Models of the zoo with several tasks: one logit each, [n, tasks], in the order of the run's labels."""

import torch
from torch import Tensor

from dpiframe_core.importers.networks.layers import mlp
from dpiframe_core.importers.networks.net import Net

_KEY = "hidden_activations"  # of every MLP of these models


def shared_bottom(m: Net) -> Tensor:
    """Caruana 1997: one MLP for all tasks, a tower for each."""
    bottom = mlp(m, "bottom", m.x(), _KEY, output=False)
    return torch.cat([mlp(m, f"tower.{i}", bottom, _KEY) for i in m.children("tower")], 1)


def mmoe(m: Net) -> Tensor:
    """Ma et al. 2018: experts for all tasks, mixed by a gate for each."""
    x = m.x()
    experts = _experts(m, "mmoe_layer.experts", x)
    mixed = [_mixed(m, f"mmoe_layer.gate.{i}", x, experts) for i in m.children("tower")]
    return torch.cat([mlp(m, f"tower.{i}", mixed[i], _KEY) for i in m.children("tower")], 1)


def ple(m: Net) -> Tensor:
    """Tang et al. 2020: experts of a task beside shared ones, extracted layer by layer."""
    tasks, layers = m.children("tower"), m.children("cgc_layers")
    inputs = [m.x()] * (len(tasks) + 1)  # the last one is the shared part's
    for layer in layers:
        at = f"cgc_layers.{layer}"
        shared = _experts(m, f"{at}.shared_experts", inputs[-1])
        own = [[*_experts(m, f"{at}.specific_experts.{i}", inputs[i]), *shared] for i in tasks]
        outputs = [_mixed(m, f"{at}.gate.{i}", inputs[i], own[i]) for i in tasks]
        if layer == layers[-1]:
            m.skip(f"{at}.gate.{len(tasks)}")  # of a shared part that nothing reads
            return torch.cat([mlp(m, f"tower.{i}", outputs[i], _KEY) for i in tasks], 1)
        inputs = [*outputs, _mixed(m, f"{at}.gate.{len(tasks)}", inputs[-1], shared)]
    raise AssertionError("a checkpoint without layers has no experts to read")


def _experts(m: Net, prefix: str, x: Tensor) -> list[Tensor]:
    return [mlp(m, f"{prefix}.{i}", x, _KEY, output=False) for i in m.children(prefix)]


def _mixed(m: Net, gate: str, x: Tensor, experts: list[Tensor]) -> Tensor:
    """The experts' sum, weighed by the softmax of the gate."""
    weights = mlp(m, gate, x, _KEY).softmax(1)
    return (weights.unsqueeze(2) * torch.stack(experts, 1)).sum(1)
