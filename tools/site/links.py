"""Where a file of the project is on the site, and what a link between two files becomes there.

Pure; called by `hooks` and by the tests of the documents. Links in the tree are right for the tree: a page in docs/
links to `../examples/01-quickstart/ppojob.yaml`. The site has the pages of docs/ at its root and the other files at
their own paths, so links are rewritten when a page is rendered.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

DOCS = "docs"
HOME = "index.md"
EXTRA_PAGES = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "charts/ppojob/README.md")
"""Pages of the site that are not in docs/; beside them the site has every file of examples/."""
EXTRA_FOLDERS = ("examples",)

_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")


class LinkLeavesSiteError(ValueError):
    """A page links to a file that the site does not have."""


def site_path(path: str) -> str:
    """Return where a file of the project is on the site, as MkDocs names sources: `docs/install.md` is `install.md`."""
    if path == "README.md":
        return HOME
    return path.removeprefix(f"{DOCS}/")


def project_path(source: str) -> str:
    """Return the file of the project from which a source of the site comes."""
    is_extra = source in EXTRA_PAGES or source.split("/")[0] in EXTRA_FOLDERS
    return source if is_extra else f"{DOCS}/{source}"


def rewrite(markdown: str, source: str, sources: Iterable[str]) -> str:
    """Return a page's text with the links of the tree replaced by those of the site; code blocks stay as they are.

    Args:
        markdown: the page's text.
        source: its path on the site.
        sources: the paths of all files of the site.

    Raises:
        LinkLeavesSiteError: a link leads to a file that the site does not have.
    """
    known = set(sources)
    folder = PurePosixPath(project_path(source)).parent

    def replaced(match: re.Match[str]) -> str:
        target = os.path.normpath(folder / match[1])
        candidates = [site_path(target), f"{site_path(target)}/README.md"]
        found = next((each for each in candidates if each in known), None)
        if found is None:
            raise LinkLeavesSiteError(
                f"{project_path(source)}: {match[1]}: the site does not have this file: link to a page of docs/, to an "
                "example, or name the file without a link"
            )
        return os.path.relpath(found, PurePosixPath(source).parent) + (match[2] or "")

    return "".join(part if is_code else _LINK.sub(replaced, part) for part, is_code in _parts(markdown))


def _parts(markdown: str) -> Iterator[tuple[str, bool]]:
    """Yield the text in parts, and for each whether it is a code block."""
    end = 0
    for match in _FENCE.finditer(markdown):
        yield markdown[end : match.start()], False
        yield match[0], True
        end = match.end()
    yield markdown[end:], False
