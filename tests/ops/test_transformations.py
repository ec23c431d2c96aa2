"""Every operation survives every transformation of JAX, keeps its mark, and can be unmarked.

The operations run together in one program for each transformation.
"""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from jax import export
from operations import BATCH, BY_NAME, OPERATIONS, assert_close, markers

import braintrace

NAMES = [o.name for o in OPERATIONS if o.name not in ("matmul on more axes", "conv 2-D")]
FEW = ["matmul", "conv 1-D", "sparse_matmul", "feedback_matmul"]
XS = {o.name: jnp.asarray(o.inputs(BATCH), jnp.float32) for o in OPERATIONS}
PS = {o.name: jax.tree.map(jnp.float32, o.p) for o in OPERATIONS}


def total(f):
    return lambda x, p: jnp.sum(jnp.sin(f(x, p)))


def stacked(tree):
    return jax.tree.map(lambda leaf: jnp.stack([leaf, -0.5 * leaf, 2 * leaf]), tree)


def jvp(f):
    return lambda x, p: jax.jvp(f, (x, p), (0.5 * x, jax.tree.map(jnp.sin, p)))


def hessian_product(f):
    gradient = jax.grad(total(f), 1)
    return lambda x, p: jax.jvp(lambda p: gradient(x, p), (p,), (p,))[1]


def map_last_axis(f):
    mapped = jax.vmap(f, (-1, None), -1)
    return lambda x, p: mapped(jnp.moveaxis(stacked(x), 0, -1), p)


def scan(f):
    def run(x, p):
        def step(carry, x):
            return carry + total(f)(x, p), None

        return jax.lax.scan(step, jnp.float32(0), stacked(x), reverse=True)[0]

    return jax.value_and_grad(run, (0, 1))


def cond(f):
    def run(x, p):
        y = jax.lax.cond(jnp.sum(x) < 1e6, f, lambda x, p: 2 * f(x, p), x, p)
        return jnp.sum(jnp.sin(y))

    return jax.value_and_grad(run, (0, 1))


def while_loop(f):
    def run(x, p):
        def body(carry):
            i, sum_ = carry
            return i + 1, sum_ + jnp.sum(f(x, p))

        return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, jnp.float32(0)))[1]

    return run


def custom_vjp(f):
    clipped = jax.custom_vjp(f)

    def backward(pull_back, cotangent):
        return pull_back(jnp.clip(cotangent, -0.5, 0.5))

    clipped.defvjp(lambda x, p: jax.vjp(f, x, p), backward)
    return jax.value_and_grad(total(clipped), (0, 1))


def custom_jvp(f):
    doubled = jax.custom_jvp(f)

    @doubled.defjvp
    def _(primals, tangents):
        y, tangent = jax.jvp(f, primals, tangents)
        return y, 2 * tangent

    return jax.value_and_grad(total(doubled), (0, 1))


TRANSFORMATIONS = {
    "jit": jax.jit,
    "grad": lambda f: jax.value_and_grad(total(f), (0, 1)),
    "jvp": jvp,
    "hessian": hessian_product,
    "vmap of inputs": lambda f: lambda x, p: jax.vmap(f, (0, None))(stacked(x), p),
    "vmap of the last axis": map_last_axis,
    "vmap of parameters": lambda f: lambda x, p: jax.vmap(f, (None, 0))(x, stacked(p)),
    "vmap of both": lambda f: lambda x, p: jax.vmap(f)(stacked(x), stacked(p)),
    "vmap of grad": lambda f: (
        lambda x, p: jax.vmap(jax.grad(total(f), 1), (0, None))(stacked(x), p)
    ),
    "checkpoint": lambda f: jax.grad(total(jax.checkpoint(f)), (0, 1)),
    "scan": scan,
    "cond": cond,
    "while_loop": while_loop,
    "custom_vjp": custom_vjp,
    "custom_jvp": custom_jvp,
}
UNMARKED = {"vmap of parameters", "vmap of both"}
"""Where weights differ by sample, which no mark of a product says."""


WITHIN = {"checkpoint", "scan", "cond", "while_loop", "custom_vjp", "custom_jvp"}
"""Of which the operations know nothing."""


def all_of(transformation, kind, names=NAMES):
    """One function of some operations."""

    def run(xs, ps):
        return {
            name: transformation(getattr(BY_NAME[name], kind))(xs[name], ps[name]) for name in names
        }

    return run


@pytest.mark.core
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_results_are_those_of_plain_jax(name):
    transformation = TRANSFORMATIONS[name]
    names = FEW if name in WITHIN else NAMES
    run = jax.jit(lambda *a: [all_of(transformation, k, names)(*a) for k in ("marked", "plain")])
    assert_close(*run(XS, PS), 2e-5)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_a_mark_stays_where_the_operation_does(name):
    transformation = TRANSFORMATIONS[name]
    for operation in map(BY_NAME.get, FEW if name in WITHIN else NAMES):
        x, p = XS[operation.name], PS[operation.name]
        found = markers(transformation(operation.marked), x, p)
        is_left = name not in UNMARKED or operation.name == "element_wise"
        assert found == (markers(operation.marked, x, p) if is_left else set()), operation.name


@pytest.mark.core
def test_gradients_are_lowered_for_all_platforms():
    traced = jax.jit(all_of(TRANSFORMATIONS["grad"], "marked")).trace(XS, PS)
    assert traced.lower(lowering_platforms=("cpu", "cuda", "tpu")).as_text()


def test_programs_are_exported_and_read_back():
    exported = export.export(jax.jit(all_of(jax.jit, "marked")))(XS, PS)
    if importlib.util.find_spec("flatbuffers"):  # JAX serializes through it
        exported = export.deserialize(exported.serialize())
    assert_close(exported.call(XS, PS), jax.jit(all_of(jax.jit, "plain"))(XS, PS))


# --- inline ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_inline_leaves_no_mark_and_the_same_results(name):
    """Of all operations without a transformation, and of one under each."""
    names = NAMES if name == "jit" else ["matmul"]
    marked = all_of(TRANSFORMATIONS[name], "marked", names)
    inlined = braintrace.inline(marked)
    assert not markers(inlined, XS, PS)
    assert_close(*jax.jit(lambda *a: (inlined(*a), marked(*a)))(XS, PS))


def test_inline_passes_quantities_and_keywords():
    x, w, b = np.ones((2, 3)) * u.mV, np.ones((3, 4)) * u.siemens, np.ones(4) * u.uA
    found = braintrace.inline(braintrace.matmul)(x, w, bias=b)
    assert u.get_unit(found).has_same_dim(u.mA)
    np.testing.assert_allclose(found.to_decimal(u.mA), 3.001)


def test_inline_names_what_it_cannot_rebuild():
    @jax.custom_batching.custom_vmap
    def mapped(x):
        return BY_NAME["matmul"].marked(x, PS["matmul"])

    @mapped.def_vmap
    def _(axis_size, in_batched, x):
        return BY_NAME["matmul"].marked(x, PS["matmul"]), True

    with pytest.raises(braintrace.PrimitiveError, match="custom_vmap"):
        braintrace.inline(mapped)(XS["matmul"])
