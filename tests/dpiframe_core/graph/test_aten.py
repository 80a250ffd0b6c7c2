"""Generic calls: each computes its definition row by row, on windows of any layout, on both backends."""

from math import prod

import numpy as np
import pytest
import torch

from dpiframe_core.graph.aten import AtenCall, Constant, Window, check_call
from dpiframe_core.graph.aten_rules import RULES
from dpiframe_core.operators.generic.aten_functions import FUNCTIONS, AtenOperator
from tests.backends import BACKENDS


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def layer_norm(x, w, b):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * w + b


def windowed(values, w):
    """float64[rows, *sizes] of a window, element by element."""
    rows = []
    for row in values:
        at = [w.offset + sum(i * s for i, s in zip(index, w.strides, strict=True)) for index in np.ndindex(*w.sizes)]
        rows.append(row[at].reshape(w.sizes))
    return np.stack(rows)


A, B = Window(0, (2, 3), (3, 1), 1), Window(1, (2, 3), (1, 2))  # the second one transposed
POSITIVE = {
    "aten.log",
    "aten.log1p",
    "aten.log2",
    "aten.log10",
    "aten.sqrt",
    "aten.rsqrt",
    "aten.reciprocal",
    "aten.pow",
    "aten.div",
    "aten.rpow.Scalar",
    "aten.fmod",
    "aten.remainder",
    "aten.floor_divide",
    "aten.trunc_divide",
}
BELOW_1 = {"aten.asin", "aten.acos", "aten.atanh"}

# op -> (operands, plain arguments, what it gives in float64), after the operators' definitions.
CASES = {
    "aten.abs": ((A,), (), np.abs), "aten.neg": ((A,), (), np.negative), "aten.exp": ((A,), (), np.exp),
    "aten.expm1": ((A,), (), np.expm1), "aten.log": ((A,), (), np.log), "aten.log1p": ((A,), (), np.log1p),
    "aten.log2": ((A,), (), np.log2), "aten.sqrt": ((A,), (), np.sqrt), "aten.rsqrt": ((A,), (), lambda x: x**-0.5),
    "aten.reciprocal": ((A,), (), lambda x: 1 / x), "aten.square": ((A,), (), np.square),
    "aten.relu": ((A,), (), lambda x: np.maximum(x, 0)), "aten.sigmoid": ((A,), (), sigmoid), "aten.tanh": ((A,), (), np.tanh),
    "aten.silu": ((A,), (), lambda x: x * sigmoid(x)),
    "aten.mish": ((A,), (), lambda x: x * np.tanh(np.log1p(np.exp(x)))),
    "aten.hardswish": ((A,), (), lambda x: x * np.clip(x + 3, 0, 6) / 6),
    "aten.hardsigmoid": ((A,), (), lambda x: np.clip(x + 3, 0, 6) / 6),
    "aten.log_sigmoid": ((A,), (), lambda x: np.log(sigmoid(x))),
    "aten.sin": ((A,), (), np.sin), "aten.cos": ((A,), (), np.cos), "aten.sign": ((A,), (), np.sign),
    "aten.atan": ((A,), (), np.arctan), "aten.log10": ((A,), (), np.log10),
    "aten.exp2": ((A,), (), np.exp2), "aten.sinh": ((A,), (), np.sinh), "aten.cosh": ((A,), (), np.cosh),
    "aten.tan": ((A,), (), np.tan), "aten.asin": ((A,), (), np.arcsin), "aten.acos": ((A,), (), np.arccos),
    "aten.asinh": ((A,), (), np.arcsinh), "aten.acosh": ((A,), (), np.arccosh), "aten.atanh": ((A,), (), np.arctanh),
    "aten.round": ((A,), (), np.round), "aten.trunc": ((A,), (), np.trunc),
    "aten.floor": ((A,), (), np.floor), "aten.ceil": ((A,), (), np.ceil), "aten.clone": ((B,), (), lambda x: x),
    "aten.logical_not": ((A,), (), lambda x: x == 0),
    "aten.add": ((A, B), (), np.add), "aten.sub": ((A, B), (), np.subtract), "aten.mul": ((A, B), (), np.multiply),
    "aten.div": ((A, B), (), np.divide), "aten.maximum": ((A, B), (), np.maximum), "aten.minimum": ((A, B), (), np.minimum),
    "aten.atan2": ((A, B), (), np.arctan2), "aten.fmod": ((A, B), (), np.fmod), "aten.remainder": ((A, B), (), np.mod),
    "aten.floor_divide": ((A, B), (), lambda a, b: np.floor(a / b)),
    "aten.trunc_divide": ((A, B), (), lambda a, b: np.trunc(a / b)),
    "aten.pow": ((A, B), (), np.power), "aten.eq": ((A, A), (), np.equal), "aten.ne": ((A, B), (), np.not_equal),
    "aten.gt": ((A, B), (), np.greater), "aten.ge": ((A, B), (), np.greater_equal), "aten.lt": ((A, B), (), np.less),
    "aten.le": ((A, B), (), np.less_equal), "aten.logical_and": ((A, B), (), lambda a, b: (a != 0) & (b != 0)),
    "aten.logical_or": ((A, B), (), lambda a, b: (a != 0) | (b != 0)),
    "aten.logical_xor": ((A, B), (), lambda a, b: (a != 0) ^ (b != 0)),
    "aten.prelu": ((A, Constant(0)), (), lambda x, w: np.where(x > 0, x, x * w)),
    "aten.add.Scalar": ((A,), (2.5,), lambda x: x + 2.5), "aten.sub.Scalar": ((A,), (2,), lambda x: x - 2),
    "aten.rsub.Scalar": ((A,), (2,), lambda x: 2 - x), "aten.mul.Scalar": ((A,), (0.5,), lambda x: x / 2),
    "aten.div.Scalar": ((A,), (3,), lambda x: x / 3), "aten.pow.Scalar": ((A,), (3,), lambda x: x**3),
    "aten.fmod.Scalar": ((A,), (0.3,), lambda x: np.fmod(x, np.float32(0.3))),
    "aten.remainder.Scalar": ((A,), (0.5,), lambda x: x - 0.5 * np.floor(x / 0.5)),
    "aten.floor_divide.Scalar": ((A,), (0.3,), lambda x: np.floor(x / 0.3)),
    "aten.trunc_divide.Scalar": ((A,), (0.3,), lambda x: np.trunc(x / 0.3)),
    "aten.rpow.Scalar": ((A,), (2.0,), lambda x: 2.0**x), "aten.eq.Scalar": ((A,), (0,), lambda x: x == 0),
    "aten.ne.Scalar": ((A,), (0,), lambda x: x != 0), "aten.gt.Scalar": ((A,), (0.1,), lambda x: x > 0.1),
    "aten.ge.Scalar": ((A,), (0.1,), lambda x: x >= 0.1), "aten.lt.Scalar": ((A,), (0.1,), lambda x: x < 0.1),
    "aten.le.Scalar": ((A,), (0.1,), lambda x: x <= 0.1),
    "aten.leaky_relu": ((A,), (0.2,), lambda x: np.where(x > 0, x, 0.2 * x)),
    "aten.elu": ((A,), (1.5, 2.0, 0.5), lambda x: 2 * np.where(x > 0, x, 1.5 * np.expm1(0.5 * x))),
    "aten.softplus": ((A,), (2.0, 20.0), lambda x: np.log1p(np.exp(2 * x)) / 2),
    "aten.clamp": ((A,), (-0.5, "inf"), lambda x: np.maximum(x, -0.5)),
    "aten.where": ((A, B, Constant(0)), (), lambda c, a, b: np.where(c != 0, a, b)),
    "aten.masked_fill.Scalar": ((A, B), (7.0,), lambda x, m: np.where(m != 0, 7.0, x)),
    "aten.sum": ((B,), ((2,), False), lambda x: x.sum(2)),
    "aten.mean": ((B,), ((1, 2), True), lambda x: x.mean((1, 2), keepdims=True)),
    "aten.amax": ((B,), ((1,), False), lambda x: x.max(1)),
    "aten.amin": ((A,), ((2,), True), lambda x: x.min(2, keepdims=True)),
    "aten.prod": ((B,), ((1, 2), True), lambda x: x.prod((1, 2), keepdims=True)),
    "aten.argmax": ((B,), ((1,), False), lambda x: x.argmax(1)), "aten.argmin": ((A,), ((2,), True), lambda x: x.argmin(2)),
    "aten.logsumexp": ((A,), ((2,), False), lambda x: np.log(np.exp(x).sum(2))),
    "aten.linalg_vector_norm": ((A,), ((2,), False, 2.0), lambda x: np.sqrt((x * x).sum(2))),
    "aten.var": ((A,), ((2,), False, 1), lambda x: x.var(2, ddof=1)),
    "aten.softmax": ((B,), (2,), softmax), "aten.log_softmax": ((B,), (2,), lambda x: np.log(softmax(x))),
    "aten.cumsum": ((B,), (1,), lambda x: x.cumsum(1)), "aten.cumprod": ((B,), (2,), lambda x: x.cumprod(2)),
    "aten.matmul": ((A, Window(1, (3, 2), (2, 1))), (), lambda a, b: a @ b),
    "aten.linear": ((A, Constant(1), Constant(2)), (), lambda x, w, b: x @ w.T + b),
    "aten.layer_norm": ((A, Constant(0), Constant(0)), (1, 1e-5), layer_norm),
    "aten.cat": ((A, B, Constant(3)), (1,), lambda a, b, c: np.concatenate([a, b, np.broadcast_to(c, (len(a), 1, 3))], 1)),
    "aten.index_select": ((B,), (2, (2, 0, 2)), lambda x: x[:, :, [2, 0, 2]]),
    "aten.topk": ((A,), (2, 2, True, True), lambda x: -np.sort(-x, 2)[..., :2]),
    "aten.topk.positions": ((A,), (2, 2, False, True), lambda x: np.argsort(x, 2)[..., :2]),
    "aten.sort": ((B,), (1, False), lambda x: np.sort(x, 1)),
    "aten.sort.positions": ((B,), (2, True), lambda x: np.argsort(-x, 2, stable=True)),
    "aten.take_along_dim": (
        (B, Window(2, (2, 1), (1, 1))), (2, True), lambda x, i: np.take_along_axis(x, i.astype(int), 2),
    ),
    "aten.einsum": ((A, Constant(1)), ("bij,kj->bki",), lambda x, w: np.einsum("bij,kj->bki", x, w)),
}  # fmt: skip
WITHOUT_AN_ORACLE = {"aten.erf", "aten.erfc", "aten.gelu"}  # NumPy has no erf: below


def test_the_two_tables_name_the_same_operators():
    assert RULES.keys() == FUNCTIONS.keys() == CASES.keys() | WITHOUT_AN_ORACLE


def inputs(op, rows):
    rng = np.random.default_rng(rows)
    values = [rng.standard_normal((rows, width)).astype(np.float32) for width in (8, 6)]
    values[1][values[1] < -1] = 0  # truth values want some zeros
    values.append(rng.integers(-3, 3, (rows, 3)).astype(np.float32))  # positions
    params = [rng.standard_normal(shape).astype(np.float32) for shape in ((3,), (4, 3), (4,), (1, 3))]
    if op in POSITIVE:
        values = [np.abs(v) + 0.1 for v in values]
    if op in BELOW_1:
        values = [np.tanh(v) for v in values]
    if op == "aten.acosh":
        values = [np.abs(v) + 1.1 for v in values]
    return values, params


def sized(op, operands, args, params):
    known = [(isinstance(o, Window), o.sizes if isinstance(o, Window) else params[o.param].shape) for o in operands]
    return AtenCall(op, operands, args, RULES[op](known, args))


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("op", CASES)
def test_a_call_computes_its_definition_on_windows(op, device):
    operands, args, definition = CASES[op]
    for rows in (1, 2, 19):
        values, params = inputs(op, rows)
        call = sized(op, operands, args, params)
        check_call(call, [8, 6, 3], [p.shape for p in params])
        exact = [
            windowed(values[o.value].astype(np.float64), o) if isinstance(o, Window) else params[o.param].astype(np.float64)
            for o in operands
        ]
        want = np.asarray(definition(*exact), np.float64).reshape(rows, -1)
        operator, by_one_view = (
            AtenOperator(call, [torch.from_numpy(p) for p in params], torch.device(device), one_view=one)
            for one in (False, True)
        )
        given = [torch.from_numpy(v).to(device) for v in values]
        within = [torch.nn.functional.pad(v, (2, 3))[:, 2:-3] for v in given]  # rows that do not lie one after the other
        across = [v.t().contiguous().t() for v in given]
        out = torch.full((rows, prod(call.sizes) + 3), torch.nan, device=device)
        operator.into(given, out)
        one_view = (by_one_view(v) for v in (given, within, across))
        for got in (operator(given), out[:, : prod(call.sizes)], *one_view):
            np.testing.assert_allclose(got.cpu().numpy(), want, rtol=2e-6, atol=2e-6)
        assert out[:, prod(call.sizes) :].isnan().all(), "columns beside the result were written"


@pytest.mark.parametrize("rows", [1, 24, 40])  # from 26 rows on as products one by one
def test_products_of_parts_of_a_row_with_a_factor_each(rows):
    rng = np.random.default_rng(rows)
    x, factors = rng.standard_normal((rows, 64)).astype(np.float32), rng.standard_normal((3, 20, 32)).astype(np.float32)
    call = sized("aten.matmul", (Window(0, (3, 1, 20), (20, 20, 1), 4), Constant(0)), (), [factors])
    got = AtenOperator(call, [torch.from_numpy(factors)], torch.device("cpu"))([torch.from_numpy(x)])
    want = np.einsum("bgk,gkm->bgm", x[:, 4:].reshape(rows, 3, 20).astype(np.float64), factors.astype(np.float64))
    np.testing.assert_allclose(got.numpy(), want.reshape(rows, -1), rtol=0, atol=2e-5)


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize(("op", "args"), [("aten.erf", ()), ("aten.erfc", ()), ("aten.gelu", (False,)), ("aten.gelu", (True,))])
def test_the_error_function_and_gelu(op, args, device):
    from math import erf, erfc, pi, sqrt, tanh

    exact = {
        (): erfc if op == "aten.erfc" else erf,
        (False,): lambda x: x * (1 + erf(x / sqrt(2))) / 2,
        (True,): lambda x: x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2,
    }[args]
    values, _ = inputs(op, 7)
    call = sized(op, (A,), args, [])
    got = AtenOperator(call, [], torch.device(device))([torch.from_numpy(v).to(device) for v in values])
    want = np.vectorize(exact)(windowed(values[0].astype(np.float64), A)).reshape(7, -1)
    np.testing.assert_allclose(got.cpu().numpy(), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("op", CASES)
def test_no_call_lets_rows_meet(op):
    """A row's result is the same with other rows beside it, whatever those hold."""
    operands, args, _ = CASES[op]
    values, params = inputs(op, 5)
    operator = AtenOperator(sized(op, operands, args, params), [torch.from_numpy(p) for p in params], torch.device("cpu"))
    alone = operator([torch.from_numpy(v[2:3]) for v in values])
    poisoned = [torch.from_numpy(np.where(np.arange(5)[:, None] == 2, v, np.nan).astype(np.float32)) for v in values]
    torch.testing.assert_close(operator(poisoned)[2:3], alone, rtol=1e-6, atol=1e-6)
