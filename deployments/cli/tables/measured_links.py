"""The links of a host, as an operator gives them to `dpiframe plan`: three numbers, or the file of a measurement."""

import json
from pathlib import Path
from typing import Any

from dpiframe_core.embedding.placement import Links
from dpiframe_core.errors import InputError

_GB, _MIB = 1e9, 1 << 20
_NUMBERS = "three numbers of GB/s, LOCAL,PEER,HOST, or a file of `tiers-gpus --parts links`"


def parse_links(text: str | None) -> Links:
    """Of "LOCAL,PEER,HOST" in GB/s, or a file that `python -m benchmarks tiers-gpus --parts links` wrote; the defaults without.

    Raises:
        InputError: other than three numbers above 0, or a file that has not what each link gives.
    """
    if text is None:
        return Links()
    if text.endswith(".json"):
        return _measured(text)
    try:
        local, peer, host = (float(part) * _GB for part in text.split(","))
    except ValueError:
        raise InputError("--links", text, _NUMBERS) from None
    return Links(local, peer, host)


def _measured(path: str) -> Links:
    """Bandwidths are those of the largest rows, spread as far as any; the host's that of any, as its waits are told apart: what
    a read of the smallest rows takes, by how far they are spread."""
    try:
        records = [r for r in json.loads(Path(path).read_text())["records"] if r["suite"] == "links"]
        by_link: dict[str, list[tuple[float, int, float, float]]] = {}
        for r in records:
            cell = r["cell"]
            by_link.setdefault(r["system"], []).append((cell["spread_mib"], cell["row_bytes"], r["gb_per_s"], r["ns_a_row"]))
        smallest = min(row for _, row, _, _ in by_link["host"])
        waits, longest = [], 0.0
        for spread, row, _, ns in sorted(by_link["host"]):
            if row == smallest:
                longest = max(longest, ns)
                waits.append((spread * _MIB, longest * 1e-9))
        found: dict[str, Any] = {link: max(by_link[link])[2] * _GB for link in ("local", "peer") if link in by_link}
        return Links(**found, host=max(gb for _, _, gb, _ in by_link["host"]) * _GB, host_waits=tuple(waits))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise InputError("--links", f"{path}: {e!r}", "a file of `tiers-gpus --parts links`") from e
