"""What an earlier warm-up found is taken over where it names what exists, and no further."""

from types import SimpleNamespace

from dpiframe_core.engine.tuning import recall_choices


def program(name, most, heard):
    operators = SimpleNamespace(recall=heard.update)
    return SimpleNamespace(name=name, operators_name=name, operators=operators, fits=lambda rows: rows <= most)


def test_a_bucket_recalls_only_a_program_that_exists_and_takes_its_rows():
    waves, chain = {}, {}
    programs = [program("waves", 4096, waves), program("chain", 8, chain)]
    known = {
        "program@1": "chain", "program@64": "waves", "program@256": "chain", "program@512": "dreams",
        "waves/wave.1@64": "mma", "chain/x@1": "y", "streams/deep@64": "product",
    }  # fmt: skip
    found = recall_choices(programs, known, (1, 8, 64, 256, 512))
    assert {bucket: c.program for bucket, c in found.items()} == {1: "chain", 64: "waves"}
    assert (waves, chain) == ({"wave.1@64": "mma"}, {"x@1": "y"})
