"""SnAp-n keeps what weights reach within n steps: all of it is RTRL, and less is RTRL masked."""

import tracemalloc

import brainstate
import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from assertions import assert_gradients_close, assert_gradients_differ
from drivers import build_algorithm, build_learner, named, sequence_gradient, weights_of
from matrices import csr

import braintrace

BATCH, STEPS = 2, references.LENGTH
DENSE = [cases.BY_NAME[name] for name in ("tanh_rnn",)]
MORE = [
    cases.BY_NAME[name]
    for name in ("leaky_rnn", "gru_reset_after", "lif_recurrent", "lstm_fused", "lstm_separate")
]


@pytest.mark.usefixtures("float64")
@cases.each(DENSE, MORE)
def test_a_dense_layer_saturates_in_two_steps(case):
    learner = build_learner(case, "snap", n=2, dtype=np.float64)
    _, _, xs, targets = references.arguments(case)
    for chunk_size in (1, 4):
        learner.reset_state(BATCH)
        found = sequence_gradient(learner, case, xs, targets, chunk_size=chunk_size)
        assert_gradients_close(found, references.bptt(case), 1e-10, f"{case.name}, {chunk_size}")
    report = learner.report()
    assert report.stored_bytes == report.possible_bytes
    assert not any(diagnostic.level == "warning" for diagnostic in report.diagnostics)


def test_an_entry_of_a_kernel_reaches_its_own_channel():
    class Convolution(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(jnp.ones((2, 1, 3)))

        def init_state(self, batch_size=None, **kwargs):
            self.h = brainstate.HiddenState(jnp.zeros((batch_size, 2, 5)))

        def update(self, x):
            self.h.value = 0.9 * self.h.value + jnp.tanh(braintrace.conv(x, self.w.value))
            return self.h.value

    learner = braintrace.compile(Convolution(), "snap", jnp.ones((2, 1, 5)), batch_size=2, n=2)
    pairs = 2 * (4 + 5 + 4)  # of both channels; at the edges there is no input
    assert learner.report().carried_bytes == 4 * BATCH * pairs


def test_a_large_parameter_that_is_summed_takes_little_memory():
    """Which entry reaches which element is no table then, and the gradient is exact."""

    class Pooled(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(jnp.linspace(-1, 1, 12000).reshape(4, 3000))

        def init_state(self, **_):
            self.h = brainstate.HiddenState(jnp.zeros(4))

        def update(self, x):
            gains = jnp.tanh(braintrace.element_wise(self.w.value))
            self.h.value = 0.5 * self.h.value + jnp.mean(gains * x, axis=-1)
            return self.h.value

    def loss(w):
        h = jnp.zeros(4)
        for x in xs:
            h = 0.5 * h + jnp.mean(jnp.tanh(w) * x, axis=-1)
        return jnp.sum(h**2)

    xs = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3000)), jnp.float32)
    model = Pooled()
    tracemalloc.start()
    try:
        learner = braintrace.compile(model, "snap", xs[0], n=2)
        assert tracemalloc.get_traced_memory()[1] < 30e6
    finally:
        tracemalloc.stop()
    for x in xs[:-1]:
        learner(x)
    found = brainstate.transform.grad(lambda: jnp.sum(learner(xs[-1]) ** 2), model.w)()
    expected = jax.grad(loss)(model.w.value)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-8)


def test_single_steps_streams_and_resets():
    case = cases.BY_NAME["tanh_rnn"]
    xs, targets = case.sequences(BATCH, STEPS)
    model, algorithm = build_algorithm(case, braintrace.SnAp, BATCH, n=2)
    gradient = brainstate.transform.jit(
        brainstate.transform.grad(
            lambda x, target: case.loss(algorithm(x), target), weights_of(model)
        )
    )
    steps = [named(gradient(*now)) for now in zip(xs, targets, strict=True)]
    found = jax.tree.map(lambda *leaves: sum(leaves), *steps)
    assert_gradients_close(found, references.bptt(case), 1e-5)

    learner = build_learner(case, "snap", n=2)
    learner.etrace_evolve(xs[:3])
    spoilt = jax.tree.map(lambda leaf: jnp.full_like(leaf, np.nan), learner.algorithm.traces.value)
    learner.algorithm.traces.value = spoilt
    reset, mask = np.zeros((STEPS, BATCH), bool), np.float32([0, 0, 0, 1, 2, 0.5])
    reset[3] = True
    found = sequence_gradient(learner, case, xs, targets, reset=reset, mask=mask, chunk_size=4)
    learner.reset_state(BATCH)
    expected = sequence_gradient(learner, case, xs[3:], targets[3:], mask=mask[3:])
    assert_gradients_close(found, expected, 1e-5)


# --- a sparse net -----------------------------------------------------------------------------

H, INPUTS, DENSITY = 40, 3, 0.05
CONNECTED = np.random.default_rng(0).random((H, H)) < DENSITY
MATRIX = csr(jnp.asarray(np.random.default_rng(1).normal(size=(H, H)) * CONNECTED, jnp.float32))
ROWS, COLUMNS = np.nonzero(CONNECTED)


class SparseNet(brainstate.nn.Module):
    """A leaky layer of which one unit in twenty is connected with another."""

    def __init__(self):
        super().__init__()
        w_in = np.random.default_rng(2).normal(size=(INPUTS, H)) / 2
        self.w_in = brainstate.ParamState(jnp.asarray(w_in, jnp.float32))
        self.w_rec = brainstate.ParamState(MATRIX.data)

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, H)))

    def update(self, x):
        recurrent = braintrace.sparse_matmul(self.h.value, self.w_rec.value, sparse_mat=MATRIX)
        drive = braintrace.matmul(x, self.w_in.value) + recurrent
        self.h.value = 0.5 * self.h.value + jnp.tanh(drive)
        return self.h.value


def plain_step(p, h, x):
    matrix = jnp.zeros((H, H)).at[ROWS, COLUMNS].set(p["w_rec"])
    return 0.5 * h + jnp.tanh(x @ p["w_in"] + h @ matrix)


def loss(h):
    return jnp.sum(h**2 * jnp.linspace(0.5, 1.5, h.shape[-1]))


def neighbours(n):
    """Which units each unit reaches within n steps, itself included."""
    reach = np.eye(H, dtype=bool)
    for _ in range(n - 1):
        reach = reach | reach @ (CONNECTED | np.eye(H, dtype=bool))
    return reach


def masked_recursion(step, parameters, masks, size, xs):
    """Real-time recurrent learning of each sample, its traces masked after every step.

    ``step(parameters, state, x)`` is that of one sample, whose state is a vector of some size.
    """
    facts = jax.jit(
        lambda S, x: (
            step(parameters, S, x),
            jax.jacrev(step, 1)(parameters, S, x),
            jax.jacrev(step)(parameters, S, x),
            jax.grad(loss)(step(parameters, S, x)),
        )
    )
    total = jax.tree.map(np.zeros_like, parameters)
    for sample in range(BATCH):
        S = jnp.zeros(size)
        eps = {name: np.zeros((size, *value.shape)) for name, value in parameters.items()}
        for x in xs[:, sample]:
            S, J, F, signal = facts(S, x)
            for name, mask in masks.items():
                eps[name] = mask * (np.tensordot(J, eps[name], 1) + F[name])
                total[name] = total[name] + np.tensordot(signal, eps[name], 1)
    return total


def literal(xs, n):
    reach = neighbours(n)
    parameters = {"w_in": SparseNet().w_in.value, "w_rec": MATRIX.data}
    masks = {"w_in": reach.T[:, None, :], "w_rec": reach.T[:, COLUMNS]}
    return masked_recursion(plain_step, parameters, masks, H, xs)


@pytest.mark.nightly
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_a_sparse_net_keeps_structural_neighbours(n):
    xs = jnp.asarray(np.random.default_rng(3).normal(size=(STEPS, BATCH, INPUTS)), jnp.float32)
    learner = braintrace.compile(SparseNet(), "snap", xs[0], batch_size=BATCH, n=n)
    counts = neighbours(n).sum(1)
    pairs = INPUTS * counts.sum() + counts[COLUMNS].sum()
    report, traces = learner.report(), jax.tree.leaves(learner.algorithm.traces.value)
    assert report.stored_bytes == 4 * BATCH * pairs == sum(leaf.nbytes for leaf in traces)
    assert report.possible_bytes == 4 * BATCH * H * (INPUTS * H + len(ROWS))
    expected = literal(xs, n)
    for chunk_size in (1, 4):
        learner.reset_state(BATCH)
        found = learner.etrace_grad(
            xs, step_fn=lambda x: loss(learner(x)), reduction="sum", chunk_size=chunk_size
        )
        assert_gradients_close({path[-1]: g for path, g in found.items()}, expected, 1e-5)
    assert_gradients_differ(expected, literal(xs, n + 1), 1e-4)


class Positions(brainstate.nn.Module):
    """Words at two positions of every sample, with a recurrent matrix each."""

    def __init__(self):
        super().__init__()
        draw = np.random.default_rng(5).normal
        self.table = brainstate.ParamState(jnp.asarray(draw(size=(INPUTS, 4)), jnp.float32))
        self.w = brainstate.ParamState(jnp.asarray(draw(size=(4, 4)), jnp.float32))
        self.w_rec = brainstate.ParamState(jnp.asarray(draw(size=(2, 4, 4)) / 4, jnp.float32))

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 2, 4)))

    def update(self, x):
        rows = braintrace.embedding(x, self.table.value)
        drive = braintrace.einsum("btk,kn->btn", x[..., None] + jnp.arange(4.0), self.w.value)
        recurrent = braintrace.einsum("btk,tkn->btn", self.h.value, self.w_rec.value)
        self.h.value = jnp.tanh(0.5 * self.h.value + rows + 0.1 * drive + recurrent)
        return self.h.value


def test_operations_at_several_positions():
    """Which are rows of one operation: of the same sample, one after the other."""
    xs = jnp.asarray(np.random.default_rng(3).integers(0, INPUTS, (STEPS, BATCH, 2)))
    model = Positions()
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    weights = model.states(brainstate.ParamState)

    def total():
        return jnp.sum(brainstate.transform.for_loop(lambda x: loss(model.update(x)), xs))

    expected = brainstate.transform.jit(brainstate.transform.grad(total, weights))()
    learner = braintrace.compile(model, "snap", xs[0], batch_size=BATCH, n=2)
    found = learner.etrace_grad(xs, step_fn=lambda x: loss(learner(x)), reduction="sum")
    assert_gradients_close(found, expected, 1e-5)


# --- several layers, weights of every kind ------------------------------------------------------

UNITS = 10


def connections(seed):
    return np.random.default_rng(seed).random((UNITS, UNITS)) < 0.12


PATTERNS = {name: connections(seed) for seed, name in enumerate(["rec", "link", "up"])}
CSR = {name: csr(jnp.asarray(pattern, float)) for name, pattern in PATTERNS.items()}


class SparseStack(brainstate.nn.Module):
    """Two sparse layers, the upper one with a leak of each unit and a plain bias."""

    def __init__(self):
        super().__init__()
        draw = np.random.default_rng(7).normal
        sizes = {name: pattern.sum() for name, pattern in PATTERNS.items()}
        shapes = {"w_in": (INPUTS, UNITS), "leak": (UNITS,), "bias": (UNITS,), **sizes}
        for name, shape in shapes.items():
            setattr(self, name, brainstate.ParamState(jnp.asarray(draw(size=shape), float)))

    def init_state(self, batch_size=None, **_):
        self.lower = brainstate.HiddenState(jnp.zeros((batch_size, UNITS)))
        self.upper = brainstate.HiddenState(jnp.zeros((batch_size, UNITS)))

    def update(self, x):
        def by(name, h):
            return braintrace.sparse_matmul(h, getattr(self, name).value, sparse_mat=CSR[name])

        drive = braintrace.matmul(x, self.w_in.value) + by("rec", self.lower.value)
        self.lower.value = 0.5 * self.lower.value + jnp.tanh(drive)
        kept = braintrace.element_wise(self.leak.value, jax.nn.sigmoid) * self.upper.value
        drive = by("link", self.lower.value) + by("up", self.upper.value) + self.bias.value
        self.upper.value = kept + jnp.tanh(drive)
        return jnp.concatenate([self.lower.value, self.upper.value], -1)


def plain_stack(p, S, x):
    """The same of one sample, both layers in one vector."""
    dense = {
        name: jnp.zeros((UNITS, UNITS)).at[np.nonzero(pattern)].set(p[name])
        for name, pattern in PATTERNS.items()
    }
    lower, upper = S[:UNITS], S[UNITS:]
    lower = 0.5 * lower + jnp.tanh(x @ p["w_in"] + lower @ dense["rec"])
    drive = lower @ dense["link"] + upper @ dense["up"] + p["bias"]
    return jnp.concatenate([lower, jax.nn.sigmoid(p["leak"]) * upper + jnp.tanh(drive)])


def reach_in_the_stack(n):
    """{parameter: (numbers, *shape)}: what each entry reaches within n steps."""
    itself, rec, link, up = np.eye(UNITS, dtype=bool), *PATTERNS.values()
    none = np.zeros_like(itself)
    onward = np.block([[itself | rec, (itself | rec) @ link], [none, itself | up]])
    entering = np.block([[itself, link], [none, itself]])
    for _ in range(n - 1):
        entering = entering | entering @ onward
    into = {name: np.nonzero(pattern)[1] for name, pattern in PATTERNS.items()}
    lower, upper = entering[:UNITS].T, entering[UNITS:].T
    return {
        "w_in": np.broadcast_to(lower[:, None], (2 * UNITS, INPUTS, UNITS)),
        "rec": lower[:, into["rec"]],
        "link": upper[:, into["link"]],
        "up": upper[:, into["up"]],
        "leak": upper,
        "bias": upper,
    }


def literal_stack(xs, n):
    model, masks = SparseStack(), reach_in_the_stack(n)
    parameters = {name: getattr(model, name).value for name in masks}
    return masked_recursion(plain_stack, parameters, masks, 2 * UNITS, xs)


@pytest.mark.nightly
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_layers_and_weights_of_every_kind(n):
    xs = jnp.asarray(np.random.default_rng(3).normal(size=(STEPS, BATCH, INPUTS)))
    learner = braintrace.compile(SparseStack(), "snap", xs[0], batch_size=BATCH, n=n)
    pairs = sum(int(mask.sum()) for mask in reach_in_the_stack(n).values())
    assert learner.report().stored_bytes == 8 * BATCH * pairs
    expected = literal_stack(xs, n)
    for chunk_size in (1, 4):
        learner.reset_state(BATCH)
        found = learner.etrace_grad(
            xs, step_fn=lambda x: loss(learner(x)), reduction="sum", chunk_size=chunk_size
        )
        found = {path[-1]: gradient for path, gradient in found.items()}
        assert_gradients_close(found, expected, 1e-10)
    assert_gradients_differ(expected, literal_stack(xs, n + 1), 1e-4)


@pytest.mark.usefixtures("float64")
@cases.each(
    [cases.BY_NAME["two_layers"]],
    [cases.BY_NAME[name] for name in ("independent_rnn", "gru", "plain_recurrent_rnn", "alif")],
)
def test_stacks_leaks_and_weights_behind_weights(case):
    """All that weights reach is reached in two steps: nothing is left out."""
    learner = build_learner(case, "snap", n=2, dtype=np.float64)
    _, _, xs, targets = references.arguments(case)
    found = sequence_gradient(learner, case, xs, targets, chunk_size=4)
    assert_gradients_close(found, references.bptt(case), 1e-10, case.name)


def test_samples_along_another_axis_are_told_apart():
    class Turned(Positions):
        def update(self, x):
            turned = (x[..., None] + jnp.arange(4.0)).swapaxes(0, 1)
            drive = braintrace.einsum("tbk,kn->btn", turned, self.w.value)
            self.h.value = 0.5 * self.h.value + drive
            return self.h.value

    xs = jnp.asarray(np.random.default_rng(3).integers(0, INPUTS, (STEPS, 3, 2)))
    found = {}
    for rule, options in (("snap", {"n": 2}), ("rtrl", {})):
        learner = braintrace.compile(Turned(), rule, xs[0], batch_size=3, **options)
        found[rule] = learner.etrace_grad(xs, step_fn=lambda x, call=learner: loss(call(x)))
    assert_gradients_close(*found.values(), 1e-5)


# --- what is refused --------------------------------------------------------------------------


class MixesSamples(SparseNet):
    """The mean over the batch inhibits every unit."""

    def update(self, x):
        h = super().update(x)
        self.h.value = h - 0.1 * h.mean(0)
        return self.h.value


def test_samples_that_mix_are_refused():
    with pytest.raises(braintrace.CompilationError, match="`SnAp` follows each sample separately"):
        braintrace.compile(MixesSamples(), "snap", jnp.ones((2, INPUTS)), batch_size=2, n=2)
