"""Target attention: kernels and plain twin against the float64 formula of [q, k, q - k, q * k], one key at a time."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from dpiframe_core.graph.architecture import LeakyReLU, TargetAttention
from kernels import reference
from kernels.runtime.source import loading
from tests import model_oracle
from tests.backends import BACKENDS
from tests.kernels import host_cuda
from tests.kernels.lane_state import lane_state

EPS = {"tf32": 2.0**-10, "bf16": 2.0**-9}  # what a factor is off by: tf32's are cut, bf16's rounded
DTYPE = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
KINDS = ["relu", "sigmoid", "tanh", "prelu", "dice", "gelu", LeakyReLU(slope=0.2)]


def unit(units, activation="dice", **options):
    return TargetAttention(targets=("a",), sequences=("b",), hidden_units=units, activation=activation, **options)


def case(own, dim, length, rows, seed=0):
    """Parameters, q[B, d], keys[B, L, d] and mask[B, L]: the first row's empty, the last one's full; padded keys are zero."""
    rng = np.random.default_rng(seed + dim + length)
    p, before = {}, 4 * dim
    for i, n in enumerate((*own.hidden_units, 1)):
        name = f"u.{i}" if i < len(own.hidden_units) else "u.out"
        p[f"{name}.weight"] = rng.standard_normal((n, before)) / np.sqrt(before)
        p |= {f"{name}.{key}": 0.3 * rng.standard_normal(n) for key in ("bias", "alpha", "scale", "shift")}
        before = n
    p = {name: value.astype(np.float32) for name, value in p.items()}
    q, keys = rng.standard_normal((rows, dim)).astype(np.float32), rng.standard_normal((rows, length, dim)).astype(np.float32)
    mask = (np.arange(length) < rng.integers(0, length + 1, (rows, 1))).astype(np.float32)
    mask[0], mask[-1] = 0, 1
    return p, q, keys * mask[:, :, None] if own.masked else keys, mask


def weights_of(own, p):
    kind, slope = (
        (own.activation.type, own.activation.slope) if isinstance(own.activation, LeakyReLU) else (own.activation, 0.0)
    )
    names = {"prelu": ("alpha",), "dice": ("alpha", "scale", "shift")}.get(kind, ())
    t = {name: torch.from_numpy(value) for name, value in p.items()}
    layers = [
        (t[f"u.{i}.weight"], t[f"u.{i}.bias"], [t[f"u.{i}.{n}"] for n in names]) for i in range(len(own.hidden_units))
    ]  # fmt: skip
    return layers, (t["u.out.weight"], t["u.out.bias"]), kind, slope, own.output_activation, own.softmax


class Run:
    """An attention on a device, and rows for it. first: the column at which parts begin in x."""

    def __init__(self, own, p, q, keys, mask, device, precision="fp32", parts=1, first=2):
        from kernels.attention.attention import Attention
        from kernels.attention.attention_columns import AttentionColumns

        (rows, length, self.dim), self.first = keys.shape, first
        ends = np.linspace(0, self.dim, parts + 1).astype(int).tolist()  # uneven parts, in x in reverse order
        x, queries, spans, at = [], [], [], first
        for array, firsts, width in ((q, queries, 1), (keys, spans, length)):
            for start, end in list(pairwise(ends))[::-1]:
                x.append(array[..., start:end].reshape(rows, -1))
                firsts.insert(0, at)
                at += (end - start) * width
        dims = tuple(b - a for a, b in pairwise(ends))
        columns = AttentionColumns(
            length, dims, tuple(queries), tuple(spans), tuple(2 + a for a in ends[:-1]), at if own.masked else -1,
            ((0, 0, 2), (first, 2 + self.dim, self.dim)),
        )  # fmt: skip
        marks = np.tile(np.float32([3, 4, *[np.nan] * (first - 2)]), (rows, 1))
        joined = np.concatenate([marks, *x, mask], 1)
        starts = [*zip(spans, dims, strict=True), (at, 1)]
        self.history = np.concatenate([np.arange(start, start + length * width) for start, width in starts])
        self.x = np.concatenate([joined, np.full((rows, 8 - joined.shape[1] % 8), np.nan, np.float32)], 1)
        self.attention = Attention(columns, *weights_of(own, p), precision, torch.device(device))
        self.device, self.dtype = device, DTYPE[precision]

    def __call__(self, way=None, rows=None, padding=0, context_rows=None):
        """The interest of the rows, again and again up to `rows`, behind which there is padding. context_rows: of each row, the
        only ones that have a history.
        """
        given = np.resize(self.x, (len(self.x) if rows is None else rows, self.x.shape[1]))
        if context_rows is not None:
            given[np.ix_(np.setdiff1d(np.arange(len(given)), context_rows), self.history)] = np.nan
            context_rows = torch.tensor(context_rows, dtype=torch.int32, device=self.device)
        given = torch.from_numpy(np.concatenate([given, np.full((padding, self.x.shape[1]), np.nan, np.float32)]))
        given, rows, dim = given.to(self.device, self.dtype), len(given) - padding, self.dim
        out = torch.full((rows + padding + 1, 2 + 2 * dim + 1), torch.nan, device=self.device, dtype=self.dtype)
        if way is None:
            self.attention(lane_state(rows, self.device), given, rows + padding, out, context_rows)
        else:
            self.attention.run(way, lane_state(rows, self.device), given, rows + padding, out, context_rows)
        assert torch.isnan(out[rows:]).all()
        assert torch.isnan(out[:, -1]).all()
        assert torch.equal(out[:rows, :2], given[:rows, :2])
        assert torch.equal(out[:rows, 2 + dim : -1], given[:rows, self.first : self.first + dim])
        return out[:rows, 2 : 2 + dim].float().cpu().numpy()

    def mma_ways(self, most=None):
        """Those of the tensor cores, the first `most` of them, compiled."""
        *ways, last = self.attention.ways
        assert last == "block-a-row"
        if self.device != "cpu":
            self.attention.recalled = dict(enumerate(ways[:most]))
            with loading([s for rows in self.attention.recalled for s in self.attention.sources(rows)]):
                pass
        return ways[:most]


def run(own, p, q, keys, mask, device, **options):
    if device == "cpu":
        t = [torch.from_numpy(a) for a in (q, keys, mask)]
        return reference.attention(t[0], t[1], t[2] if own.masked else None, *weights_of(own, p)).numpy()
    return Run(own, p, q, keys, mask, device, **options)()


def check(own, dim, length, rows, device, **options):
    p, q, keys, mask = case(own, dim, length, rows)
    p64 = {name: value.astype(np.float64) for name, value in p.items()}
    want = model_oracle.attention(q.astype(np.float64), keys.astype(np.float64), mask, p64, "u", own)
    got = run(own, p, q, keys, mask, device, **options)
    # A weight is off by a few roundings of sums whose terms are near 1; the interest sums as many as there are keys.
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * max(1.0, float(np.abs(keys).sum(1).max()) / 4))


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("dim", "length"), [(1, 1), (3, 2), (10, 5), (16, 17), (40, 50), (130, 4), (8, 201)])
def test_the_interest_is_the_sum_of_weighted_keys(dim, length, masked, softmax, device):
    check(unit((9, 5), softmax=softmax, masked=masked), dim, length, 5, device)


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("output", ["identity", "sigmoid", "relu"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_activation_of_the_layers_and_of_the_weight(kind, output, device):
    check(unit((16, 7), kind, output_activation=output), 12, 9, 7, device)


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("units", [(1,), (33,), (80, 40), (36, 20, 10, 3)])
def test_any_number_and_width_of_layers(units, device):
    check(unit(units), 16, 11, 6, device)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [2, 3])
def test_a_key_of_several_parts_is_put_together(parts):
    check(unit((9, 5)), 13, 6, 4, "cuda:0", parts=parts)


@pytest.mark.gpu
def test_a_row_that_shared_memory_cannot_hold_is_read_from_the_cache():
    check(unit((200,)), 400, 3, 3, "cuda:0")


@pytest.mark.gpu
def test_bfloat16_rows_are_summed_in_float32():
    own = unit((16, 8), "relu", softmax=True)
    p, q, keys, mask = case(own, 16, 40, 9)
    q, keys = (torch.from_numpy(a).bfloat16().float().numpy() for a in (q, keys))
    p64 = {name: value.astype(np.float64) for name, value in p.items()}
    want = model_oracle.attention(q.astype(np.float64), keys.astype(np.float64), mask, p64, "u", own)
    got = Run(own, p, q, keys, mask, "cuda:0", precision="bf16")("block-a-row")
    np.testing.assert_allclose(got, want, rtol=2.0**-8, atol=1e-5)  # one rounding to 8 digits, at the end


def test_the_first_layer_is_split_without_loss():
    rng = np.random.default_rng(0)
    weight = torch.from_numpy(rng.standard_normal((5, 12)))
    q, k = (torch.from_numpy(rng.standard_normal(3)) for _ in range(2))
    of_query, of_key, of_product = reference.split_attention(weight)
    whole = weight @ torch.cat([q, k, q - k, q * k])
    torch.testing.assert_close(of_query @ q + of_key @ k + of_product @ (q * k), whole, rtol=1e-12, atol=1e-12)


# On the tensor cores (attention_mma.cu).


@pytest.fixture
def on_host(monkeypatch, run_folder):
    """The kernels' own code, run on the host."""
    from kernels.attention import attention, attention_mma

    for module in (attention, attention_mma):
        host_cuda.put_under(monkeypatch, module, run_folder)


def whole_numbers(own, dim, length, rows):
    """A case whose every sum is a whole number that the factors of tf32 and bf16 hold: products and sums are exact."""
    rng = np.random.default_rng(dim + length)
    p, q, keys, mask = case(own, dim, length, rows)
    p = {
        name: (rng.integers(-1, 2, value.shape) * (rng.random(value.shape) < min(1.0, 6 / value.shape[-1]))).astype(np.float32)
        for name, value in p.items()
    }
    q, keys = (rng.integers(-1, 2, t.shape).astype(np.float32) for t in (q, keys))
    return p, q, keys * mask[:, :, None] if own.masked else keys, mask


def check_whole_numbers(own, dim, length, all_rows, precision, device, most_ways=None, **options):
    p, q, keys, mask = whole_numbers(own, dim, length, 19)
    p64 = {name: value.astype(np.float64) for name, value in p.items()}
    want = model_oracle.attention(q.astype(np.float64), keys.astype(np.float64), mask, p64, "u", own)
    assert want.any()
    want = torch.from_numpy(want).to(DTYPE[precision]).float().numpy()  # interests alone may be too large for bf16
    one = Run(own, p, q, keys, mask, device, precision, **options)
    ways = one.mma_ways(most_ways)
    assert ways
    for way in (*ways, "block-a-row"):
        for rows in all_rows:
            assert np.array_equal(one(way, rows, padding=3), np.resize(want, (rows, dim))), (way, rows)


def check_contexts(precision, device, most_ways=None):
    """Rows that find their keys and mask in another row's columns."""
    own, dim, length = unit((16, 9), "relu"), 32, 40
    p, q, keys, mask = whole_numbers(own, dim, length, 19)
    mask[-1] = 1
    at = np.sort(np.random.default_rng(0).integers(0, 6, 19)) * 3
    at = np.minimum(at, np.arange(19))
    p64 = {name: value.astype(np.float64) for name, value in p.items()}
    want = model_oracle.attention(q.astype(np.float64), keys[at].astype(np.float64), mask[at], p64, "u", own)
    want = torch.from_numpy(want).to(DTYPE[precision]).float().numpy()
    one = Run(own, p, q, keys, mask, device, precision, first=8)
    for way in (*one.mma_ways(most_ways), "block-a-row"):
        assert np.array_equal(one(way, context_rows=at), want), way


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_rows_of_a_context_share_one_rows_keys(precision):
    check_contexts(precision, "cuda:0")


@pytest.mark.bulk
def test_on_the_host_too_rows_of_a_context_share_one_rows_keys(on_host):
    check_contexts("bf16", "cpu", 1)


SHAPES = [  # dim, parts, length, units, the column at which parts begin
    (1, 1, 1, (1,), 2),
    (10, 1, 5, (9, 5), 2),
    (16, 1, 33, (64, 16), 8),
    (48, 2, 50, (80, 40), 8),
    (64, 2, 50, (80, 40), 8),
    (64, 2, 50, (80, 40), 3),
    (40, 3, 201, (36, 20, 10, 3), 2),
    (130, 1, 17, (33, 17, 8), 2),
]


# The precisions by turns, and two of several parts in both.
HOST_SHAPES = [(*shape, ("tf32", "bf16")[i % 2]) for i, shape in enumerate(SHAPES)]
HOST_SHAPES += [(*SHAPES[3], "tf32"), (*SHAPES[6], "bf16")]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize(("dim", "parts", "length", "units", "first"), SHAPES)
def test_whole_numbers_are_exact_in_every_way(dim, parts, length, units, first, precision):
    own = unit(units, "relu", masked=True)
    check_whole_numbers(own, dim, length, (1, 2, 19, 301, 2500), precision, "cuda:0", parts=parts, first=first)


@pytest.mark.bulk
@pytest.mark.parametrize(("dim", "parts", "length", "units", "first", "precision"), HOST_SHAPES)
def test_on_the_host_too_whole_numbers_are_exact(on_host, dim, parts, length, units, first, precision):
    """Each shape in one precision and way, and two in both precisions: each is compiled for itself, for most of a second."""
    own, ways = unit(units, "relu", masked=True), 2 if units == (80, 40) else 1
    check_whole_numbers(own, dim, length, (4,), precision, "cpu", most_ways=ways, parts=parts, first=first)


def score_deviation(own, p, q, keys, eps):
    """What the scores [B, L] are off by in the mean square, to first order, if no two roundings know of each other: each layer
    passes on the errors of its inputs and adds those of both factors (of the first layer's weights two more, as they are
    formed); after an activation there is tanh's 2^-11.
    """
    q = np.broadcast_to(q[:, None], keys.shape)
    value, squares = np.concatenate([q, keys, q - keys, q * keys], 2), 0.0
    for i, _ in enumerate(own.hidden_units):
        weight = p[f"u.{i}.weight"].T
        squares = (squares + (4 if i == 0 else 2) * (eps * value) ** 2) @ weight**2
        value = value @ weight + p[f"u.{i}.bias"]
        steepest = {"sigmoid": 1 / 4, "gelu": 1.13}.get(own.activation, 1.0)
        if own.activation == "dice":
            alpha, scale = p[f"u.{i}.alpha"], p[f"u.{i}.scale"]
            steepest = np.maximum(1, np.abs(alpha)) + np.abs((1 - alpha) * value * scale) / 4
        before, value = value, model_oracle.activate(own.activation, value, p, f"u.{i}")
        squares = steepest**2 * squares + (2.0**-11 * (np.abs(before) + 1)) ** 2
    return np.sqrt(squares @ p["u.out.weight"][0] ** 2)


DIGITS = [("sigmoid", True, False), ("dice", True, True), ("prelu", False, True)]


def check_digits(own, dim, length, precision, device, most_ways=None, **options):
    p, q, keys, mask = case(own, dim, length, 19)
    q, keys = (torch.from_numpy(a).to(DTYPE[precision]).float().numpy() for a in (q, keys))
    p64 = {name: value.astype(np.float64) for name, value in p.items()}
    want = model_oracle.attention(q.astype(np.float64), keys.astype(np.float64), mask, p64, "u", own)
    known = mask if own.masked else np.ones_like(mask)
    off = score_deviation(own, p64, q, keys, EPS[precision]) * known
    if own.softmax:  # a weight is off by its share of its score's error and of all others'
        off = off.max(1, keepdims=True) * known / np.sqrt(np.maximum(1, known.sum(1, keepdims=True)))
    bound = 6 * np.sqrt(np.einsum("bl,bld->bd", off**2, keys.astype(np.float64) ** 2)) + 1e-6
    bound += 2.0**-8 * (precision == "bf16") * np.abs(want)  # of the result
    one = Run(own, p, q, keys, mask, device, precision, **options)
    for way in one.mma_ways(most_ways):
        got = one(way)
        assert np.array_equal(got, one(way)), way
        assert (np.abs(got - want) <= bound).all(), way


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize(("kind", "masked", "softmax"), [*((k, True, False) for k in KINDS), *DIGITS])
def test_lower_precisions_lose_no_more_than_their_digits(kind, masked, softmax, precision):
    output = "sigmoid" if kind == "tanh" else "identity"
    own = unit((80, 40), kind, softmax=softmax, masked=masked, output_activation=output)
    check_digits(own, 64, 50, precision, "cuda:0", 2, first=8)


@pytest.mark.covering(1)
@pytest.mark.bulk
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize(("kind", "masked", "softmax"), DIGITS)
def test_on_the_host_too_they_lose_no_more(on_host, kind, masked, softmax, precision):
    check_digits(unit((24, 9), kind, softmax=softmax, masked=masked), 16, 50, precision, "cpu", 1, first=8)


def test_what_a_thread_cannot_hold_is_left_to_a_block_a_row(on_host):
    for units, dim in (((200,), 600), ((80, 400), 16)):
        own = unit(units)
        one = Run(own, *case(own, dim, 3, 2), "cpu", "bf16")
        assert one.attention.ways == ["block-a-row"]


def test_strict_float32_is_a_block_a_row(on_host):
    own = unit((9, 5))
    assert Run(own, *case(own, 8, 3, 2), "cpu", "fp32").attention.ways == ["block-a-row"]
