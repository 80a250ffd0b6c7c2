"""The file of tokens: what it may hold, and that nothing ever says a token that was written there by mistake."""

import hashlib
from pathlib import Path

import pytest

from deployments.access.tokens import Token, new_token, read_tokens
from dpiframe_core.errors import ConfigError, InputError
from tests.deployments.access.token_files import made, written

HASH = "ab" * 32
SECRET = "dpi_somebody-wrote-the-token-itself"


def test_a_made_token_is_random_and_its_line_holds_its_hash_and_not_the_token(tmp_path: Path) -> None:
    secrets = set()
    for _ in range(100):
        secret, token = new_token("ranker", ["score", "metrics", "score"])
        secrets.add(secret)
        assert secret not in token.line()
        assert token == Token(name="ranker", scopes=("score", "metrics"), sha256=hashlib.sha256(secret.encode()).hexdigest())
        [known] = read_tokens(written(tmp_path / "t.yaml", token.line())).values()
        assert (known.digest.hex(), known.scopes) == (token.sha256, {"score", "metrics"})
    assert len(secrets) == 100
    assert min(map(len, secrets)) >= 4 + 43  # 256 bits in base64


@pytest.mark.parametrize(("name", "scopes"), [("a b", ["score"]), ("null\n", ["score"]), ("x", []), ("x", ["scores"])])
def test_a_token_without_a_name_or_a_known_scope_is_not_made(name: str, scopes: list[str]) -> None:
    with pytest.raises(InputError, match=r"^(name|scope): got .*, expected [^()]*$"):  # one fault, told as one
        new_token(name, scopes)


def test_a_name_that_yaml_takes_for_something_else_stays_text(tmp_path: Path) -> None:
    for name in ("null", "on", "1", "1e5", "2020-01-01"):
        assert len(read_tokens(written(tmp_path / "t.yaml", new_token(name, ["score"])[1].line()))) == 1, name


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        SECRET,
        f"- {SECRET}",
        f"- {{name: a, scopes: [score], sha256: {SECRET}}}",
        f"- {{name: a, scopes: [{SECRET}], sha256: {HASH}}}",
        f"- {{name: a, scopes: [], sha256: {HASH}}}",
        f"- {{name: a, scopes: score, sha256: {HASH}}}",
        f"- {{name: a, scopes: [score], sha256: {HASH}, token: {SECRET}}}",
        f"- {{name: a, scopes: [score], sha256: {HASH.upper()}}}",
        f"- {{name: a, scopes: [score], sha256: {HASH[:-1]}}}",
        f"- {{name: a, scopes: [score], sha256: {HASH}}}\n- {{name: b, scopes: [admin], sha256: {HASH}}}",
        f"- {{name: a, sha256: {HASH}}}",
        f"- {{name: [{SECRET}, sha256: {HASH}}}",
        f"- {{name: a\n  {SECRET}: [",
        "\x00" * 10,
        "- " + "[" * 5000,
        "#" * ((1 << 20) + 1),
    ],
    ids=range(19),
)
def test_a_file_of_another_form_is_refused_in_one_line_that_shows_nothing_of_it(tmp_path: Path, text: str) -> None:
    file = written(tmp_path / "t.yaml", text)
    with pytest.raises(ConfigError) as caught:
        read_tokens(file)
    message = str(caught.value)
    assert message.startswith(f"{file}: ")
    assert "expected a list of {name: NAME, scopes: [score], sha256: HASH}" in message
    assert SECRET not in message
    assert "\n" not in message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: got 'No such file or directory', expected a readable file of tokens"):
        read_tokens(tmp_path / "none.yaml")


def test_a_file_of_many_tokens_knows_each(tmp_path: Path) -> None:
    tokens = made(tmp_path / "t.yaml", **{f"n{i}": ["score"] for i in range(300)})
    assert {k.digest for k in read_tokens(tmp_path / "t.yaml").values()} == {
        hashlib.sha256(t.encode()).digest() for t in tokens.values()
    }
