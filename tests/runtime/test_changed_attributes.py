"""Plain attributes of a model that change after it has been compiled: the next call sees them."""

import copy
import dataclasses
import enum
import functools
import types
import warnings

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from assertions import assert_gradients_close, assert_same_bits
from gradient_paths import RUNS, loss_of, pure, stream

import braintrace
from braintrace._runtime.known_steps import MOST_STEPS

LENGTH, BATCH = 6, 2
XS = np.random.default_rng(0).normal(size=(LENGTH, BATCH, 3)).astype(np.float32)
WEIGHT = 0.3 * np.sin(np.arange(12, dtype=np.float32)).reshape(3, 4)


class Mode(enum.Enum):
    TRAIN = 1
    EVALUATION = 2


@dataclasses.dataclass
class Settings:
    gain: float = 1.0
    more: object = None


class Incomparable:
    """An object whose ``==`` fails, as that of some arrays does."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        raise ValueError("ambiguous")

    __hash__ = None


class Gain(brainstate.nn.Module):
    """A part without States."""

    def __init__(self):
        super().__init__()
        self.scales, self.named, self.window = [1.0, [0.9]], {"late": 1.0}, (1.0, 2.0)

    def update(self, h):
        return self.scales[0] * self.scales[1][0] * self.named["late"] * self.window[0] * h


TRACED = []
"""The shape of the input at each trace of a `Net`."""


class Net(brainstate.nn.Module):
    """A leaky layer with attributes of many kinds."""

    shift = 0.0

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jax.device_put(WEIGHT))
        self.part = Gain()
        self.parts = [Gain()]
        self.activation, self.train, self.mode = jnp.tanh, True, Mode.TRAIN
        self.scale, self.tau, self.mask = jnp.ones(4), 2.0 * u.ms, None
        self.table, self.times = np.ones(4, np.float32), np.full(4, 2.0, np.float32) * u.ms
        self.settings, self.options = Settings(more=Settings()), types.SimpleNamespace(gain=1.0)
        self.options.part, self.options.state = Gain(), brainstate.State(jnp.ones(4))
        self.flags, self.odd = {"named"}, Incomparable(1.0)

    def init_state(self, batch_size=None):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)))

    def update(self, x):
        TRACED.append(x.shape)
        drive = braintrace.matmul(self.activation(x), self.w.value) * self.scale
        if self.mask is not None:
            drive = drive * self.mask
        if self.train and self.mode is Mode.TRAIN:
            drive = 2 * drive
        drive = drive * self.table * self.settings.gain * self.settings.more.gain
        decay = jnp.exp(-1.0 / self.tau.to_decimal(u.ms) - 0.1 * self.times.to_decimal(u.ms))
        decay = (
            self.options.part(decay * self.options.gain * self.odd.value) * self.options.state.value
        )
        if "named" not in self.flags:
            decay = 0.5 * decay
        self.h.value = self.parts[0](self.part(decay * self.h.value)) + drive + self.shift
        return self.h.value


def doubled(x):
    return 2 * x


def other_update(self, x):
    self.h.value = 0.3 * self.h.value + braintrace.matmul(x, self.w.value)
    return self.h.value


def replace_part(net):
    net.part = Gain()
    net.part.named["late"] = 0.2


CHANGES = {
    "a flag": lambda net: setattr(net, "train", False),
    "an enumeration": lambda net: setattr(net, "mode", Mode.EVALUATION),
    "a function": lambda net: setattr(net, "activation", doubled),
    "a partial function": lambda net: setattr(net, "activation", functools.partial(jnp.power, 2.0)),
    "an array": lambda net: setattr(net, "scale", 0.5 * jnp.ones(4)),
    "an array for nothing": lambda net: setattr(net, "mask", np.float32([0, 1, 0, 1])),
    "a quantity": lambda net: setattr(net, "tau", 5.0 * u.ms),
    "a unit": lambda net: setattr(net, "tau", 2.0 * u.second),
    "an attribute of the class": lambda net: setattr(net, "shift", 0.3),
    "the method itself": lambda net: setattr(net, "update", functools.partial(other_update, net)),
    "of a part": lambda net: setattr(net.part, "window", (0.5, 2.0)),
    "in a list of a part": lambda net: net.part.scales.__setitem__(0, 0.3),
    "in a list in a list": lambda net: net.part.scales[1].__setitem__(0, 0.3),
    "in a dict": lambda net: net.part.named.update(late=0.4),
    "of a part in a list": lambda net: setattr(net.parts[0], "named", {"late": 0.1}),
    "a part": replace_part,
    "in an array": lambda net: np.copyto(net.table, [0.5, 2, 3, 4]),
    "in an array of a quantity": lambda net: np.copyto(net.times.mantissa, 3.0),
    "in a dataclass": lambda net: setattr(net.settings, "gain", 0.5),
    "in a dataclass in a dataclass": lambda net: setattr(net.settings.more, "gain", 0.5),
    "in a namespace": lambda net: setattr(net.options, "gain", 0.5),
    "of a part in a namespace": lambda net: setattr(net.options.part, "scales", [0.5, [0.9]]),
    "a state in a namespace": lambda net: setattr(
        net.options, "state", brainstate.State(0.5 * jnp.ones(4))
    ),
    "an object that cannot be compared": lambda net: setattr(net, "odd", Incomparable(0.5)),
    "in a set": lambda net: net.flags.clear(),
}
each_change = pytest.mark.parametrize("change", CHANGES)
WITHIN_OTHERS = ("in a list of a part", "of a part", "in a dataclass", "in an array")
"""Where rows that go deeper into a model go as well; an array is changed on every path."""


def compiled(net=None, **options):
    net = Net() if net is None else net
    return braintrace.compile(net, "d_rtrl", XS[0], batch_size=BATCH, **options)


def changed(change):
    net = Net()
    CHANGES[change](net)
    return net


def gradient(learner, xs=XS, **options):
    return learner.etrace_grad(xs, step_fn=loss_of(learner), reduction="sum", **options)


def as_users_do(learner):
    """Losses and gradients on every path, each from the start of a sequence."""
    weights, found = learner.algorithm.model.states(brainstate.ParamState), {}
    step = brainstate.transform.grad(loss_of(learner), weights)

    def fresh(run):
        learner.reset_state()
        return run()

    def pure():
        functional = learner.functional()
        return jax.jit(lambda s, xs: functional.grad(s, xs, step_fn=loss_of(learner))[1])(
            functional.state(), XS
        )

    def pure_steps():
        functional = learner.functional()
        _, outputs = jax.lax.scan(functional.step, functional.state(), XS)
        return outputs

    found["steps"] = fresh(lambda: np.stack([learner(x) for x in XS]))
    found["own grad"] = fresh(lambda: [dict(step(x)) for x in XS])
    found["own loop"] = fresh(lambda: brainstate.transform.for_loop(lambda x: dict(step(x)), XS))
    found["sequence"] = fresh(lambda: gradient(learner))
    found["stream"] = fresh(lambda: stream(learner, XS))
    found["evolve"] = fresh(lambda: learner.etrace_evolve(XS))
    found["predict"] = fresh(lambda: learner.predict(XS))
    found["window"] = fresh(lambda: learner(braintrace.MultiStepData(XS)))
    found["pure"] = fresh(pure)
    found["pure steps"] = fresh(pure_steps)
    return found


def by_steps(learner):
    """What all paths give, of single steps alone."""
    weights = learner.algorithm.model.states(brainstate.ParamState)

    def loss(x):
        output = learner(x)
        return (output**2).sum(), output

    step = brainstate.transform.grad(loss, weights, has_aux=True)
    each, outputs = jax.tree.map(np.asarray, brainstate.transform.for_loop(step, XS))
    found = dict.fromkeys(("steps", "evolve", "predict", "window", "pure steps"), outputs)
    total = jax.tree.map(lambda leaf: leaf.sum(0), dict(each))
    found["own grad"] = [jax.tree.map(lambda leaf, t=t: leaf[t], dict(each)) for t in range(LENGTH)]
    found["own loop"], found["sequence"], found["stream"] = dict(each), total, total
    found["pure"] = jax.tree.map(lambda leaf: leaf / LENGTH, total)
    return found


def numbers(found):
    leaves = jax.tree_util.tree_leaves_with_path(found)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def distance(a, b):
    return np.abs(np.asarray(a) - np.asarray(b)).max()


@pytest.mark.by_day("in an array")
@each_change
def test_every_path_sees_a_change(change):
    learner = compiled()
    was = as_users_do(learner)
    CHANGES[change](learner.algorithm.model)
    now = as_users_do(learner)
    assert_gradients_close(numbers(now), numbers(by_steps(compiled(changed(change)))), 1e-6)
    for path in was:
        assert jax.tree.reduce(max, jax.tree.map(distance, was[path], now[path])) > 1e-3


@pytest.mark.by_day(*(change for change in CHANGES if change not in WITHIN_OTHERS))
@each_change
def test_one_step_sees_a_change(change):
    """As the changed model itself does, without a learner."""
    learner = compiled()
    learner(XS[0])
    learner.reset_state()
    CHANGES[change](learner.algorithm.model)
    plain = changed(change)
    brainstate.nn.init_all_states(plain, batch_size=BATCH)
    step = brainstate.transform.jit(plain.update)
    for x in XS[:2]:
        np.testing.assert_allclose(learner(x), step(x), rtol=1e-6)


@jax.jit
@functools.partial(jax.grad, argnums=1)
def by_backpropagation(gains, w):
    """The gradient of the losses of a sequence whose decay changes."""

    def step(h, now):
        gain, x = now
        h = gain * h + x @ w
        return h, (h**2).sum()

    return jax.lax.scan(step, jnp.zeros((BATCH, 4)), (gains, XS))[1].sum()


class Leaky(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jax.device_put(WEIGHT))
        self.gain = 0.9

    def init_state(self, batch_size=None):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)))

    def update(self, x):
        self.h.value = self.gain * self.h.value + braintrace.matmul(x, self.w.value)
        return self.h.value


@pytest.mark.by_day("d_rtrl-sequence", "d_rtrl-own loop")
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("algorithm", ["d_rtrl", "rtrl"])
def test_traces_go_on_where_a_decay_changes(run, algorithm):
    """Exactly: D_RTRL is exact for a leaky layer, whatever its decay is at each step."""
    net = Leaky()
    learner = braintrace.compile(net, algorithm, XS[0], batch_size=BATCH)
    first = RUNS[run](learner, XS[:2])
    net.gain = 0.4
    second = RUNS[run](learner, XS[2:4])
    net.gain = 0.9  # as it was: nothing is compiled for it
    third = RUNS[run](learner, XS[4:])
    found = sum(np.asarray(part["w",]) for part in (first, second, third))
    expected = by_backpropagation(np.float32([0.9, 0.9, 0.4, 0.4, 0.9, 0.9]), net.w.value)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_going_to_and_fro_compiles_nothing_again():
    learner = compiled()
    net, graphs = learner.algorithm.model, []
    for train in (True, False, True, False):
        net.train = train
        learner(XS[0])
        gradient(learner)
        graphs.append(learner.graph)
    assert graphs[0] is graphs[2] and graphs[1] is graphs[3]
    traced = len(TRACED)
    learner.reset_state(3)
    learner.reset_state(BATCH)
    learner(XS[0])
    net.train = True
    learner(XS[0])
    assert learner.graph is graphs[0]
    assert len(TRACED) == traced + 1  # for the batch of three


def test_the_same_values_compile_nothing():
    learner = compiled()
    net = learner.algorithm.model
    learner(XS[0])
    graph = learner.graph
    net.train, net.tau, net.mask = bool(1), 2.0 * u.ms, None
    net.scale, net.part.scales = jnp.ones(4), [1.0, [0.9]]
    net.w.value = 2 * net.w.value
    learner(XS[0])
    assert learner.graph is graph


class Noting(Leaky):
    """Notes things while it is traced, in all the ways there are."""

    def __init__(self):
        super().__init__()
        self.calls, self.log, self.memo, self.last = 0, [], {}, None

    def update(self, x):
        self.calls += 1
        self.log.append(x.shape)
        self.memo[self.calls] = x
        self.last = x
        return super().update(x)


def test_notes_of_the_model_and_of_the_users_functions_do_not_count():
    net = Noting()
    learner = compiled(net)
    learner(XS[0])
    graph, calls = learner.graph, net.calls

    def step_fn(x):
        net.gain = net.gain  # the same
        if notes:
            net.steps = getattr(net, "steps", 0) + 1
        return (learner(x) ** 2).sum()

    for notes in (False, True):
        for _ in range(3):
            learner.etrace_grad(XS, step_fn=step_fn)
            learner.etrace_online(XS, step_fn=step_fn, update_fn=lambda gradients: None)
            pure(learner, XS)
            learner(XS[0])
        assert learner.graph is graph
        assert notes or net.calls == calls  # a note of `step_fn` might be read by `update`
    net.gain = 0.2
    learner.reset_state()
    learner(XS[0])
    assert learner.graph is not graph
    expected = 0.2 * (XS[0] @ net.w.value) + XS[1] @ net.w.value
    np.testing.assert_allclose(learner(XS[1]), expected, rtol=1e-5)


def test_the_fourth_change_is_told():
    net = Leaky()
    learner = compiled(net)
    for gain in (0.8, 0.7):
        net.gain = gain
        learner(XS[0])
    net.gain = 0.6
    told = r"`Leaky` is compiled for the fourth time.*`gain` \(0.7 then, 0.6 now\)"
    with pytest.warns(braintrace.RecompilationWarning, match=told) as caught:
        learner(XS[0])
    assert caught[0].filename == __file__
    net.gain = 0.5
    learner(XS[0])


def test_many_changes_of_what_is_not_read_are_told():
    net = Leaky()
    learner = compiled(net)
    for epoch in range(40):
        net.epoch = epoch
        if epoch == MOST_STEPS - 1:
            told = f"`Leaky` is analysed {MOST_STEPS} times.*`epoch` .30 then, 31 now"
            with pytest.warns(braintrace.RecompilationWarning, match=told):
                learner(XS[0])
        else:
            learner(XS[0])


class Wide(Leaky):
    """Has a second operation, if it is told to."""

    def __init__(self):
        super().__init__()
        self.v = brainstate.ParamState(jnp.ones((3, 4)))
        self.is_wide = False

    def update(self, x):
        more = braintrace.matmul(x, self.v.value) if self.is_wide else x @ self.v.value
        self.h.value = self.gain * self.h.value + braintrace.matmul(x, self.w.value) + more
        return self.h.value


def test_a_change_of_what_is_carried_is_refused():
    net = Wide()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", braintrace.ApproximationWarning)
        learner = compiled(net)
    kept = learner.functional().state()
    net.is_wide = True
    for call in (learner, gradient, learner.predict):
        told = r"`Wide` needs other traces.*`is_wide` \(False then, True now\).*compile_graph"
        with pytest.raises(braintrace.NotCompiledError, match=told):
            call(learner if call is gradient else XS[0])
        assert_same_bits(learner.functional().state(), kept)
    learner.algorithm.compile_graph(XS[0])
    twin = Wide()
    twin.is_wide = True
    expected = compiled(twin)
    np.testing.assert_allclose(gradient(learner)[("v",)], gradient(expected)[("v",)], rtol=1e-6)


@pytest.mark.parametrize("where", ["net", "part"])
def test_a_state_that_is_added_is_refused(where):
    learner = compiled()
    net = learner.algorithm.model
    learner(XS[0])
    owner, path = (net, "new") if where == "net" else (net.part, "part/new")
    owner.new = brainstate.HiddenState(jnp.zeros((BATCH, 4)))
    calls = {
        "step": lambda: learner(XS[0]),
        "sequence": lambda: gradient(learner),
        "prediction": lambda: learner.predict(XS),
        "reset": learner.reset_state,
        "pure": lambda: pure(learner, XS),
    }
    for call in calls.values():
        with pytest.raises(braintrace.NotCompiledError, match=f"'{path}' was added to `Net`"):
            call()
    del owner.new
    learner(XS[0])


def test_a_value_that_cannot_be_used_is_refused_and_changes_nothing():
    net = Leaky()
    learner = compiled(net)
    learner(XS[0])
    kept = learner.functional().state()
    net.gain = jnp.ones(7)
    with pytest.raises(braintrace.CompilationError, match="update"):
        learner(XS[0])
    assert_same_bits(learner.functional().state(), kept)
    net.gain = 0.9
    learner(XS[0])


def test_copies_have_attributes_of_their_own():
    net = Leaky()
    learner = compiled(net)
    learner(XS[0])
    twins = [copy.deepcopy(learner), brainstate.graph.clone(learner)]
    twins[0].algorithm.model.gain = 0.1
    net.gain = 0.2
    outputs = [float(np.asarray(each(np.zeros_like(XS[0])))[0, 0]) for each in (learner, *twins)]
    start = float((XS[0] @ WEIGHT)[0, 0])
    np.testing.assert_allclose(outputs, [0.2 * start, 0.1 * start, 0.9 * start], rtol=1e-5)


def test_a_step_that_is_exported_has_the_attributes_of_then():
    pytest.importorskip("flatbuffers")
    net = Leaky()
    learner = compiled(net)
    learner(XS[0])
    net.gain = 0.25
    learner.reset_state()
    program, state = learner.export_step(
        XS[0], step_fn=loss_of(learner), update_fn=lambda gradients: None
    )
    step = jax.export.deserialize(bytearray(program)).call
    losses = []
    for x in XS[:2]:
        state, loss = step(state, x)
        losses.append(loss)
    first = XS[0] @ WEIGHT
    second = 0.25 * first + XS[1] @ WEIGHT
    np.testing.assert_allclose(losses, [(first**2).sum(), (second**2).sum()], rtol=1e-5)


def test_a_mapped_model_sees_a_change():
    net = Mapped()
    learner = braintrace.compile(net, "d_rtrl", XS[0], batch_size=BATCH, vmap=True)
    learner(XS[0])
    net.gain = 0.3
    learner.reset_state()
    found = gradient(learner)[("w",)]
    expected = by_backpropagation(np.float32([0.3] * LENGTH), net.w.value)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


class Mapped(Leaky):
    def init_state(self):
        self.h = brainstate.HiddenState(jnp.zeros(4))
