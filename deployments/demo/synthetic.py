"""A synthetic click log in Criteo's own file format, whose true click probabilities are known.

The labels are drawn from a planted model, so its AUC is the most that any trained model can reach; a demo that says
"AUC 0.78 of 0.79 possible" shows something, a bare number would not. It knows neither the trained model nor the schema.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv

from dpiframe_core.evaluation.quality import auc, log_loss
from dpiframe_core.files.click_logs import CRITEO

CLICK_RATE = 0.25
_ZIPF = 1.1
# Distinct values of C1..C26 in Criteo Kaggle's training file, as published.
_PUBLISHED = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
# Share of rows without a value, after the same file: I1..I13, then C1..C26.
_MISSING_NUMBERS = (0.45, 0.0, 0.21, 0.22, 0.03, 0.22, 0.04, 0.0, 0.04, 0.45, 0.04, 0.76, 0.22)
_MISSING_VALUES = (
    0.0, 0.0, 0.03, 0.03, 0.0, 0.12, 0.0, 0.0, 0.0, 0.0, 0.0, 0.03, 0.0,
    0.0, 0.0, 0.03, 0.0, 0.0, 0.44, 0.44, 0.03, 0.76, 0.0, 0.03, 0.44, 0.44,
)  # fmt: skip
# ln(1 + value) of I1..I13 is about normal with these means and deviations: I5 runs into the millions, I10 is 0 or 1.
_LOG_MEAN = (0.9, 2.7, 2.0, 1.6, 7.5, 3.5, 1.8, 2.3, 4.0, 0.4, 0.9, 0.3, 1.8)
_LOG_STD = (1.1, 1.8, 1.2, 0.8, 2.4, 1.5, 1.3, 1.0, 1.5, 0.5, 0.7, 0.5, 1.1)
# Fields whose pairs act together (0-based): context with candidate fields, since a ranking lives on how the two meet.
_PAIRS = ((0, 8), (4, 13), (5, 16), (1, 19), (7, 21), (4, 24), (5, 22))
_PAIR_DIM = 4
_HELD_OUT = 0.1

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ClickLogReport:
    """What `write_click_log` wrote, and how well its planted model predicts the held-out rows: the ceiling of any model.

    Attributes:
        path: tab-separated, no header; the last `held_out` of `rows` rows are for testing.
        click_rate: share of clicks over all rows.
    """

    path: Path
    rows: int
    held_out: int
    click_rate: float
    planted_auc: float
    planted_log_loss: float


def vocabulary_sizes() -> tuple[int, ...]:
    """Criteo's sizes, scaled down: up to 1,000 as they are, above that compressed, so that 10 million become 40 thousand."""
    return tuple(size if size <= 1000 else round(1000 * (size / 1000) ** 0.4) for size in _PUBLISHED)


def write_click_log(path: str | Path, *, rows: int = 300_000, seed: int = 7) -> ClickLogReport:
    """Draws the log and writes it to `path`. The same arguments give the same bytes."""
    rng, planted = (
        np.random.default_rng((seed, stream)) for stream in range(2)
    )  # the planted model is the same for any `rows`
    logit = np.zeros(rows)
    columns: list[pa.Array] = []
    for mean, std, missing in zip(_LOG_MEAN, _LOG_STD, _MISSING_NUMBERS, strict=True):
        column, effect = _number(rng, planted, rows, mean, std, missing, signed=len(columns) == 1)
        columns.append(column)
        logit += effect
    sizes = vocabulary_sizes()
    ranks = []
    for field, (size, missing) in enumerate(zip(sizes, _MISSING_VALUES, strict=True)):
        rank = _zipf(rng, size, rows)
        absent = rng.random(rows) < missing
        columns.append(pa.array(_hex_values(field, size)).take(pa.array(rank, mask=absent)))
        rank = np.where(absent, size, rank)  # a missing value has an effect of its own, as in real logs
        ranks.append(rank)
        logit += _value_effects(planted, size, 1, 0.35)[rank, 0]
    for left, right in _PAIRS:  # a factorization machine's term: the inner product of the two values' planted vectors
        u = _value_effects(planted, sizes[left], _PAIR_DIM, 0.3)
        v = _value_effects(planted, sizes[right], _PAIR_DIM, 0.3)
        logit += np.einsum("nd,nd->n", u[ranks[left]], v[ranks[right]])
    logit += _intercept(logit)
    probability = _sigmoid(logit)
    label = (rng.random(rows) < probability).astype(np.int64)

    path = Path(path)
    pa.csv.write_csv(
        pa.table([pa.array(label), *columns], names=list(CRITEO.columns)),
        path,
        pa.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none"),
    )
    test = max(1, round(rows * _HELD_OUT))
    return ClickLogReport(
        path=path,
        rows=rows,
        held_out=test,
        click_rate=float(label.mean()),
        planted_auc=auc(label[-test:], probability[-test:]),
        planted_log_loss=log_loss(label[-test:], probability[-test:]),
    )


def _number(
    rng: np.random.Generator, planted: np.random.Generator, rows: int, mean: float, std: float, missing: float, *, signed: bool
) -> tuple[pa.Array, Floats]:
    """A heavy-tailed integer column and its effect on the logit: a saturating curve, which no linear model fits."""
    log = mean + std * rng.standard_normal(rows)
    value = np.floor(np.expm1(np.maximum(log, 0.0))).astype(np.int64)
    if signed:  # as Criteo's I2, which starts at -3
        value -= rng.integers(0, 4, rows) * (value == 0)
    absent = rng.random(rows) < missing
    standard = (np.log1p(np.maximum(value, 0)) - mean) / std
    slope, bend = planted.normal(0.0, 0.3), planted.normal(0.0, 0.2)
    effect = slope * np.tanh(standard) + bend * np.abs(np.tanh(standard))
    return pa.array(value, mask=absent), np.where(absent, 0.0, effect)


def _zipf(rng: np.random.Generator, size: int, rows: int) -> npt.NDArray[np.int64]:
    """Ranks 0..size-1, rank r with a weight of 1 / (r + 1)^1.1."""
    cumulative = np.cumsum(np.arange(1, size + 1, dtype=np.float64) ** -_ZIPF)
    ranks: npt.NDArray[np.int64] = np.searchsorted(cumulative, rng.random(rows) * cumulative[-1])
    return ranks


def _hex_values(field: int, size: int) -> list[str]:
    """Distinct eight-digit hex strings: the map rank -> value is a bijection of 32-bit words (murmur3's finalizer)."""
    word = np.arange(size, dtype=np.uint32) + np.uint32((field + 1) << 24)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        word = (word ^ (word >> np.uint32(shift))) * np.uint32(factor)
    return [f"{w:08x}" for w in word.tolist()]


def _value_effects(planted: np.random.Generator, size: int, width: int, scale: float) -> Floats:
    """float64[size + 1, width]: a row for each rank and one, last, for a missing value.

    The effect fades with the rank: a value that a log shows ten times teaches nothing, and a ceiling that counts on it
    would be out of any model's reach.
    """
    effects: Floats = planted.normal(0.0, scale, (size + 1, width))
    effects[:size] /= 1.0 + np.arange(size)[:, None] / 30.0
    return effects


def _intercept(logit: Floats) -> float:
    """The constant that brings the mean probability to `CLICK_RATE`, by bisection."""
    low, high = -20.0, 20.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _sigmoid(logit + middle).mean() < CLICK_RATE else (low, middle)
    return (low + high) / 2


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(1.0 / (1.0 + np.exp(-x)))
