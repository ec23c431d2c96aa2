"""JAX's kernel for sparse matrices on a processor, and what runs where it is not to be used."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import sparse as jax_sparse

from braintrace._etrace_op import sparse_matmul
from braintrace._etrace_op.sparse import csr_kernel, product_forms
from braintrace._etrace_op.sparse.pattern import sparse_pattern

INPUTS, OUTPUTS, ENTRIES, BATCH = 7, 5, 12, 11
GENERATOR = np.random.default_rng(0)
PLACES = GENERATOR.integers((INPUTS, OUTPUTS), size=(ENTRIES, 2))
PLACES[3] = PLACES[4]  # entries at the same place add up
PLACES[6] = INPUTS, OUTPUTS  # padding
MATRIX = jax_sparse.BCOO((jnp.ones(ENTRIES), jax.device_put(PLACES)), shape=(INPUTS, OUTPUTS))


def operands(batch=BATCH, dtype=np.float32):
    arrays = (GENERATOR.normal(size=shape) for shape in ((batch, INPUTS), ENTRIES, OUTPUTS))
    return [jax.device_put(array.astype(dtype)) for array in arrays]


def product(x, entries, bias):
    return sparse_matmul(x, entries, sparse_mat=MATRIX, bias=bias)


def dense(x, entries, bias):
    matrix = jnp.zeros((INPUTS, OUTPUTS), entries.dtype)
    return x @ matrix.at[PLACES[:, 0], PLACES[:, 1]].add(entries, mode="drop") + bias


def uses_kernel(function, *arguments):
    return "cpu_csr" in jax.jit(function).lower(*arguments).as_text()


@pytest.fixture(autouse=True)
def small_matrices(monkeypatch):
    monkeypatch.setattr(csr_kernel, "FEWEST_ENTRIES", 1)
    monkeypatch.setattr(csr_kernel, "SAMPLES_AT_ONCE", 8)
    jax.clear_caches()
    yield
    jax.clear_caches()  # the sizes are no part of what JAX keeps programs by


@pytest.mark.parametrize(
    ("batch", "dtype"), [(7, "complex64"), (7, "float64"), (11, "float32"), (11, "float64")]
)
def test_the_kernel_gives_the_dense_product(batch, dtype):
    with jax.enable_x64(dtype == "float64"):
        arguments = operands(batch, dtype)
        assert uses_kernel(product, *arguments)
        found = jax.jit(product)(*arguments)
        assert found.dtype == dtype
        np.testing.assert_allclose(found, jax.jit(dense)(*arguments), rtol=1e-5, atol=1e-6)


def test_the_kernel_survives_transformations():
    def transformed(function):
        def all_of_them(x, *rest):
            mapped = jax.vmap(function, in_axes=(0, None, None))(jnp.stack([x, 2 * x]), *rest)
            tangent = jax.jvp(function, (x, *rest), (x, *rest))
            gradients = jax.grad(lambda *a: jnp.sum(jnp.sin(function(*a))), (0, 1, 2))(x, *rest)
            steps, _ = jax.lax.scan(
                lambda c, _: (c + function(x, *rest), None), 0 * x @ ZERO, None, 2
            )
            return mapped, tangent, gradients, steps

        return jax.jit(all_of_them)

    ZERO = np.zeros((INPUTS, OUTPUTS), np.float32)
    arguments = operands()
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, transformed(product)(*arguments), transformed(dense)(*arguments))


def test_numbers_that_are_not_finite_reach_what_they_are_connected_with():
    x, entries, bias = operands()
    connected = np.zeros((INPUTS + 1, OUTPUTS + 1), bool)
    connected[PLACES[:, 0], PLACES[:, 1]] = True
    for row in range(INPUTS):
        bad = np.array(x)
        bad[2, row] = np.nan
        found = np.asarray(jax.jit(product)(bad, entries, bias))
        np.testing.assert_array_equal(np.isnan(found[2]), connected[row, :OUTPUTS])
        assert np.isfinite(np.delete(found, 2, 0)).all()


@pytest.mark.parametrize(("rows", "in_blocks"), [(32, False), (33, True)])
def test_many_rows_are_taken_in_blocks(rows, in_blocks):
    """Features, of which there are more, have nothing to do with it."""
    pattern, entries = sparse_pattern(MATRIX), jax.device_put(np.ones(ENTRIES, np.float32))
    for x in (np.ones((rows, INPUTS), np.float32), np.ones((rows, 40, INPUTS), np.float32)):
        closed = jax.make_jaxpr(lambda x: product_forms.product_of_entries(x, entries, pattern))(x)
        assert ("platform_index" in str(closed)) == in_blocks


def test_scattered_sums_run_where_the_kernel_does_not_fit(monkeypatch):
    x, entries, bias = operands()
    halves = [np.asarray(array).astype(jnp.bfloat16) for array in (x, entries, bias)]
    few = np.asarray(x)[: csr_kernel.FEWEST_SAMPLES - 1], entries, bias
    for arguments in (halves, few, (x, halves[1], bias)):
        assert not uses_kernel(product, *arguments)
    exported = export.export(jax.jit(product))(x, entries, bias)
    assert "cpu_csr" not in exported.mlir_module()
    monkeypatch.setattr(csr_kernel, "has_csr_kernel", lambda: False)
    jax.clear_caches()
    assert not uses_kernel(product, x, entries, bias)
    found = jax.jit(product)(x, entries, bias)
    np.testing.assert_allclose(found, jax.jit(dense)(x, entries, bias), rtol=1e-5, atol=1e-6)
