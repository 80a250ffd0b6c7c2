"""How much room a label takes, and how it is broken into lines. An estimate that stays above what matplotlib's own font (DejaVu
Sans) takes, so that a layout needs no matplotlib.
"""

import re

# Letters by width, in hundredths of the size; any other has 64.
_WIDTHS = {"il'j": 29, " .,:;|": 34, "()[]rt/f-!": 42, '_"*': 52, "csvxyzk": 61, "%@W→…": 103, "mM": 98, "w": 84, "+=<>": 85}
_HUNDREDTHS = {letter: width for letters, width in _WIDTHS.items() for letter in letters}
_BOLD = 1.16
_LINES = 3


def text_width(text: str, size: float, bold: bool = False) -> float:
    """In the unit of `size`, the font's height."""
    hundredths = sum(_HUNDREDTHS.get(letter, 78 if letter.isupper() else 64) for letter in text)
    return hundredths * size / 100 * (_BOLD if bold else 1)


def shortened(text: str, size: float, width: float, bold: bool = False) -> str:
    """The text, its middle left out as far as it must be to fit; its end tells operators apart."""
    kept = len(text)
    short = text
    while kept > 1 and text_width(short, size, bold) > width:
        kept -= 1
        short = text[: kept // 2] + "…" + text[len(text) - (kept - kept // 2) :]
    return short


def wrapped(text: str, size: float, width: float, bold: bool = False) -> tuple[str, ...]:
    """At most three lines that fit, broken after spaces, dots and underscores."""
    if text_width(text, size, bold) <= width:
        return (text,)
    lines = [""]
    for piece in re.findall(r"[^ ._]+[ ._]*|[ ._]+", text):
        if lines[-1] and text_width((lines[-1] + piece).rstrip(), size, bold) > width:
            lines.append("")
        lines[-1] += piece
    if len(lines) > _LINES:
        lines[_LINES - 1 :] = ["".join(lines[_LINES - 1 :])]
    return tuple(shortened(line.strip(), size, width, bold) for line in lines)
