"""A processor's large vocabularies are compared with the file's without being held: by sums of hashes of their entries."""

import io
import pickle
import sys
import types

import pytest

from dpiframe_core.errors import InputError
from dpiframe_core.features.vocabulary import VocabularyTable
from dpiframe_core.importers.fuxictr.pickled_processor import _InertUnpickler, read_processor
from dpiframe_core.importers.fuxictr.processor import check_tokenizers
from tests.dpiframe_core.importers.peers import RUNS, needs_runs

CLASSES = {"FeatureProcessor": "fuxictr.preprocess.feature_processor", "Tokenizer": "fuxictr.preprocess.tokenizer"}
# Text of one character is one object in Python, so the pickle writes it once and then reads it of its memo.
TOKENS = ["__PAD__", *map(str, range(2600)), "a", "caf\u00e9", "x" * 63, "x" * 64, "x" * 300, "", "__OOV__"]


@pytest.fixture
def pickled(monkeypatch, tmp_path):
    """A function that writes a processor with these vocabularies, as FuxiCTR does."""
    kinds = {}
    for name, module in CLASSES.items():
        kinds[name] = type(name, (), {"__module__": module})
        made = types.ModuleType(module)
        setattr(made, name, kinds[name])
        monkeypatch.setitem(sys.modules, module, made)

    def write(vocabularies, protocol=4, pickler=pickle.dumps):
        processor = kinds["FeatureProcessor"]()
        processor.processor_dict = {}
        for name, vocabulary in vocabularies.items():
            processor.processor_dict[f"{name}::tokenizer"] = tokenizer = kinds["Tokenizer"]()
            tokenizer.vocab = vocabulary
        (tmp_path / "p.pkl").write_bytes(pickler(processor, protocol))
        return read_processor(tmp_path / "p.pkl")

    return write


def check(processor, vocabularies):
    check_tokenizers(processor, "p.pkl", "v.json", {name: VocabularyTable.of(v) for name, v in vocabularies.items()})


@pytest.mark.parametrize("pickler", [pickle.dumps, pickle._dumps])
@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_equal_vocabularies_are_equal_in_whatever_order(pickled, protocol, pickler):
    first = {token: i for i, token in enumerate(TOKENS)}
    second = {token: 70_000 * i for i, token in enumerate(reversed(TOKENS))}
    made = pickled({"a": first, "b": second, "same": first}, protocol, pickler)
    shuffled = dict(sorted(first.items()))
    check(made, {"a": shuffled, "b": second, "same": first})
    check(pickled({"a": {i: i for i in range(3000)}}, protocol, pickler), {"a": {str(i): i for i in range(3000)}})


def test_a_vocabulary_that_differs_in_one_entry_is_refused(pickled):
    ours = {token: i for i, token in enumerate(TOKENS)}
    made = pickled({"a": ours})
    others = [ours | {"a": 1, "0": ours["a"]}, ours | {"5": 7}, ours | {"new": 5}, {t: i for t, i in ours.items() if t != "9"}]
    others.append({("b" if token == "a" else token): i for token, i in ours.items()})
    for other in others:
        with pytest.raises(
            InputError, match=r"p\.pkl: got '1 other vocabularies than v\.json', expected the same for a \(another"
        ):
            check(made, {"a": other})
    with pytest.raises(InputError, match=r"the same for b \(no tokenizer\)"):
        check(made, {"a": ours, "b": ours})


def test_of_a_long_vocabulary_no_more_than_its_end_is_held(pickled):
    made = pickled({"a": {str(i): i for i in range(100_000)}, "b": {str(i): 1.5 for i in range(3000)}})
    assert len(made.fields["processor_dict"]["a::tokenizer"].fields["vocab"]) < 1000
    assert len(made.fields["processor_dict"]["b::tokenizer"].fields["vocab"]) == 3000


@needs_runs
def test_real_processors_say_what_their_pickles_say():
    def plain(value):
        if isinstance(value, dict):
            return {key: plain(v) for key, v in value.items()}
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        return (type(value), plain(vars(value))) if hasattr(value, "__dict__") else repr(value)

    for path in sorted(RUNS.glob("*/feature_processor.pkl")):
        assert plain(read_processor(path)) == plain(_InertUnpickler(io.BytesIO(path.read_bytes())).load())
