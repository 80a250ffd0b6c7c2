"""What a chain is made of: links, each a job and the numbers of the links that it reads, and the head. Plain data, checked."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.interaction.pairs import Pairs
from kernels.waves.wave_jobs import CrossJob, FmJob, Job, LinearJob, NormJob

MOST_EXPERTS = 64  # of a mixture: a thread each of all rows


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """A job of a chain. x: the numbers of the links, before this one, whose values it reads, side by side; none: it is given x.
    x0: the same of a gate's x0; None: it is given. xl: of a cross layer's last input, if that is not x. mixed: of the logits by
    which a layer's x is mixed (`reference.mixture`) before it is multiplied. The first vector of `Pairs` is the x of a layer.
    """

    job: Job | Pairs
    x: tuple[int, ...] = ()
    xl: int | None = None
    x0: int | None = None
    mixed: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ChainHead:
    """bias: float[tasks]. logits: at most 3: the number of the FM or cross link that makes it; None: it is given."""

    bias: torch.Tensor
    logits: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class ChainOperands:
    """What a link is given: x in the dense dtype, rows 16-byte aligned, unless a link before makes it; a cross layer's x0, and
    its xl, unless that is x or a link before makes it; as xl all vectors of `Pairs` but the first.
    """

    x: torch.Tensor | None
    x0: torch.Tensor | None = None
    xl: torch.Tensor | None = None


def check_links(links: Sequence[Link], head: ChainHead) -> None:
    """What a link waits for must come: else it would wait for ever.

    Raises:
        ValueError: it cannot come, or is not as wide as its reader.
    """
    rows: dict[int, tuple[int, ...]] = {}  # of links that are read side by side
    for i, link in enumerate(links):
        numbers = ", ".join(map(str, link.x)) or "None"
        got = f"chain link {i}: got x of link {numbers}"
        if not all(number < i and isinstance(links[number].job, LinearJob | Pairs | NormJob) for number in link.x):
            raise ValueError(f"{got}, expected a layer before it")
        if any(rows.setdefault(number, link.x) != link.x for number in link.x):
            raise ValueError(f"{got}, expected each to be read in one row alone")
        columns = sum(made_columns(links[number].job) for number in link.x)
        if link.mixed is not None:
            experts = made_columns(links[link.mixed].job) if link.mixed < i else 0
            if not isinstance(link.job, LinearJob) or not 1 <= experts <= MOST_EXPERTS or columns % experts or columns % 8:
                raise ValueError(f"{got} mixed by link {link.mixed}, expected 1 to {MOST_EXPERTS} equal parts of it")
        if len(link.x) > 1 and any(made_columns(links[number].job) % 8 for number in link.x[:-1]):
            raise ValueError(f"{got} side by side, expected multiples of 8 columns")
        match link.job:
            case Pairs(dim=dim) if len(link.x) != 1 or columns != dim:
                raise ValueError(f"{got}, expected a layer of {dim} columns before it")
            case Pairs() | NormJob() if all(i not in (*other.x, other.x0) for other in links):
                raise ValueError(f"chain link {i}: got no reader, expected a layer behind it")
            case NormJob(width=width) if width % 8 or (link.x and columns != width):
                raise ValueError(f"chain link {i}: got {width} columns of norms, expected those of x, a multiple of 8")
            case LinearJob(weight=weight) if link.x and weight.shape[1] != columns:
                got = f"{weight.shape[1]} columns of link {numbers}"
                raise ValueError(f"chain link {i}: got {got}, expected its {columns}")
            case LinearJob(weight=weight) if not all(
                number is None or (number < i and made_columns(links[number].job) == weight.shape[0])
                for number in (link.xl, link.x0)
            ):
                name, number = ("xl", link.xl) if link.xl is not None else ("x0", link.x0)
                raise ValueError(f"chain link {i}: got {name} of link {number}, expected a layer as wide before it")
            case FmJob() | CrossJob() if link.x:
                raise ValueError(f"{got}, expected it to be given")
            case FmJob() | CrossJob() if i not in head.logits:
                raise ValueError(f"chain link {i}: got no reader, expected it to be one of the head's logits")
    for logit in head.logits:
        if logit is not None and not isinstance(links[logit].job, FmJob | CrossJob):
            raise ValueError(f"chain head: got link {logit} as a logit, expected an FM or a cross network")


def made_columns(job: Job | Pairs) -> int:
    """Columns that a layer, norms or pairs make; -1: these are logits."""
    match job:
        case LinearJob(weight=weight):
            return weight.shape[0]
        case Pairs(columns=columns) | NormJob(width=columns):
            return columns
    return -1
