"""Turns names in code type into links: `docs/fit.md` into the page by its title, `kvtailor.fit` into its reference.

Documents name each other by their paths, which is what a reader of the repository needs. On the site a page is reached
by its title, so the paths become that, and nothing has to be written twice.
"""

# mypy: disable-error-code="import-not-found,import-untyped,misc"
from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

import kvtailor

__all__ = ["page_named", "setup"]

# Documents of the repository that stand outside of `docs/`, and folders that have an index.
_ELSEWHERE = {
    "CHANGELOG.md": "changes",
    "CONTRIBUTING.md": "contribute",
    "LOG.md": "log",
    "docs/decisions/": "decisions",
    "docs/methods/": "methods",
}
_PUBLIC = re.compile(r"kvtailor\.(\w+)(?:\(.*\))?")
_LEFT_ALONE = (nodes.reference, addnodes.pending_xref, nodes.title, addnodes.desc_signature)


def setup(app: Sphinx) -> dict[str, Any]:
    """Change every page once it has been read."""
    app.connect("doctree-read", _linked)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def page_named(text: str, pages: Collection[str]) -> str | None:
    """Return the page that a path stands for, None where it stands for none.

    Args:
        text: a path from the repository's root.
        pages: all pages, by their paths in `docs/` without suffix.
    """
    if text in _ELSEWHERE:
        return _ELSEWHERE[text]
    page = text.removeprefix("docs/").removesuffix(".md")
    return page if text == f"docs/{page}.md" and page in pages else None


def _linked(app: Sphinx, doctree: nodes.document) -> None:
    here = app.env.docname
    for literal in list(doctree.findall(nodes.literal)):
        if _inside(literal):
            continue
        text = literal.astext()
        page, public = page_named(text, app.env.found_docs), _PUBLIC.fullmatch(text)
        if page is not None and page != here:
            literal.replace_self(_reference(here, "std", "doc", f"/{page}", nodes.inline(text, text), must=True))
        elif public is not None and public[1] in kvtailor.__all__:
            literal.replace_self(_reference(here, "py", "obj", f"kvtailor.{public[1]}", literal.deepcopy(), must=False))


def _inside(literal: nodes.literal) -> bool:
    above = literal.parent
    while above is not None:
        if isinstance(above, _LEFT_ALONE):
            return True
        above = above.parent
    return False


def _reference(here: str, domain: str, kind: str, target: str, shown: Any, *, must: bool) -> Any:
    found = addnodes.pending_xref(
        "", refdomain=domain, reftype=kind, reftarget=target, refdoc=here, refexplicit=False, refwarn=must
    )
    found += shown
    return found
