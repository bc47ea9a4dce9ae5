"""How Sphinx makes the documentation site: `make docs`, which writes it to `build/site`.

The API reference is made by autodoc with napoleon and not by autodoc2, which does not read Google's sections.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE / "extensions")]

from kvtailor.version import __version__  # noqa: E402

project = "kvtailor"
author = "kvtailor developers"
copyright = "kvtailor developers, Apache-2.0"
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "markdown_docstrings",
    "mathml",
    "named_pages",
]
exclude_patterns = ["cards", "extensions", "static"]

myst_enable_extensions = ["dollarmath"]
# GitHub's anchors of headings, to which the documents link.
myst_heading_anchors = 3

# Notebooks are kept without outputs, and run anew for every build: what they show is what the code does today.
nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_execution_show_tb = True
# Progress bars and warnings of libraries are no part of a page.
nb_output_stderr = "remove"

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = True
# A name between single backticks is code, as in Markdown.
default_role = "literal"

html_theme = "furo"
html_title = f"kvtailor {__version__}"
html_math_renderer = "mathml"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True

linkcheck_timeout = 20
linkcheck_workers = 4
