"""Dense layers in plain PyTorch with a workload's weights, by the names that docs/models.md gives them."""

from collections.abc import Mapping

import torch
from torch import nn


def linear(
    dense: Mapping[str, torch.Tensor], name: str, device: torch.device, dtype: torch.dtype, *, bias: bool = True
) -> nn.Linear:
    weight = dense[f"{name}.weight"]
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias, device="meta")
    layer.weight = nn.Parameter(weight.to(device, dtype), False)
    if bias:
        layer.bias = nn.Parameter(dense[f"{name}.bias"].to(device, dtype), False)
    return layer


class Mlp(nn.Module):
    """Layers `prefix.0`, `prefix.1`, .. with ReLU (or another function) behind each."""

    def __init__(
        self,
        dense: Mapping[str, torch.Tensor],
        prefix: str,
        device: torch.device,
        dtype: torch.dtype,
        activation: type[nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        count = 0
        while f"{prefix}.{count}.weight" in dense:
            count += 1
        self.layers = nn.ModuleList(linear(dense, f"{prefix}.{i}", device, dtype) for i in range(count))
        self.activation = activation()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.activation(layer(x))
        return x


class CrossNetwork(nn.Module):
    """DCN-V2's cross layers: x_{l+1} = x_0 * (W_l x_l + b_l) + x_l. W_l is a matrix, of low rank, or a mixture of such.

    Of a mixture the experts' V, C and U are applied to all experts at once: U after the gates, as one product.
    """

    def __init__(
        self,
        dense: Mapping[str, torch.Tensor],
        layers: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        experts: int | None = None,
    ) -> None:
        super().__init__()
        names = [f"cross.{i}" for i in range(layers)]
        self.out = nn.ModuleList(linear(dense, name, device, dtype) for name in names)
        self.low = nn.ModuleList(
            linear(dense, f"{name}.v", device, dtype, bias=False) for name in names if f"{name}.v.weight" in dense
        )
        self.experts = experts
        if experts:
            self.gates = linear(dense, "cross.gates", device, dtype, bias=False)
            self.middle = nn.ParameterList(
                nn.Parameter(_diagonal(dense[f"{name}.c.weight"], experts).to(device, dtype), False) for name in names
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        xl = x
        for i, out in enumerate(self.out):
            v = self.low[i](xl) if self.low else xl
            if self.experts:
                v = self._mixed(v, xl, i)
            xl = x * out(v) + xl
        return xl

    def _mixed(self, v: torch.Tensor, xl: torch.Tensor, layer: int) -> torch.Tensor:
        """[rows, experts * rank]: tanh(C_e tanh(V_e x)), each expert's times its gate."""
        v = torch.tanh(v).view(len(v), self.experts, -1)
        v = torch.tanh(torch.einsum("ber,esr->bes", v, self.middle[layer]))
        return (v * self.gates(xl).softmax(1)[:, :, None]).flatten(1)


def _diagonal(matrix: torch.Tensor, blocks: int) -> torch.Tensor:
    """[blocks, n, n]: the blocks on the diagonal of a matrix [blocks * n, blocks * n]."""
    n = len(matrix) // blocks
    return torch.stack([matrix[i * n : (i + 1) * n, i * n : (i + 1) * n] for i in range(blocks)])
