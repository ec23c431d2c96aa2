"""Every operation gives the values of plain JAX: for all leading axes, dtypes, and units."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from operations import BY_NAME, OPERATIONS, assert_close, markers, normal

import braintrace

ROWS = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)


@ROWS
def test_leading_axes_are_batch_axes(operation):
    inputs = [operation.inputs(*lead) for lead in ((), (2,), (2, 3), (0,))]

    @jax.jit
    def both(p):
        return [[f(x, p) for x in inputs] for f in (operation.marked, operation.plain)]

    assert_close(*both(operation.p))
    assert markers(operation.marked, inputs[1], operation.p)


@pytest.mark.parametrize(
    "equation",
    [
        "bk,kn->bn",
        "k,kn->n",
        "kb,nk->nb",
        "btk,kmhn->bhmtn",
        "gk,gkn->gn",
        "tgbkh,nhgk->hbtng",
        " ... g k , gkn -> g ... n ",
        "btk,kmn->bn",  # letters of one operand alone
        ",n->n",
        "tbg,ngm->gtmnb",  # nothing is summed over
        "bgh,g->hb",  # nothing is free
        "bs,sn->bn",  # an axis of length one
        "bk,kkn->bn",  # diagonals
        "bb,kbk->bk",
    ],
)
def test_einsum_is_that_of_numpy(equation):
    spelled = equation.replace(" ", "").replace("...", "tb")
    size = {"b": 2, "t": 5, "k": 3, "n": 4, "m": 3, "g": 2, "h": 3, "s": 1}
    letters = spelled.split("->")[0].split(",")
    x, w = (normal(i, *(size[a] for a in own)) for i, own in enumerate(letters))
    y = jax.jit(functools.partial(braintrace.einsum, equation))(x, w)
    np.testing.assert_allclose(y, np.einsum(spelled, x, w), rtol=1e-5, atol=1e-5)
    assert markers(functools.partial(braintrace.einsum, equation), x, w)


@pytest.mark.parametrize("shape", [(5, 4), (5,), (5, 2, 3), (5, 0)])
def test_embedding_returns_rows_of_the_table(shape):
    table = np.float32(normal(0, *shape))
    each = [np.asarray(i, "int8") for i in ([[4, 0, 1], [1, 3, 3]], [], 2)]
    found = jax.jit(lambda w: [braintrace.embedding(indices, w) for indices in each])(table)
    for rows, indices in zip(found, each, strict=True):
        np.testing.assert_array_equal(rows, table[indices])


def test_an_index_beyond_the_table_gives_nan_and_no_gradient():
    indices, table = np.array([-1, 3, 300, -4], np.int16), np.float32(normal(0, 3, 2))
    y, pull_back = jax.vjp(lambda w: braintrace.embedding(indices, w), table)
    np.testing.assert_array_equal(y[0], table[2])
    assert np.isnan(y[1:]).all()
    np.testing.assert_array_equal(pull_back(jnp.ones((4, 2)))[0], [[0, 0], [0, 0], [1, 1]])


@pytest.mark.parametrize("name", ["matmul", "conv 1-D", "sparse_matmul", "grouped_matmul"])
@pytest.mark.parametrize(
    ("of_x", "of_p"),
    [
        ("bfloat16", "float32"),
        ("float32", "bfloat16"),
        ("float16", "float16"),
        ("int32", "float32"),
        ("complex64", "float32"),
        ("complex64", "complex64"),
    ],
)
def test_results_have_the_promoted_dtype(name, of_x, of_p):
    operation = BY_NAME[name]
    x = (4 * operation.inputs(2)).astype(of_x) * (1 + 0.5j if "complex" in of_x else 1)
    x = x.astype(of_x)
    p = {key: value.astype(of_p) for key, value in operation.p.items()}
    found = jax.jit(operation.marked)(x, p)
    assert found.dtype == jnp.promote_types(of_x, of_p)
    wide = jnp.promote_types(found.dtype, np.float32)
    expected = operation.plain(x.astype(wide), {k: v.astype(wide) for k, v in p.items()})
    tolerance = 2e-2 if "16" in of_x + of_p else 1e-5
    assert_close(found.astype(wide), expected, tolerance)


def test_element_wise_without_a_function_is_its_operand():
    w = normal(0, 3, 2)
    np.testing.assert_array_equal(braintrace.element_wise(w), np.float32(w))
    assert braintrace.element_wise(2.0).shape == ()


# --- functions of operands ------------------------------------------------------------------------


def square(w):
    return w**2


def halved(b):
    return 0.5 * b


X, W, B = normal(0, 2, 3), normal(1, 3, 4), normal(2, 4)
WITH_FUNCTIONS = {
    "matmul": lambda w, b, **f: braintrace.matmul(X, w, b, **f),
    "conv": lambda w, b, **f: braintrace.conv(
        X[:, None], w[None], b, dimension_numbers=("NWC", "WIO", "NWC"), **f
    ),
    "grouped_matmul": lambda w, b, **f: braintrace.grouped_matmul(
        X[:, None], w[None], b[None], **f
    ),
    "einsum": lambda w, b, weight_fn=None, **_: (
        b + braintrace.einsum("bk,kn->bn", X, w, weight_fn=weight_fn)
    ),
    "embedding": lambda w, b, weight_fn=None, **_: (
        b + braintrace.embedding(jnp.array([2, 0]), w, weight_fn=weight_fn)
    ),
    "element_wise": lambda w, b, weight_fn=None, **_: (
        b + braintrace.element_wise(w, weight_fn=weight_fn)
    ),
}


@pytest.mark.parametrize("name", WITH_FUNCTIONS)
def test_functions_of_operands_are_applied_first(name):
    operation = WITH_FUNCTIONS[name]
    has_bias_fn = name in ("matmul", "conv", "grouped_matmul")
    found = operation(W, B, weight_fn=square, bias_fn=halved)
    assert_close(found, operation(square(W), halved(B) if has_bias_fn else B))


def test_a_function_makes_the_operand_of_several_arrays():
    pair = {"size": jnp.abs(W), "sign": jnp.sign(W)}
    found = braintrace.matmul(X, pair, weight_fn=lambda p: p["size"] * p["sign"])
    assert_close(found, braintrace.matmul(X, W))


# --- units ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("transform", [lambda f: f, jax.vmap], ids=["whole", "vmap"])
@ROWS
def test_units_change_no_number(operation, transform):
    x, p = operation.inputs(2), operation.with_units()
    run = jax.jit(transform(lambda x: operation.marked(x * u.mV, p)))
    found = run(x)
    assert u.get_unit(found).has_same_dim(operation.unit)
    assert_close(found.to_decimal(operation.unit), operation.plain(jnp.asarray(x), operation.p))


@ROWS
def test_a_gradient_has_the_unit_of_loss_over_parameter(operation):
    x, p = operation.inputs(2), operation.with_units()

    def loss(f, x, unit):
        return lambda p: ((f(x, p) / unit) ** 2).sum() * unit**2

    found = jax.jit(u.autograd.grad(loss(operation.marked, x * u.mV, operation.unit)))(p)
    expected = jax.jit(jax.grad(loss(operation.plain, x, 1.0)))(operation.p)
    for name, gradient in found.items():
        unit = operation.unit**2 / u.get_unit(p[name])
        assert u.get_unit(gradient).has_same_dim(unit)
        scale = u.get_mantissa(p[name]).max() / operation.p[name].max()
        assert_close(u.Quantity(gradient).to_decimal(unit) * scale, expected[name], 1e-4)


def test_units_that_cancel_leave_a_plain_array():
    found = braintrace.matmul(X * u.mV, W / u.volt)
    assert not isinstance(found, u.Quantity)
    np.testing.assert_allclose(found, 1e-3 * X @ W, rtol=1e-5)


def test_element_wise_keeps_the_unit_that_its_function_returns():
    w = np.float32(normal(0, 3))
    squared = braintrace.element_wise(w * u.mV, fn=lambda w: w**2)
    np.testing.assert_allclose(squared.to_decimal(u.mV**2), w**2, rtol=1e-6)
    made = braintrace.element_wise(w, fn=lambda w: jnp.exp(w) * u.ms)
    np.testing.assert_allclose(made.to_decimal(u.ms), np.exp(w), rtol=1e-6)
