"""Write `docs/_generated/coverage.md` from the table that the tests run.

    python docs/make_coverage.py

Every cell of the page is a case of `tests/ops/test_ops_transformations.py`, which compares its
numbers with plain JAX and looks into the jaxpr for the primitive that the cell names.
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from ops_catalogue import OPERATIONS, TRANSFORMATIONS  # noqa: E402

HEAD = """# Operations under transformations

Written by `python docs/make_coverage.py`; do not edit. Each cell is a test.

| Cell | Meaning |
|---|---|
| a name | the primitive in the jaxpr after the transformation |
| `plain` | the ordinary operation: the numbers are correct, and a compiler finds no ETP operation |
| `yes` | a compiled or exported program or a second derivative, which contains no primitive |

Tests also run every operation and its gradient under `shard_map` over eight devices.
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
    (ROOT / "docs" / "_generated" / "coverage.md").write_text(render())
