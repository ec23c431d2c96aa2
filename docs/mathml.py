"""Sphinx extension: formulas as MathML, which browsers show without a script from elsewhere."""

from docutils.nodes import SkipNode
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.errors import ExtensionError

# What docutils does not know under this name.
SYNONYMS = {r"\dots": r"\ldots", r"\lVert": r"\|", r"\rVert": r"\|"}


def to_mathml(latex, block):
    """Return a formula as MathML; several lines are aligned at their `&`."""
    for name, known in SYNONYMS.items():
        latex = latex.replace(name, known)
    if block and r"\\" in latex and r"\begin" not in latex:
        latex = rf"\begin{{aligned}} {latex} \end{{aligned}}"
    try:
        return tex2mathml(latex.strip(), as_block=block)
    except Exception as error:
        raise ExtensionError(f"The formula {latex!r} cannot be shown: {error}") from error


def visit_inline(self, node):
    self.body.append(to_mathml(node.astext(), block=False))
    raise SkipNode


def visit_block(self, node):
    self.body.append(f'<div class="math">{to_mathml(node.astext(), block=True)}</div>')
    raise SkipNode


def setup(app):
    app.add_html_math_renderer(
        "mathml", inline_renderers=(visit_inline, None), block_renderers=(visit_block, None)
    )
    return {"parallel_read_safe": True, "parallel_write_safe": True}
