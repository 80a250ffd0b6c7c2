"""What MkDocs does beside rendering docs/: it takes the records of benchmarks/results in, and mends links that leave docs/.

On a viewer of repositories such links are followed as they stand. The site is read apart from the repository: a link to a
record leads to its page here, and a link to any other file becomes that file's path.

A page that loads something from another host fails a strict build: the site is read where there is no network.
"""

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_LOADED = re.compile(r"<(?:(?:script|img|iframe|source)\b[^>]*\ssrc|link\b[^>]*\shref)=\"?(?:https?:)?//[^\">]+")
_OUTER_LINK = re.compile(r"(?P<text>\[[^\]]*\])\((?P<path>\.\./[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")
log = logging.getLogger("mkdocs.hooks")


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Each machine's RESULTS.md and its pictures, as results/MACHINE/."""
    for path in [*RESULTS.glob("*/RESULTS.md"), *RESULTS.glob("*/*.png")]:
        files.append(File.generated(config, _place(path) or "", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """MkDocs calls it with each page's text."""
    source, place = Path(page.file.abs_src_path or ""), page.file.src_uri
    if place.startswith("results/"):
        page.meta["search"] = {"exclude": True}  # tables of figures, which a search for words would drown in
    return mended(markdown, source, place)


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """MkDocs calls it with each page as it is written."""
    for loaded in loads_of(output):
        log.warning("%s: got %s, expected nothing that is loaded from another host", page.file.src_uri, loaded)
    return output


def loads_of(html: str) -> list[str]:
    """What a page has a browser load from other hosts: scripts, pictures, styles."""
    return [match[0] for match in _LOADED.finditer(html)]


def mended(markdown: str, source: Path, place: str) -> str:
    """The text of the page `source`, which the site has as `place`, with links that the site can follow.

    A file that does not exist is logged as a warning, which ends a strict build.
    """

    def link(match: re.Match[str]) -> str:
        target = (source.parent / match["path"]).resolve()
        if not target.exists():
            log.warning("%s: got a link to %s, expected a file of the repository", place, match["path"])
        if there := _place(target):
            return f"{match['text']}({posixpath.relpath(there, posixpath.dirname(place) or '.')}{match['anchor'] or ''})"
        name, text = target.relative_to(ROOT).as_posix(), match["text"][1:-1]
        return f"`{name}`" if text.strip("`/") == name else f"{text} (`{name}`)"

    return _OUTER_LINK.sub(link, markdown)


def _place(target: Path) -> str | None:
    """Where the site has a file of the repository."""
    if target.is_relative_to(ROOT / "docs"):
        return target.relative_to(ROOT / "docs").as_posix()
    if target.parent.parent == RESULTS and (target.name == "RESULTS.md" or target.suffix == ".png"):
        return target.relative_to(RESULTS.parent).as_posix()
    return None
