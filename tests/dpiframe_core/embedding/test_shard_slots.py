"""Slots of the processes that share rows: each has one, whoever dies loses it, and nobody reads what is not published."""

import os
import signal
import subprocess
import sys

import pytest

from dpiframe_core.embedding.shard_slots import ShardSlot, published, slot_paths


def handles(folder, slots, own=None):
    return [None if found is None else found[1] for found in published(slot_paths(folder, "m", slots), own)]


def test_each_takes_the_first_free_slot_and_finds_what_the_others_published(tmp_path):
    assert handles(tmp_path, 3) == [None] * 3
    a, b = (ShardSlot.claim(tmp_path, "m", 3) for _ in range(2))
    assert (a.index, b.index) == (0, 1)
    assert handles(tmp_path, 3) == [None] * 3
    b.publish(b"of b")
    assert handles(tmp_path, 3, own=0) == [None, b"of b", None]
    a.publish(b"of a")
    a.publish(b"again")
    assert handles(tmp_path, 3, own=1) == [b"again", None, None]
    assert handles(tmp_path, 3) == [b"again", b"of b", None]
    a.close()
    assert handles(tmp_path, 3) == [None, b"of b", None]
    c = ShardSlot.claim(tmp_path, "m", 3)
    assert c.index == 0
    assert handles(tmp_path, 3) == [None, b"of b", None]
    assert [ShardSlot.claim(tmp_path, "m", 3).index, ShardSlot.claim(tmp_path, "m", 3)] == [2, None]
    for slot in (b, c):
        slot.close()


def test_the_same_handle_of_another_process_is_told_from_the_first(tmp_path):
    tokens = set()
    for _ in range(2):
        slot = ShardSlot.claim(tmp_path, "m", 1)
        slot.publish(b"handle")
        ((token, handle),) = published(slot_paths(tmp_path, "m", 1), None)
        tokens.add(token)
        assert handle == b"handle"
        slot.close()
    assert len(tokens) == 2


def test_a_killed_process_loses_its_slot(tmp_path):
    code = f"""
import time
from pathlib import Path
from dpiframe_core.embedding.shard_slots import ShardSlot
slot = ShardSlot.claim(Path({str(tmp_path)!r}), "m", 2)
slot.publish(b"dead soon")
print(slot.index, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "0\n"
        assert handles(tmp_path, 2) == [b"dead soon", None]
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        assert handles(tmp_path, 2) == [None, None]
    slot = ShardSlot.claim(tmp_path, "m", 2)
    assert slot.index == 0
    slot.close()


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"token": 1}', b'{"token": "a", "handle": "xyz"}', b"\xff"])
def test_what_is_no_publication_is_none(tmp_path, text):
    slot = ShardSlot.claim(tmp_path, "m", 1)
    slot_paths(tmp_path, "m", 1)[0].write_bytes(text)
    assert handles(tmp_path, 1) == [None]
    slot.close()
