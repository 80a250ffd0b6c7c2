"""The fast way through the encoders gives the same bits as the careful one, and leaves to it whatever is not plain."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpiframe_core.errors import InputError
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.features.schema import Categorical, FeatureSchema, Hash, Identity, Numeric, Table, Vocabulary
from dpiframe_core.features.transforms import Log, MinMax, Standardize
from dpiframe_core.features.vocabulary import VocabularyTable

pytestmark = pytest.mark.usefixtures("both_ways")

KNOWN = {"a": 2, "b": 3, "ö": 4}
TRANSFORMS = [
    (),
    (Log(), Standardize(mean=1.5, std=0.7)),
    (Log(offset=3, minimum=-2), Standardize(mean=-1, std=3)),
    (MinMax(minimum=-1, maximum=5, clip=True),),
    (MinMax(minimum=0, maximum=2),),
]


def schema() -> FeatureSchema:
    features = []
    for scope in ("context", "candidate"):
        s = scope[:2]
        features += [Numeric(name=f"n{s}{i}", scope=scope, transforms=t, missing_value=i / 4) for i, t in enumerate(TRANSFORMS)]
        for i in range(2):
            features.append(
                Categorical(name=f"v{s}{i}", scope=scope, encoder=Vocabulary(file="v"), table="t", missing_id=0, oov_id=1)
            )
            features.append(
                Categorical(
                    name=f"h{s}{i}", scope=scope, encoder=Hash(buckets=5 + i, seed=i, first_id=2), table="t", missing_id=0
                )
            )
            features.append(
                Categorical(
                    name=f"i{s}{i}", scope=scope, values="int", table=f"t{i or ''}", missing_id=[None, 3][i],
                    oov_id=[None, 4][i], encoder=Identity(out_of_range=["error", "oov"][i]),
                )
            )  # fmt: skip
    return FeatureSchema(features=tuple(features), tables=(Table(name="t", rows=20, dim=4), Table(name="t1", rows=7, dim=4)))


def encoders() -> tuple[Encoder, Encoder]:
    """(with the fast way, without it)."""
    fast, careful = (Encoder(schema(), {"v": VocabularyTable.of(KNOWN)}) for _ in range(2))
    assert fast._multi_column
    careful._multi_column = []
    return fast, careful


TEXT = st.one_of(st.none(), st.sampled_from([*KNOWN, "c", ""]), st.text(max_size=3))
NUMBER = st.one_of(
    st.none(), st.integers(-(2**70), 2**70), st.floats(allow_nan=True, allow_infinity=True), st.booleans(), st.just("x")
)
ID = st.one_of(st.none(), st.integers(-(2**70), 2**70), st.integers(-1, 21), st.booleans(), st.just("x"))
PLAIN_ID = st.integers(0, 6)
PLAIN_NUMBER = st.one_of(st.none(), st.integers(-100, 100), st.floats(-1e6, 1e6))


@st.composite
def requests(draw, text, number, ready):
    n = draw(st.integers(1, 4))
    candidates, context = {}, {}
    for f in schema().features:
        values = number if isinstance(f, Numeric) else ready if isinstance(f.encoder, Identity) else text
        if f.scope == "context":
            context[f.name] = draw(values)
        else:
            candidates[f.name] = draw(st.lists(values, min_size=n, max_size=n))
    return candidates, context


@given(requests(TEXT.filter(lambda t: t is None or t.isprintable()), PLAIN_NUMBER, PLAIN_ID))
def test_plain_requests_encode_to_the_same_bits(request_):
    fast, careful = encoders()
    np.testing.assert_array_equal(fast.encode(*request_).buffer, careful.encode(*request_).buffer)


@pytest.mark.bulk
@given(requests(st.one_of(TEXT, st.integers(), st.just("\ud800")), NUMBER, ID))
def test_faulty_requests_get_the_same_error(request_):
    outcomes = []
    for encoder in encoders():
        try:
            outcomes.append(encoder.encode(*request_).buffer.tobytes())
        except InputError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("moved", ["context", "candidates"])
def test_a_feature_on_the_other_side_of_the_request_is_still_read(moved):
    def values(f, number, text, ready):
        return number if isinstance(f, Numeric) else ready if isinstance(f.encoder, Identity) else text

    candidates = {f.name: values(f, [1.0, 2.0], ["a", None], [5, 0]) for f in schema().features if f.scope == "candidate"}
    context = {f.name: values(f, 3.0, "b", 2) for f in schema().features if f.scope == "context"}
    if moved == "context":
        context["vca0"] = candidates.pop("vca0")[0]
    else:
        candidates["vco0"] = [context.pop("vco0"), "zzz"]
    fast, careful = encoders()
    np.testing.assert_array_equal(fast.encode(candidates, context).buffer, careful.encode(candidates, context).buffer)


@pytest.mark.parametrize("ids", [[4, 6], [6, 7], [0, -1], [1, True], [1, None], [2, 2**70], [1, "1"], [2.0, 1]])
def test_ready_ids_in_a_table_are_taken_as_they_are_and_all_else_goes_the_careful_way(ids):
    def encoder(features):
        made = [Categorical(name=n, scope="candidate", values="int", encoder=Identity(), table=n) for n in features]
        return Encoder(FeatureSchema(features=tuple(made), tables=tuple(Table(name=n, rows=7, dim=2) for n in features)), {})

    (reader,) = encoder(["a", "b"])._multi_column
    plain = all(type(v) is int and 0 <= v < 7 for v in ids)
    found = reader.read([[3, 5], ids])
    assert (found is not None) == plain
    if plain:
        np.testing.assert_array_equal(found, [[3, 5], ids])
