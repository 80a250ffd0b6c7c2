"""How near two models' scores are, and how well scores rank and fit clicks: deviation, rank correlation, AUC, log-loss.

NumPy only; knows no models.
"""

from dataclasses import dataclass

import numpy as np

from dpiframe_core.evaluation.quality import Labels, Scores, auc, log_loss, ranks


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


def spearman(a: Scores, b: Scores) -> float | None:
    """Spearman's rho: the correlation of the ranks, tied values sharing their mean rank. None if one side is constant.

    Scores are compared as float32: below that a tie of one model may be no tie of the other.
    """
    x, y = (ranks(v.astype(np.float32)) for v in (a, b))
    x, y = x - x.mean(), y - y.mean()
    norm = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / norm if norm else None
