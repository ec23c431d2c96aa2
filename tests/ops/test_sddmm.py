"""Sums of sampled products: what large sparse matrices learn by, block by block."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close
from jax.experimental import sparse as jax_sparse
from jax.extend.core import jaxpr_as_fun
from operation_cases import BATCH, CASES, Diagonal, bptt, by_name, es_d_rtrl, loss
from ops_catalogue import quick_jit

import braintrace
from braintrace._etrace_op.sparse import pattern as sparse_pattern
from braintrace._etrace_op.sparse import sddmm as sddmm_module
from braintrace._etrace_op.sparse.sddmm import sddmm
from braintrace._jax import open_jaxpr, struct_of, sub_jaxprs

INPUTS, OUTPUTS, ENTRIES, BATCHES = 7, 6, 23, 3
GENERATOR = np.random.default_rng(0)
PLACES = GENERATOR.integers((INPUTS, OUTPUTS), size=(ENTRIES, 2))


def pattern(places=PLACES):
    entries = jnp.ones(len(places)), jax.device_put(places)
    matrix = jax_sparse.BCOO(entries, shape=(INPUTS, OUTPUTS))
    return sparse_pattern.sparse_pattern(matrix)


def factors(*lead, dtype=np.float32):
    x, f = (GENERATOR.normal(size=(*lead, size)) for size in (INPUTS, OUTPUTS))
    return jax.device_put(x.astype(dtype)), jax.device_put(f.astype(dtype))


def by_definition(x, f, places=PLACES):
    x, f = (np.pad(np.asarray(a, complex), [*[(0, 0)] * (a.ndim - 1), (0, 1)]) for a in (x, f))
    return sum(x[..., places[:, 0]] * f[..., places[:, 1]])


PATTERN = pattern()


def summed(x, f, sparse_mat=PATTERN):
    return quick_jit(lambda x, f: sddmm(x, f, sparse_mat))(x, f)


@pytest.fixture
def small_blocks(monkeypatch):
    """Let parts, pieces and blocks have remainders, and small matrices count as wide ones."""
    monkeypatch.setattr(sddmm_module, "WIDE", INPUTS)
    monkeypatch.setattr(sparse_pattern, "FEWEST_NEAR", 9)
    monkeypatch.setattr(sparse_pattern, "NEAR_PER_LINE", 1)
    monkeypatch.setattr(sddmm_module, "ROWS_AT_ONCE", 5)
    monkeypatch.setattr(sddmm_module, "PIECE", 2)
    monkeypatch.setattr(sddmm_module, "TERMS_AT_ONCE", 10)
    monkeypatch.setattr(sddmm_module, "MOST_TERMS", 100)
    monkeypatch.setattr(sddmm_module, "FEWEST_ROWS", 1)
    monkeypatch.setattr(sddmm_module, "FEWEST_ENTRIES", 1)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("lead", [(3,), (10,), (10, BATCHES)])
@pytest.mark.parametrize(("wide", "piece"), [(INPUTS, 2), (INPUTS + 1, 16)])
def test_sums_of_parts_and_blocks(wide, piece, lead, monkeypatch):
    monkeypatch.setattr(sddmm_module, "WIDE", wide)
    monkeypatch.setattr(sddmm_module, "PIECE", piece)
    monkeypatch.setattr(sddmm_module, "MANY_ROWS", 10 if piece == 16 else 2**8)
    x, f = factors(*lead)
    found = summed(x, f)
    np.testing.assert_allclose(found, by_definition(x, f), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("by", [0, 1])
def test_blocks_are_sorted_by_the_index_that_is_scattered(by):
    places = PLACES[np.lexsort(PLACES.T[::-1] if by == 0 else PLACES.T)]
    rows, columns, at = pattern(places).by_block
    np.testing.assert_array_equal(np.stack([rows, columns], 1)[at], places)
    scattered = (columns, rows)[by]
    for start in range(0, ENTRIES, sparse_pattern.FEWEST_NEAR):
        assert np.all(np.diff(scattered[start : start + sparse_pattern.FEWEST_NEAR]) >= 0)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("lead", [(10,), (10, BATCHES)])
def test_the_form_of_other_platforms(lead, monkeypatch):
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *a, default, **_: default(*a))
    x, f = factors(*lead)
    found = summed(x, f)
    np.testing.assert_allclose(found, by_definition(x, f), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "complex64"])
def test_sums_are_in_single_precision_at_least(dtype):
    with jax.enable_x64(dtype == "float64"):
        x, f = factors(10, dtype=dtype)
        found = summed(x, f)
        assert found.dtype == jnp.promote_types(dtype, "float32")
        tolerance = {"bfloat16": 5e-2, "float64": 1e-12}.get(dtype, 1e-5)
        np.testing.assert_allclose(found, by_definition(x, f), rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("small_blocks")
def test_padding_and_numbers_that_are_not_finite():
    places = PLACES.copy()
    places[::5] = INPUTS, OUTPUTS
    x, f = factors(10)
    x, f = map(np.array, (x, f))
    x[3, 2], f[5, 1] = np.nan, np.inf
    found = np.asarray(summed(x, f, pattern(places)))
    touched = (places[:, 0] == 2) | (places[:, 1] == 1)
    np.testing.assert_array_equal(np.isfinite(found), ~touched)
    expected = by_definition(np.nan_to_num(x), np.nan_to_num(f, posinf=0), places)
    np.testing.assert_allclose(found[~touched], expected[~touched], rtol=1e-4, atol=1e-5)
    assert not np.any(found[::5])


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("algorithm", ["d_rtrl", "es_d_rtrl"])
def test_learning_block_by_block(algorithm):
    (case,) = (case for case in CASES if case.name == "sparse_matmul with bias")
    options = {"decay_or_rank": 0.7} if algorithm == "es_d_rtrl" else {}
    expected = es_d_rtrl(case, alpha=0.7) if options else bptt(case)
    inputs = case.inputs[0]
    learner = braintrace.compile(Diagonal(case), algorithm, inputs, batch_size=BATCH, **options)
    for chunk in (2, 4):
        learner.reset_state(BATCH)
        found = learner.etrace_grad(
            case.inputs, step_fn=lambda x: loss(learner(x)), reduction="sum", chunk_size=chunk
        )
        assert_gradients_close(by_name(found), expected, 1e-5, f"chunks of {chunk}")


def equations_within(jaxpr):
    for equation in open_jaxpr(jaxpr)[0].eqns:
        yield equation
        for body in sub_jaxprs(equation):
            yield from equations_within(body)


class Recurrent(brainstate.nn.Module):
    """Leaky units that read each other through few connections."""

    def __init__(self, units, entries):
        super().__init__()
        places = np.random.default_rng(0).integers((units, units), size=(entries, 2))
        shape = {"shape": (units, units)}
        self.matrix = jax_sparse.BCOO((jnp.ones(entries), jax.device_put(places)), **shape)
        self.w = brainstate.ParamState(jnp.ones(entries))
        self.units = units

    def init_state(self, batch_size=None):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, self.units)))

    def update(self, x):
        y = braintrace.sparse_matmul(self.h.value, self.w.value, sparse_mat=self.matrix)
        self.h.value = 0.9 * self.h.value + jnp.tanh(y + x)
        return self.h.value


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(("algorithm", "wide"), [("d_rtrl", 1), ("es_d_rtrl", 2**15)])
def test_nothing_of_all_entries_times_all_steps_is_held(algorithm, wide, monkeypatch):
    units, entries, steps, batch = 600, 20_000, 32, 1
    monkeypatch.setattr(sddmm_module, "WIDE", wide)
    monkeypatch.setattr(sddmm_module, "TERMS_AT_ONCE", 2**12)
    monkeypatch.setattr(sddmm_module, "MOST_TERMS", 2**12)
    xs = jnp.ones((steps, batch, units))
    learner = braintrace.compile(Recurrent(units, entries), algorithm, xs[0], batch_size=batch)

    def gradient(xs):
        return learner.etrace_grad(xs, step_fn=lambda x: loss(learner(x)), chunk_size=steps // 2)

    jaxpr, _ = brainstate.transform.make_jaxpr(gradient)(xs)
    equations = equations_within(jaxpr)
    largest = max(variable.aval.size for e in equations for variable in e.outvars)
    assert entries <= largest < entries * steps // 2
    arguments = [struct_of(variable.aval) for variable in open_jaxpr(jaxpr)[0].invars]
    compiled = jax.jit(jaxpr_as_fun(jaxpr)).lower(*arguments).compile()
    held = compiled.memory_analysis().temp_size_in_bytes
    assert 4 * entries <= held < 4 * entries * steps // 2
