"""Vocabularies of JSON read in pieces are those that `json.loads` reads; what is not plain is left to it."""

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpiframe_core.errors import InputError
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.features.schema import Categorical, FeatureSchema, Table, Vocabulary
from dpiframe_core.features.vocabulary import VocabularyTable
from dpiframe_core.importers import token_ids
from dpiframe_core.importers.model_spec import Spec, with_vocabularies
from dpiframe_core.importers.raw_rows import entries_named
from dpiframe_core.importers.token_ids import read_token_ids

TOKENS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(
    ["__PAD__", "__OOV__", "", '"', "\\", '":1,', '1,"', "},{", "\n", "\x00", "\u2028", "caf\u00e9", "\U0001f600", "0x1F"]
)
VOCABULARIES = st.dictionaries(TOKENS, st.integers(0, 1 << 62), min_size=1, max_size=40)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("json") / "vocabulary.json"


def entries(vocabulary):
    return list(zip(vocabulary.table["value"].to_pylist(), vocabulary.table["id"].to_pylist(), strict=True))


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(TOKENS, VOCABULARIES, min_size=1, max_size=4), st.booleans(), st.sampled_from([None, 0, 4]), st.data())
def test_what_a_library_writes_is_read_in_its_order(file, vocabularies, ascii_only, indent, data):
    file.write_text(json.dumps(vocabularies, ensure_ascii=ascii_only, indent=indent), "utf-8")
    names = data.draw(st.sets(st.sampled_from(sorted(vocabularies))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_ids, "_PIECE", 64)  # less than most entries together, and more than each
        found = read_token_ids(file, names)
    longest = max(len(json.dumps(t, ensure_ascii=ascii_only).encode()) for v in vocabularies.values() for t in v)
    assert found is not None or longest > 30
    for name, vocabulary in (found or {}).items():
        assert entries(vocabulary) == list(vocabularies[name].items())
    assert found is None or found.keys() == names


@settings(max_examples=120, deadline=None)
@given(VOCABULARIES, st.data())
def test_a_damaged_file_is_read_as_json_reads_it_or_left_to_it(file, vocabulary, data):
    whole = bytearray(json.dumps({"a": vocabulary}, indent=data.draw(st.sampled_from([None, 1]))).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.sampled_from([b"", b'"', b"{", b"}", b",", b"0", b"\xff", b"-"])
        )
    file.write_bytes(whole)
    found = read_token_ids(file, ["a"])
    if found is not None:
        expected = json.loads(whole)
        assert {name: dict(entries(v)) for name, v in found.items()} == {k: v for k, v in expected.items() if k == "a"}


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", "[]", '{"a": {}}', '{"a": {"x": 1}', '{"a": {"x": 1}} 2', '{"a": {"x": -1}}', '{"a": {"x": 1.0}}',
        '{"a": {"x": 01}}', '{"a": {"x": true}}', '{"a": {"x": 1, "x": 2}}', '{"a": {"x": 1}, "a": {"x": 1}}',
        '{"a": {"x": 1,}}', '{"a": {"x": 9223372036854775808}}', '{"a": {"\\ud800": 1}}', '{"a": {"x\t": 1}}',
        '{"a": {"x": {"y": 1}}}', '\ufeff{"a": {"x": 1}}', '{"a": {"\\q": 1}}', '{"a": {"' + "x" * 70_000 + '": 1, "y": 2}}',
    ],
)  # fmt: skip
def test_what_is_not_plain_is_left_to_json(file, text):
    file.write_text(text, "utf-8")
    assert read_token_ids(file, ["a"]) is None
    file.write_text(text, "utf-16")
    assert read_token_ids(file, ["a"]) is None


def test_a_file_that_is_not_there_is_left_to_who_says_so(tmp_path):
    assert read_token_ids(tmp_path / "none.json", None) is None
    spec = Spec.model_validate({"model": "X", "features": [{"name": "a", "vocabulary": "none.json"}]})
    with pytest.raises(InputError, match=r"s\.yaml: a\.vocabulary: got .*none\.json', expected a file, named as seen"):
        with_vocabularies(spec, "s.yaml", tmp_path)


@pytest.mark.parametrize("tokens", [{"7": 1, "-3": 2, "0": 3}, {" 7": 1, "+8": 2, "0": 3}, {"1_0": 1}])
def test_a_specs_integers_are_those_that_python_reads(file, tokens):
    file.write_text(json.dumps(tokens))
    spec = Spec.model_validate({"model": "X", "features": [{"name": "a", "vocabulary": file.name}]})
    found = with_vocabularies(spec, "s.yaml", file.parent).vocabularies["a"]
    assert dict(entries(found)) == {int(k): v for k, v in tokens.items()}


@pytest.mark.parametrize("text", ["0x1F", "1\n", "1.0", "", "9" * 19, "\u0663", "-0", "01"])
def test_text_that_no_program_writes_for_an_integer_is_none(text):
    assert VocabularyTable.of({"5": 0, text: 1}).of_integers() is None


def test_a_vocabulary_without_some_values_is_the_others_in_their_order():
    table = pa.concat_tables([VocabularyTable.of({f"{part}{i}": i for i in range(3)}).table for part in "ab"])
    vocabulary = VocabularyTable(table)
    assert [v for v, _ in entries(vocabulary.without(["a0", "b0", "b2", "none"]))] == ["a1", "a2", "b1"]
    assert vocabulary.without([]).table.equals(table)
    assert (vocabulary.id_of("b2"), vocabulary.id_of("none")) == (2, None)


def test_the_entries_that_columns_name_encode_them_as_whole_vocabularies_do():
    words = VocabularyTable.of({f"w{i}": i % 50 for i in range(2000)})
    numbers = VocabularyTable.of({i * 3 - 900: i % 50 for i in range(2000)})
    common = {"table": "t", "oov_id": 49, "missing_id": 48}
    features = (
        Categorical(name="word", encoder=Vocabulary(file="words"), **common),
        Categorical(name="number", values="int", encoder=Vocabulary(), **common),
        Categorical(name="words", encoder=Vocabulary(file="words"), max_values=4, splitter="^", pooling="mean", **common),
    )
    schema = FeatureSchema(features=features, tables=(Table(name="t", rows=50, dim=4),))
    vocabularies = {"words": words, "number": numbers}
    columns = {"word": ["w7", None, "none"], "number": [-900, 1, None], "words": ["w1^w1999^no", ["w5"], None]}
    named = entries_named(schema, vocabularies, columns)
    assert {name: len(v.table) for name, v in named.items()} == {"words": 4, "number": 1}
    few, whole = Encoder(schema, named).encode(columns), Encoder(schema, vocabularies).encode(columns)
    assert np.array_equal(few.wide_ids("candidate_ids"), whole.wide_ids("candidate_ids"))
