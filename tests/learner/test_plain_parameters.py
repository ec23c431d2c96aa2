"""Parameters without a trace get the ordinary gradient of the same step, never a silent zero."""

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from assertions import assert_gradients_close
from drivers import build_algorithm, named, sequence_gradient, weights_of
from every_path import Paths
from models import small

import braintrace

ALGORITHMS = [{}, {"algorithm": "es_d_rtrl", "decay_or_rank": 0.7}]


@pytest.mark.core
@catalogue.each([catalogue.BY_NAME["PlainEncoder"], catalogue.BY_NAME["ALIF"]])
def test_one_gradient_around_a_loop_written_by_hand(case):
    model, algorithm = build_algorithm(case)
    _, _, xs, targets = references.arguments(case, dtype=np.float32)

    def sequence_loss():
        def step_loss(x, target):
            return case.loss(algorithm(x), target)

        return brainstate.transform.for_loop(step_loss, xs, targets).sum()

    gradient = brainstate.transform.grad(sequence_loss, weights_of(model))
    actual = named(brainstate.transform.jit(gradient)())
    assert_gradients_close(actual, references.dense_d_rtrl(case), 1e-5, case.name)


@pytest.mark.core
def test_a_parameter_may_be_a_python_number():
    @small({"h": (3,)}, w=0.5)
    def scaled(self, x):
        self.h.value = 0.5 * self.h.value + braintrace.element_wise(self.w.value) * x
        return self.h.value

    xs = np.ones((4, 2, 3), np.float32)
    learner = braintrace.compile(scaled(), "d_rtrl", xs[0], batch_size=2)
    options = {"step_fn": lambda x: learner(x).sum(), "reduction": "sum"}
    # h^t = w (1 + 1/2 + ... + 1/2^(t-1)), summed over 6 units and 4 steps
    expected = 6 * (1 + 1.5 + 1.75 + 1.875)
    assert learner.etrace_grad(xs, **options)[("w",)] == pytest.approx(expected)


@pytest.mark.parametrize("options", [{}, {"rule": "rtrl"}, {"window": 2}])
def test_a_parameter_may_be_an_array_of_numpy_in_double_precision(options):
    """As in JAX, where it is in single precision unless double precision is allowed."""

    def model(dtype):
        weights = {"w": np.eye(3, dtype=dtype), "gain": 0.5 * np.ones(3, dtype)}

        @small({"h": (3,)}, **dict.fromkeys(weights, 0.0))
        def leaky(self, x):
            drive = braintrace.matmul(jnp.tanh(x), self.w.value)
            self.h.value = 0.5 * self.h.value + drive
            return self.gain.value * self.h.value

        made = leaky()
        made.w.value, made.gain.value = weights.values()
        return made

    xs = np.random.default_rng(0).normal(size=(4, 2, 3)).astype(np.float32)
    double, single = (Paths(lambda t=t: model(t), xs, **options) for t in ("f8", "f4"))
    step_by_step = () if "window" in options else (Paths.stream, Paths.own_gradient)
    expected = single.sequence()
    for path in (Paths.sequence, *step_by_step):
        found = path(double)
        assert_gradients_close(found, expected, 1e-6, path.__name__)
        assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype("float32")}
    pure = double.learner.functional()
    state = jax.jit(lambda state: pure.evolve(state, xs)[0])(pure.state())
    pure.step(state, xs[0])


class FusedGates(brainstate.nn.Module):
    """The catalogue's `gru`, its update and reset gates computed by one operation."""

    def __init__(self, case):
        super().__init__()
        self.case, params = case, case.params()
        self.w_gates = brainstate.ParamState(np.hstack([params["w_z"], params["w_r"]]))
        self.w_h = brainstate.ParamState(params["w_h"])
        self.w_out = brainstate.ParamState(params["w_out"])

    def init_state(self, batch_size):
        self.h = brainstate.HiddenState(self.case.initial_states(batch_size)["h"])

    def update(self, x):
        h = self.h.value
        gates = braintrace.matmul(jnp.concatenate([x, h], axis=-1), self.w_gates.value)
        z, r = jnp.split(jax.nn.sigmoid(gates), 2, axis=-1)
        reset = jnp.concatenate([x, r * h], axis=-1)
        candidate = jnp.tanh(braintrace.matmul(reset, self.w_h.value))
        self.h.value = (1 - z) * h + z * candidate
        return self.h.value @ self.w_out.value


@pytest.mark.core
@pytest.mark.parametrize("options", ALGORITHMS, ids=["d_rtrl", "es_d_rtrl"])
def test_outputs_without_a_trace_next_to_others_with_one(options):
    """The reset gate acts through `w_h` only; the update gate beside it has a trace."""
    case, options = catalogue.BY_NAME["GRU"], dict(options)
    _, _, xs, targets = references.arguments(case, dtype=np.float32)
    algorithm = options.pop("algorithm", "d_rtrl")
    with pytest.warns(braintrace.ApproximationWarning, match="w_gates"):
        learner = braintrace.compile(FusedGates(case), algorithm, xs[0], batch_size=2, **options)
    if algorithm == "d_rtrl":
        apart = references.dense_d_rtrl(case)
    else:
        apart = references.dense_es_d_rtrl(case, alpha=options["decay_or_rank"])
    expected = {
        "w_gates": np.hstack([apart["w_z"], apart["w_r"]]),
        "w_h": apart["w_h"],
        "w_out": apart["w_out"],
    }
    found = sequence_gradient(learner, case, xs, targets)
    assert_gradients_close(found, expected, 1e-5)
    learner.reset_state()
    gradient = brainstate.transform.grad(
        lambda x, target: case.loss(learner(x), target), weights_of(learner.algorithm.model)
    )
    gradient = brainstate.transform.jit(gradient)
    steps = [named(gradient(x, target)) for x, target in zip(xs, targets, strict=True)]
    found = jax.tree.map(lambda *parts: np.sum(parts, axis=0), *steps)
    assert_gradients_close(found, expected, 1e-5)
