"""Write `docs/coverage.md` from the table that the tests run.

    python docs/make_coverage.py

Every cell of the page is a case of `tests/test_ops_transformations.py`, which compares its
numbers with plain JAX and looks into the jaxpr for the primitive that the cell names.
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from ops_catalogue import OPERATIONS, TRANSFORMATIONS  # noqa: E402

HEAD = """# Which operation works under which transformation

Written by `python docs/make_coverage.py`; do not edit. A cell names the primitive that stands
in the jaxpr afterwards. `plain` means that the operation becomes its plain implementation: the
numbers are right, and a compiler sees no ETP operation there. `yes` means that the result is
a compiled or exported program, or a second derivative, which holds no primitive to look for.
`shard_map` over eight devices is tested for every operation, with its gradient.
"""


def cell(operation, transformation):
    """Return what one case of the table promises."""
    if transformation.marker is None:
        return "yes"
    primitive = getattr(operation, transformation.marker)
    return "plain" if primitive is None else f"`{primitive}`"


def render():
    """Return the page."""
    names = [f"`{operation.primitive}`" for operation in OPERATIONS]
    lines = [
        HEAD,
        "| transformation | " + " | ".join(names) + " |",
        "|---" * (1 + len(names)) + "|",
    ]
    for transformation in TRANSFORMATIONS:
        cells = [cell(operation, transformation) for operation in OPERATIONS]
        lines.append(f"| {transformation.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "coverage.md").write_text(render())
