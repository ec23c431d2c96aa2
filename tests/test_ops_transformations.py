"""Every marked operation under every JAX transformation, against plain JAX."""

import functools
import os
import pathlib
import runpy
import subprocess
import sys

import jax
import numpy as np
import ops_catalogue as catalogue
import pytest

from braintrace._etrace_op import ETP_PRIMITIVES
from braintrace._jax import open_jaxpr, sub_jaxprs

ROOT = pathlib.Path(__file__).parent.parent


def markers(jaxpr):
    """Names of the marker primitives in a jaxpr, bodies included."""
    names = set()
    for equation in open_jaxpr(jaxpr)[0].eqns:
        if equation.primitive in ETP_PRIMITIVES:
            names.add(equation.primitive.name)
        for body in sub_jaxprs(equation):
            names |= markers(body)
    return names


def assert_trees_close(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_allclose(left, right, rtol=2e-5, atol=2e-5)


@functools.cache
def results_of(transformation):
    """Marked and plain results by primitive; one compilation serves all operations."""
    arguments = {o.primitive: (o.x, o.weights) for o in catalogue.OPERATIONS}
    functions = {
        o.primitive: (transformation.apply(o.marked), transformation.apply(o.plain))
        for o in catalogue.OPERATIONS
    }

    def all_of_them(arguments):
        return {name: [f(*arguments[name]) for f in both] for name, both in functions.items()}

    return (catalogue.quick_jit if transformation.jit else lambda f: f)(all_of_them)(arguments)


@pytest.mark.parametrize("operation", catalogue.OPERATIONS, ids=lambda o: o.primitive)
@pytest.mark.parametrize("transformation", catalogue.TRANSFORMATIONS, ids=lambda t: t.name)
def test_operation_under_transformation(operation, transformation):
    got, want = results_of(transformation)[operation.primitive]
    assert_trees_close(got, want)
    if transformation.marker is not None:
        marked = transformation.apply(operation.marked)
        found = markers(jax.make_jaxpr(marked)(operation.x, operation.weights))
        expected = getattr(operation, transformation.marker)
        assert found == (set() if expected is None else {expected})


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
import compilation
import ops_catalogue as catalogue

compilation.compile_in_a_hurry()
assert jax.device_count() == 8
mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
for operation in catalogue.OPERATIONS:
    x = jnp.concatenate([(1 + 0.1 * i) * jnp.atleast_2d(operation.x) for i in range(8)])
    mapped = jax.vmap if operation.x.ndim == 1 else (lambda f, in_axes: f)

    def loss(f):
        f = mapped(f, in_axes=(0, None))
        return lambda x, w: jax.lax.psum(jnp.sum(jnp.sin(f(x, w))), "d")

    def sharded(f):
        specs = dict(mesh=mesh, in_specs=(P("d"), P()), out_specs=(P(), P()))
        return jax.jit(jax.shard_map(jax.value_and_grad(loss(f), argnums=1), **specs))

    got = sharded(operation.marked)(x, operation.weights)
    plain = mapped(operation.plain, in_axes=(0, None))
    want = jax.jit(jax.value_and_grad(lambda w: jnp.sum(jnp.sin(plain(x, w)))))(operation.weights)
    for left, right in zip(*map(jax.tree.leaves, (got, want))):
        np.testing.assert_allclose(left, right, rtol=2e-4, atol=1e-5)
    print(operation.primitive)
"""


def test_shard_map_over_eight_devices():
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    run = subprocess.run(
        [sys.executable, "-c", SHARDED], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split() == [operation.primitive for operation in catalogue.OPERATIONS]


def test_the_coverage_page_is_that_of_this_table():
    script = runpy.run_path(str(ROOT / "docs" / "make_coverage.py"), run_name="make_coverage")
    assert (ROOT / "docs" / "coverage.md").read_text() == script["render"]()
