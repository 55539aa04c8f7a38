"""Sphinx configuration. `uvx nox -s docs` builds; a warning is an error."""

import re
import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "packages/titan-train/tests/parallel"))
from refusals import table  # what the tests hold to be refused

project = "titan"
release = version_of("titan-train")
author = "The titan authors"
copyright = "2026, The titan authors"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
copybutton_prompt_text = "$ "
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"  # not what a command printed
exclude_patterns = ["_build", "concepts/_refused.md"]

# The list of refused combinations is asked of the code, each time the documentation is built.
_rows = "".join(f"| {what} | {reason} |\n" for what, reason in table())
_refused = Path(__file__).parent / "concepts" / "_refused.md"
_refused.write_text("| combination | what the user is told |\n| --- | --- |\n" + _rows, encoding="utf-8")

# no dollarmath: formulas would be drawn by a script from another server
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Docstrings are written for people who read them in an editor: `name` is code there.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
autoclass_content = "both"  # arguments are documented on __init__, or on the fields of a dataclass
python_maximum_signature_line_length = 96
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_include_init_with_doc = False
# Several classes have an attribute `ranks`; a type that is written `ranks` in one of them is no reference to another.
suppress_warnings = ["ref.python"]

html_theme = "furo"
html_title = f"titan {release}"
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {"color-brand-primary": "#2f6bde", "color-brand-content": "#2f6bde"},
    "dark_css_variables": {"color-brand-primary": "#6ea3ff", "color-brand-content": "#6ea3ff"},
}


def escape_bars(app, what, name, obj, options, lines):
    """Docstrings say ``<|endoftext|>``; reStructuredText would look for a substitution of that name."""
    for i, line in enumerate(lines):
        if not line.lstrip().startswith("|"):  # a table or a line block
            pieces = re.split(r"(`[^`]*`)", line)
            lines[i] = "".join(p if p.startswith("`") else p.replace("|", "\\|") for p in pieces)


def skip_aliases(app, what, name, obj, skip, options):
    """Leave out fields of named tuples that have no docstring: Python's own says "Alias for field number 0"."""
    return True if (obj.__doc__ or "").startswith("Alias for field number") else None


def setup(app):
    app.connect("autodoc-skip-member", skip_aliases)
    fields: dict[str, list[str]] = {}

    def keep(app, what, name, obj, options, lines):
        if what == "attribute":
            fields[name] = list(lines)

    def restore(app, what, name, obj, options, lines):
        # napoleon reads "What to train on: tables of …" under a field as "type: description"
        if name in fields:
            lines[:] = fields.pop(name)

    app.connect("autodoc-process-docstring", escape_bars, priority=300)
    app.connect("autodoc-process-docstring", keep, priority=400)  # napoleon's own is 500
    app.connect("autodoc-process-docstring", restore, priority=600)
