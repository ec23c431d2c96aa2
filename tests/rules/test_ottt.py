"""OTTT by its recursion: that of the paper in NumPy, and that of the dense oracle."""

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close
from drivers import build_learner, named, weights_of
from marks import spike
from operation_cases import BATCH

import braintrace

DECAY, LEAK = 0.7, 0.8
LENGTH, INPUTS, H, OUTPUTS = 8, 3, 6, 2
RANDOM = np.random.default_rng(4)
XS = RANDOM.normal(size=(LENGTH, BATCH, INPUTS))
TARGETS = RANDOM.normal(size=(LENGTH, BATCH, OUTPUTS))
WEIGHTS = {
    "w": 1.5 * RANDOM.normal(size=(INPUTS, H)),
    "b": 0.3 * RANDOM.normal(size=H),
    "w_upper": RANDOM.normal(size=(H, H)),
    "w_out": RANDOM.normal(size=(H, OUTPUTS)),
}


class Network(brainstate.nn.Module):
    """Two layers of leaky integrate-and-fire neurons and a readout of spikes."""

    def __init__(self):
        super().__init__()
        for name, value in WEIGHTS.items():
            setattr(self, name, brainstate.ParamState(jnp.asarray(value, jnp.float32)))

    def init_state(self, batch_size=None, **_):
        self.V, self.U = (brainstate.HiddenState(jnp.zeros((batch_size, H))) for _ in range(2))

    def update(self, x):
        drive = braintrace.matmul(x, self.w.value, self.b.value)
        self.V.value = LEAK * (self.V.value - spike(self.V.value - 1)) + drive
        upper = braintrace.matmul(spike(self.V.value - 1), self.w_upper.value)
        self.U.value = LEAK * (self.U.value - spike(self.U.value - 1)) + upper
        return spike(self.U.value - 1) @ self.w_out.value


def step_loss(output, target):
    return 0.5 * jnp.sum((output - target) ** 2)


def paper(mask=None, resets=()):
    """Gradients of every step: spatial errors by hand, times the traces of what came in."""
    w, b, w_upper, w_out = (np.float32(value).astype(float) for value in WEIGHTS.values())
    V = U = np.zeros((BATCH, H))
    of_input, of_spikes = np.zeros((BATCH, INPUTS)), np.zeros((BATCH, H))
    steps = []
    for t, (x, target) in enumerate(zip(XS, TARGETS, strict=True)):
        for step, sample in resets:
            keep = np.where((np.arange(BATCH) == sample) & (step == t), 0, 1)[:, None]
            V, U, of_input, of_spikes = (keep * a for a in (V, U, of_input, of_spikes))
        V = LEAK * (V - (V >= 1)) + x @ w + b
        spikes = (V >= 1).astype(float)
        U = LEAK * (U - (U >= 1)) + spikes @ w_upper
        upper_spikes = (U >= 1).astype(float)
        of_input, of_spikes = DECAY * of_input + x, DECAY * of_spikes + spikes
        error = (upper_spikes @ w_out - target) * (1 if mask is None else mask[t])
        to_U = error @ w_out.T / (1 + 2 * np.abs(U - 1)) ** 2
        to_V = to_U @ w_upper.T / (1 + 2 * np.abs(V - 1)) ** 2
        steps.append(
            {
                "w": of_input.T @ to_V,
                "b": to_V.sum(0),
                "w_upper": of_spikes.T @ to_U,
                "w_out": upper_spikes.T @ error,
            }
        )
    return steps


def summed(steps):
    return jax.tree.map(lambda *leaves: sum(leaves), *steps)


def test_the_network_of_the_paper_with_every_driver():
    xs, targets = jnp.asarray(XS, jnp.float32), jnp.asarray(TARGETS, jnp.float32)
    learner = braintrace.compile(Network(), "ottt", xs[0], batch_size=BATCH, decay=DECAY)

    def step_fn(x, target):
        return step_loss(learner(x), target)

    def gradient(first=0, **options):
        found = learner.etrace_grad(
            xs[first:], targets[first:], step_fn=step_fn, reduction="sum", **options
        )
        return named(found)

    resets, mask = ((3, 0), (5, 1)), np.float32([1, 0, 2, 1, 0.5, 1, 0, 1])
    flags = np.zeros((LENGTH, BATCH), bool)
    flags[tuple(zip(*resets, strict=True))] = True
    for chunk_size, options in ((3, {}), (LENGTH, {"mask": mask}), (2, {"reset": flags})):
        learner.reset_state()
        expected = summed(paper(options.get("mask"), resets if "reset" in options else ()))
        found = gradient(chunk_size=chunk_size, **options)
        assert_gradients_close(found, expected, 1e-5, f"chunks of {chunk_size}")
    steps = paper()
    learner.reset_state()
    learner.etrace_evolve(xs[:4])
    assert_gradients_close(gradient(first=4), summed(steps[4:]), 1e-5, "after steps without a loss")
    learner.reset_state()
    own = brainstate.transform.grad(step_fn, weights_of(learner.algorithm.model))
    own = brainstate.transform.jit(own)
    for x, target, expected in zip(xs[:2], targets[:2], steps, strict=False):
        assert_gradients_close(named(own(x, target)), expected, 1e-5, "a gradient of one's own")


def test_traces_are_filters_of_inputs_and_what_is_read_late():
    adaptive = catalogue.BY_NAME["ALIF"]
    traces = build_learner(adaptive, "ottt").algorithm.traces.value
    shapes = jax.tree.map(jnp.shape, traces)
    assert shapes == {f"x, decay={DECAY}": {"w_in@mm0": (2, catalogue.INPUTS)}, "f": {}}
    late = build_learner(catalogue.BY_NAME["ALIFLateThreshold"], "ottt").algorithm.traces.value
    assert {key: trace.shape for key, trace in late["f"].items()} == {
        "w_in@mm0>a": (2, catalogue.H)
    }
    report = build_learner(adaptive, "ottt", trace_dtype=jnp.bfloat16).report()
    assert (report.stored_bytes, report.carried_bytes) == (24, 12)


def test_traces_of_another_decay_are_refused():
    case = catalogue.BY_NAME["TwoLayers"]
    own, other = (build_learner(case, "ottt", decay=decay) for decay in (0.7, 0.9))
    with pytest.raises(braintrace.ShapeError, match=r"made with decay=0.9; .* has decay=0.7") as e:
        own.algorithm.traces.value = other.algorithm.traces.value
    assert str(e.value).count("decay=0.9") == 1


def test_there_is_no_decay_by_default():
    model, x = catalogue.BY_NAME["Leaky"].build(), jnp.ones((2, catalogue.INPUTS))
    with pytest.raises(TypeError, match="decay"):
        braintrace.compile(model, "ottt", x, batch_size=2)
