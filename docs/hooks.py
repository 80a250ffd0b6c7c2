"""What MkDocs does to a page before it renders it: links to files outside docs/ become the file's path.

On a viewer of repositories such a link is followed. The site is read apart from the repository and has nowhere to lead.
"""

import logging
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<path>(?:\.\./)[^)#\s]*)(?:#[^)\s]*)?\)")
log = logging.getLogger("mkdocs.hooks")


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """MkDocs calls it with each page's text."""
    return without_outer_links(markdown, Path(page.file.abs_src_path))


def without_outer_links(markdown: str, source: Path) -> str:
    """`[figures](../benchmarks/RESULTS.md#cpu)` as figures (`benchmarks/RESULTS.md`); a link within docs/ stays as it is.

    A file that does not exist is logged as a warning, which ends a strict build.
    """

    def path_of(match: re.Match[str]) -> str:
        target = (source.parent / match["path"]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return match[0]
        if not target.exists():
            log.warning("%s: got a link to %s, expected a file of the repository", source.name, match["path"])
        name = target.relative_to(ROOT).as_posix()
        return f"`{name}`" if match["text"].strip("`") == name else f"{match['text']} (`{name}`)"

    return _LINK.sub(path_of, markdown)
