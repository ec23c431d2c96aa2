"""How Sphinx builds the site: `sphinx-build -W docs build/docs`."""

import inspect

import brainstate
from sphinx.util.inspect import stringify_signature

import braintrace

project = "braintrace"
author = copyright = "the braintrace developers"
release = braintrace.__version__
html_title = f"braintrace {release}"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
default_role = "autolink"  # single backquotes in docstrings: a link where one can be made

# The notebooks are committed with their outputs; docs/run_notebooks.py executes them.
nb_execution_mode = "off"
nb_merge_streams = True
nb_render_markdown_format = "myst"  # outputs may have tables
myst_enable_extensions = ["attrs_block", "colon_fence", "dollarmath"]
myst_heading_anchors = 3

autosummary_generate = True
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings give shapes and units, which types do not
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
# The methods that brainstate lists are documented as members.
napoleon_custom_sections = [("Methods", "params_style")]
templates_path = ["_templates"]
# Docstrings list their sources under "References" without a mark in the text, and several classes
# have attributes of one name.
suppress_warnings = ["ref.footnote", "ref.python"]

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/favicon.svg"
html_theme_options = {"top_of_page_buttons": []}
pygments_dark_style = "github-dark"  # the theme's own underlines names as if they were links
copybutton_exclude = ".linenos, .gp, .go"


def show_constructor(app, what, name, obj, options, signature, returns):
    """Show constructor arguments in place of the ``*args, **kwargs`` of brainstate's metaclass."""
    if not (inspect.isclass(obj) and issubclass(obj, brainstate.nn.Module)):
        return None
    _, *parameters = inspect.signature(obj.__init__).parameters.values()
    shown = inspect.Signature([p.replace(annotation=p.empty) for p in parameters])
    return stringify_signature(shown, show_annotation=False), None


def setup(app):
    app.connect("autodoc-process-signature", show_constructor)
