"""The status page in headless Chromium, over the real app with a real engine: what it shows is what the service says."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.access.gate import Gate
from deployments.scoring.served_model import ServedModel
from deployments.status.profiles import NoProfile, Profiles
from dpiframe_core.engine.engine import Engine
from tests.chromium import Browser, Page, chromium
from tests.deployments.access.token_files import bearing, made
from tests.deployments.live_app import LiveApp
from tests.deployments.serve.test_http_app import Service
from tests.deployments.serving_doubles import FakeEngine, columns

pytestmark = [pytest.mark.bulk, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

SERVING = "document.getElementById('state').textContent.startsWith('Serving') && document.querySelector('#candidates input')"
MARKUP = "<img src=x onerror=window.hit=1>"


def trace(name: str = "deep/linear", **facts: Any) -> dict[str, Any]:
    """A profile of two rows on one stream; texts as given, since nobody vouches for a file."""
    about = [
        {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "captured graph"}},
        {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "host"}},
        {"ph": "M", "pid": 1, "tid": 2, "name": "thread_name", "args": {"name": "stream 0"}},
    ]
    spans = [
        {"ph": "X", "pid": 1, "tid": 1, "cat": "host", "name": "launch", "ts": 0.0, "dur": 6.0, "args": {}},
        {"ph": "X", "pid": 1, "tid": 2, "cat": "deep", "name": name, "ts": 6.5, "dur": 12.0, "args": {}},
        {"ph": "X", "pid": 1, "tid": 2, "cat": "fm", "name": "fm", "ts": 18.5, "dur": 4.0, "args": {}},
    ]
    told = {"model": "demo", "version": "1", "rows": 256, "precision": "fp32", "device": "cpu", "date": "2026-11-24"}
    return {"otherData": told | facts, "traceEvents": about + spans}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    chromium()
    with Browser(tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture(scope="module")
def engine(demo_bundle: Path) -> Iterator[Engine]:
    with_example = Engine.load(demo_bundle, device="cpu")
    with_example.warmup()
    yield with_example
    with_example.close()


def sound(page: Page, url: str) -> None:
    """Nothing was refused, nothing failed, and nothing of another host was asked for."""
    assert page.complaints() == []
    assert {asked[: len(url)] for asked in page.requests() if not asked.startswith("data:")} == {url}


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)], ids=["desktop", "phone, dark"])
def test_the_page_scores_the_example_that_it_is_filled_with(
    browser: Browser, engine: Engine, tmp_path: Path, width: int, dark: bool
) -> None:
    (tmp_path / "demo.json").write_text(json.dumps(trace()))
    with LiveApp(engine, profiles=tmp_path) as live:
        page = browser.open(f"{live.url}/", width=width, dark=dark)
        page.wait(SERVING)
        page.run("document.getElementById('score').click()")
        page.wait("document.querySelector('tr.scores')")
        example = engine.bundle.example
        assert example is not None
        direct = httpx.post(f"{live.url}/v1/score", json=example).json()
        shown = page.run("[...document.querySelectorAll('tr.scores td')].map((cell) => Number(cell.textContent))")
        assert shown == [float(f"{score:.5g}") for score in direct["scores"]]
        sent = json.loads(page.text("request"))
        assert sent == {"model": "demo", "context": example["context"], "candidates": example["candidates"]}
        for step in ("queue", "encode", "device", "total", "seen from here"):
            assert step in page.text("timing")
        page.wait("document.querySelector('#throughput polyline') && document.querySelector('#latency polyline')")
        assert "the one replica heard from" in page.text("live-about")
        features = page.run("document.querySelectorAll('#schema tbody tr').length")
        assert features == len(engine.schema.features)
        page.wait("document.querySelectorAll('svg.timeline rect').length === 3")
        assert page.run("document.documentElement.scrollWidth") <= width  # wide parts scroll by themselves
        ground = page.run("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") is not dark
        sound(page, live.url)
        page.picture(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 20_000


def test_every_field_has_a_name_and_a_wrong_value_is_marked_with_what_the_service_says(browser: Browser) -> None:
    with LiveApp(FakeEngine()) as live:
        page = browser.open(f"{live.url}/")
        page.wait(SERVING)
        names = page.run("[...document.querySelectorAll('input, select')].every((f) => f.labels?.length || f.ariaLabel)")
        assert names
        field = "document.querySelector('[aria-label=\"candidates.item[1]\"]')"
        page.run("document.getElementById('more').click()")
        values = {"context.user": "1", "candidates.item[0]": "5", "candidates.item[1]": "six"}
        for path, value in values.items():
            page.run(f"document.querySelector('[aria-label={json.dumps(path)}]').value = {json.dumps(value)}")
        page.run("document.getElementById('score').click()")
        page.wait("document.getElementById('fault').textContent")
        assert page.text("fault") == "candidates.item[1]: got 'six', expected an integer or null"
        assert page.run(f"{field}.ariaInvalid") == "true"
        assert page.run("document.activeElement.ariaLabel") == "candidates.item[1]"
        page.run(f"{field}.value = '6'")
        tags = "document.querySelector('[aria-label=\"candidates.tags[0]\"]')"
        page.run(f'{tags}.value = \'["x", "y"]\'')
        page.run("document.getElementById('score').click()")
        page.wait("document.querySelector('tr.scores')")
        assert page.run("document.querySelectorAll('[aria-invalid]').length") == 0
        assert json.loads(page.text("request"))["candidates"]["tags"] == [["x", "y"], None]
        shown = page.run("[...document.querySelectorAll('tr.scores td')].map((cell) => Number(cell.textContent))")
        assert shown == [0.005, 0.006]


def test_an_id_of_64_bits_is_sent_digit_for_digit(browser: Browser) -> None:
    with LiveApp(FakeEngine()) as live:
        page = browser.open(f"{live.url}/")
        page.wait(SERVING)
        page.run("document.querySelector('[aria-label=\"context.user\"]').value = '9007199254740993'")
        page.run("document.getElementById('score').click()")
        page.wait("document.getElementById('fault').textContent")
        assert '"user": 9007199254740993}' in page.text("request")
        parsed = page.run("import('./page/api.js').then((api) => String(api.parse('[18446744073709551615]')[0]))")
        assert parsed == "18446744073709551615"


def test_text_of_a_schema_or_a_profile_is_never_markup(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "fake.json").write_text(json.dumps(trace(MARKUP, model=MARKUP, gpu=MARKUP)))
    with LiveApp(FakeEngine(version="<b>7"), profiles=tmp_path) as live:
        page = browser.open(f"{live.url}/")
        page.wait(SERVING)
        page.wait("document.querySelector('svg.timeline')")
        assert page.text("state") == "Serving fake <b>7"
        assert MARKUP in page.text("profile-about")
        assert MARKUP in page.text("profile")
        assert page.run("document.querySelectorAll('img, b').length") == 0
        assert page.run("window.hit === undefined")
        sound(page, live.url)


def test_with_tokens_the_page_asks_for_one_and_keeps_it_nowhere(browser: Browser, tmp_path: Path) -> None:
    tokens = made(tmp_path / "tokens.yaml", both=["score", "metrics"], ranker=["score"])
    with LiveApp(FakeEngine(), gate=Gate(str(tmp_path / "tokens.yaml"))) as live:
        page = browser.open(f"{live.url}/")

        def give(token: str) -> None:
            page.wait("!document.getElementById('token-form').hidden")
            page.run(f"document.getElementById('token').value = {json.dumps(token)}")
            page.run("document.querySelector('#token-form button').click()")

        page.wait("!document.getElementById('token-form').hidden")
        assert page.text("token-why") == "authorization: got no bearer token, expected one bearer token"
        assert page.run("document.querySelector('#candidates input')") is None
        give("dpi_wrong")
        page.wait("document.getElementById('token-why').textContent.includes('unknown token')")
        give(tokens["ranker"])
        page.wait(SERVING)
        page.wait("document.getElementById('live-about').textContent.includes(\"without the scope 'metrics'\")")
        page.reload()
        give(tokens["both"])
        page.wait(SERVING)
        page.wait("document.getElementById('live-about').textContent.includes('heard from')")
        kept = "JSON.stringify([document.cookie, localStorage.length, sessionStorage.length, location.href])"
        assert json.loads(page.run(kept)) == ["", 0, 0, f"{live.url}/"]
        assert page.run("document.getElementById('token').value") == ""
        assert httpx.get(f"{live.url}/v1/recent", headers=bearing(tokens["both"])).status_code == 200


def test_of_several_models_one_is_shown_and_asked_and_a_new_version_is_told(browser: Browser) -> None:
    with LiveApp(FakeEngine(name="a"), FakeEngine(("click", "buy"), name="b")) as live:
        page = browser.open(f"{live.url}/")
        page.wait(SERVING)
        assert page.text("state") == "Serving a 7, b 7"
        page.run("document.getElementById('model').value = '1'")
        page.run("document.getElementById('model').dispatchEvent(new Event('change'))")
        page.run("document.querySelector('[aria-label=\"context.user\"]').value = '1'")
        for name, value in columns(1).items():
            path = json.dumps(f"[aria-label='candidates.{name}[0]']")
            text = json.dumps(json.dumps(value[0]) if isinstance(value[0], list) else str(value[0]))
            page.run(f"document.querySelector({path}).value = {text}")
        page.run("document.getElementById('score').click()")
        page.wait("document.querySelectorAll('tr.scores').length === 2")
        assert page.run("[...document.querySelectorAll('tr.scores th')].map((cell) => cell.textContent)") == ["click", "buy"]
        assert page.text("timing").startswith("b 7, ms: ")
        live.models["b"] = ServedModel.of(FakeEngine(("click", "buy"), "b", "8"), live.batchers["b"], live.limits)
        page.wait("document.getElementById('state').textContent === 'Serving a 7, b 8 (this page shows a 7, b 7: reload it)'")


def test_a_quantile_of_counts_by_bucket_lies_where_the_requests_do(browser: Browser) -> None:
    with LiveApp(FakeEngine()) as live:
        page = browser.open(f"{live.url}/")
        page.wait(SERVING)
        counts = "[50, 40, 0, 10, 0], [1, 2, 3, 4]"
        found = "import('./page/plots.js').then((plots) => [0.25, 0.5, 0.9, 0.95, 1].map((q) => plots.quantile(q, %s)))"
        assert page.run(found % counts) == [0.5, 1, 2, 3.5, 4]
        assert page.run(found % "[0, 0], [1]") == [None] * 5


def test_replicas_that_answered_are_added_up_and_one_that_is_long_gone_is_not(browser: Browser) -> None:
    def answer(replica: str, now: float, scored: int) -> dict[str, Any]:
        seconds = [
            {"at": int(now) - 1 - i, "scored": scored, "failed": 0, "rows": 7 * scored, "latency": [0, scored]}
            for i in range(10)
        ]
        return {"replica": replica, "now": now, "serving": {}, "bounds_ms": [1, 2], "seconds": seconds}

    heard = [answer("gone", 500.0, 1000), answer("a", 900.2, 4), answer("a", 1000.2, 2), answer("b", 1000.2, 3)]
    with LiveApp(FakeEngine()) as live:
        page = browser.open(f"{live.url}/")
        page.wait(SERVING)
        script = """import('./page/plots.js?apart').then((plots) => {
          const pictures = [0, 1].map(() => document.createElementNS('http://www.w3.org/2000/svg', 'svg'));
          for (const answer of %s) plots.hear(answer);
          return plots.plot(...pictures);
        })"""
        said = page.run(script % json.dumps(heard))
    assert (
        said == "5.00 requests and 35.0 rows a second, p50 1.50 ms, p99 1.99 ms; of the last ten seconds, 2 replicas heard from"
    )


def test_the_page_and_its_files_are_served_with_a_policy_that_lets_nothing_else_in() -> None:
    async def body(client: httpx.AsyncClient) -> None:
        page = await client.get("/")
        assert page.headers["content-type"].startswith("text/html")
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert "*" not in policy
        for path in ("/page/main.js", "/page/page.css"):
            answer = await client.get(path)
            assert answer.status_code == 200
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
        for path in ("/page/", "/page/../recent.py", "/page/none.js", "/page"):
            assert (await client.get(path)).status_code == 404

    Service().run(body)


def test_a_profile_that_is_not_there_or_none_is_404_with_what_writes_it(tmp_path: Path) -> None:
    with pytest.raises(NoProfile, match="profiles: got no folder in the configuration"):
        Profiles(None).read("m")
    stored = Profiles(str(tmp_path))
    with pytest.raises(NoProfile, match=r"profiles: got 'No such file or directory', expected m.json .*dpiframe profile"):
        stored.read("m")
    for content in ("", "[]", '{"traceEvents": {}, "otherData": {}}', "{" * 5000):
        (tmp_path / "m.json").write_text(content)
        with pytest.raises(NoProfile, match="got a file of another kind"):
            stored.read("m")
    (tmp_path / "m.json").write_text(json.dumps(trace()))
    assert json.loads(stored.read("m")) == trace()


def test_what_dpiframe_profile_writes_is_a_profile(demo_bundle: Path, tmp_path: Path) -> None:
    from deployments.cli.profile_command import write_profile

    write_profile(demo_bundle, 16, tmp_path / "demo.json", None, "cpu", None)
    read = json.loads(Profiles(str(tmp_path)).read("demo"))
    assert {"model", "version", "rows", "precision", "device", "date"} <= set(read["otherData"])
    assert [e for e in read["traceEvents"] if e["ph"] == "X"]
