"""What a log line may hold of a fault: text of a client in an exception's message must not look like a line of the log, nor
reach a terminal as its commands.
"""

import traceback


def traced(error: BaseException) -> str:
    """The traceback, each of its lines after a bar, with control and formatting characters escaped."""
    return "\n".join(f"  | {_escaped(line)}" for line in "".join(traceback.format_exception(error)).rstrip().split("\n"))


def _escaped(line: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
