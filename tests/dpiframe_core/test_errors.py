"""An input error says the same in another process and of another place."""

import pickle

import pytest

from dpiframe_core.errors import InputError, ModelNotFound, TooLarge


@pytest.mark.parametrize("kind", [InputError, TooLarge, ModelNotFound])
def test_an_input_error_survives_pickling_with_all_that_it_says(kind):
    error = kind("candidates.C1[3]", "x", "text or null")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert (str(back), back.where, back.got, back.expected) == (
        "candidates.C1[3]: got 'x', expected text or null", "candidates.C1[3]", "'x'", "text or null",
    )  # fmt: skip


def test_an_error_moved_to_another_place_shows_its_value_once():
    moved = TooLarge("here", "x", "y").at("row 7")
    assert type(moved) is TooLarge
    assert str(moved) == "row 7: got 'x', expected y"
