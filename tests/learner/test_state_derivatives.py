"""Derivatives with respect to hidden states: those of the model's own steps."""

import dataclasses

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drivers import build_learner
from rules import OTHERS, RULES

import braintrace

STEPS = 3
ROWS = [(rule.case, name) for name, rule in RULES.items()]
MODELS = [(name, "d_rtrl") for name in ("LSTMFused", "TwoLayers", "TanhRNN", "LeakyWithBias")]
close = {"rtol": 2e-5, "atol": 1e-6}


def in_the_middle(name, algorithm, window):
    """A learner in the middle of a sequence, with its data."""
    case = catalogue.BY_NAME[name]
    learner = build_learner(case, algorithm, window=window)
    xs, targets = map(np.asarray, case.sequences(2, 2 * STEPS))
    learner.etrace_evolve(xs[:STEPS])
    return case, learner, xs[STEPS:], targets[STEPS:]


def hidden_of(learner):
    return learner.algorithm.model.states(brainstate.HiddenState)


def of_plain_steps(case, learner, xs, targets):
    """The derivative by brainstate of the model's own `update`, from the same values."""
    model, before = learner.algorithm.model, learner.functional().state()

    def loss():
        outputs = [model.update(x) for x in xs]
        last = sum(jnp.sum(jnp.sin(s.value)) for s in hidden_of(learner).values())
        return last + sum(map(case.loss, outputs, targets))

    found = brainstate.transform.jit(brainstate.transform.grad(loss, hidden_of(learner)))()
    learner.functional().restore(before)
    return found


def assert_close(found, expected):
    assert set(found) == set(expected)
    assert any(np.any(np.asarray(value)) for value in expected.values())
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, **close)


def pure_loss(case, pure, start, xs, targets, scanned=False):
    """The loss of a few steps as a function of hidden states and parameters."""

    def loss(hidden, parameters=start.parameters):
        state = dataclasses.replace(start, hidden=hidden, parameters=parameters)
        if scanned:
            state, outputs = jax.lax.scan(pure.step, state, xs)
        else:
            outputs = []
            for x in xs:
                state, output = pure.step(state, x)
                outputs.append(output)
        hidden = [state.hidden[path] for path in hidden_of(pure._learner)]
        return sum(jnp.sum(jnp.sin(h)) for h in hidden) + sum(map(case.loss, outputs, targets))

    return loss


@pytest.mark.by_day("TwoLayers-ostl_feedforward-2", "TwoLayers-d_rtrl-None")
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize(("name", "algorithm"), ROWS + MODELS)
def test_derivative_of_steps(name, algorithm, window):
    """Of one and of several, as a function, through States, and in one window."""
    case, learner, xs, targets = in_the_middle(name, algorithm, window)
    pure = learner.functional()
    start = pure.state()
    paths = hidden_of(learner)
    for length, scanned in ((1, False), (STEPS, True)):
        expected = of_plain_steps(case, learner, xs[:length], targets[:length])
        data = xs[:length], targets[:length]
        found = jax.jit(jax.grad(pure_loss(case, pure, start, *data, scanned)))(start.hidden)
        assert_close({path: found[path] for path in paths}, expected)

    def through_states():
        if window:
            outputs = learner(braintrace.MultiStepData(xs))
        else:
            outputs = brainstate.transform.for_loop(learner, xs)
        last = sum(jnp.sum(jnp.sin(s.value)) for s in paths.values())
        return last + sum(map(case.loss, outputs, targets))

    found = brainstate.transform.jit(brainstate.transform.grad(through_states, paths))()
    assert_close(found, expected)


@pytest.mark.by_day(
    "LSTMFused-d_rtrl-None",
    "ALIFLateThreshold-immediate-None",
    "ALIFLateThreshold-snap-None",
    "ALIFLateThreshold-ottt-None",
)
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize(
    ("name", "algorithm"), [("LSTMFused", "d_rtrl"), *((r.case, r.name) for r in OTHERS)]
)
def test_gradient_with_respect_to_both_is_refused(name, algorithm, window):
    """By every rule, of one step and of several, instead of a zero for the hidden states."""
    case, learner, xs, targets = in_the_middle(name, algorithm, window)
    pure = learner.functional()
    start = pure.state()
    for length, scanned in ((1, False), (STEPS, True)):
        loss = pure_loss(case, pure, start, xs[:length], targets[:length], scanned)
        with pytest.raises(braintrace.OptionError, match="Take two gradients"):
            jax.make_jaxpr(jax.grad(loss, (0, 1)))(start.hidden, start.parameters)


def test_programs_without_that_derivative_have_nothing_of_it():
    """A derivative with respect to parameters has not one equation more for it."""
    case, learner, xs, targets = in_the_middle("LSTMFused", "d_rtrl", None)
    pure = learner.functional()
    start = pure.state()
    loss = pure_loss(case, pure, start, xs[:1], targets[:1])
    text = jax.jit(jax.grad(loss, 1)).lower(start.hidden, start.parameters).as_text()
    assert "custom_jvp" not in text


@pytest.mark.parametrize("outside", ["argument", "parameter"])
def test_what_depends_on_parameters_stops_at_old_states(outside):
    """An encoder in front of the model has the gradient of each step, as the model's own have."""
    _, learner, xs, _ = in_the_middle("Leaky", "d_rtrl", None)
    weight = brainstate.ParamState(jnp.eye(xs.shape[-1]))
    own = {("encoder",): weight}
    if outside == "parameter":
        own |= learner.algorithm.param_states
    before = learner.functional().state()

    def total():
        return sum(jnp.sum(learner(x @ weight.value)) for x in xs)

    together = brainstate.transform.jit(brainstate.transform.grad(total, own))()
    learner.functional().restore(before)
    of_step = brainstate.transform.grad(lambda x: jnp.sum(learner(x @ weight.value)), own)
    of_step = brainstate.transform.jit(of_step)
    expected = jax.tree.map(lambda *parts: sum(parts), *[of_step(x) for x in xs])
    jax.tree.map(lambda f, e: np.testing.assert_allclose(f, e, **close), together, expected)


# --- parameters and hidden states of one loss -----------------------------------------------


class Diagonal(brainstate.nn.Module):
    """A state that keeps its units apart, so that D-RTRL is exact."""

    def __init__(self):
        super().__init__()
        draw = np.random.default_rng(1).normal
        self.w = brainstate.ParamState(jnp.asarray(draw(size=(3, 4)), jnp.float32))

    def init_state(self, batch_size=2):
        self.h = brainstate.HiddenState(jnp.full((batch_size, 4), 0.3))

    def update(self, x):
        self.h.value = jnp.tanh(0.8 * self.h.value + braintrace.matmul(x, self.w.value))
        return self.h.value


XS = np.random.default_rng(0).normal(size=(2 * STEPS, 2, 3)).astype(np.float32)


def by_bptt(h, w, before, xs):
    """The loss of the last steps, of the state before them and of a weight in all steps."""
    for x in before:
        h = jnp.tanh(0.8 * h + x @ w)
    return _rest(h, w, xs)


def _rest(h, w, xs):
    total = 0.0
    for x in xs:
        h = jnp.tanh(0.8 * h + x @ w)
        total = total + jnp.sum(h**2)
    return total


of_first_states = jax.jit(jax.grad(_rest))
of_weight = jax.jit(jax.grad(by_bptt, 1))


def two_by_states(learner, xs):
    hidden, parameters = hidden_of(learner), learner.algorithm.param_states
    before, found = learner.functional().state(), {}
    for states in (hidden, parameters):
        learner.functional().restore(before)
        loss = lambda: jnp.sum(brainstate.transform.for_loop(learner, xs) ** 2)  # noqa: E731
        found |= brainstate.transform.grad(loss, states)()
    return found[("h",)], found[("w",)]


def two_by_functions(learner, xs):
    pure = learner.functional()
    start = pure.state()

    def loss(hidden, parameters):
        state = dataclasses.replace(start, hidden=hidden, parameters=parameters)
        return jnp.sum(jax.lax.scan(pure.step, state, xs)[1] ** 2)

    found = [jax.jit(jax.grad(loss, place))(start.hidden, start.parameters) for place in (0, 1)]
    return found[0][("h",)], found[1][("w",)]


def two_by_lanes(learner, xs):
    """Inside a map of somebody else: over copies of the hidden state."""
    pure = learner.functional()
    start = pure.state()

    def loss(hidden, parameters):
        state = dataclasses.replace(start, hidden=hidden, parameters=parameters)
        return jnp.sum(jax.lax.scan(pure.step, state, xs)[1] ** 2)

    copies = jax.tree.map(lambda leaf: np.stack([leaf] * 2), start.hidden)
    found = [
        jax.jit(jax.vmap(jax.grad(loss, place), in_axes=(0, None)))(copies, start.parameters)
        for place in (0, 1)
    ]
    found = jax.device_get(found)
    jax.tree.map(lambda leaf: np.testing.assert_allclose(leaf[0], leaf[1], **close), found)
    return found[0][("h",)][0], found[1][("w",)][0]


@pytest.mark.by_day(
    "two_by_states-rtrl-after a reset",
    "two_by_functions-rtrl-start",
    "two_by_lanes-d_rtrl-after a reset",
)
@pytest.mark.parametrize("place", ["start", "middle", "after a reset"])
@pytest.mark.parametrize("rule", ["d_rtrl", "rtrl"])
@pytest.mark.parametrize("two", [two_by_states, two_by_functions, two_by_lanes])
def test_two_gradients_equal_backpropagation(two, rule, place):
    """One with respect to the hidden states, one with respect to the parameters, of one loss."""
    learner = braintrace.compile(Diagonal(), rule, XS[0], batch_size=2)
    before, xs = XS[:0], XS[STEPS:]
    if place != "start":
        learner.etrace_evolve(XS[:STEPS])
        before = XS[:STEPS]
    if place == "after a reset":
        learner.reset_state(2)
        before = XS[:0]
    model = learner.algorithm.model
    start, w = jnp.full((2, 4), 0.3), model.w.value
    expected = of_first_states(model.h.value, w, xs), of_weight(start, w, before, xs)
    for found, value in zip(two(learner, xs), expected, strict=True):
        np.testing.assert_allclose(found, value, **close)


# --- both in one gradient ---------------------------------------------------------------------


STARTS = "Parameter 'first' is read by `init_state` alone"
warned = pytest.mark.filterwarnings(f"ignore:{STARTS}")


def test_parameter_that_init_state_alone_reads():
    """Its gradient in a sequence is zero, which is said when the model is compiled."""
    with pytest.warns(braintrace.ApproximationWarning, match=STARTS):
        compiled(LearnedStart())
    with pytest.raises(braintrace.CompilationError, match=STARTS):
        compiled(LearnedStart(), strict=True)
    compiled(Diagonal(), strict=True)


class LearnedStart(Diagonal):
    """A state that starts from a parameter."""

    def __init__(self):
        super().__init__()
        self.first = brainstate.ParamState(jnp.linspace(-0.5, 0.5, 4))

    def init_state(self, batch_size=2):
        self.h = brainstate.HiddenState(jnp.broadcast_to(self.first.value, (batch_size, 4)))


def compiled(model, rule="d_rtrl", **options):
    return braintrace.compile(model, rule, XS[0], batch_size=2, **options)


def squared(learner, xs=XS[:STEPS]):
    return jnp.sum(brainstate.transform.for_loop(learner, xs) ** 2)


def in_a_loop(learner):
    return squared(learner)


def in_a_compiled_loop(learner):
    return brainstate.transform.jit(lambda: squared(learner))()


def step_by_step(learner):
    return sum(jnp.sum(learner(x) ** 2) for x in XS[:STEPS])


def one_step(learner):
    return jnp.sum(learner(XS[0]) ** 2)


def as_a_sequence(learner):
    return jnp.sum(learner(braintrace.MultiStepData(XS[:STEPS])) ** 2)


def in_a_branch(learner):
    return brainstate.transform.cond(XS[0, 0, 0] < 9, lambda: one_step(learner), lambda: 0.0)


def recomputed(learner):
    return brainstate.transform.checkpoint(lambda: squared(learner))()


WAYS = [in_a_loop, in_a_compiled_loop, step_by_step, one_step, as_a_sequence, in_a_branch]
WAYS += [recomputed]


def refused(match="Take two gradients"):
    return pytest.raises(braintrace.OptionError, match=match)


@pytest.mark.by_day("in_a_compiled_loop-immediate", "step_by_step-d_rtrl", "one_step-rtrl")
@pytest.mark.parametrize(
    ("way", "rule"),
    [(way, rule) for way in WAYS for rule in ("d_rtrl", "immediate", "rtrl")],
)
def test_states_and_parameters_at_once(way, rule):
    """Refused by name wherever the steps are, and gradients of one kind are as without it."""
    learner = compiled(Diagonal(), rule)
    learner.etrace_evolve(XS[STEPS:])
    hidden, parameters = dict(hidden_of(learner)), learner.algorithm.param_states
    before, found = learner.functional().state(), []
    for _ in range(2):
        for states in (parameters, hidden):
            learner.functional().restore(before)
            found.append(brainstate.transform.grad(lambda: way(learner), states)())
        learner.functional().restore(before)
        with refused("State 'h' from before the learner's first step"):
            brainstate.transform.grad(lambda: way(learner), hidden | parameters)()
        learner.functional().restore(before)
    jax.tree.map(np.testing.assert_array_equal, found[:2], found[2:])
    assert all(np.any(leaf) for leaf in jax.tree.leaves(found))


@pytest.mark.by_day("d_rtrl")
@pytest.mark.parametrize("rule", ["d_rtrl", "immediate"])
def test_one_gradient_is_the_sum_of_those_of_the_steps(rule):
    """Cotangents do not pass from step to step beside the traces."""
    learner = compiled(Diagonal(), rule)
    parameters = learner.algorithm.param_states
    of_step = brainstate.transform.grad(lambda x: jnp.sum(learner(x) ** 2), parameters)
    of_step = brainstate.transform.jit(of_step)
    expected = jax.tree.map(lambda *parts: sum(parts), *[of_step(x) for x in XS[:STEPS]])
    for way in (in_a_loop, step_by_step, as_a_sequence, recomputed, in_a_compiled_loop):
        learner.reset_state()
        together = brainstate.transform.grad(lambda way=way: way(learner), parameters)()
        jax.tree.map(lambda f, e: np.testing.assert_allclose(f, e, **close), together, expected)


def refused_with_learned_start(loss, states):
    with refused():
        brainstate.transform.grad(loss, states)()


@warned
@pytest.mark.parametrize("rule", ["d_rtrl", "immediate"])
def test_parameter_that_states_start_from(rule):
    """Its gradient is that of backpropagation, and next to others it is refused."""
    model = LearnedStart()
    learner = compiled(model, rule)
    first, w = model.first.value, model.w.value

    def loss(learner=learner):
        learner.reset_state()
        return squared(learner)

    whole = jax.jit(jax.grad(lambda f: _rest(jnp.broadcast_to(f, (2, 4)), w, XS[:STEPS])))
    expected = whole(first)
    found = brainstate.transform.grad(loss, model.first)()
    np.testing.assert_allclose(found, expected, **close)
    refused_with_learned_start(loss, model.states(brainstate.ParamState))
    only_w = brainstate.transform.grad(loss, model.w)()
    assert np.any(only_w)

    pure = learner.functional()
    start = pure.state()

    def by_functions(parameters):
        state = pure.reset(dataclasses.replace(start, parameters=parameters))
        return jnp.sum(jax.lax.scan(pure.step, state, XS[:STEPS])[1] ** 2)

    with refused():
        jax.grad(by_functions)(start.parameters)


@pytest.mark.by_day("False-None", "True-None")
@warned
@pytest.mark.parametrize("where", [None, [True, False]])
@pytest.mark.parametrize("in_branch", [False, True])
def test_starts_from_a_parameter_between_steps(where, in_branch):
    """Refused too: within a loop, of some samples, and in a branch."""
    model = LearnedStart()
    learner = compiled(model)

    def step(x):
        output = learner(x)
        reset = lambda: learner.reset_state(where=where)  # noqa: E731
        if in_branch:
            brainstate.transform.cond(x[0, 0] > 0, reset, lambda: None)
        else:
            reset()
        return output

    def loss():
        return jnp.sum(brainstate.transform.for_loop(step, XS) ** 2)

    refused_with_learned_start(loss, model.states(brainstate.ParamState))
    assert np.any(brainstate.transform.grad(loss, model.w)())
    assert np.any(brainstate.transform.grad(loss, model.first)())


def test_arguments_that_depend_on_old_states():
    """A derivative through a loop that is closed outside of the model is refused, not in part."""
    learner = compiled(Diagonal())

    def closed():
        output = learner(XS[0])
        return jnp.sum(learner(output[:, :3]) ** 2)

    with refused():
        brainstate.transform.grad(closed, hidden_of(learner))()


def test_state_written_from_what_is_differentiated():
    """Such as the first state of a decoder that another model has computed."""
    learner = compiled(Diagonal())
    model, code = learner.algorithm.model, brainstate.ParamState(jnp.full((2, 4), 0.1))

    def loss(stop=lambda value: value):
        learner.reset_state()
        model.h.value = stop(code.value)
        return squared(learner)

    both = {"code": code, "w": model.w}
    refused_with_learned_start(loss, both)
    refused_with_learned_start(lambda: squared(learner) + loss(), both)
    stopped = brainstate.transform.grad(lambda: loss(jax.lax.stop_gradient), both)()
    np.testing.assert_array_equal(stopped["code"], 0)
    alone = brainstate.transform.grad(loss, code)()
    expected = of_first_states(code.value, model.w.value, XS[:STEPS])
    np.testing.assert_allclose(alone, expected, **close)


def test_maps_around_and_inside_the_gradient():
    """A map of somebody else hides nothing."""
    learner = compiled(Diagonal())
    pure = learner.functional()
    start = pure.state()

    def loss(hidden, parameters):
        state = dataclasses.replace(start, hidden=hidden, parameters=parameters)
        return jnp.sum(jax.lax.scan(pure.step, state, XS[:STEPS])[1] ** 2)

    copies = jax.tree.map(lambda leaf: np.stack([leaf] * 2), start.hidden)
    both = jax.grad(loss, (0, 1))
    mapped = jax.grad(lambda h, p: jnp.sum(jax.vmap(loss, (0, None))(h, p)), (0, 1))
    for call in (jax.vmap(both, (0, None)), mapped):
        with refused():
            call(copies, start.parameters)


METHODS = {
    "etrace_evolve": lambda learner: learner.etrace_evolve(XS[:STEPS]),
    "etrace_grad": lambda learner: learner.etrace_grad(
        XS[:STEPS], step_fn=lambda x: jnp.sum(learner(x))
    ),
}


@pytest.mark.parametrize("method", METHODS)
def test_sequences_within_a_gradient(method):
    """The steps after one count its states as their own; it has no derivative itself."""
    learner = compiled(Diagonal())
    hidden, parameters = hidden_of(learner), learner.algorithm.param_states

    def loss():
        learner.reset_state()
        METHODS[method](learner)
        return jnp.sum(learner(XS[STEPS]) ** 2)

    found = brainstate.transform.grad(loss, parameters)()
    learner.reset_state()
    METHODS[method](learner)
    expected = brainstate.transform.grad(lambda: jnp.sum(learner(XS[STEPS]) ** 2), parameters)()
    jax.tree.map(lambda f, e: np.testing.assert_allclose(f, e, **close), found, expected)
    total = lambda tree: sum(map(jnp.sum, jax.tree.leaves(tree)))  # noqa: E731
    with refused("runs a whole sequence"):
        brainstate.transform.grad(lambda: total(METHODS[method](learner)), hidden)()


def test_outputs_of_evolution_are_not_differentiated():
    """Their derivative would lack the operands of ETP operations."""
    learner = compiled(Diagonal())
    states, pure = learner.algorithm.param_states, learner.functional()
    start = pure.state()

    def of_learner(through):
        def loss():
            return jnp.sum(through(learner.etrace_evolve(XS[:STEPS])) ** 2)

        return brainstate.transform.jit(brainstate.transform.grad(loss, states))()

    def of_functional(through):
        def loss(parameters):
            state = dataclasses.replace(start, parameters=parameters)
            return jnp.sum(through(pure.evolve(state, XS[:STEPS])[1]) ** 2)

        return jax.jit(jax.grad(loss))(start.parameters)

    def of_arguments(through):
        def loss(xs):
            return jnp.sum(through(pure.evolve(start, xs)[1]) ** 2)

        return jax.jit(jax.grad(loss))(XS[:STEPS])

    for gradient in (of_learner, of_functional, of_arguments):
        with pytest.raises(braintrace.OptionError, match="outputs of `etrace_evolve`"):
            gradient(lambda outputs: outputs)
        held = gradient(jax.lax.stop_gradient)
        assert not any(map(np.any, jax.tree.leaves(held)))


def test_mark_is_not_saved(tmp_path):
    """Checkpoints have what they had before, and restore a learner that has one."""
    learner = compiled(Diagonal())
    brainstate.transform.grad(lambda: squared(learner), learner.algorithm.param_states)()
    state = learner.functional().state()
    assert state.others[("braintrace", "step_mark")] == 0
    braintrace.save(tmp_path, learner)
    texts = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert any(b"skipped_updates" in text for text in texts)
    assert not any(b"step_mark" in text for text in texts)
    braintrace.restore(tmp_path, learner)
    jax.tree.map(np.testing.assert_array_equal, learner.functional().state(), state)
