"""Hooks of mkdocs that build the site from pages written for GitHub, and from the files of the repository they link to.

- The title contains the package's version.
- If a page links to a file outside docs, the site contains this file under `repository/`, so no link leads to another
  host. Markdown becomes a page, any other text a page with its source, and a directory a list of its files. A picture
  is copied unchanged.
- `adr/index.md` lists the decisions.
- In the reference, names of pages in docstrings become links.
- Lists are adapted to Python-Markdown. Unlike GitHub, it requires a blank line before a list and four spaces for each
  level.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parent.parent
OUTSIDE: Final = "repository/"
"""Path on the site of the files outside docs."""
_ALWAYS: Final = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md")
"""Pages outside docs that the navigation contains."""
_PICTURES: Final = {".png", ".svg", ".gif"}
_LINK: Final = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
_NAMED_PAGE: Final = re.compile(r"\bdocs/([\w/]+\.md)\b")
_FENCE: Final = re.compile(r" *(`{3,})")
_ITEM: Final = re.compile(r"( *)([-*]|\d+\.) +")


def on_config(config: MkDocsConfig) -> None:
    """Put the version into the title without importing the package."""
    found = re.search(r'^VERSION: Final = "(.+)"', (ROOT / "tq_service/version.py").read_text(), re.MULTILINE)
    if found is None:
        raise ValueError("tq_service/version.py has no VERSION")
    config.site_name = f"{config.site_name} {found[1]}"


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the files outside docs that pages link to, and the list of decisions."""
    decisions = sorted(file.src_uri for file in files.documentation_pages() if file.src_uri.startswith("adr/"))
    files.append(File.generated(config, "adr/index.md", content=_list_of_decisions(decisions)))
    results = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("benchmarks/results/*.md")]
    left = {*_ALWAYS, *results}
    for file in files.documentation_pages():
        left |= _links_outside(f"docs/{file.src_uri}", file.content_string)
    added: set[str] = set()
    while left:
        added.add(name := left.pop())
        path = ROOT / name
        if path.suffix in _PICTURES:
            files.append(File.generated(config, OUTSIDE + name, abs_src_path=str(path)))
            continue
        if path.is_dir():
            content = _list_of_files(name)
            left |= _links_outside(f"{name}/index.md", content) - added
        elif path.suffix == ".md":
            content = path.read_text()
            left |= _links_outside(name, content) - added
        else:
            content = _source_page(name)
        files.append(File.generated(config, _uri_of(name), content=content))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to repository files into links within the site, and adapt lists to Python-Markdown."""
    uri = page.file.src_uri
    if uri.startswith(("adr/", OUTSIDE)):  # searches find guides before decisions and results of benchmarks
        page.meta.setdefault("search", {"boost": 0.5})
    name = uri.removeprefix(OUTSIDE) if uri.startswith(OUTSIDE) else f"docs/{uri}"
    if not (ROOT / name).exists() and not name.endswith("/index.md"):  # the source of a file
        return markdown

    def to_site(link: re.Match[str]) -> str:
        return posixpath.relpath(_uri_of(_target(name, link[1])), posixpath.dirname(uri) or ".")

    return python_markdown_lists(_LINK.sub(to_site, markdown))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the names of pages in docstrings, such as docs/errors.md, into links."""

    def link(name: re.Match[str]) -> str:
        file = files.get_file_from_path(name[1])
        return name[0] if file is None else f'<a href="{file.url_relative_to(page.file)}">{name[0]}</a>'

    return _NAMED_PAGE.sub(link, html) if page.file.src_uri.startswith("reference/") else html


def python_markdown_lists(markdown: str) -> str:
    """Indent the contents of list items by four spaces per level, and put a blank line before each list."""
    lines: list[str] = []
    columns: list[int] = []  # where the content of each item around this line begins
    fence = ""
    for line in markdown.split("\n"):
        indent = len(line) - len(line.lstrip(" "))
        item, mark = _ITEM.match(line), _FENCE.match(line)
        after_text = bool(lines and lines[-1])
        if not fence and line:
            if item and after_text and not columns:
                lines.append("")
            if item or mark or not after_text:  # any other line goes with the one above
                columns = [column for column in columns if column <= indent]
        depth = sum(column <= indent for column in columns)
        shift = 4 * depth - columns[depth - 1] if depth else 0
        lines.append(" " * (indent + shift) + line[indent:])
        if item and not fence:
            columns.append(item.end())
        if mark and (not fence or mark[1].startswith(fence)):
            fence = "" if fence else mark[1]
    return "\n".join(lines)


def _links_outside(name: str, markdown: str) -> set[str]:
    """Return the files outside docs that a page links to, as paths from the root."""
    targets = {_target(name, link) for link in _LINK.findall(markdown)}
    return {target for target in targets if not target.startswith(("docs/", "..")) and (ROOT / target).exists()}


def _target(name: str, link: str) -> str:
    """Return the file or directory to which a link in a file leads, as a path from the root."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(name), link))
    return f"{target}/README.md" if (ROOT / target / "README.md").is_file() else target


def _uri_of(name: str) -> str:
    """Return the URI of a repository file on the site."""
    uri = name.removeprefix("docs/") if name.startswith("docs/") else OUTSIDE + name
    if (ROOT / name).is_dir():
        return f"{uri}/index.md"
    return uri if name.startswith("docs/") or Path(name).suffix in {".md", *_PICTURES} else f"{uri}.md"


def _source_page(name: str) -> str:
    source, language = (ROOT / name).read_text().rstrip(), Path(name).suffix[1:] or "text"
    return f"---\nsearch:\n  exclude: true\n---\n# {name}\n\n````{language}\n{source}\n````\n"


def _list_of_files(name: str) -> str:
    names = sorted(path.name for path in (ROOT / name).iterdir() if path.is_file())
    return f"# {name}\n\n" + "".join(f"- [{each}]({each})\n" for each in names)


def _list_of_decisions(uris: list[str]) -> str:
    titles = [(ROOT / "docs" / uri).read_text().split("\n", 1)[0].removeprefix("# ") for uri in uris]
    links = [f"- [{title}]({posixpath.basename(uri)})" for title, uri in zip(titles, uris, strict=True)]
    return "# Decisions\n\nWhy it is built as it is: one page per decision.\n\n" + "\n".join(links) + "\n"
