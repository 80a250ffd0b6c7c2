"""How well scores rank and fit clicks: AUC and log-loss, at once or as scores come. NumPy only."""

import numpy as np
import numpy.typing as npt

from dpiframe_core.features.row_block import Floats

Labels = npt.NDArray[np.int64] | npt.NDArray[np.bool_]
Scores = npt.NDArray[np.float32] | npt.NDArray[np.float64]


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


def ranks(values: Scores) -> npt.NDArray[np.float64]:
    """float64[n]: 1 for the least; equal values share their mean rank."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    out: npt.NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return out


class RunningQuality:
    """AUC and log-loss of scores that come in parts. Keeps 5 bytes a row: its score and its label."""

    def __init__(self) -> None:
        self._scores: list[Floats] = []
        self._labels: list[npt.NDArray[np.bool_]] = []

    def add(self, labels: npt.NDArray[np.bool_], scores: Floats) -> None:
        """bool[n] and float32[n]; the arrays are kept."""
        self._labels.append(labels)
        self._scores.append(scores)

    def result(self) -> tuple[float | None, float]:
        """(AUC, None if all labels are alike; log-loss in nats) of at least one row."""
        labels, scores = np.concatenate(self._labels), np.concatenate(self._scores)
        mixed = bool(labels.any()) and not bool(labels.all())
        return auc(labels, scores) if mixed else None, log_loss(labels, scores)
