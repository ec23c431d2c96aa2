"""A weight times a mask or a scale that is a State which the step only reads: current values."""

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close, assert_gradients_differ
from backpropagation import through_time
from drivers import stream_gradient

import braintrace

BATCH, INPUTS, H, STEPS = 2, 3, 4, 5
XS = np.random.default_rng(1).normal(size=(STEPS, BATCH, INPUTS))
MASKS = [np.indices((INPUTS, H)).sum(0) % n != 0 for n in (2, 3)]
WEIGHT = np.random.default_rng(0).normal(size=(INPUTS, H))
pytestmark = pytest.mark.usefixtures("float64")


class Masked(brainstate.nn.Module):
    """The mask is a State of the model, the scale one that the model does not know of."""

    def __init__(self, kind=brainstate.LongTermState, writes=False):
        super().__init__()
        self.w = brainstate.ParamState(jnp.asarray(WEIGHT))
        self.kind, self.writes = kind, writes
        scale = brainstate.State(jnp.full((H,), 0.5))
        self.scale = lambda: scale
        if kind is not brainstate.ShortTermState:
            self.mask = kind(jnp.asarray(MASKS[0]))

    def init_state(self, batch_size=None, **_):
        if self.kind is brainstate.ShortTermState:
            self.mask = self.kind(jnp.asarray(MASKS[0]))
        lead = () if batch_size is None else (batch_size,)
        self.h = brainstate.HiddenState(jnp.zeros((*lead, H)))

    def update(self, x):
        weight = jnp.where(self.mask.value, self.w.value, 0.0) * self.scale().value
        if self.writes:
            self.mask.value = ~self.mask.value
        self.h.value = 0.8 * self.h.value + jnp.tanh(braintrace.matmul(x, weight))
        return self.h.value


def squared(h):
    return jnp.sum(h**2)


def compiled(model=None, algorithm="d_rtrl", **options):
    model = Masked() if model is None else model
    return braintrace.compile(model, algorithm, XS[0], batch_size=BATCH, **options)


def plain_step(params, states, x, counts):
    h, mask, scale = states
    h = 0.8 * h + jnp.tanh(x @ (jnp.where(mask, params["w"], 0.0) * scale))
    return (h, mask, scale), counts * squared(h)


def bptt(mask, scale, first=0):
    """The gradient of the losses from a step on."""
    start = jnp.zeros((BATCH, H)), mask, scale
    return through_time(plain_step, {"w": WEIGHT}, start, XS, np.arange(STEPS) >= first)


def by_sequence(learner, chunk_size):
    found = learner.etrace_grad(
        XS, step_fn=lambda x: squared(learner(x)), reduction="sum", chunk_size=chunk_size
    )
    return {"w": found[("w",)]}


def by_steps(learner):
    model = learner.algorithm.model

    def total():
        return brainstate.transform.for_loop(lambda x: squared(learner.algorithm(x)), XS).sum()

    return brainstate.transform.jit(brainstate.transform.grad(total, {"w": model.w}))()


def by_stream(learner):
    found = stream_gradient(learner, XS, step_fn=lambda x: squared(learner(x)))
    assert np.array_equal(learner.algorithm.model.w.value, WEIGHT)
    return {"w": found[("w",)]}


WAYS = {
    "sequence": lambda learner: by_sequence(learner, STEPS),
    "chunks": lambda learner: by_sequence(learner, 2),
    "steps": by_steps,
    "stream": by_stream,
}
VALUES = [(MASKS[0], 0.5), (MASKS[1], 1.5)]


def use(learner, mask, scale):
    learner.reset_state()
    learner.algorithm.model.mask.value = jnp.asarray(mask)
    learner.algorithm.model.scale().value = jnp.full((H,), scale)


@pytest.mark.parametrize("vmap", [True])
def test_every_call_uses_the_mask_as_it_is(vmap):
    learner = compiled(vmap=vmap)
    for mask, scale in VALUES:
        expected = bptt(mask, scale)
        for way, learned in WAYS.items():
            use(learner, mask, scale)
            assert_gradients_close(learned(learner), expected, 1e-10, way)
        use(learner, mask, scale)
        learner.etrace_evolve(XS[:3], chunk_size=2)
        rest = learner.etrace_grad(XS[3:], step_fn=lambda x: squared(learner(x)), reduction="sum")
        assert_gradients_close({"w": rest[("w",)]}, bptt(mask, scale, first=3), 1e-10, "evolve")
    assert_gradients_differ(bptt(*VALUES[0]), bptt(*VALUES[1]), 0.1)


@pytest.mark.parametrize("vmap", [False, True], ids=["batch axis", "mapped"])
def test_a_mask_that_is_only_read_is_none_of_the_samples_when_marks_are_found(vmap):
    class Plain(Masked):
        def update(self, x):
            weight = self.mask.value * self.w.value
            self.h.value = 0.8 * self.h.value + jnp.tanh(x @ weight)
            return self.h.value

    learner = compiled(Plain(), vmap=vmap, mark="auto")
    (relation,) = learner.graph.hidden_param_op_relations
    assert relation.primitive.name == "etp_mm"
    use(learner, MASKS[1], 1.0)
    assert_gradients_close(by_sequence(learner, 2), bptt(MASKS[1], 1.0), 1e-10)


def test_windows_and_filters_use_the_mask():
    windows = compiled(window=2)
    filters = compiled(algorithm="es_d_rtrl", decay_or_rank=0.7)
    for mask, scale in VALUES:
        use(windows, mask, scale)
        assert_gradients_close(by_sequence(windows, 2), bptt(mask, scale), 1e-10)
        found = []
        for way in (WAYS["chunks"], by_steps):
            use(filters, mask, scale)
            found.append(way(filters))
        assert_gradients_close(*found, 1e-10)
        assert not np.any(np.where(mask, 0.0, found[0]["w"]))


def test_a_mask_that_a_reset_initialises():
    """Between sequences it does; within one it would change the weights."""
    learner = compiled(Masked(brainstate.ShortTermState))
    use(learner, *VALUES[1])
    assert_gradients_close(by_sequence(learner, 2), bptt(*VALUES[1]), 1e-10)
    learner.reset_state()
    assert_gradients_close(by_sequence(learner, 2), bptt(MASKS[0], 1.5), 1e-10)
    flags = np.zeros(STEPS, bool)
    with pytest.raises(
        braintrace.OptionError, match=r"'mask', which `reset` initialises.*LongTerm"
    ):
        learner.etrace_grad(XS, step_fn=lambda x: squared(learner(x)), reset=flags)
    with pytest.raises(braintrace.OptionError, match="'mask', which `reset` initialises"):
        learner.etrace_evolve(XS, reset=flags)
    learner.predict(XS, reset=flags)


def test_a_mask_that_changes_within_a_sequence():
    learner = compiled()

    def pruning(x):
        learner.algorithm.model.mask.value = jnp.zeros_like(MASKS[0])
        return squared(learner(x))

    with pytest.raises(braintrace.OptionError, match="'mask', which `step_fn` writes"):
        learner.etrace_grad(XS, step_fn=pruning)
    with pytest.raises(braintrace.CompilationError, match="is computed from mask as well"):
        compiled(Masked(writes=True))
