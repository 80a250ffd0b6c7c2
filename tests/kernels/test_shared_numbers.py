"""Numbers that Python and CUDA both name are the same in both."""

import re
from dataclasses import replace
from enum import IntEnum

import pytest

from kernels.dense.activation import KINDS
from kernels.lookup.batch_header import HeaderWord
from kernels.lookup.plan import Kind
from kernels.lookup.units import How
from kernels.runtime.source import FOLDER
from kernels.runtime.state import StateWord
from kernels.waves.wave_jobs import FIELDS_AT_ONCE, JobKind


def enum_of(file: str, name: str) -> dict[str, int]:
    (body,) = re.findall(rf"enum {name} {{([^}}]*)}}", (FOLDER / file).read_text())
    return {key.strip(): int(number) for key, number in (item.split("=") for item in body.split(","))}


@pytest.mark.parametrize(
    ("file", "name", "twin"),
    [
        ("runtime/common.cuh", "StateWord", StateWord),
        ("lookup/wait_for_rows.cuh", "HeaderWord", HeaderWord),
        ("lookup/unit_records.cuh", "Kind", Kind),
        ("waves/epilogue.cuh", "Kind", JobKind),
    ],
)
def test_an_enum_of_cuda_has_the_numbers_of_its_twin(file: str, name: str, twin: type[IntEnum]) -> None:
    ours, theirs = {word.name: int(word) for word in twin}, enum_of(file, name)
    assert theirs
    assert theirs.items() <= ours.items()


def test_activations_have_the_numbers_that_their_kernels_know() -> None:
    alone = {key.rstrip("_").lower(): number for key, number in enum_of("dense/activation.cuh", "Kinds").items()}
    assert alone.pop("as_is") == KINDS["identity"]
    assert alone.items() <= KINDS.items()


def test_as_many_fields_are_normed_at_once_in_both() -> None:
    (fields,) = re.findall(r"#define FIELDS_AT_ONCE (\d+)", (FOLDER / "dense/row_norms.cuh").read_text())
    assert int(fields) == FIELDS_AT_ONCE


FIELD = re.compile(r"#define HOW_(\w+)\(how\) \(\(how\)(?: >> (\d+))?(?: & (\d+))?\)")


def test_each_field_of_a_units_word_is_read_where_it_is_packed() -> None:
    text = (FOLDER / "lookup/row_loads.cuh").read_text()
    fields = {name.lower(): (int(shift or 0), int(mask or -1)) for name, shift, mask in FIELD.findall(text)}
    none = How(Kind.GATHER)
    odd = {"kind": Kind.MASK, "dtype": 2, "width": 8, "id_bytes": 4, "mean": 1, "may_pad": 1, "counted": 1, "largest": 1}
    assert fields.keys() == {*odd, "pick"}
    for changed, value in odd.items():
        word = replace(none, **{changed: value}).word
        read = {name: word >> shift & mask for name, (shift, mask) in fields.items()}
        assert read.pop("pick") == (0x3210 if changed == "id_bytes" else 0)
        assert read == {name: value if name == changed else int(getattr(none, name)) for name in read}
