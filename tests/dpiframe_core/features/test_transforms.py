"""What a transform cannot be is refused with the value and the rule."""

import pytest

from dpiframe_core.errors import InputError
from dpiframe_core.features.transforms import Bucketize


def test_boundaries_that_do_not_ascend_are_refused_with_what_they_are():
    with pytest.raises(InputError, match=r"^boundaries: got \[0\.0, 2\.0, 2\.0\], expected strictly ascending values"):
        Bucketize(boundaries=(0, 2, 2), first_id=1)
