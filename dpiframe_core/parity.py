"""How near two models' scores are, and how well scores rank and fit clicks: deviation, rank correlation, AUC, log-loss.

NumPy only; knows no models.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Labels = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float32] | npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Parity:
    """Scores of a bundle against those of its source model on the same rows. Filled by `parity`.

    Attributes:
        max_deviation, mean_deviation: of |probability - source's|.
        rank_correlation: Spearman's rho; None where one side gives every row the same score.
        auc, log_loss: (source's, bundle's); None without labels of both kinds.
    """

    rows: int
    max_deviation: float
    mean_deviation: float
    rank_correlation: float | None
    auc: tuple[float, float] | None = None
    log_loss: tuple[float, float] | None = None

    def metrics(self) -> dict[str, float]:
        """As a bundle's provenance stores them."""
        out = {
            "parity_rows": float(self.rows),
            "parity_max_deviation": self.max_deviation,
            "parity_mean_deviation": self.mean_deviation,
        }
        if self.rank_correlation is not None:
            out["parity_rank_correlation"] = self.rank_correlation
        for name, pair in (("auc", self.auc), ("log_loss", self.log_loss)):
            if pair is not None:
                out |= {f"source_{name}": pair[0], name: pair[1]}
        return out

    def report(self) -> str:
        """For people."""
        rank = "undefined (equal scores)" if self.rank_correlation is None else f"{self.rank_correlation:.9g}"
        lines = [
            f"parity on {self.rows} rows: |dp| max {self.max_deviation:.3g}, mean {self.mean_deviation:.3g}, "
            f"rank correlation {rank}"
        ]
        for name, pair in (("AUC", self.auc), ("log-loss", self.log_loss)):
            if pair is not None:
                lines.append(f"{name}: source {pair[0]:.6f}, bundle {pair[1]:.6f}")
        return "\n".join(lines)


def parity(source: Scores, scores: Scores, labels: Labels | None = None) -> Parity:
    """Compares float[n] probabilities of the source model with a bundle's; `labels` int64[n] of 0 and 1."""
    off = np.abs(scores.astype(np.float64) - source.astype(np.float64))
    out = Parity(len(off), float(off.max()), float(off.mean()), spearman(source, scores))
    if labels is None or len(np.unique(labels)) < 2:
        return out
    both = (source, scores)
    first, second = (auc(labels, s) for s in both)
    fits = (log_loss(labels, source), log_loss(labels, scores))
    return Parity(out.rows, out.max_deviation, out.mean_deviation, out.rank_correlation, (first, second), fits)


def auc(labels: Labels, scores: Scores) -> float:
    """Area under the ROC curve by the rank sum (Mann-Whitney U); tied scores share their mean rank."""
    placed = ranks(scores)
    clicks = labels == 1
    positives, negatives = int(clicks.sum()), int((~clicks).sum())
    if positives == 0 or negatives == 0:
        raise ValueError(f"labels: got {positives} clicks and {negatives} others, expected some of both")
    return float((placed[clicks].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def log_loss(labels: Labels, scores: Scores) -> float:
    """Mean binary cross-entropy, in nats, of probabilities strictly between 0 and 1."""
    p = np.clip(scores.astype(np.float64), 1e-12, 1 - 1e-12)
    return float(-np.mean(np.where(labels == 1, np.log(p), np.log1p(-p))))


def spearman(a: Scores, b: Scores) -> float | None:
    """Spearman's rho: the correlation of the ranks, tied values sharing their mean rank. None if one side is constant.

    Scores are compared as float32: below that a tie of one model may be no tie of the other.
    """
    x, y = (ranks(v.astype(np.float32)) for v in (a, b))
    x, y = x - x.mean(), y - y.mean()
    norm = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / norm if norm else None


def ranks(values: Scores) -> npt.NDArray[np.float64]:
    """float64[n]: 1 for the least; equal values share their mean rank."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    out: npt.NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return out
