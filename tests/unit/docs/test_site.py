"""The site is built without a warning, loads nothing from other hosts, and its links are those of the tree."""

from __future__ import annotations

import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.environments import OwnEnvironment, variables
from tools.site.diagrams import DIAGRAMS
from tools.site.links import LinkLeavesSiteError, project_path, rewrite, site_path

PROJECT = Path.cwd()
SOURCES = ["index.md", "install.md", "charts/ppojob/README.md", "examples/00-smallest/README.md",
           "examples/00-smallest/ppojob.yaml", "ARCHITECTURE.md"]  # fmt: skip
LOADS = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}
BUILD_LIMIT_SECONDS = 300


class Loads(HTMLParser):
    """Collects what a browser loads with a page, without links that a reader may follow."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag loads."""
        given = dict(attrs)
        if tag in LOADS and given.get("rel") not in ("canonical", "next", "prev", "edit"):
            self.found.append(given.get(LOADS[tag]) or "")


def loads(page: str) -> list[str]:
    """Return the addresses that a browser loads with a page."""
    parser = Loads()
    parser.feed(page)
    return parser.found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    python = OwnEnvironment("site", "docs", PROJECT / "requirements" / "docs.txt").python()
    command: list[str | Path] = [python, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    # No proxy leads anywhere: a build that asks another host fails.
    offline = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command,
        env={**variables(), **offline},
        capture_output=True,
        text=True,
        timeout=BUILD_LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_every_page_is_there_and_loads_nothing_from_other_hosts(site: Path) -> None:
    pages = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    addresses = {address for page in pages.values() for address in loads(page)}

    assert {"index.html", "install/index.html", "examples/01-quickstart/index.html"} <= set(pages)
    assert {address for address in addresses if urlsplit(address).netloc} == set()
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"url\((?:https?:)?//[^)]*\)|@import", styles) == []


@pytest.mark.slow
def test_every_page_is_in_the_sidebar_by_its_title(site: Path) -> None:
    link = re.compile(r'<a href="([^"#]+)" class="md-nav__link[^>]*>\s*<span class="md-ellipsis">\s*([^<]*?)\s*<')
    sidebar = set(link.findall((site / "index.html").read_text()))
    navigation = Path("mkdocs.yml").read_text().partition("\nnav:")[2]
    titles = re.findall(r"- ([^:\n]+): ([\w/.-]+\.md)$", navigation, re.MULTILINE)
    named = set(re.findall(r"[\w/.-]+\.md", navigation))

    assert {path.name for path in Path("docs").glob("*.md")} - named == set()
    assert [(title, source) for title, source in titles if (_address(source), title) not in sidebar] == []


def _address(source: str) -> str:
    return f"{source.removesuffix('.md').removesuffix('README')}/".replace("//", "/")


def test_what_another_host_would_serve_is_found() -> None:
    page = '<link href="https://fonts.example/a.css"><a href="https://ok.example">x</a><script src="a.js">'

    assert loads(page) == ["https://fonts.example/a.css", "a.js"]


@pytest.mark.parametrize(
    ("source", "written", "shown"),
    [
        ("install.md", "[a](index.md)", "[a](index.md)"),
        ("install.md", "[a](../examples/00-smallest/ppojob.yaml)", "[a](examples/00-smallest/ppojob.yaml)"),
        ("install.md", "[a](../examples/00-smallest)", "[a](examples/00-smallest/README.md)"),
        ("install.md", "[a](../charts/ppojob/README.md#security)", "[a](charts/ppojob/README.md#security)"),
        ("install.md", "[a](../README.md)", "[a](index.md)"),
        ("install.md", "[a](#here) [b](https://example.org)", "[a](#here) [b](https://example.org)"),
        ("install.md", "```\n[a](nowhere.md)\n```\n", "```\n[a](nowhere.md)\n```\n"),
        ("examples/00-smallest/README.md", "[a](../../docs/install.md#x)", "[a](../../install.md#x)"),
        ("charts/ppojob/README.md", "[a](../../docs/install.md)", "[a](../../install.md)"),
        ("ARCHITECTURE.md", "[a](docs/install.md)", "[a](install.md)"),
    ],
)
def test_a_link_of_the_tree_becomes_one_of_the_site(source: str, written: str, shown: str) -> None:
    assert rewrite(written, source, SOURCES) == shown


def test_a_link_that_leaves_the_site_is_refused() -> None:
    with pytest.raises(LinkLeavesSiteError, match=r"docs/install\.md: \.\./Makefile: the site does not have this file"):
        rewrite("[a](../Makefile)", "install.md", SOURCES)


@pytest.mark.parametrize("source", SOURCES)
def test_a_source_has_one_place_in_the_project(source: str) -> None:
    assert site_path(project_path(source)) == source


@pytest.mark.parametrize("name", DIAGRAMS)
def test_a_picture_is_the_one_that_is_drawn(name: str) -> None:
    """`make generate` writes them."""
    assert Path(f"docs/pictures/{name}.svg").read_text() == DIAGRAMS[name]().svg()
