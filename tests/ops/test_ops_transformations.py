"""Every ETP operation under every JAX transformation, against plain JAX."""

import functools
import itertools

import jax
import ops_catalogue as catalogue
import places
import pytest
from assertions import assert_trees_close
from ops_catalogue import markers

ROOT = places.ROOT
OPERATIONS = catalogue.OPERATIONS


SAME_MATHEMATICS = {
    **dict.fromkeys(["eager", "lower().compile()", "jax.export"], "jit"),
    "checkpoint": "grad",
    "linearize": "jvp",
}
"""What plain JAX gives under these, it gives under another one, which is compiled anyway."""

BY_NAME = {t.name: t for t in catalogue.TRANSFORMATIONS}


@functools.cache
def results_of(transformation):
    """Marked and plain results by primitive; one compilation serves all operations."""
    reference = SAME_MATHEMATICS.get(transformation.name)
    kinds = ["marked"] if reference else ["marked", "plain"]

    def together(kind):
        def function(xs, weights):
            return {
                o.primitive: getattr(o, kind)(xs[o.primitive], weights[o.primitive])
                for o in OPERATIONS
            }

        return function

    def one_by_one(xs, weights):
        return [
            {
                o.primitive: transformation.apply(getattr(o, kind))(
                    xs[o.primitive], weights[o.primitive]
                )
                for o in OPERATIONS
            }
            for kind in kinds
        ]

    xs = {o.primitive: o.x for o in OPERATIONS}
    weights = {o.primitive: o.weights for o in OPERATIONS}
    if transformation.jit:
        found = catalogue.quick_jit(one_by_one)(xs, weights)
    else:
        found = [transformation.apply(together(kind))(xs, weights) for kind in kinds]
    if transformation.name == "donated arguments":
        found = [{n: [results[0][n], results[1][n]] for n in xs} for results in found]
    return found[0], results_of(BY_NAME[reference])[1] if reference else found[1]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.primitive)
@pytest.mark.parametrize("transformation", catalogue.TRANSFORMATIONS, ids=lambda t: t.name)
def test_operation_under_transformation(operation, transformation):
    got, want = (results[operation.primitive] for results in results_of(transformation))
    assert_trees_close(got, want)


WITH_A_JAXPR = [t for t in catalogue.TRANSFORMATIONS if t.marker is not None]
NAMES = [t.name for t in WITH_A_JAXPR], [o.primitive for o in OPERATIONS]
MARKED = {
    *itertools.product(["jit", "grad", "vmap over x", "vmap over weights"], NAMES[1]),
    *itertools.product(NAMES[0], ["etp_mm", "etp_sp_mv"]),
}


@pytest.mark.rows(*map("-".join, MARKED))
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.primitive)
@pytest.mark.parametrize("transformation", WITH_A_JAXPR, ids=lambda t: t.name)
def test_the_marker_that_is_left(operation, transformation):
    marked = transformation.apply(operation.marked)
    found = markers(jax.make_jaxpr(marked)(operation.x, operation.weights))
    expected = getattr(operation, transformation.marker)
    assert found == (set() if expected is None else {expected})
