"""`inline` replaces every ETP operation, wherever it stands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit
from assertions import assert_trees_close
from jax import export
from jax.sharding import PartitionSpec
from ops_catalogue import OPERATIONS, TRANSFORMATIONS, array, markers, quick_jit

from braintrace._errors import PrimitiveError
from braintrace._etrace_op import inline, matmul

DENSE = OPERATIONS[0]
ARGUMENTS = (DENSE.x, DENSE.weights)
CONSTRUCTS = {
    "jit",
    "vmap over x",
    "jit(vmap(grad))",
    "checkpoint",
    "inside scan",
    "inside cond",
    "inside while_loop",
    "inside custom_vjp",
    "inside custom_jvp",
}
TRACEABLE = [
    transformation for transformation in TRANSFORMATIONS if transformation.name in CONSTRUCTS
]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.primitive)
def test_every_operation(operation):
    plain = inline(operation.marked)
    arguments = (operation.x, operation.weights)
    assert markers(jax.make_jaxpr(operation.marked)(*arguments))
    assert not markers(jax.make_jaxpr(plain)(*arguments))
    assert_trees_close(quick_jit(plain)(*arguments), operation.plain(*arguments))


@pytest.mark.parametrize("transformation", TRACEABLE, ids=lambda t: t.name)
def test_inside_every_transformation(transformation):
    plain = inline(transformation.apply(DENSE.marked))
    assert not markers(jax.make_jaxpr(plain)(*ARGUMENTS))
    oracle = transformation.apply(DENSE.plain)
    assert_trees_close(*quick_jit(lambda *a: (plain(*a), oracle(*a)))(*ARGUMENTS))


def custom_vjp_function(x, weights):
    @jax.custom_vjp
    def clipped(x, count, weights):
        return count * DENSE.marked(x, weights)

    def forward(x, count, weights):
        return clipped(x, count, weights), (x, weights)

    def backward(residuals, cotangent):
        pull = jax.vjp(DENSE.marked, *residuals)[1]
        x, weights = pull(jnp.clip(cotangent, -0.5, 0.5))
        return x, None, weights

    clipped.defvjp(forward, backward)
    return jnp.sum(jnp.sin(clipped(x, 3, weights)))


def custom_jvp_function(x, weights):
    @jax.custom_jvp
    def doubled(x, weights):
        return DENSE.marked(x, weights)

    @doubled.defjvp
    def _(primals, tangents):
        y, tangent = jax.jvp(DENSE.marked, primals, tangents)
        return y, 2 * tangent

    return jnp.sum(jnp.sin(doubled(x, weights)))


def checkpointed_function(x, weights):
    return jnp.sum(jnp.sin(jax.checkpoint(DENSE.marked)(x, weights)))


@pytest.mark.parametrize(
    "function", [custom_vjp_function, custom_jvp_function, checkpointed_function]
)
def test_custom_derivatives_are_kept(function):
    marked = jax.value_and_grad(function, argnums=(0, 1))
    derivative = jax.value_and_grad(inline(function), argnums=(0, 1))
    assert_trees_close(*quick_jit(lambda *a: (derivative(*a), marked(*a)))(*ARGUMENTS))
    assert not markers(jax.make_jaxpr(derivative)(*ARGUMENTS))


def test_loops_with_every_kind_of_operand():
    def total(x, weights):
        def step(carry, x_now):
            h, count = carry
            h = jnp.tanh(DENSE.marked(x_now, weights) + h)
            return (h, count + 1), h * count

        start = (jnp.zeros((2, 4)), 0)
        xs = jnp.stack([x, -x, 2 * x])
        (h, count), ys = jax.lax.scan(step, start, xs, reverse=True)
        limit = jnp.int32(2)
        bound = jax.lax.while_loop(
            lambda carry: carry[0] < limit,
            lambda carry: (carry[0] + 1, carry[1] + jnp.sum(DENSE.marked(x, weights))),
            (0, jnp.float32(0)),
        )
        return {"h": h, "count": count, "ys": ys, "bound": bound}

    plain = inline(total)
    assert not markers(jax.make_jaxpr(plain)(*ARGUMENTS))
    assert_trees_close(plain(*ARGUMENTS), total(*ARGUMENTS))


def test_shard_map_is_rebuilt():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (PartitionSpec("d"), PartitionSpec())
    sharded = jax.shard_map(DENSE.marked, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("d"))
    plain = inline(sharded)
    assert not markers(jax.make_jaxpr(plain)(*ARGUMENTS))
    assert_trees_close(quick_jit(plain)(*ARGUMENTS), DENSE.plain(*ARGUMENTS))


def test_quantities_and_keywords_pass():
    x, weight = array(0, 2, 3) * saiunit.mV, array(1, 3, 4) * saiunit.siemens
    got = inline(matmul)(x, weight, bias=array(2, 4) * saiunit.mA)
    want = matmul(x, weight, bias=array(2, 4) * saiunit.mA)
    assert saiunit.get_unit(got) == saiunit.get_unit(want)
    np.testing.assert_allclose(got.mantissa, want.mantissa, rtol=1e-6)


def test_export_of_an_inlined_function():
    exported = export.export(jax.jit(inline(DENSE.marked)))(*ARGUMENTS)
    assert_trees_close(exported.call(*ARGUMENTS), DENSE.plain(*ARGUMENTS))


def test_what_cannot_be_rebuilt_is_named():
    @jax.custom_batching.custom_vmap
    def mapped(x):
        return DENSE.marked(x, DENSE.weights)

    @mapped.def_vmap
    def _(axis_size, in_batched, x):
        return jax.vmap(DENSE.plain, (0, None))(x, DENSE.weights), True

    with pytest.raises(PrimitiveError, match="cannot rebuild `custom_vmap_call`"):
        inline(mapped)(DENSE.x)
