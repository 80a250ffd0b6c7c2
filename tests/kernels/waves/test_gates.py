"""Gates and layer norms, in waves of every tile and in chains, against float64 of the rounded factors."""

import numpy as np
import pytest
import torch

from kernels.runtime.state import STATE_WORDS, StateWord
from kernels.waves import chain as chain_module
from kernels.waves import wave as wave_module
from kernels.waves.wave_tiles import EXACT_TILES, TILES, WIDE_TILES
from tests.kernels import host_cuda
from tests.kernels.lane_state import lane_state

PRECISIONS = ("fp32", "tf32", "bf16")
EPS = {"fp32": 4 * 2**-23, "tf32": 2**-10, "bf16": 2**-8}  # of a factor or an output; sums are float32, within 8 eps
OFF = {"fp32": 1e-5, "tf32": 5e-3, "bf16": 4e-2}  # of a chain's probability


@pytest.fixture
def on_host(monkeypatch, run_folder):
    """The kernels' own code, run on the host."""
    for module in (chain_module, wave_module):
        host_cuda.put_under(monkeypatch, module, run_folder)


class Drawn:
    def __init__(self, seed, dtype, device):
        self.rng, self.dtype, self.device = np.random.default_rng(seed), dtype, device

    def normal(self, *shape):
        return torch.from_numpy(self.rng.standard_normal(shape)).float()

    def layer(self, out, width):
        return self.normal(out, width) / width**0.5, self.normal(out)

    def rows(self, rows, bucket, width):
        """The padding's rows are poison."""
        x = torch.full((bucket, width), torch.nan)
        x[:rows] = self.normal(rows, width)
        return x.to(self.dtype).to(self.device)

    def exact(self, layer):
        return layer[0].to(self.dtype).double(), layer[1].double()


def normed(x, fields, eps, weight, bias):
    """By the definition, in float64."""
    v = x.reshape(len(x), fields, -1)
    v = v - v.mean(2, keepdim=True)
    v = v / (v.square().mean(2, keepdim=True) + eps).sqrt()
    return (v * weight.double() + bias.double()).reshape(x.shape)


def check_wave(precision, rows, fields, dim, tiles, device):
    from kernels.waves.wave import Wave
    from kernels.waves.wave_jobs import LinearJob, NormJob, Operands

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    d, width = Drawn(rows + dim, dtype, device), fields * dim
    gates = {"sigmoid": 2.0, "identity": -0.5, "tanh": 1.0}
    layers, (scale, shift) = [d.layer(width, 72) for _ in gates], (d.normal(dim), d.normal(dim))
    jobs = [LinearJob(*own, kind, gate=factor) for own, (kind, factor) in zip(layers, gates.items(), strict=True)]
    jobs += [NormJob(fields, dim, 1e-5, scale, shift), NormJob(fields, dim, 1e-3, scale, shift, relu=True)]
    plain, crossed = d.layer(40, 72), d.layer(width, 72)
    jobs += [LinearJob(*plain, "gelu"), LinearJob(*crossed, cross=True)]
    wave = Wave(jobs, None, precision, torch.device(device))
    x, x0, given, xl = (d.rows(rows, rows, n) for n in (72, width, width, width + 8))
    xl = xl[:, :width]  # of a wider matrix
    v, v0, g, last = (t.cpu().double() for t in (x, x0, given, xl))
    sums = {kind: v @ w.T + b for kind, (w, b) in zip(gates, map(d.exact, layers), strict=True)}
    of = {"sigmoid": torch.sigmoid, "identity": lambda t: t, "tanh": torch.tanh}
    want = [factor * v0 * of[kind](sums[kind]) for kind, factor in gates.items()]
    want += [normed(g, fields, 1e-5, scale, shift), normed(g, fields, 1e-3, scale, shift).relu()]
    (w, b), (u, c) = d.exact(plain), d.exact(crossed)
    want += [torch.nn.functional.gelu(v @ w.T + b), v0 * (v @ u.T + c) + last]
    terms = [2 * v0.abs() * (v.abs() @ d.exact(own)[0].abs().T + 1) + 1 for own in layers]
    terms += [(4 + 4 * scale.abs().repeat(fields) + shift.abs().repeat(fields)).double()] * 2
    terms += [v.abs() @ w.abs().T + b.abs(), v0.abs() * (v.abs() @ u.abs().T + 1) + last.abs()]
    for tile in tiles:
        outs = [torch.full((rows, t.shape[1]), torch.nan, dtype=dtype, device=device) for t in want]
        operands = [Operands(x, out, x0) for out in outs[:3]] + [Operands(given, out) for out in outs[3:5]]
        operands += [Operands(x, outs[5]), Operands(x, outs[6], x0, xl)]
        wave.run(operands, rows, None, lane_state(rows, device), tile)
        for i, (out, expected, most) in enumerate(zip(outs, want, terms, strict=True)):
            assert ((out.cpu().double() - expected).abs() <= 2 * EPS[precision] * most).all(), (tile.name, i)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("rows", [1, 17, 300])
@pytest.mark.parametrize(("fields", "dim"), [(26, 16), (1, 128), (8, 10), (3, 200)])
def test_every_tile_gates_and_norms_exactly(fields, dim, rows, precision):
    check_wave(precision, rows, fields, dim, (*TILES, *(EXACT_TILES if precision == "fp32" else WIDE_TILES)), "cuda:0")


@pytest.mark.parametrize("precision", ["fp32", pytest.param("tf32", marks=pytest.mark.whole), "bf16"])
def test_on_the_host_too_tiles_gate_and_norm_exactly(on_host, precision):
    tiles = [TILES[0], next(t for t in (EXACT_TILES if precision == "fp32" else WIDE_TILES) if t.along_k == 1)]
    for rows, fields, dim in ((3, 5, 16), (70, 2, 40), (17, 8, 10)):
        check_wave(precision, rows, fields, dim, tiles, "cpu")


class Gated:
    """What MaskNet and FinalMLP have: norms of the input and of layers, gates whose other factor is given, a norm or a layer,
    a layer of norms side by side, and a gate that the head sums up as it is; and what DCN-V2 has, a mixture of experts.
    """

    def __init__(self, fields, dim, hidden, precision, device):
        from kernels.waves.chain import Chain
        from kernels.waves.chain_links import ChainHead, Link
        from kernels.waves.wave_jobs import LinearJob, NormJob

        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.d = d = Drawn(fields + dim, self.dtype, device)
        self.fields, self.width, self.precision, self.device = fields, fields * dim, precision, device
        width, self.hidden = self.width, hidden
        shapes = (
            (hidden, width),
            (width, hidden),
            (24, width),
            (hidden, width),
            (48, 24 + hidden),
            (48, width),
            (width, hidden),
            (4, width),
        )
        self.layers = [d.layer(*shape) for shape in shapes]
        mask, gate, one, two, deep, beside, outer, experts = self.layers
        self.norms = [(d.normal(n), d.normal(n)) for n in (dim, 8, hidden)]
        self.head, self.bias = d.normal(1, 48) / 10, d.normal(1)
        links = [
            Link(NormJob(fields, dim, 1e-5, *self.norms[0])),
            Link(LinearJob(*mask, "relu")),
            Link(LinearJob(*gate, "sigmoid", gate=2.0), (1,), x0=0),
            Link(LinearJob(*one), (2,)),
            Link(LinearJob(*two), (2,)),
            Link(NormJob(3, 8, 1e-3, *self.norms[1], relu=True), (3,)),
            Link(NormJob(1, hidden, 1e-3, *self.norms[2], relu=True), (4,)),
            Link(LinearJob(*deep, "tanh", head=self.head), (5, 6)),
            Link(LinearJob(*experts)),
            Link(LinearJob(*outer, gate=0.25), (1,), mixed=8),
            Link(LinearJob(*beside, head=torch.ones(1, 48) / 4, kept=False, gate=1.0), (9,), x0=7),
        ]
        self.chain = Chain(links, ChainHead(self.bias), precision, torch.device(device))
        self.words = torch.zeros(self.chain.words, dtype=torch.int64, device=device)
        self.state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=device)

    def run(self, rows, bucket, batch):
        from kernels.waves.chain_links import ChainOperands

        x = self.d.rows(rows, bucket, self.width)
        pinned = {"pin_memory": self.device != "cpu"}
        scores, done = torch.full((bucket, 1), torch.nan, **pinned), torch.zeros(1, dtype=torch.int32, **pinned)
        self.state[StateWord.TRUE_ROWS], self.state[StateWord.BATCH_NUMBER] = rows, batch
        given = [ChainOperands(x), ChainOperands(x), *[ChainOperands(None)] * 6, ChainOperands(x)]
        given += [ChainOperands(None, x), ChainOperands(None)]
        self.chain(given, [], bucket, scores, done, self.words, self.state)
        if self.device != "cpu":
            torch.cuda.synchronize()
        assert done.item() == (batch if rows else 0)
        assert scores[rows:].isnan().all()
        if rows:
            off = (scores[:rows].double() - self.wanted(x[:rows].cpu().double())).abs().max()
            assert off <= OFF[self.precision], (rows, bucket, batch)

    def wanted(self, x):
        mask, gate, one, two, deep, beside, outer, experts = map(self.d.exact, self.layers)
        h = (x @ mask[0].T + mask[1]).relu()
        e = 2 * normed(x, self.fields, 1e-5, *self.norms[0]) * torch.sigmoid(h @ gate[0].T + gate[1])
        a = normed(e @ one[0].T + one[1], 3, 1e-3, *self.norms[1]).relu()
        b = normed(e @ two[0].T + two[1], 1, 1e-3, *self.norms[2]).relu()
        y = torch.tanh(torch.cat((a, b), 1) @ deep[0].T + deep[1])
        parts = torch.softmax(x @ experts[0].T + experts[1], 1)[:, :, None] * h.reshape(len(h), 4, -1)
        o = 0.25 * x * (parts.reshape(h.shape) @ outer[0].T + outer[1])
        last = y * (o @ beside[0].T + beside[1])
        return torch.sigmoid(y @ self.head.double().T + last.sum(1, keepdim=True) / 4 + self.bias.double())


SHAPES = ((26, 16, 128), (3, 8, 16), (2, 200, 40))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_chain_gates_and_norms_batch_after_batch(shape, precision):
    model, batch = Gated(*shape, precision, "cuda:0"), 0
    for bucket in (1, 2, 3, 4, 8) if shape[0] * shape[1] <= 416 else (1,):
        for rows in range(bucket + 1):
            batch += 1
            model.run(rows, bucket, batch)
    for later in range(200):
        model.run(1, 1, batch + 1 + later)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("tf32", marks=pytest.mark.whole), "bf16"])
def test_on_the_host_too_a_chain_gates_and_norms(on_host, precision):
    for shape in SHAPES:
        model = Gated(*shape, precision, "cpu")
        for batch, (bucket, rows) in enumerate(((1, 1), (8, 5), (8, 0), (3, 3), (1, 1)), 1):
            model.run(rows, bucket, batch)


def test_links_that_nobody_could_read_are_refused(on_host):
    from kernels.waves.chain import Chain
    from kernels.waves.chain_links import ChainHead, Link
    from kernels.waves.wave_jobs import LinearJob, NormJob

    def refused(match, *links):
        with pytest.raises(ValueError, match=match):
            Chain(links, ChainHead(torch.zeros(1)), "tf32", torch.device("cpu"))

    layer, norm = LinearJob(torch.ones(16, 16), None), NormJob(2, 8, 1e-5, torch.ones(8), torch.ones(8))
    refused("link 1: got no reader, expected a layer behind it", Link(layer), Link(norm, (0,)))
    wide, three = NormJob(3, 8, 1e-5, torch.ones(8), torch.ones(8)), Link(LinearJob(torch.ones(3, 16), None))
    refused("link 1: got 24 columns of norms, expected those of x", Link(layer), Link(wide, (0,)), Link(layer, (1,)))
    refused("link 2: got x of link 0 mixed by link 1, expected 1 to 64 equal", Link(layer), three, Link(layer, (0,), mixed=1))
    both = LinearJob(torch.ones(8, 32), None)
    refused("link 3: got x of link 1, expected each to be read in one row alone", Link(layer), Link(layer), Link(both, (0, 1)),
            Link(layer, (1,)))  # fmt: skip
    gate = LinearJob(torch.ones(8, 16), None, gate=1.0)
    refused("link 1: got x0 of link 0, expected a layer as wide before it", Link(layer), Link(gate, (0,), x0=0))
