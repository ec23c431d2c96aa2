"""An index that no row of a table has gives JAX's gradient, in every mode of indexing."""

import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close
from backpropagation import through_time
from every_path import OF_SAMPLES, Paths, loss

import braintrace

ROWS, UNITS = 5, 4
INDICES = np.array([[0, 4], [1, -1], [7, 2], [-5, -6], [5, 3], [-20, 100]])
pytestmark = pytest.mark.usefixtures("float64")


class Table(brainstate.nn.Module):
    """Rows of a table, looked up in some way, into a leaky state."""

    def __init__(self, look_up):
        super().__init__()
        self.look_up = look_up
        values = np.random.default_rng(0).normal(size=(ROWS, UNITS))
        self.w = brainstate.ParamState(jnp.asarray(values))

    def init_state(self, batch_size=None, **_):
        lead = () if batch_size is None else (batch_size,)
        self.h = brainstate.HiddenState(jnp.zeros((*lead, UNITS)))

    def update(self, index):
        self.h.value = advanced(self.look_up, self.w.value, self.h.value, index)
        return jnp.tanh(self.h.value)


def advanced(look_up, w, h, index):
    """The state after a step."""
    row = look_up(w, index)
    row = jnp.where(jnp.isnan(row), 0.5, row)  # where there is none
    return 0.8 * h + jnp.sin(row)


def at(w, i, **options):
    return w.at[i].get(**options)


def of_a_column(w, i):
    return w.T[:, i].T if i.ndim else w.T[:, i]


def window(w, i):
    def one(i):
        return jax.lax.dynamic_slice(w, (i, 0), (2, UNITS)).sum(0)

    return jax.vmap(one)(i) if i.ndim else one(i)


def two_axes(w, i):
    return w[i][..., ::-1] * jnp.expand_dims(w[i, 2], -1)


LOOKUPS = {
    **{str(m): functools.partial(at, mode=m) for m in ("fill", "clip", "drop", None)},
    "promise_in_bounds": functools.partial(at, mode="promise_in_bounds"),
    "filled with a number": functools.partial(at, mode="fill", fill_value=3.0),
    "no negative indices": functools.partial(at, mode="fill", wrap_negative_indices=False),
    "an index": lambda w, i: w[i],
    "take": lambda w, i: jnp.take(w, i, axis=0),
    "take, wrapped": lambda w, i: jnp.take(w, i, axis=0, mode="wrap"),
    "a column": of_a_column,
    "a window": window,
    "two axes": two_axes,
    "an ETP operation": lambda w, i: braintrace.embedding(i, w),
}


@functools.cache
def paths_of(name):
    return Paths(functools.partial(Table, LOOKUPS[name]), INDICES)


@functools.cache
def step_of(name):
    def step(w, h, index):
        h = advanced(LOOKUPS[name], w, h, index)
        return h, loss(jnp.tanh(h))

    return step


@functools.cache
def wanted(name, of_samples=False):
    """The gradient by `jax.grad` through all steps: of all samples, or of one after the other."""
    w = paths_of(name).make().w.value
    parts = INDICES.T if of_samples else [INDICES]
    found = [through_time(step_of(name), w, np.zeros((*i.shape[1:], UNITS)), i) for i in parts]
    return {"w": np.sum(found, axis=0)}


@pytest.mark.parametrize("name", ["filled with a number", "take", "an ETP operation"])
@pytest.mark.core
def test_the_gradient_is_that_of_jax(name):
    assert_gradients_close(paths_of(name).sequence(), wanted(name), 1e-12, name)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("an index", Paths.sequence),
        ("an index", Paths.two_calls),
        ("an index", Paths.mapped_by_the_compiler),
        ("fill", Paths.after_a_reset),
        ("fill", Paths.stream),
        ("fill", Paths.own_gradient),
        ("fill", Paths.foreign_vmap),
    ],
)
def test_every_path(name, path):
    """JAX reads the row of a single index in another way, with another gradient."""
    expected = wanted(name, of_samples=path in OF_SAMPLES)
    assert_gradients_close(path(paths_of(name)), expected, 1e-12, name)
