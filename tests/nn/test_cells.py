"""Cells follow their equations."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace import nn

BATCH, STEPS, INPUTS, UNITS = 2, 4, 3, 4

pytestmark = pytest.mark.usefixtures("float64")


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def split(parameters):
    """The part of a weight that multiplies the input, the recurrent part, and the bias."""
    return (*np.split(parameters["weight"], [INPUTS]), parameters["bias"])


def gru(p, x, h):
    r, z = np.split(sigmoid(np.hstack([x, h]) @ p["Wrz"]["weight"] + p["Wrz"]["bias"]), 2, -1)
    W_x, W_h, b = split(p["Wh"])
    return (1 - z) * h + z * np.tanh(x @ W_x + b + r * (h @ W_h))


def mgu(p, x, h):
    f = sigmoid(np.hstack([x, h]) @ p["Wf"]["weight"] + p["Wf"]["bias"])
    W_x, W_h, b = split(p["Wh"])
    return (1 - f) * h + f * np.tanh(x @ W_x + b + f * (h @ W_h))


def leaky(p, x, h):
    W_x, W_h, b = split(p["W"])
    return 0.7 * h + 0.3 * np.maximum(x @ W_x + h @ W_h + b, 0)


def independent(p, x, h):
    return np.maximum(x @ p["W"]["weight"] + p["W"]["bias"] + p["u"] * h, 0)


def minimal(p, x, h):
    z = np.tanh(x @ p["Wx"]["weight"] + p["Wx"]["bias"])
    u = sigmoid(np.hstack([h, z]) @ p["Wu"]["weight"] + p["Wu"]["bias"])
    return u * h + (1 - u) * z


def minimal_gru(p, x, h):
    z, candidate = np.split(x @ p["W"]["weight"] + p["W"]["bias"], 2, -1)
    return (1 - sigmoid(z)) * h + sigmoid(z) * candidate


def minimal_lstm(p, x, h):
    f, i, candidate = np.split(x @ p["W"]["weight"] + p["W"]["bias"], 3, -1)
    f, i = sigmoid(f), sigmoid(i)
    return f / (f + i) * h + i / (f + i) * np.sin(candidate)


def chaos_free(p, x, h):
    gates = sigmoid(np.hstack([x, h]) @ p["Wg"]["weight"] + p["Wg"]["bias"])
    theta, eta = np.split(gates, 2, -1)
    return theta * np.tanh(h) + eta * np.tanh(x @ p["W"]["weight"])


def eigenvalues(p):
    return np.exp(-np.exp(p["recurrence"]["nu"]) + 1j * np.exp(p["recurrence"]["theta"]))


def trace_units(p, x, h):
    """Real and imaginary part go through the nonlinearity one by one."""
    a, b = np.split(h, 2, -1)
    eigenvalue = eigenvalues(p)
    W_a, W_b = np.split(p["W"], 2, -1)
    drive = x @ (W_a + 1j * W_b)
    new = eigenvalue * (a + 1j * b) + np.sqrt(1 - np.abs(eigenvalue) ** 2) * drive
    return np.hstack([np.tanh(new.real), np.tanh(new.imag)])


CELLS = {
    "GRUCell": (lambda: nn.GRUCell(INPUTS, UNITS), gru),
    "MGUCell": (lambda: nn.MGUCell(INPUTS, UNITS), mgu),
    "LeakyRNN": (lambda: nn.LeakyRNN(INPUTS, UNITS, alpha=0.3), leaky),
    "IndRNN": (lambda: nn.IndRNN(INPUTS, UNITS), independent),
    "MinimalRNNCell": (lambda: nn.MinimalRNNCell(INPUTS, UNITS), minimal),
    "MiniGRU": (lambda: nn.MiniGRU(INPUTS, UNITS), minimal_gru),
    "MiniLSTM": (lambda: nn.MiniLSTM(INPUTS, UNITS, activation=jnp.sin), minimal_lstm),
    "CFNCell": (lambda: nn.CFNCell(INPUTS, UNITS), chaos_free),
    "RTUCell": (lambda: nn.RTUCell(INPUTS, UNITS, r_min=0.3), trace_units),
}


def in_double(build):
    """A cell with seeded parameters, and their values by name."""
    with brainstate.random.seed_context(4):
        cell = build()
    generator = np.random.default_rng(5)
    values = {}
    for path, state in cell.states(brainstate.ParamState).items():
        state.value = jax.tree.map(
            lambda leaf: jnp.asarray(leaf + 0.2 * generator.standard_normal(leaf.shape), float),
            state.value,
        )
        values[path[0]] = jax.tree.map(np.asarray, state.value)
    cell.init_state(BATCH)
    return cell, values


@pytest.mark.parametrize("name", CELLS)
def test_equations(name):
    build, equation = CELLS[name]
    cell, parameters = in_double(build)
    step, h = brainstate.transform.jit(cell), np.zeros((BATCH, UNITS))
    for x in np.random.default_rng(1).standard_normal((STEPS, BATCH, INPUTS)):
        h = equation(parameters, x, h)
        np.testing.assert_allclose(step(jnp.asarray(x)), h, rtol=0, atol=1e-12)
    assert np.abs(h).max() > 0.1


def test_gates_that_are_both_closed_have_a_quotient():
    cell = nn.MiniLSTM(1, 2, w_init=jnp.zeros((1, 6)), b_init=jnp.repeat(-1e4, 6), state_init=1.0)
    cell.init_state()
    np.testing.assert_allclose(cell(jnp.ones(1)), 0.5 - 0.5e4)


def test_a_linear_recurrent_unit_follows_its_equations():
    cell, p = in_double(lambda: nn.LRUCell(INPUTS, 2, num_hidden=UNITS, r_min=0.5))
    gamma = np.exp(p["recurrence"]["gamma"])
    B, C = p["B"][:, :UNITS] + 1j * p["B"][:, UNITS:], p["C"][:UNITS] - 1j * p["C"][UNITS:]
    step, h = brainstate.transform.jit(cell), np.zeros((BATCH, UNITS), complex)
    for x in np.random.default_rng(1).standard_normal((STEPS, BATCH, INPUTS)):
        h = eigenvalues(p) * h + gamma * (x @ B)
        y = step(jnp.asarray(x))
        np.testing.assert_allclose(cell.re.value + 1j * cell.im.value, h, rtol=0, atol=1e-12)
        np.testing.assert_allclose(y, (h @ C).real + x @ p["D"], rtol=0, atol=1e-12)


def test_initial_eigenvalues_lie_on_the_ring():
    cell = nn.LRUCell(INPUTS, 2, num_hidden=500, r_min=0.6, r_max=0.9, max_phase=0.5)
    found = eigenvalues({"recurrence": cell.recurrence.value})
    radius, angle = np.abs(found), np.angle(found)
    assert 0.6 <= radius.min() < 0.65 < 0.85 < radius.max() <= 0.9
    assert 0 < angle.min() < 0.05 < 0.45 < angle.max() <= 0.5 + 1e-6
    normalisation = np.exp(cell.recurrence.value["gamma"])
    np.testing.assert_allclose(normalisation, np.sqrt(1 - radius**2), rtol=1e-4)
