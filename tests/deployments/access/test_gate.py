"""Who passes the gate, and how its file changes under it."""

import logging
from pathlib import Path

import pytest

from deployments.access.gate import Forbidden, Gate, Unauthenticated
from deployments.config_clients import Access
from dpiframe_core.errors import ConfigError
from tests.deployments.access.token_files import made, written


class Clock:
    """Seconds, as a test says."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokens.yaml"


def header(value: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", value.encode("latin-1")), (b"accept", b"*/*")]


def passes(gate: Gate, token: str) -> bool:
    try:
        gate.require(header(f"Bearer {token}"))
    except Unauthenticated:
        return False
    return True


def test_a_token_passes_for_its_scopes_and_for_what_takes_any_token(file: Path) -> None:
    tokens = made(file, ranker=["score"], boss=["admin", "metrics"])
    gate = Gate(str(file))
    for spelling in ("Bearer {}", "bearer {}", "BEARER  {} "):
        gate.require(header(spelling.format(tokens["ranker"])), "score")
    for token in tokens.values():
        gate.require(header(f"Bearer {token}"))
    gate.require(header(f"Bearer {tokens['boss']}"), "admin")
    for name, scope in (("ranker", "admin"), ("ranker", "metrics"), ("boss", "score")):
        with pytest.raises(Forbidden, match=f"authorization: got a token without the scope '{scope}', expected one with it"):
            gate.require(header(f"Bearer {tokens[name]}"), scope)  # type: ignore[arg-type]


def test_anything_but_one_known_bearer_token_is_refused_without_being_repeated(file: Path) -> None:
    token = made(file, ranker=["score"])["ranker"]
    gate = Gate(str(file))
    good = f"Bearer {token}"
    wrong = [
        [], header(""), header("Bearer"), header("Bearer "), header(token), header(f"Basic {token}"), header(f"Bearer{token}"),
        header(good[:-1]), header(good + "x"), header(f"Bearer {token.upper()}"), header(f"Bearer {token} {token}"),
        header(f"Bearer {token}\0"), header("Bearer " + "x" * 70_000), header("Bearer caf\xe9"),
        header(good) + header(good), header(good) + header("Bearer x"), header("Bearer x") + header(good),
        header("Bearer " + file.read_text().split("sha256: ")[1].strip("}\n")),
    ]  # fmt: skip
    for headers in wrong:
        for scope in ("score", None):
            with pytest.raises(Unauthenticated) as caught:
                gate.require(headers, scope)  # type: ignore[arg-type]
            assert token[4:] not in str(caught.value)
            assert str(caught.value).startswith("authorization: got ")
            assert len(str(caught.value)) < 100


def test_a_token_whose_hash_begins_like_a_known_one_is_still_unknown(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = made(file, ranker=["score"])
    gate = Gate(str(file))
    monkeypatch.setattr("deployments.access.gate.head_of", lambda digest: next(iter(gate._known)))
    assert passes(gate, tokens["ranker"])
    assert not passes(gate, "another")


def test_the_file_is_read_anew_when_it_changes_and_not_for_each_request(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, reads = Clock(), []
    old = made(file, a=["score"])["a"]
    gate = Gate(str(file), clock)
    import deployments.access.gate as module

    read = module.read_tokens
    monkeypatch.setattr(module, "read_tokens", lambda path: (reads.append(path), read(path))[1])
    new = made(file, a=["score"])["a"]
    assert (passes(gate, old), passes(gate, new)) == (True, False)  # within the second
    clock.now = 1
    assert (passes(gate, old), passes(gate, new)) == (False, True)
    for clock.now in range(2, 50):
        assert passes(gate, new)
    assert len(reads) == 1


def test_a_link_to_another_folder_is_a_change_as_kubernetes_makes_it(tmp_path: Path) -> None:
    clock = Clock()
    tokens = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        tokens.append(made(tmp_path / name / "tokens.yaml", a=["score"])["a"])
    (tmp_path / "..data").symlink_to("one")
    (tmp_path / "tokens.yaml").symlink_to("..data/tokens.yaml")
    gate = Gate(str(tmp_path / "tokens.yaml"), clock)
    assert passes(gate, tokens[0])
    (tmp_path / "..new").symlink_to("two")
    (tmp_path / "..new").rename(tmp_path / "..data")
    clock.now = 1
    assert (passes(gate, tokens[0]), passes(gate, tokens[1])) == (False, True)


def test_a_broken_or_missing_new_file_keeps_the_old_tokens_and_is_logged_once(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    old = made(file, a=["score"])["a"]
    gate = Gate(str(file), clock)
    for change in (lambda: written(file, "- {name: a"), lambda: written(file, ""), file.unlink):
        change()
        caplog.clear()
        for _ in range(3):
            clock.now += 1
            assert passes(gate, old)
        [record] = caplog.records
        assert record.levelno == logging.ERROR
        assert record.getMessage().startswith(f"the tokens stay as they were: {file}: got ")
    new = made(file, a=["score"])["a"]
    clock.now += 1
    assert (passes(gate, old), passes(gate, new)) == (False, True)


def test_there_is_a_gate_where_a_file_is_configured_and_it_must_be_sound_at_first(file: Path) -> None:
    assert Gate.of(None) is None
    assert Gate.of(Access(open=True)) is None
    with pytest.raises(ConfigError, match="expected a readable file of tokens"):
        Gate.of(Access(tokens=str(file)))
    made(file, a=["score"])
    assert isinstance(Gate.of(Access(tokens=str(file))), Gate)


def test_within_a_second_the_file_is_looked_at_once_however_many_ask(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looks = Clock(), []
    token = made(file, a=["score"])["a"]
    gate = Gate(str(file), clock)
    monkeypatch.setattr("deployments.access.gate._stamp", lambda path: looks.append(path) or gate._stamp)
    for clock.now in (0.5, 1.0, 1.1, 1.9, 2.0, 2.5):
        for _ in range(20):
            assert passes(gate, token)
    assert len(looks) == 2
