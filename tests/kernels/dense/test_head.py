"""The head: the kernel, the CPU's and the plain one against a float64 formula."""

import numpy as np
import pytest
import torch

from kernels import reference
from kernels.cpu import dense
from tests.backends import BACKENDS
from tests.kernels.lane_state import lane_state
from tests.kernels.operands import padded_rows


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("tasks", [1, 3])
@pytest.mark.parametrize("rows", [1, 8, 9, 130])
@pytest.mark.parametrize("widths", [(), (1,), (256,), (624, 256)])
def test_the_head_joins_parts_and_logits(widths, rows, tasks, device):
    rng = np.random.default_rng(rows)
    parts = [rng.standard_normal((rows, w)) for w in widths]
    logits = [rng.standard_normal((rows, w)) for w in (1, tasks)]
    columns = [sum(widths[:i]) for i in range(len(widths))]
    weight, bias = rng.standard_normal((tasks, sum(widths) + 2)) / 16, rng.standard_normal(tasks)
    rounded = [a.astype(np.float32).astype(np.float64) for a in (weight, bias, *parts, *logits)]
    w64, b64, p64, l64 = rounded[0], rounded[1], rounded[2 : 2 + len(parts)], rounded[2 + len(parts) :]
    z = b64 + sum(l64) + sum(p @ w64[:, c : c + p.shape[1]].T for p, c in zip(p64, columns, strict=True))
    t = [torch.from_numpy(a).float() for a in (weight, bias)]
    if device == "cpu":
        values = [padded_rows(p, device, pad=0) for p in parts], [padded_rows(v, device, pad=0) for v in logits]
        plain = reference.head(values[0], columns, values[1], *t)
        np.testing.assert_allclose(plain.numpy(), 1 / (1 + np.exp(-z)), rtol=0, atol=1e-5)
        got = dense.Head(*t, list(zip(columns, widths, strict=True)))(*values[0], *values[1])
    else:
        from kernels.dense.head import Head

        head = Head(t[0], t[1], torch.float32, torch.device(device))
        got = torch.full((rows, tasks), torch.nan, device=device)
        placed = [(padded_rows(p, device, pad=2), p.shape[1], c) for p, c in zip(parts, columns, strict=True)]
        done = torch.zeros(-(-rows // 8), dtype=torch.int32).pin_memory()
        head(lane_state(rows, device), placed, [padded_rows(v, device, pad=0) for v in logits], rows, got, done)
        torch.cuda.synchronize()
        assert (done == 7).all()
    np.testing.assert_allclose(got.cpu().numpy(), 1 / (1 + np.exp(-z)), rtol=0, atol=1e-5)
