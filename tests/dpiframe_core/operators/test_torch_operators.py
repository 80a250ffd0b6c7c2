"""What torch computes alone on a GPU, here with tensors of the host."""

import pytest
import torch

from dpiframe_core.graph.graph import Node
from dpiframe_core.operators.torch_operators import run_with_torch

CONCAT = Node("joined", "concat", ("a", "b", "c"), ("joined",), "deep")
WIDTHS = (8, 4, 3)


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("inside", [(), (0, 1, 2), (1,), (0, 2)])
def test_a_concat_has_all_parts_whichever_were_written_in_their_places(inside: tuple[int, ...], padding: int) -> None:
    """Programs of one lane share buffers: what one of them writes side by side, another one joins."""
    wanted = torch.randn(6, sum(WIDTHS))
    matrix = torch.full((6, sum(WIDTHS) + padding), 7.0)
    out = matrix[:, : sum(WIDTHS)]
    parts = []
    for i, (part, place) in enumerate(zip(wanted.split(WIDTHS, 1), out.split(WIDTHS, 1), strict=True)):
        parts.append(place.copy_(part) if i in inside else part.clone())
    run_with_torch(CONCAT, None, parts, out)
    assert torch.equal(out, wanted)
    assert (matrix[:, sum(WIDTHS) :] == 7).all()
