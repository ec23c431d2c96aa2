"""A State that gets a value of another pytree structure: refused, and every State as it was."""

import brainstate
import jax
import jax.numpy as jnp
import pytest

import braintrace

XS = jnp.ones((4, 2, 3))


class Counting:
    """An optimizer with a State of its own, which writes what it is told to."""

    def __init__(self, write):
        self.count, self.write = brainstate.LongTermState(jnp.zeros(())), write

    def update(self, gradients):
        self.count.value = self.count.value + 1
        self.write()


class Setting:
    """A learner, States of the user's own, and a way to write another structure."""

    def __init__(self, target="weight", inside=lambda write: write()):
        brainstate.random.seed(1)
        self.model = braintrace.nn.LeakyRNN(3, 4)
        self.learner = braintrace.compile(self.model, "d_rtrl", XS[0], batch_size=2)
        self.log = brainstate.ShortTermState({"losses": jnp.zeros(3)})
        self.target = {"weight": self.weight, "h": self.model.h, "log": self.log}[target]
        self.inside = inside

    @property
    def weight(self):
        (state,) = self.model.states(brainstate.ParamState).values()
        return state

    def write(self):
        def wrong():
            self.target.value = (self.model.h.value,)

        self.inside(wrong)

    def step(self, x):
        self.log.value = jax.tree.map(lambda v: v + 1, self.log.value)
        return self.learner(x).sum()

    def wrong_step(self, x):
        loss = self.step(x)
        self.write()
        return loss

    def early_step(self, x):
        self.write()
        return self.step(x)

    def nothing(self, gradients):
        """Update no parameter."""

    def wrong_update(self, gradients):
        weight = self.weight
        weight.value = jax.tree.map(lambda w: 0.9 * w, weight.value)
        self.write()

    def states(self):
        return [*self.learner.states().values(), self.log, brainstate.random.DEFAULT]


def gradient(setting, **options):
    setting.learner.etrace_grad(XS, step_fn=setting.wrong_step, **options)


def stream(setting, **options):
    setting.learner.etrace_online(
        XS, step_fn=setting.step, update_fn=setting.wrong_update, **options
    )


def stream_step(setting):
    setting.learner.etrace_online(XS, step_fn=setting.wrong_step, update_fn=setting.nothing)


def optimizer(setting, **options):
    optimizer = Counting(setting.write)
    setting.learner.etrace_online(XS, step_fn=setting.step, optimizer=optimizer, **options)


def early(setting):
    setting.learner.etrace_grad(XS, step_fn=setting.early_step)


def pure_gradient(setting):
    pure = setting.learner.functional(log=setting.log)
    pure.grad(pure.state(), XS, step_fn=setting.wrong_step)


def pure_stream(setting):
    pure = setting.learner.functional(log=setting.log)
    pure.online(pure.state(), XS, step_fn=setting.step, update_fn=setting.wrong_update)


def blocks(setting):
    stream(setting, every=2)


def masked(setting):
    stream(setting, mask=jnp.ones(4))


def unguarded(setting):
    stream(setting, nonfinite="ignore")


def optimizer_in_blocks(setting):
    optimizer(setting, every=3)


ROUTES = [gradient, stream, stream_step, optimizer, pure_gradient, pure_stream]
MORE_ROUTES = [early, blocks, masked, unguarded, optimizer_in_blocks]
PATHS = {"weight": "W/weight", "h": "h", "log": "ShortTermState"}


def in_jit(write):
    brainstate.transform.jit(write)()


def in_cond(write):
    brainstate.transform.cond(jnp.zeros(()) < 1, write, lambda: None)


def refused(setting, route, name):
    before = [(state, jax.tree.flatten(state._value)) for state in setting.states()]
    with pytest.raises(braintrace.BraintraceError, match=f"State '{name}'") as caught:
        route(setting)
    assert "PyTreeDef" in str(caught.value) and "structure" in str(caught.value)
    for state, (leaves, tree) in before:
        now, now_tree = jax.tree.flatten(state._value)
        assert now_tree == tree
        assert all(one is other for one, other in zip(now, leaves, strict=True)), state


@pytest.mark.by_day(
    "stream-weight",
    "stream_step-h",
    "pure_gradient-log",
    "blocks-h",
    "masked-h",
    "unguarded-log",
)
@pytest.mark.parametrize("target", PATHS)
@pytest.mark.parametrize("route", ROUTES + MORE_ROUTES)
def test_nothing_changes_where_a_structure_does(route, target):
    setting = Setting(target)
    refused(setting, route, PATHS[target])
    setting.write = lambda: None
    route(setting)  # as if nothing had happened


@pytest.mark.by_day("gradient-in_jit", "stream-in_cond")
@pytest.mark.parametrize("inside", [in_jit, in_cond])
@pytest.mark.parametrize("route", [gradient, stream, stream_step])
def test_nothing_changes_where_an_inner_transformation_writes(route, inside):
    refused(Setting("weight", inside), route, "W/weight")


def test_errors_of_the_users_own_pass_through():
    setting = Setting()

    def failing(x):
        setting.wrong_step(x)
        raise KeyError("mine")

    before = setting.weight.value
    with pytest.raises(KeyError, match="mine"):
        setting.learner.etrace_grad(XS, step_fn=failing)
    assert setting.weight.value is before


def test_a_structure_may_change_within_a_step():
    setting = Setting("log")

    def step(x):
        before = setting.log.value
        setting.log.value = None
        loss = setting.learner(x).sum()
        setting.log.value = before
        return loss

    setting.learner.etrace_grad(XS, step_fn=step)


def test_a_model_that_changes_a_structure_does_not_compile():
    class Wrong(braintrace.nn.LeakyRNN):
        def update(self, x):
            out = super().update(x)
            self.h.value = (self.h.value,)
            return out

    model = Wrong(3, 4)
    brainstate.nn.init_all_states(model, batch_size=2)
    before = {path: state.value for path, state in model.states().items()}
    with pytest.raises(braintrace.CompilationError, match=r"`update` changes State 'h' from"):
        braintrace.D_RTRL(model).compile_graph(XS[0])
    assert all(model.states()[path].value is value for path, value in before.items())
    with pytest.raises(braintrace.CompilationError, match=r"`update` changes State 'h' from"):
        braintrace.gradient_check(Wrong(3, 4), "d_rtrl", XS, XS, lambda o, y: o.sum(), batch_size=2)


def call(setting):
    setting.learner(XS[0])


def evolution(setting):
    setting.learner.etrace_evolve(XS)


def prediction(setting):
    setting.learner.predict(XS)


def pure_step(setting):
    pure = setting.learner.functional()
    pure.step(pure.state(), XS[0])


@pytest.mark.by_day(
    "call",
    "prediction",
    "pure_step",
)
@pytest.mark.parametrize("route", [call, evolution, prediction, gradient, stream, pure_step])
def test_a_structure_written_between_two_calls_is_refused(route):
    """Also by what has been compiled already; what has been written by hand stays."""
    setting = Setting()
    setting.write = lambda: None
    route(setting)
    right = setting.weight.value
    setting.weight.value = right["weight"]
    refused(setting, route, "W/weight")
    setting.weight.value = right
    route(setting)
