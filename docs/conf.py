"""How Sphinx builds the site: `sphinx-build -W docs build/docs`."""

import os

import braintrace

project = "braintrace"
author = copyright = "the braintrace developers"
release = braintrace.__version__
html_title = f"braintrace {release}"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
default_role = "autolink"  # single backquotes in docstrings: a link where one can be made
nb_execution_mode = "off"  # docs/run_notebooks.py executes and stores them
nb_merge_streams = True
myst_enable_extensions = ["attrs_block", "colon_fence", "dollarmath"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings give shapes and units, which types do not
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_custom_sections = [("Methods", "params_style")]  # brainstate lists its members so
templates_path = ["_templates"]
# References without a mark in the text, and attributes of several classes with one name.
suppress_warnings = ["ref.footnote", "ref.python"]
sites = {"jax": "docs.jax.dev/en/latest", "optax": "optax.readthedocs.io/en/latest"}
sites |= {name: f"{name}.readthedocs.io" for name in ("brainstate", "saiunit")}
if os.environ.get("INTERSPHINX"):  # links into other sites; without it, the build is offline
    intersphinx_mapping = {name: (f"https://{site}/", None) for name, site in sites.items()}

html_theme = "furo"
html_static_path = ["_static"]
html_extra_path = ["llms.txt"]  # a summary for language models, at the root of the site
html_css_files = ["site.css"]
html_favicon = "_static/favicon.svg"
pygments_dark_style = "github-dark"  # the theme's own underlines names as if they were links
