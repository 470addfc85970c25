"""MkDocs calls this: it adds the pages that are not in docs/, and rewrites the links of all pages.

`mkdocs.yml` names it. What a link becomes is decided in `links`.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tools.site.links import EXTRA_FOLDERS, EXTRA_PAGES, LinkLeavesSiteError, rewrite

PROJECT = Path(__file__).resolve().parents[2]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and examples that are elsewhere in the project."""
    examples = [path for folder in EXTRA_FOLDERS for path in sorted((PROJECT / folder).rglob("*")) if path.is_file()]
    for path in [*(PROJECT / page for page in EXTRA_PAGES), *examples]:
        if "__pycache__" not in path.parts:
            files.append(File.generated(config, path.relative_to(PROJECT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the page's links from those of the tree to those of the site.

    Raises:
        PluginError: a link leads to a file that the site does not have.
    """
    try:
        return rewrite(markdown, page.file.src_uri, [file.src_uri for file in files])
    except LinkLeavesSiteError as error:
        raise PluginError(str(error)) from error
