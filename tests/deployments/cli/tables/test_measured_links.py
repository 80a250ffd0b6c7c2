"""Links are what was given or measured, and a file that has not all of them is refused."""

import json
from pathlib import Path

import pytest

from deployments.cli.tables.measured_links import parse_links
from dpiframe_core.embedding.placement import Links
from dpiframe_core.errors import InputError

MEASURED = Path("benchmarks/results/h100x2/links.json")
MIB = 1 << 20


def record(link: str, spread_mib: float, row_bytes: int, gb_per_s: float, ns: float) -> dict[str, object]:
    cell = {"gpus": 1, "row_bytes": row_bytes, "spread_mib": spread_mib}
    return {"suite": "links", "system": link, "cell": cell, "gb_per_s": gb_per_s, "ns_a_row": ns}


def written(path: Path, records: object) -> str:
    path.write_text(json.dumps({"records": records}))
    return str(path)


@pytest.mark.parametrize("text", ["1,2", "1,2,3,4", "a,b,c", ""])
def test_other_than_three_numbers_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=f"--links: got '{text}', expected three numbers of GB/s, LOCAL,PEER,HOST, or a file"):
        parse_links(text)


def test_links_are_given_in_gigabytes_a_second() -> None:
    assert parse_links("1700,366,50") == parse_links(None) == Links()
    with pytest.raises(InputError, match=r"links.host: got -5"):
        parse_links("1,2,-5e-9")


def test_a_measurement_tells_bandwidths_and_what_a_read_of_the_host_waits_by_the_spread(tmp_path: Path) -> None:
    host = [(4096, 64, 3, 21.0), (64, 64, 33, 2.0), (64, 512, 50, 11.0), (1024, 64, 7, 8.0), (256, 64, 36, 1.9)]
    local = [(64, 64, 900, 0.1), (64, 512, 3000, 0.2), (4096, 64, 1000, 0.1), (4096, 512, 1500, 0.3)]
    records = [record(link, *each) for link, some in (("host", host), ("local", local)) for each in some]
    other = {"suite": "tiers", "system": "host"}
    found = parse_links(written(tmp_path / "links.json", [other, *records]))
    waits = ((64 * MIB, 2e-9), (256 * MIB, 2e-9), (1024 * MIB, 8e-9), (4096 * MIB, 21e-9))  # one that falls is noise
    assert (found.local, found.peer, found.host) == (1500e9, Links().peer, 50e9)
    assert [spread for spread, _ in found.host_waits] == [spread for spread, _ in waits]
    assert [wait for _, wait in found.host_waits] == pytest.approx([wait for _, wait in waits])


def test_a_file_of_two_gpus_is_read() -> None:
    found = parse_links(str(MEASURED))
    records = json.loads(MEASURED.read_text())["records"]
    peer = [r["gb_per_s"] for r in records if (r["system"], r["cell"]["row_bytes"]) == ("peer", 512)]
    host = [r["ns_a_row"] for r in records if (r["system"], r["cell"]["row_bytes"]) == ("host", 64)]
    assert min(peer) <= found.peer / 1e9 <= max(peer)
    assert min(host) <= found.host_s(64) * 1e9 <= max(host)


@pytest.mark.parametrize("records", [[], {}, [{"suite": "links"}], [record("local", 1, 64, 1, 1)]])
def test_a_file_without_reads_of_the_host_is_refused(tmp_path: Path, records: object) -> None:
    with pytest.raises(InputError, match=r"--links: got .*links.json: .*, expected a file of `tiers-gpus --parts links`"):
        parse_links(written(tmp_path / "links.json", records))


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match=r"nowhere.json: FileNotFoundError"):
        parse_links("nowhere.json")
