"""Sparse products of every size and format equal dense ones, and so do their gradients.

The form of a product depends on its size: segment sums, dense blocks, kernels of a processor, sums
block by block. Each row reaches others of them.
"""

import functools

import brainevent
import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from jax.experimental import sparse as jax_sparse

import braintrace

SMALL = ((7, 5), 12)
LARGE = ((600, 500), 20_000)
THIN = ((1_200, 900), 20_000)
WIDE = ((40_000, 30), 20_000)
SIZES = {
    "one sample": (SMALL, ()),
    "a few samples": (SMALL, (2,)),
    "positions": (SMALL, (2, 20)),
    "dense blocks": (((60, 50), 600), (20,)),
    "rows in blocks": (((300, 310), 50), (45,)),
    "kernel": (LARGE, (11,)),
    "kernel of single rows": (LARGE, (2,)),
    "kernel in parts": (THIN, (70,)),
    "sorted blocks": (THIN, (300,)),
    "wide": (WIDE, (9,)),
}


@functools.cache
def places_of(shape, entries):
    """Rows and columns, some of them twice and some of padding."""
    places = np.random.default_rng(0).integers(shape, size=(entries, 2))
    places[3] = places[4]
    places[6::50] = shape
    return places


@functools.cache
def matrix_of(shape, entries):
    places = jnp.asarray(places_of(shape, entries))
    return jax_sparse.BCOO((jnp.ones(entries), places), shape=shape)


def dense_of(data, shape, entries):
    rows, columns = places_of(shape, entries).T
    dense = np.zeros((shape[0] + 1, shape[1] + 1))
    np.add.at(dense, (rows, columns), data)
    return dense[:-1, :-1]


def drawn(shape, entries, lead):
    rng = np.random.default_rng(1)
    return rng.normal(size=(*lead, shape[0])), rng.normal(size=entries) / 4


def at_entries(gradient, shape, entries):
    """Of a dense gradient, what belongs to each entry."""
    rows, columns = places_of(shape, entries).T
    return np.pad(gradient, [(0, 1), (0, 1)])[rows, columns]


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in SIZES),
        *(("kernel", dtype) for dtype in ("float64", "complex64", "bfloat16")),
        ("dense blocks", "bfloat16"),
        ("sorted blocks", "float64"),
    ],
)
def test_values_and_gradients_are_those_of_the_dense_matrix(name, dtype):
    size, lead = SIZES[name]
    matrix = matrix_of(*size)
    with jax.enable_x64(dtype == "float64"):
        x, data = (np.asarray(jnp.asarray(a, dtype)) for a in drawn(*size, lead))

        @jax.jit
        def run(x, data):
            y, pull = jax.vjp(lambda *a: braintrace.sparse_matmul(*a, sparse_mat=matrix), x, data)
            return y, pull(y)

        y, (of_x, of_data) = run(x, data)
    assert {y.dtype, of_x.dtype, of_data.dtype} == {np.dtype(dtype)}
    wide = complex if dtype == "complex64" else float
    x, data = x.astype(wide), data.astype(wide)
    dense = dense_of(data.real, *size)
    expected = x @ dense
    rows = expected.reshape(-1, size[0][1])
    slopes = at_entries((x.reshape(len(rows), -1).T @ rows).real, *size)
    if dtype == "complex64":  # neither is conjugated
        slopes = slopes + 1j * at_entries((x.reshape(len(rows), -1).T @ rows).imag, *size)
    tolerance = {"bfloat16": 3e-2, "float64": 1e-12}.get(dtype, 1e-5)
    for found, wanted in ((y, expected), (of_x, expected @ dense.T), (of_data, slopes)):
        off = np.abs(np.asarray(found).astype(wide) - wanted).max()
        assert off <= tolerance * np.abs(wanted).max()


def test_transformations_of_a_kernel():
    shape, entries = LARGE
    x, data = (np.float32(a) for a in drawn(shape, entries, (11,)))
    dense, matrix = np.float32(dense_of(data, *LARGE)), matrix_of(*LARGE)

    @jax.jit
    def run(x, data):
        def f(x, data):
            return braintrace.sparse_matmul(x, data, sparse_mat=matrix)

        mapped = jax.vmap(f, (0, None))(jnp.stack([x, 2 * x]), data)
        tangent = jax.jvp(f, (x, data), (x, data))[1]
        looped = jax.lax.scan(lambda c, x: (c + f(x, data), None), 0 * f(x, data), x[None])[0]
        return mapped, tangent, looped

    y = x @ dense
    for found, wanted in zip(run(x, data), (np.stack([y, 2 * y]), 2 * y, y), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(y).max())


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_numbers_that_are_not_finite_reach_what_they_are_connected_with(size):
    x, data = (np.float32(a) for a in drawn(*size, (11,)))
    x[2, 1], matrix = np.nan, matrix_of(*size)

    @jax.jit
    def run(data):
        y, pull = jax.vjp(lambda data: braintrace.sparse_matmul(x, data, sparse_mat=matrix), data)
        return y, pull(jnp.ones_like(y))[0]

    found, slopes = run(data)
    reached = dense_of(np.ones(size[1]), *size)[1] > 0
    np.testing.assert_array_equal(np.isnan(found[2]), reached)
    assert np.isfinite(np.delete(found, 2, 0)).all()
    np.testing.assert_array_equal(np.isnan(slopes), places_of(*size)[:, 0] == 1)


MATRIX = np.array([[0.5, 0, 0, -1], [0, 0, 2, 0], [0, 0.3, 0, 0.7]], np.float32)
FORMATS = {
    "saiunit CSR": u.sparse.CSR.fromdense,
    "saiunit CSC": u.sparse.CSC.fromdense,
    "saiunit COO": u.sparse.COO.fromdense,
    "brainevent CSR": brainevent.CSR.fromdense,
    "brainevent CSC": brainevent.CSC.fromdense,
    "BCOO": jax_sparse.BCOO.fromdense,
    "BCOO with padding": functools.partial(jax_sparse.BCOO.fromdense, nse=9),
    "BCSR": jax_sparse.BCSR.fromdense,
    "BCSR with padding": functools.partial(jax_sparse.BCSR.fromdense, nse=9),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_the_entries_of_its_matrix(name):
    matrix = FORMATS[name](jnp.asarray(MATRIX))
    x, bias = np.float32(np.arange(6).reshape(2, 3)), np.arange(4.0)

    @jax.jit
    def run(data):
        y, pull = jax.vjp(
            lambda data: braintrace.sparse_matmul(x, data, sparse_mat=matrix, bias=bias), data
        )
        return y, pull(y)[0]

    y, slopes = map(np.asarray, run(matrix.data))
    np.testing.assert_allclose(y, x @ MATRIX + bias, rtol=1e-5)
    wanted = (x.T @ y)[MATRIX != 0]
    np.testing.assert_allclose(np.sort(slopes[slopes != 0]), np.sort(wanted), rtol=1e-5)


def by_kind(kind):
    """A matrix of brainevent with three rows."""
    entries, places = jnp.arange(1.0, 7.0).reshape(3, 2), jnp.array([[0, 2], [1, 2], [0, 1]])
    if kind != "TCSR":
        return getattr(brainevent, kind)(entries, places, shape=(3, 3))
    if not hasattr(brainevent, kind):
        pytest.skip("brainevent 0.3 has it")
    return brainevent.TCSR.fromcsr(brainevent.CSR.fromdense(jnp.asarray(MATRIX)))


@pytest.mark.parametrize("kind", ["FixedNumPerPre", "FixedNumPerPost", "TCSR"])
def test_matrices_of_brainevent_give_the_gradient_of_their_dense_form(kind):
    with jax.enable_x64(kind == "TCSR"):  # which has pointers of 64 bits
        matrix = by_kind(kind)
        x, data = jnp.arange(6, dtype=matrix.data.dtype).reshape(2, 3), matrix.data
        dense, pull = jax.vjp(lambda data: matrix.with_data(data).todense(), data)
        y, slopes = jax.vjp(lambda data: braintrace.sparse_matmul(x, data, sparse_mat=matrix), data)
        np.testing.assert_allclose(y, x @ dense, rtol=1e-6)
        np.testing.assert_allclose(slopes(y)[0], pull(x.T @ y)[0], rtol=1e-6)


def test_signs_of_a_matrix_with_a_fixed_number_of_connections():
    matrix = by_kind("FixedNumPerPost")
    layer = braintrace.nn.SparseLinear(matrix, w_sign=[1, -1, 1])
    signed = matrix.todense() * np.array([[1], [-1], [1]])
    np.testing.assert_allclose(layer(jnp.eye(3)), signed, rtol=1e-6)


def test_a_matrix_without_rows_and_columns_is_refused():
    for matrix in (
        brainevent.Dense(jnp.ones((3, 3))),
        brainevent.JITCScalarR(1.0, 0.5, 3, shape=(3, 3)),
    ):
        with pytest.raises(braintrace.DtypeError, match="todense"):
            braintrace.sparse_matmul(np.ones(3), jnp.ones(9), sparse_mat=matrix)


def test_one_weight_for_all_entries():
    matrix, x = FORMATS["saiunit CSR"](jnp.asarray(MATRIX)), np.ones(3, np.float32)
    y = braintrace.sparse_matmul(x, jnp.float32(2.0), sparse_mat=matrix)
    np.testing.assert_allclose(y, 2.0 * (MATRIX != 0).sum(0))


def test_equal_patterns_share_one_program():
    x = np.ones(3, np.float32)

    def text(matrix):
        run = jax.jit(lambda x: braintrace.sparse_matmul(x, jnp.ones(5), sparse_mat=matrix))
        return run.lower(x).as_text()

    first, second = (FORMATS["saiunit CSR"](jnp.asarray(scale * MATRIX)) for scale in (1, 2))
    assert text(first) == text(second)


# --- learning -------------------------------------------------------------------------------------


class Sparse(brainstate.nn.Module):
    """Leaky units behind a sparse product."""

    def __init__(self, size):
        super().__init__()
        self.units = size[0][1]
        self.matrix = matrix_of(*size)
        self.w = brainstate.ParamState(jnp.asarray(drawn(*size, ())[1], jnp.float32))

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, self.units)))

    def update(self, x):
        y = braintrace.sparse_matmul(x, self.w.value, sparse_mat=self.matrix)
        self.h.value = 0.8 * self.h.value + y
        return self.h.value


@pytest.mark.parametrize("size", [LARGE, THIN, WIDE], ids=["large", "thin", "wide"])
def test_large_matrices_learn_block_by_block(size):
    (inputs, _), _ = size
    steps, batch = 9, 3
    xs = np.random.default_rng(2).normal(size=(steps, batch, inputs)).astype(np.float32)
    learner = braintrace.compile(Sparse(size), "d_rtrl", xs[0], batch_size=batch)
    found = learner.etrace_grad(
        xs, step_fn=lambda x: (learner(x) ** 2).sum() / 2, reduction="sum", chunk_size=steps
    )
    dense = dense_of(np.asarray(learner.module.w.value, float), *size)
    h, filtered, expected = 0.0, 0.0, 0.0
    for x in xs.astype(float):  # the trace of entry (r, c) is that of its input alone
        h, filtered = 0.8 * h + x @ dense, 0.8 * filtered + x
        expected = expected + filtered.T @ h
    expected = at_entries(expected, *size)
    np.testing.assert_allclose(found["w",], expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.usefixtures("optimised")
def test_nothing_of_inputs_times_outputs_or_entries_times_steps_is_held():
    size = (3_000, 3_000), 20_000
    xs = jnp.ones((64, 1, 3_000))
    learner = braintrace.compile(Sparse(size), "es_d_rtrl", xs[0], batch_size=1)
    pure = learner.functional()

    def gradient(state, xs):
        return pure.grad(state, xs, step_fn=lambda x: learner(x).sum(), chunk_size=64)[1]

    program = jax.jit(gradient).lower(pure.state(), xs).compile()
    held = program.memory_analysis().temp_size_in_bytes
    assert held < 4 * min(3_000**2, 20_000 * 64)
