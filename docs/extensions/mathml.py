"""Formulas as MathML, which browsers show without a script, a font from elsewhere, or a network."""

# mypy: disable-error-code="import-not-found,import-untyped,misc"
from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

__all__ = ["setup"]

_log = logging.getLogger(__name__)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer "mathml"."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(_mathml(node, as_block=False))
    raise nodes.SkipNode


def _block(writer: Any, node: nodes.math_block) -> None:
    # A formula that is wider than a phone scrolls in its box, which keys can only do where it can be focused.
    box = '<div class="math-block" tabindex="0" role="group" aria-label="formula">'
    writer.body.append(f"{box}{_mathml(node, as_block=True)}</div>\n")
    raise nodes.SkipNode


def _mathml(node: Any, *, as_block: bool) -> str:
    try:
        found: str = tex2mathml(node.astext(), as_block=as_block)
    except MathError as error:
        _log.warning("this formula cannot be shown: %s", error, location=node)
        return str(node.astext())
    return found
