"""`dpiframe models` against a server that notes what it is asked."""

import json
import shlex
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from deployments.cli.main import app

STATE: dict[str, Any] = {
    "model": "ctr", "revision": 3, "live": "2", "previous": "1", "shadow": None,
    "canary": {"version": "3", "percent": 5.0, "by": "user"},
    "versions": [{"version": v, "path": f"/models/ctr-{v}", "fingerprint": "f"} for v in "123"],
    "replicas": [{"id": "r1", "node": "n", "current": True, "loaded": [], "failed": {}},
                 {"id": "r2", "node": "n", "current": False, "loaded": [], "failed": {"ctr/4": "no room"}}],
}  # fmt: skip


# Of other services, by the first part of a path.
OTHERS: dict[str, Any] = {
    "list": (200, []), "object": (200, {"name": "other"}), "text": (404, {"error": "no"}), "none": (404, {}),
}  # fmt: skip


class Asked(BaseHTTPRequestHandler):
    asked: list[tuple[str, str, str | None, Any]]

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        type(self).asked.append((self.command, self.path, self.headers.get("authorization"), json.loads(body or b"null")))
        refused = "/versions/bad" in self.path
        said = {"error": {"message": "golden rows: got scores off by 0.1"}} if refused else STATE
        if (self.command, self.path) == ("DELETE", "/v1/models/ctr"):
            said = {"models": ["cvr"]}
        if self.path == "/v1/models":
            said = {"models": [{"name": "ctr"}]}
        status, said = OTHERS.get(self.path.split("/")[1], (422 if refused else 200, said))
        data = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815 (these names are the library's)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Asked.asked = []
    server = HTTPServer(("127.0.0.1", 0), Asked)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_version_with_two_parts_is_listed_with_both(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STATE, "shadow", "3")
    said = CliRunner().invoke(app, ["models", "list", "--url", url])
    assert "shadow, canary 5 % by user" in said.output


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        ("load ctr 2 ctr-2", ("PUT", "/v1/models/ctr/versions/2", {"path": "ctr-2", "live": True, "timeout_s": 600})),
        ("load ctr 2 --no-live --timeout 5", ("PUT", "/v1/models/ctr/versions/2", {"live": False, "timeout_s": 5})),
        (
            "load ctr 2 ctr-2 --tables '{hbm_gib: 2.5, remote: {shards: 4}}'",
            (
                "PUT",
                "/v1/models/ctr/versions/2",
                {"path": "ctr-2", "live": True, "timeout_s": 600, "tables": {"hbm_gib": 2.5, "remote": {"shards": 4}}},
            ),
        ),
        ("rollback ctr", ("POST", "/v1/models/ctr/rollback", None)),
        ("canary ctr 3 5 --by user", ("PUT", "/v1/models/ctr/canary", {"version": "3", "percent": 5, "by": "user"})),
        ("canary ctr off", ("DELETE", "/v1/models/ctr/canary", None)),
        ("shadow ctr 1", ("PUT", "/v1/models/ctr/shadow", {"version": "1"})),
        ("shadow ctr off", ("DELETE", "/v1/models/ctr/shadow", None)),
        ("delete ctr", ("DELETE", "/v1/models/ctr", None)),
        ("unload ctr a%20b", ("DELETE", "/v1/models/ctr/versions/a%2520b", None)),
    ],
)
def test_each_command_is_one_call_with_the_token(
    url: str, monkeypatch: pytest.MonkeyPatch, said: str, asked: tuple[str, str, Any]
) -> None:
    monkeypatch.setenv("DPIFRAME_TOKEN", "dpi_x")
    done = CliRunner().invoke(app, ["models", *shlex.split(said), "--url", url])
    assert done.exit_code == 0, done.output
    looked = [("GET", "/v1/models", "Bearer dpi_x", None)] if said.startswith("load") else []
    assert Asked.asked == [*looked, (asked[0], asked[1], "Bearer dpi_x", asked[2])]


@pytest.mark.parametrize("said", ["unload ctr ..", "unload ctr .", "load ctr .. ctr-2 --new", "delete ..", "rollback .."])
def test_a_name_of_dots_is_no_name_of_what_lies_above(url: str, said: str) -> None:
    """`DELETE /v1/models/ctr/versions/..` goes out as `DELETE /v1/models/ctr`: the model with all of its versions."""
    done = CliRunner().invoke(app, ["models", *shlex.split(said), "--url", url])
    assert (done.exit_code, Asked.asked) == (1, []), done.output
    assert done.output.endswith("', expected that of a model or a version\n")


@pytest.mark.parametrize(
    ("place", "got"),
    [
        ("list", "200, '[]'"),
        ("object", """200, '{"name": "other"}'"""),
        ("text", """404, '{"error": "no"}'"""),
        ("none", "404, '{}'"),
    ],
)
def test_another_service_that_speaks_json_is_none_of_ours(url: str, place: str, got: str) -> None:
    done = CliRunner().invoke(app, ["models", "list", "--url", f"{url}/{place}"])
    assert (done.exit_code, done.output) == (1, f"error: {url}/{place}: got {got}, expected a service of DPIFrame\n")


def test_a_model_that_the_service_does_not_have_is_loaded_only_as_a_new_one(url: str) -> None:
    done = CliRunner().invoke(app, ["models", "load", "ctrr", "4", "ctr-4", "--url", url])
    assert (done.exit_code, done.output) == (1, "error: model: got 'ctrr', expected ctr, or --new for a further model\n")
    assert [asked[0] for asked in Asked.asked] == ["GET"]
    done = CliRunner().invoke(app, ["models", "load", "ctrr", "4", "ctr-4", "--new", "--url", url])
    assert done.exit_code == 0, done.output
    assert [asked[:2] for asked in Asked.asked[1:]] == [("PUT", "/v1/models/ctrr/versions/4")]


@pytest.mark.parametrize("said", ["ctr 3", "ctr 3 --by user", "ctr off 5"])
def test_a_canary_without_its_share_asks_nothing_of_the_service(url: str, said: str) -> None:
    done = CliRunner().invoke(app, ["models", "canary", *shlex.split(said), "--url", url])
    assert (done.exit_code, Asked.asked) == (2, []), done.output


def test_the_list_says_which_part_each_version_has(url: str) -> None:
    done = CliRunner().invoke(app, ["models", "list", "--url", url])
    assert done.exit_code == 0
    assert [line.split() for line in done.output.splitlines()] == [
        ["ctr", "1", "before", "/models/ctr-1"],
        ["ctr", "2", "live", "/models/ctr-2"],
        ["ctr", "3", "canary", "5", "%", "by", "user", "/models/ctr-3"],
        ["r2", "has", "no", "ctr/4:", "no", "room"],
        ["not", "there", "yet:", "r2"],
    ]


def test_a_refusal_is_one_line(url: str) -> None:
    done = CliRunner().invoke(app, ["models", "load", "ctr", "bad", "x", "--url", url])
    assert (done.exit_code, done.output) == (1, "error: golden rows: got scores off by 0.1\n")
    done = CliRunner().invoke(app, ["models", "load", "ctr", "2", "--tables", "hbm_gib", "--url", url])
    assert (done.exit_code, done.output) == (
        1,
        "error: --tables: got 'hbm_gib', expected a mapping, as {hbm_gib: 20}\n",
    )
    done = CliRunner().invoke(app, ["models", "list", "--url", "http://127.0.0.1:1"])
    assert done.exit_code == 1
    assert done.output.startswith("error: http://127.0.0.1:1: got ")
    assert done.output.endswith(", expected a service of DPIFrame\n")
