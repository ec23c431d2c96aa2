"""Stored verdicts of the compiler on the model catalogue.

``pytest tests/test_verdicts.py --update`` writes ``tests/verdicts.txt`` again. Compare each changed
line with the model by hand before you commit it.
"""

import pathlib
import re
import warnings

import brainstate
import catalogue_cells  # noqa: F401 (adds its models)
import catalogue_foreign  # noqa: F401
import catalogue_spiking  # noqa: F401
import jax.numpy as jnp
import pytest
from catalogue_models import BATCH, ENTRIES

import braintrace

pytestmark = pytest.mark.usefixtures("float64")
STORED = pathlib.Path(__file__).parent / "verdicts.txt"


def verdict_of(entry):
    """Return the relations, hidden groups and diagnostics of a model, one in each line."""
    x = jnp.ones((BATCH, *entry.shape))
    with warnings.catch_warnings(), brainstate.environ.context(precision=64):
        warnings.simplefilter("ignore", braintrace.ApproximationWarning)
        graph = braintrace.compile(entry.build(), "d_rtrl", x, **dict(entry.options)).graph
    lines = []
    for relation in graph.hidden_param_op_relations:
        groups = [states_of(group) for group in relation.hidden_groups]
        lines.append(f"{relation.key} -> {' | '.join(groups)}")
    lines += [f"group: {states_of(group)}" for group in graph.hidden_groups]
    for diagnostic in graph.diagnostics:
        place = re.search(r"\((.*)\)$", diagnostic.source or "")
        where = f" in {place[1].rpartition('.')[2]}" if place else ""
        paths = ", ".join(diagnostic.paths)
        lines.append(f"{diagnostic.level}, {diagnostic.kind}: {paths}{where}")
    return "\n".join(lines)


def states_of(group):
    return ", ".join(state.name for state in group.hidden_states)


def read_stored():
    parts = STORED.read_text().split("\n\n") if STORED.exists() else []
    return dict(part.strip().split("\n", 1) for part in parts)


def test_verdicts(request):
    pytest.importorskip("brainpy")  # with all extras, so that every model can be made
    verdicts = {f"# {entry.name}": verdict_of(entry) for entry in ENTRIES}
    if request.config.getoption("--update"):
        STORED.write_text("\n\n".join(f"{k}\n{v}" for k, v in verdicts.items()) + "\n")
    assert verdicts == read_stored()
