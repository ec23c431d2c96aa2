"""How Sphinx builds the site: `sphinx-build -W docs build/docs`."""

import inspect
import json
import os
import pathlib
import sys

import brainstate
import saiunit
from docutils import nodes
from sphinx.util.inspect import stringify_signature

import braintrace

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import hosting

project = "braintrace"
author = copyright = "the braintrace developers"
release = braintrace.__version__
html_title = f"braintrace {release}"

extensions = [
    "mathml",  # docs/mathml.py
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["README.md"]
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
templates_path = ["_templates"]
# Docstrings list their sources under "References" without a mark in the text, and several classes
# have attributes of one name, of which none is meant where another class lists its own.
suppress_warnings = ["ref.footnote", "ref.python"]

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/favicon.svg"
REPOSITORY = hosting.repository()
html_theme_options = {"top_of_page_buttons": []}
if REPOSITORY is not None:
    html_theme_options = {
        "source_repository": f"{REPOSITORY}/",
        "source_branch": "main",
        "source_directory": "docs/",
    }
pygments_dark_style = "github-dark"  # the theme's own underlines names as if they were links
html_math_renderer = "mathml"
copybutton_exclude = ".linenos, .gp, .go"


def include_benchmarks(app, docname, source):
    """Append every stored result to the introduction of the benchmark page."""
    if docname != "benchmarks":
        return
    stored = sorted((pathlib.Path(app.srcdir).parent / "benchmarks" / "results").glob("*.md"))
    for path in stored:
        if "-quick" not in path.name:
            machine = path.read_text().split("\n\n")[1].partition(". ")[0]
            include = f"```{{include}} ../benchmarks/results/{path.name}\n:start-line: 1"
            options = ":heading-offset: 1\n:relative-images:\n```"
            source[0] += f"\n## {machine}\n\n{include}\n{options}\n"


def link_notebooks(app, docname, source):
    """Put links to Colab and to the file below the title of a notebook."""
    folder, _, name = docname.rpartition("/")
    if folder == "notebooks":
        linked = hosting.with_links(json.loads(source[0]), name, REPOSITORY)
        source[0] = json.dumps(linked)


def write_notebooks(app, exception):
    """Put the notebooks into the site as Colab and other machines run them."""
    if exception is not None or app.builder.format != "html":
        return
    folder = pathlib.Path(app.outdir) / "colab"
    folder.mkdir(exist_ok=True)
    for path in (pathlib.Path(app.srcdir) / "notebooks").glob("*.ipynb"):
        notebook = json.loads(path.read_text())
        revision = os.environ.get("GITHUB_SHA", "HEAD")
        ready = hosting.for_colab(notebook, REPOSITORY, revision)
        (folder / path.name).write_text(json.dumps(ready, indent=1))


def keep_short_cells(app, doctree):
    """Keep a number and its unit on one line in wide tables."""
    for body in doctree.findall(nodes.tbody):
        for cell in body.findall(nodes.entry):
            if len(cell.astext()) <= 14:
                cell["classes"].append("short")


def public_bases(app, name, obj, options, bases):
    """Name public bases as a user imports them, and omit private ones."""
    rooms = {
        "braintrace": braintrace,
        "braintrace.nn": braintrace.nn,
        "brainstate.nn": brainstate.nn,
    }
    names = [
        f":py:class:`{room}.{base.__name__}`"
        for base in bases
        for room, module in rooms.items()
        if vars(module).get(base.__name__) is base
    ]
    module = ":py:class:`brainstate.nn.Module`"
    bases[:] = names or [module if issubclass(obj, brainstate.nn.Module) else ":py:class:`object`"]


def constructor_signature(app, what, name, obj, options, signature, returns):
    """Show constructor arguments in place of the ``*args, **kwargs`` of brainstate's metaclass."""
    if not (inspect.isclass(obj) and issubclass(obj, brainstate.nn.Module)):
        return None
    _, *parameters = inspect.signature(obj.__init__).parameters.values()
    shown = [p.replace(annotation=p.empty, default=Shown.of(p.default)) for p in parameters]
    return stringify_signature(inspect.Signature(shown), show_annotation=False), None


class Shown(str):
    """A default value as in source code."""

    __repr__ = str.__str__

    @classmethod
    def of(cls, value):
        if inspect.isfunction(value):
            return cls(value.__name__)
        if isinstance(value, type):
            return value if value is inspect.Parameter.empty else cls(value.__name__)
        if isinstance(value, brainstate.nn.init.Initializer):
            return cls(f"{type(value).__name__}()")
        return cls(value if isinstance(value, saiunit.Quantity) else repr(value))


def setup(app):
    app.connect("source-read", include_benchmarks)
    app.connect("source-read", link_notebooks)
    app.connect("doctree-read", keep_short_cells)
    app.connect("build-finished", write_notebooks)
    app.connect("autodoc-process-bases", public_bases)
    app.connect("autodoc-process-signature", constructor_signature)
