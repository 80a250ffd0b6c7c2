"""Chains: every layer of a model in one launch, against float64 of the rounded factors, batch after batch."""

import numpy as np
import pytest
import torch

from kernels.interaction.pairs import Pairs
from kernels.runtime.state import STATE_WORDS, StateWord
from kernels.waves import chain as chain_module
from kernels.waves.packed_weights import packed
from tests.kernels import host_cuda

EPS = {"fp32": 3e-5, "tf32": 5e-3, "bf16": 5e-2}  # of a probability; the logit sums terms up to a thousand: an ulp is 6e-5
ROWS = (1, 2, 5, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8, 8), (40, 72), (16, 16), (1024, 624)])
def test_packed_weights_lie_as_the_lanes_of_an_mma_take_them(shape, dtype):
    """By the tables of PTX for A of m16n8k8 (tf32) and m16n8k16 (bf16), word by word."""
    weight = torch.arange(shape[0] * shape[1]).reshape(shape).remainder(251).to(dtype)
    got = packed(weight)
    words = weight.view(torch.int32)
    size = 4 // dtype.itemsize
    assert got.shape == (-(-shape[0] // 16), -(-shape[1] // (16 * size)), 2, 32, 4)
    for tile, group, step, lane, register in np.random.default_rng(0).integers(0, got.shape, (2000, 5)):
        column = tile * 16 + lane // 4 + 8 * (register & 1)
        word = group * 16 + 4 * (lane % 4) + 2 * step + (register >> 1)
        expected = words[column, word] if column < shape[0] and word < words.shape[1] else 0
        assert got[tile, group, step, lane, register] == expected


class Model:
    """Two layers beside two DCN-V2 layers and two of low rank, an FM, DCN's folded cross network, and a head of three logits
    over the last of each.
    """

    def __init__(self, width, hidden, tasks, precision, seed=0, device="cuda:0"):
        from kernels.waves.chain import Chain
        from kernels.waves.chain_links import ChainHead, Link
        from kernels.waves.wave_jobs import CrossJob, FmJob, LinearJob

        self.rng = np.random.default_rng(seed)
        self.width, self.tasks, self.precision = width, tasks, precision
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.deep = [self.layer(hidden, width), self.layer(hidden // 2, hidden)]
        self.dice = self.normal(hidden), self.normal(hidden), self.normal(hidden)
        self.cross = [self.layer(width, width), self.layer(width, width)]
        self.low = [(*self.layer(width, 24), self.layer(24, width)[0]) for _ in range(2)]
        self.shares = self.normal(tasks, hidden // 2) / 20, self.normal(tasks, width) / 20, self.normal(tasks, width) / 20
        self.bias, self.dots, self.k = self.normal(tasks), self.normal(2 + tasks, width) / width, self.normal(2 + tasks)
        links = [
            Link(LinearJob(*self.deep[0], "dice", params=self.dice)),
            Link(LinearJob(*self.cross[0], "identity", True)),
            Link(FmJob(0, width // 8, 8)),
            Link(CrossJob(self.dots, self.k, 2)),
            Link(LinearJob(*self.deep[1], "tanh", False, self.shares[0], False), (0,)),
            Link(LinearJob(*self.cross[1], "identity", True, self.shares[1], False), (1,)),
            Link(LinearJob(self.low[0][2], None)),
            Link(LinearJob(*self.low[0][:2], cross=True, outer_bias=True), (6,)),
            Link(LinearJob(self.low[1][2], None), (7,)),
            Link(LinearJob(*self.low[1][:2], cross=True, head=self.shares[2], kept=False), (8,), 7),
        ]
        self.device = torch.device(device)
        self.chain = Chain(links, ChainHead(self.bias, (2, None, 3)), precision, self.device)
        self.words = torch.zeros(self.chain.words, dtype=torch.int64, device=device)
        self.state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=device)

    def normal(self, *shape):
        return torch.from_numpy(self.rng.standard_normal(shape)).float()

    def layer(self, out, width):
        return self.normal(out, width) / width**0.5, self.normal(out)

    def start(self, rows, bucket, batch):
        """Launches a batch. Gives a check of its scores against the formulas in float64, for when the device is done."""
        from kernels.dense.linear import padded
        from kernels.waves.chain_links import ChainOperands

        x = torch.full((bucket, padded(self.width) + 8), torch.nan)
        x[:rows, :-8] = 0
        x[:rows, : self.width] = self.normal(rows, self.width)
        x = x.to(self.dtype).to(self.device)[:, :-8]  # of a wider matrix, as wide as its links' words are not
        total = self.normal(bucket, self.tasks if batch % 2 else 1).to(self.device)
        pinned = {"pin_memory": self.device.type == "cuda"}
        scores, done = torch.full((bucket, self.tasks), torch.nan, **pinned), torch.zeros(1, dtype=torch.int32, **pinned)
        self.state[StateWord.TRUE_ROWS], self.state[StateWord.BATCH_NUMBER] = rows, batch
        given = [ChainOperands(x), ChainOperands(x, x), *[ChainOperands(x)] * 2, ChainOperands(None), ChainOperands(None, x)]
        given += [ChainOperands(x), ChainOperands(None, x, x), ChainOperands(None), ChainOperands(None, x)]
        self.chain(given, [total], bucket, scores, done, self.words, self.state)

        def check():
            assert done.item() == (batch if rows else 0)  # nobody waits for a batch of no rows
            assert scores[rows:].isnan().all()
            if rows:
                want = self.wanted(x[:rows, : self.width].cpu().double(), total[:rows].cpu().double())
                assert (scores[:rows].double() - want).abs().max() <= EPS[self.precision], (rows, bucket, batch)

        return check

    def run(self, rows, bucket, batch):
        check = self.start(rows, bucket, batch)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        check()

    def wanted(self, x, total):
        deep, cross = ([(w.to(self.dtype).double(), b.double()) for w, b in layers] for layers in (self.deep, self.cross))
        alpha, scale, shift = (t.double() for t in self.dice)
        h = x @ deep[0][0].T + deep[0][1]
        h = torch.tanh(h * (alpha + (1 - alpha) * torch.sigmoid(scale * h + shift)) @ deep[1][0].T + deep[1][1])
        crossed = x
        for w, b in cross:
            crossed = x * (crossed @ w.T + b) + crossed
        low = x
        for (u, b, v), outer in zip(self.low, (1, 0), strict=True):  # the first one's bias is outside of its product with x0
            u, v, b = u.to(self.dtype).double(), v.to(self.dtype).double(), b.double()
            low = x * (low @ v.T @ u.T + b * (1 - outer)) + b * outer + low
        fields = x.reshape(len(x), -1, 8)
        fm = 0.5 * (fields.sum(1).square() - fields.square().sum(1)).sum(1, keepdim=True)
        dots, k, a = x @ self.dots.double().T, self.k.double(), 1.0
        for layer in range(2):
            a = a + a * dots[:, layer] + k[layer]
        logit = a[:, None] * dots[:, 2:] + k[2:]
        parts = zip((h, crossed, low), self.shares, strict=True)
        return torch.sigmoid(sum(part @ share.double().T for part, share in parts) + self.bias.double() + fm + total + logit)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("tasks", [1, 3])
@pytest.mark.parametrize(("width", "hidden"), [(8, 16), (72, 200), (624, 1024), (1000, 48)])
def test_a_chain_computes_all_its_layers_for_every_number_of_rows(width, hidden, tasks, precision):
    model, batch = Model(width, hidden, tasks, precision), 0
    for bucket in (1, 2, 3, 4, 8):
        if not model.chain.fits(bucket):
            continue
        for rows in range(1, bucket + 1):
            batch += 1
            model.run(rows, bucket, batch)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
def test_batches_after_one_another_never_read_what_the_last_one_left(rows):
    model = Model(72, 200, 1, "fp32")
    for batch in range(1, 400):
        model.run(rows, 8, batch)


@pytest.mark.gpu
def test_two_chains_share_a_gpu_without_waiting_for_each_other_for_ever():
    """More blocks than the device holds at once, on two streams: a block waits only for those that started before it."""
    models = [Model(1000, 3000, 1, "bf16", seed) for seed in (0, 1)]
    streams, checks = [torch.cuda.Stream() for _ in models], []
    torch.cuda.synchronize()
    for batch in range(1, 40):
        for model, stream in zip(models, streams, strict=True):
            with torch.cuda.stream(stream):
                checks.append(model.start(3, 4, batch))
    torch.cuda.synchronize()
    for check in checks:
        check()


class Dotted:
    """DLRM: two layers of some numbers, the dots of their output with the vectors of the lookup, two layers and the head."""

    def __init__(self, numbers, hidden, pairs, precision, device="cuda:0"):
        from kernels.waves.chain import Chain
        from kernels.waves.chain_links import ChainHead, Link
        from kernels.waves.wave_jobs import LinearJob

        self.rng = np.random.default_rng(numbers)
        self.numbers, self.pairs, self.precision, self.device = numbers, pairs, precision, torch.device(device)
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        widths = (numbers, hidden), (hidden, pairs.dim), (pairs.columns, hidden), (hidden, 24)
        self.layers = [(self.normal(out, width) / width**0.5, self.normal(out) / 4) for width, out in widths]
        self.head, self.bias = self.normal(1, 24) / 5, self.normal(1)
        jobs = [LinearJob(*layer, "relu") for layer in self.layers[:3]]
        last = LinearJob(*self.layers[3], "relu", head=self.head, kept=False)
        links = [Link(jobs[0]), Link(jobs[1], (0,)), Link(pairs, (1,)), Link(jobs[2], (2,)), Link(last, (3,))]
        self.chain = Chain(links, ChainHead(self.bias), precision, self.device)
        self.words = torch.zeros(self.chain.words, dtype=torch.int64, device=device)
        self.state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=device)

    def normal(self, *shape):
        return torch.from_numpy(self.rng.standard_normal(shape)).float()

    def given(self, rows, bucket, columns):
        from kernels.dense.linear import padded

        x = torch.full((bucket, padded(columns)), torch.nan)
        x[:rows] = 0
        x[:rows, :columns] = self.normal(rows, columns)
        return x.to(self.dtype).to(self.device)

    def run(self, rows, bucket, batch):
        from kernels.waves.chain_links import ChainOperands

        p = self.pairs
        x, vectors = self.given(rows, bucket, self.numbers), self.given(rows, bucket, (p.fields - 1) * p.dim)
        pinned = {"pin_memory": self.device.type == "cuda"}
        scores, done = torch.full((bucket, 1), torch.nan, **pinned), torch.zeros(1, dtype=torch.int32, **pinned)
        self.state[StateWord.TRUE_ROWS], self.state[StateWord.BATCH_NUMBER] = rows, batch
        none = ChainOperands(None)
        given = [ChainOperands(x), none, ChainOperands(None, xl=vectors), none, none]
        self.chain(given, [], bucket, scores, done, self.words, self.state)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        assert done.item() == (batch if rows else 0)
        assert scores[rows:].isnan().all()
        if rows:
            want = self.wanted(x[:rows, : self.numbers].cpu().double(), vectors[:rows].cpu().double())
            assert (scores[:rows].double() - want).abs().max() <= EPS[self.precision], (rows, bucket, batch)

    def wanted(self, x, vectors):
        p, weights = self.pairs, [(w.to(self.dtype).double(), b.double()) for w, b in self.layers]
        for w, b in weights[:2]:
            x = (x @ w.T + b).relu()
        v = torch.cat((x, vectors[:, : (p.fields - 1) * p.dim]), 1).view(len(x), p.fields, p.dim)
        products = v @ v.transpose(1, 2)
        pairs = [products[:, i, j] for i in range(p.fields) for j in range(i + p.diagonal)]
        x = torch.cat((x[:, : p.keep], torch.stack(pairs, 1)), 1)
        for w, b in weights[2:]:
            x = (x @ w.T + b).relu()
        return torch.sigmoid(x @ self.head.double().T + self.bias.double())


DOTTED = {
    "kaggle": (13, 512, Pairs(27, 64, 64, False)),
    "small": (3, 24, Pairs(5, 8, 8, True)),
    "few kept": (1, 40, Pairs(11, 16, 3, False)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("name", DOTTED)
def test_a_chain_makes_the_dots_between_its_layers(name, precision):
    model, batch = Dotted(*DOTTED[name], precision), 0
    for bucket in (1, 2, 3, 4, 8):
        for rows in range(1, bucket + 1):
            batch += 1
            model.run(rows, bucket, batch)
    for later in range(200):
        model.run(1 + later % 8, 8, batch + 1 + later)


@pytest.fixture
def on_host(monkeypatch, run_folder):
    """The kernel's own code, run on the host."""
    host_cuda.put_under(monkeypatch, chain_module, run_folder)


@pytest.mark.covering(1)
@pytest.mark.bulk
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("tasks", [1, 3])
@pytest.mark.parametrize(("width", "hidden"), [(8, 16), (72, 200), (624, 1024)])
def test_on_the_host_too_a_chain_computes_all_its_layers(on_host, width, hidden, tasks, precision):
    model = Model(width, hidden, tasks, precision, device="cpu")
    for batch, (bucket, rows) in enumerate(((1, 1), (1, 0), (8, 5), (8, 0), (3, 3), (1, 1), (8, 8)), 1):
        model.run(rows, bucket, batch)


@pytest.mark.covering(1)
@pytest.mark.bulk
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("name", DOTTED)
def test_on_the_host_too_a_chain_makes_the_dots_between_its_layers(on_host, name, precision):
    model = Dotted(*DOTTED[name], precision, device="cpu")
    for batch, (bucket, rows) in enumerate(((1, 1), (8, 5), (8, 0), (3, 3), (1, 1)), 1):
        model.run(rows, bucket, batch)


def test_what_does_not_fit_is_refused(on_host, monkeypatch):
    from kernels.waves.chain import Chain
    from kernels.waves.chain_links import ChainHead, ChainOperands, Link
    from kernels.waves.wave_jobs import FmJob, LinearJob

    launched: list[object] = []
    monkeypatch.setattr(chain_module, "launch", lambda *given, **_: launched.append(given))
    device, bias = torch.device("cpu"), torch.zeros(1)
    layer = LinearJob(torch.ones(8, 8), None, head=torch.ones(1, 8))
    with pytest.raises(ValueError, match="chain: got 25 links and 0 logits, expected 1 to 24 and at most 3"):
        Chain([Link(layer)] * 25, ChainHead(bias), "fp32", device)
    with pytest.raises(ValueError, match="chain link 0: got x of link 0, expected a layer before it"):
        Chain([Link(layer, (0,))], ChainHead(bias), "fp32", device)
    with pytest.raises(ValueError, match="chain head: got link 0 as a logit, expected an FM or a cross network"):
        Chain([Link(layer)], ChainHead(bias, (0,)), "fp32", device)
    with pytest.raises(ValueError, match="chain link 1: got 24 columns of link 0, expected its 8"):
        Chain([Link(layer), Link(LinearJob(torch.ones(8, 24), None), (0,))], ChainHead(bias), "fp32", device)
    with pytest.raises(ValueError, match="chain link 1: got xl of link 0, expected a layer as wide before it"):
        Chain([Link(layer), Link(LinearJob(torch.ones(16, 8), None, cross=True), (0,), 0)], ChainHead(bias), "fp32", device)
    with pytest.raises(ValueError, match="chain link 1: got x of link 0, expected it to be given"):
        Chain([Link(layer), Link(FmJob(0, 1, 8), (0,))], ChainHead(bias, (1,)), "fp32", device)
    with pytest.raises(ValueError, match="chain link 0: got no reader, expected it to be one of the head's logits"):
        Chain([Link(FmJob(0, 1, 8)), Link(layer)], ChainHead(bias), "fp32", device)
    dots, linear = Pairs(3, 8, 8, False), LinearJob(torch.ones(8, 11), None)
    with pytest.raises(ValueError, match="chain link 0: got x of link None, expected a layer of 8 columns before it"):
        Chain([Link(dots), Link(linear, (0,))], ChainHead(bias), "bf16", device)
    with pytest.raises(ValueError, match="chain link 1: got no reader, expected a layer behind it"):
        Chain([Link(layer), Link(dots, (0,))], ChainHead(bias), "bf16", device)
    with pytest.raises(ValueError, match="chain link 2: got 8 columns of link 1, expected its 11"):
        Chain([Link(layer), Link(dots, (0,)), Link(layer, (1,))], ChainHead(bias), "bf16", device)
    wide = Chain([Link(LinearJob(torch.ones(8, 9000), None, head=torch.ones(1, 8)))], ChainHead(bias), "fp32", device)
    assert not wide.fits(1)
    chain = Chain([Link(FmJob(0, 1, 8)), Link(layer)], ChainHead(bias, (0,)), "fp32", device)
    assert chain.fits(8)
    assert not chain.fits(9)
    words, state = torch.zeros(chain.words, dtype=torch.int64), torch.ones(4, dtype=torch.int32)
    rest = torch.zeros(9, 1), torch.zeros(2, dtype=torch.int32), words, state
    x, narrow = torch.zeros(9, 8), torch.zeros(9, 4)
    for given, rows, message in (
        ([ChainOperands(x)] * 2, 9, "chain: got 9 rows"),
        ([ChainOperands(x)], 8, "chain: got 8 rows, .* 1 operands"),
        ([ChainOperands(narrow)] * 2, 8, "chain link 0 x: got shape"),
        ([ChainOperands(x.bfloat16())] * 2, 8, "chain link 0 x: got torch.bfloat16"),
        ([ChainOperands(None)] * 2, 8, "chain link 0 x: got none"),
        ([ChainOperands(x), ChainOperands(x, x)], 8, "chain link 1: got x0, expected the contrary"),
    ):
        with pytest.raises(ValueError, match=message):
            chain(given, [], rows, *rest)
    crossing = Chain(
        [Link(LinearJob(torch.ones(8, 8), None, cross=True, head=torch.ones(1, 8)))], ChainHead(bias), "fp32", device
    )
    with pytest.raises(ValueError, match="chain link 0: got no x0, expected the contrary"):
        crossing([ChainOperands(x)], [], 8, *rest)
    with pytest.raises(ValueError, match="chain link 0 x0: got shape"):
        crossing([ChainOperands(x, narrow)], [], 8, *rest)
    dotted = Chain([Link(layer), Link(dots, (0,)), Link(linear, (1,))], ChainHead(bias), "bf16", device)
    wide_words, x16 = torch.zeros(dotted.words, dtype=torch.int64), ChainOperands(x.bfloat16())
    for last, message in ((None, "got no xl, expected 2 vectors"), (x.bfloat16(), "xl: got shape")):
        with pytest.raises(ValueError, match=f"chain link 1:? {message}"):
            dotted([x16, ChainOperands(None, xl=last), ChainOperands(None)], [], 8, *rest[:2], wide_words, state)
    up = LinearJob(torch.ones(16, 8), None, cross=True, head=torch.ones(1, 16))
    low_rank = Chain([Link(up)], ChainHead(bias), "fp32", device)
    wide_x0 = torch.zeros(9, 16)
    with pytest.raises(ValueError, match="chain link 0: got no xl, expected one as wide as the layer"):
        low_rank([ChainOperands(x, wide_x0)], [], 8, *rest)
    with pytest.raises(ValueError, match="chain link 0 xl: got shape"):
        low_rank([ChainOperands(x, wide_x0, x)], [], 8, *rest)
    assert not launched
