"""`/docs` without the internet: what it loads is here, and the browser is told to load nothing else."""

import re
from html.parser import HTMLParser
from importlib.machinery import ModuleSpec
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import httpx
import pytest

from deployments.http_api import docs_page
from tests.deployments.serve.test_http_app import Service


class Addresses(HTMLParser):
    """What a page refers to, and the text of its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inline = ""
        self._in_script = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_script = tag == "script"
        self.found += [value for key, value in attrs if key in ("src", "href", "action", "srcset", "data") and value]

    def handle_data(self, data: str) -> None:
        self.inline += data.strip() if self._in_script else ""


def test_the_page_loads_what_this_application_answers_and_nothing_from_another_host() -> None:
    async def body(client: httpx.AsyncClient) -> None:
        page = await client.get("/docs")
        addresses = Addresses(page.text)
        loaded = [found for found in addresses.found if not found.startswith("data:")]
        assert len(loaded) == 3
        assert addresses.inline == ""
        start = (await client.get("/docs/start.js")).text
        (described,) = re.findall(r'url: "(.*?)"', start)
        assert "validatorUrl: null" in start
        for address in (*loaded, described):
            assert urlsplit(address)[:2] == ("", ""), address
            answer = await client.get(urljoin("/docs", address))
            assert answer.status_code == 200, address
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert not re.search(r"https?:|\*|script-src[^;]*unsafe", policy)
        assert "//" not in page.text + start
        styles = (await client.get("/docs/swagger-ui.css")).text
        assert {url[:5] for url in re.findall(r"url\([\"']?([^)]{5})", styles)} <= {"data:"}
        assert "@import" not in styles
        for path in ("/docs/swagger-ui-bundle.js", "/docs/start.js"):
            assert "javascript" in (await client.get(path)).headers["content-type"]
        for path in ("/redoc", "/docs/", "/docs/../openapi.py", "/docs/redoc.standalone.js"):
            assert (await client.get(path)).status_code == 404, path

    Service().run(body)


@pytest.mark.parametrize("wheel", ["none", "without its files"])
def test_without_the_wheel_the_page_is_a_line_that_says_where_the_description_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: str
) -> None:
    spec = ModuleSpec("fastapi_offline", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(docs_page, "find_spec", lambda name: None if wheel == "none" else spec)

    async def body(client: httpx.AsyncClient) -> None:
        page = await client.get("/docs")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/plain; charset=utf-8")
        assert (
            page.text
            == "The API is described in openapi.json, beside this page. To read it here: pip install fastapi-offline\n"
        )
        assert (await client.get("/openapi.json")).status_code == 200
        assert (await client.get("/docs/swagger-ui.css")).status_code == 404

    Service().run(body)
