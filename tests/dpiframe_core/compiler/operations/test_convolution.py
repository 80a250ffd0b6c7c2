"""Convolutions, pooling and norms of groups over a history or over fields, held against torch's own in float64."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from dpiframe_core import compile as compile_module
from dpiframe_core.errors import InputError
from tests.backends import BACKENDS
from tests.dpiframe_core.compiler.operations.lowered import Lowered
from tests.dpiframe_core.compiler.served import any_rows_score_as
from tests.dpiframe_core.compiler.test_sequences import DIM, GPU_ONLY, STEPS, Base, example, schema

pytestmark = pytest.mark.bulk


def weight(*shape):
    return (torch.arange(torch.Size(shape).numel()) * 1.3 + len(shape)).cos().reshape(shape)


def conv1d(x, out, kernel, *, groups=1, bias=True, **more):
    w = weight(out, x.shape[1] // groups, kernel).to(x.dtype)
    return F.conv1d(x, w, weight(out).to(x.dtype) if bias else None, groups=groups, **more)


def conv2d(x, out, kernel, *, groups=1, **more):
    w = weight(out, x.shape[1] // groups, *kernel).to(x.dtype)
    return F.conv2d(x, w, weight(out).to(x.dtype), groups=groups, **more)


# h[n, 7 steps, 4] -> [n, ..]: of a history (its steps lie one behind the other), and of fields as channels
CONVOLUTIONS = {
    "over steps": lambda h: conv1d(h.transpose(1, 2), 5, 3),
    "over steps, width 1": lambda h: conv1d(h.transpose(1, 2), 5, 1, bias=False),
    "over steps, as wide as they": lambda h: conv1d(h.transpose(1, 2), 5, 7),
    "padded": lambda h: conv1d(h.transpose(1, 2), 5, 3, padding=1),
    "padded to the same": lambda h: conv1d(h.transpose(1, 2), 5, 4, padding="same"),
    "valid": lambda h: conv1d(h.mT, 5, 4, padding="valid"),
    "by steps of two": lambda h: conv1d(h.transpose(1, 2), 5, 3, stride=2, padding=2),
    "dilated": lambda h: conv1d(h.transpose(1, 2), 3, 2, dilation=3),
    "causal": lambda h: conv1d(F.pad(h.transpose(1, 2), (2, 0)), 5, 3),
    "by groups": lambda h: conv1d(h.transpose(1, 2), 6, 3, groups=2, padding=1),
    "by channel": lambda h: conv1d(h.transpose(1, 2), 4, 3, groups=4),
    "by channel, two each": lambda h: conv1d(h.transpose(1, 2), 8, 3, groups=4, bias=False),
    "steps as channels": lambda h: conv1d(h, 5, 2),
    "one channel": lambda h: conv1d(h.flatten(1)[:, None], 3, 5, stride=4),
    "twice": lambda h: conv1d(conv1d(h.transpose(1, 2), 5, 3).relu(), 3, 2),
    "of some steps": lambda h: conv1d(h[:, 1::2].transpose(1, 2), 5, 2),
    "of what is expanded": lambda h: conv1d(h[:, :1].expand(-1, 5, -1).transpose(1, 2), 5, 2),
    "rows and heads": lambda h: conv1d(h.reshape(-1, 2, 7, 2).mT.reshape(-1, 2, 7), 3, 2).reshape(h.shape[0], 2, -1),
    "two dimensions": lambda h: conv2d(h[:, None], 3, (2, 4)),
    "two dimensions, down": lambda h: conv2d(h[:, None], 2, (7, 1)),
    "two dimensions, padded": lambda h: conv2d(h[:, None], 3, (3, 2), padding=(1, 1), stride=(2, 1)),
    "two dimensions, dilated": lambda h: conv2d(h[:, None], 3, (2, 2), dilation=(3, 1)),
    "two dimensions, the same": lambda h: conv2d(h[:, None], 3, (4, 3), padding="same"),
    "two dimensions, twice": lambda h: conv2d(conv2d(h[:, None], 4, (3, 1), padding=(1, 0)).tanh(), 3, (3, 2)),
    "two dimensions, by groups": lambda h: conv2d(conv2d(h[:, None], 4, (2, 1)), 6, (2, 2), groups=2),
    "two dimensions, transposed": lambda h: conv2d(h.transpose(1, 2)[:, None], 3, (2, 3)),
    "largest": lambda h: F.max_pool1d(h.transpose(1, 2), 3),
    "largest, overlapping": lambda h: F.max_pool1d(h.transpose(1, 2), 3, stride=2, padding=1),
    "largest, dilated": lambda h: F.max_pool1d(h.transpose(1, 2), 2, stride=1, dilation=3),
    "largest of all": lambda h: F.adaptive_max_pool1d(h.transpose(1, 2), 1),
    "largest, two dimensions": lambda h: F.max_pool2d(h[:, None], (2, 1), padding=(1, 0)),
    "largest of two dimensions": lambda h: F.adaptive_max_pool2d(h[:, None], (1, 2)),
    "mean": lambda h: F.avg_pool1d(h.transpose(1, 2), 2, padding=1),
    "mean of all": lambda h: F.adaptive_avg_pool1d(h.transpose(1, 2), 1),
    "mean, two dimensions": lambda h: F.avg_pool2d(h[:, None], (3, 2), stride=(2, 2)),
    "mean of two dimensions": lambda h: F.adaptive_avg_pool2d(h[:, None], (7, 1)),
}  # fmt: skip


def history(rows):
    return torch.randn(rows, 7, 4, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_windows_hold_what_torchs_own_hold(name, device):
    """Also NaN and infinite numbers, which only the windows that hold them show."""
    lowered = Lowered(lambda h: CONVOLUTIONS[name](-h), 7, 4)
    for rows in (1, 5):
        want = CONVOLUTIONS[name](-history(rows).double())
        torch.testing.assert_close(lowered(history(rows), device).double(), want, rtol=1e-5, atol=1e-5)
    odd = history(5)
    odd[1, 0, 0], odd[2, 6, 3], odd[3] = torch.nan, torch.inf, -torch.inf
    want = CONVOLUTIONS[name](-odd.double())
    torch.testing.assert_close(lowered(odd, device).double(), want, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "copies"),
    [("over steps", 0), ("by steps of two", 0), ("two dimensions", 0), ("two dimensions, padded", 1), ("steps as channels", 1)],
)
def test_windows_over_the_steps_of_a_history_are_not_copied(name, copies):
    """Each is one run of neighbouring embeddings. Others are copied, as torch does for all."""
    lowered = Lowered(lambda h: CONVOLUTIONS[name](-h), 7, 4)
    assert lowered.ops.count("aten.clone") == copies
    assert lowered.ops.count("aten.linear") == 1


def affine(x):
    return weight(x.shape[1]).to(x.dtype), weight(1, x.shape[1])[0].to(x.dtype)


# h[n, 6 steps, 4] -> [n, ..]
NORMS = {
    "groups of channels": lambda h: F.group_norm(h.mT, 2, *affine(h.mT)),
    "groups of steps": lambda h: F.group_norm(h, 3, *affine(h), eps=0.1),
    "one group": lambda h: F.group_norm(h, 1),
    "a group each": lambda h: F.group_norm(h.mT, 4, affine(h.mT)[0]),
    "flat": lambda h: F.group_norm(h.flatten(1), 4, *affine(h.flatten(1))),
    "images": lambda h: F.group_norm(h.reshape(-1, 4, 3, 2), 2, *affine(h.mT)),
    "rows and heads": lambda h: F.group_norm(h.reshape(-1, 3, 4), 3).reshape(h.shape[0], 6, 4),
    "after a convolution": lambda h: F.group_norm(conv1d(h.mT, 4, 3), 2, *affine(h.mT)).relu(),
    "each row's statistics": lambda h: F.instance_norm(h.mT, weight=affine(h.mT)[0], bias=affine(h.mT)[1]),
}  # fmt: skip


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_of_groups_is_torchs(name, device):
    """One NaN is in all of its group, and in no other."""
    lowered = Lowered(lambda h: NORMS[name](-h), 6, 4)
    for rows in (1, 5):
        want = NORMS[name](-history(rows)[:, :6].double())
        torch.testing.assert_close(lowered(history(rows)[:, :6], device).double(), want, rtol=1e-5, atol=1e-5)
    odd = history(5)[:, :6]
    odd[1, 0, 0], odd[2, 5, 3] = torch.nan, torch.inf
    want = NORMS[name](-odd.double())
    torch.testing.assert_close(lowered(odd, device).double(), want, rtol=1e-5, atol=1e-5, equal_nan=True)


def normed(x):
    own = [weight(x.shape[1], n)[:, 0].to(x.dtype) for n in range(1, 5)]
    return F.batch_norm(x, own[0], own[1].abs() + 0.5, own[2], own[3])


BATCH_NORMS = {
    "of a convolution": (lambda h: normed(conv1d(h.mT, 5, 3)), True),
    "without a bias": (lambda h: normed(conv1d(h.mT, 5, 3, bias=False)), True),
    "of maps": (lambda h: normed(conv2d(h[:, None], 3, (3, 2), padding=(1, 0))), True),
    "of each step's layer": (lambda h: normed(F.linear(h, weight(5, 4).to(h.dtype)).mT), True),
    "of halves": (lambda h: normed(conv1d(h.mT, 6, 3).unflatten(1, (2, 3)).transpose(1, 2)), False),
    "of what others read": (lambda h: normed(c := conv1d(h.mT, 5, 3)) * c, True),
    "of steps": (lambda h: normed(F.linear(h, weight(7, 4).to(h.dtype))), False),
}  # fmt: skip


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", BATCH_NORMS)
def test_batch_norm_behind_windows_is_folded_into_their_product(name, device):
    function, folded = BATCH_NORMS[name]
    lowered = Lowered(lambda h: function(-h), 7, 4)
    assert (not {"aten.mul", "aten.add"} & {*lowered.ops} - ({"aten.mul"} if "others" in name else set())) == folded
    want = function(-history(5).double())
    torch.testing.assert_close(lowered(history(5), device).double(), want, rtol=1e-5, atol=1e-5)


class Convolved(Base):
    """Kim's text network over a history: kernels of several widths, the largest of each over time; a depthwise one beside."""

    width = 3 * 4 + DIM

    def made(self):
        self.wide = nn.ModuleList(nn.Conv1d(DIM, 4, k, padding=k // 2) for k in (1, 2, 3))
        self.apart = nn.Conv1d(DIM, DIM, 3, groups=DIM, padding="same")

    def read(self, item, history, ids):
        h = history.transpose(1, 2)
        largest = [F.max_pool1d(conv(h).relu(), STEPS).squeeze(2) for conv in self.wide]
        return torch.cat([*largest, self.apart(h).mean(2)], 1)


@pytest.mark.parametrize(("device", "policy"), [("cpu", "auto"), *GPU_ONLY])
@pytest.mark.parametrize("padding", [0.0, 2.0], ids=["zeros", "a row of its own"])
def test_a_bundle_scores_as_the_module_did_for_any_rows(padding, device, policy, tmp_path):
    module = Convolved().eval()
    if padding:
        module.table.padding_idx = None
        module.table.weight.data[0] = padding
    compiled = compile_module(module, schema(), example())
    assert compiled.golden.scores.std() > 1e-3
    compiled.write(tmp_path / "b", name="convolved")
    any_rows_score_as(module, tmp_path / "b", example(), device, policy)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda h: conv1d(h.permute(1, 2, 0), 5, 2).transpose(0, 2), "expected any number: .*, no convolution over rows"),
        (lambda h: F.max_pool1d(h.mT, 2, ceil_mode=True), r"got pooling of windows that are cut off .*\(ceil_mode=False, no"),
        (lambda h: F.max_pool1d(h.mT, 2, padding=1, dilation=2), "got pooling of windows that are cut off or spread"),
        (lambda h: F.avg_pool1d(h.mT, 2, padding=1, count_include_pad=False), "got pooling of windows that are cut off"),
        (lambda h: F.adaptive_max_pool1d(h.mT, 3), r"got pooling of \[7\] to \[3\], expected sizes that it divides"),
        (lambda h: F.conv_transpose1d(h.mT, weight(4, 2, 2)), "got aten.conv_transpose1d.default, expected an operation that"),
        (lambda h: F.conv3d(h[:, None, None], weight(1, 1, 1, 2, 2)), "got aten.conv3d.default, expected an operation"),
    ],
    ids=["batch", "cut off", "spread", "left out", "uneven", "transposed", "three dimensions"],
)  # fmt: skip
def test_what_windows_cannot_say_is_refused(function, said):
    with pytest.raises(InputError, match=said):
        Lowered(function, 7, 4)
