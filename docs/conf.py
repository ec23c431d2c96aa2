"""How Sphinx builds the site: `sphinx-build -W docs build/docs`."""

import inspect
import pathlib
import sys

import brainstate
import saiunit
from sphinx.util.inspect import stringify_signature

import braintrace

sys.path.insert(0, str(pathlib.Path(__file__).parent))

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
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

autosummary_generate = True
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings give shapes and units, which types do not
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
templates_path = ["_templates"]
# Docstrings list their sources under "References" without a mark in the text.
suppress_warnings = ["ref.footnote"]

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
copybutton_exclude = ".linenos, .gp, .go"


def include_benchmarks(app, docname, source):
    """Put every stored result behind the introduction of the benchmark page."""
    if docname != "benchmarks":
        return
    stored = sorted((pathlib.Path(app.srcdir).parent / "benchmarks" / "results").glob("*.md"))
    for path in stored:
        if "-quick" not in path.name:
            include = f"```{{include}} ../benchmarks/results/{path.name}"
            source[0] += f"\n{include}\n:heading-offset: 1\n:relative-images:\n```\n"


def public_bases(app, name, obj, options, bases):
    """Name bases as a user imports them, and leave out those that are private."""
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
    """Show what a module takes; brainstate's metaclass hides it behind ``*args, **kwargs``."""
    if not (inspect.isclass(obj) and issubclass(obj, brainstate.nn.Module)):
        return None
    _, *parameters = inspect.signature(obj.__init__).parameters.values()
    shown = [p.replace(annotation=p.empty, default=Shown.of(p.default)) for p in parameters]
    return stringify_signature(inspect.Signature(shown), show_annotation=False), None


class Shown(str):
    """A default value as one would write it."""

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
    app.connect("autodoc-process-bases", public_bases)
    app.connect("autodoc-process-signature", constructor_signature)
