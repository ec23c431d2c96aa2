"""States that a step returns as they were are constants of it, whatever their shape."""

import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close
from every_path import Paths

import braintrace

BATCH, INPUTS, UNITS, STEPS = 3, 2, 4, 6
pytestmark = pytest.mark.usefixtures("float64")


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def inputs(batch=BATCH):
    return np.random.default_rng(7).normal(size=(STEPS, batch, INPUTS))


class Normalised(brainstate.nn.Module):
    """A diagonal network whose drive is normalised by statistics that no step changes."""

    def __init__(self, pass_on):
        super().__init__()
        self.pass_on = pass_on
        self.w = brainstate.ParamState(draw(1, INPUTS, UNITS))
        self.decay = brainstate.ParamState(draw(2, UNITS))
        self.mean = brainstate.HiddenState(draw(3, UNITS))

    def init_state(self, batch_size=None, **_):
        lead = () if batch_size is None else (batch_size,)
        self.h = brainstate.HiddenState(jnp.zeros((*lead, UNITS)))

    def update(self, x):
        mean = self.mean.value
        drive = braintrace.matmul(x, self.w.value) - mean
        decay = jax.nn.sigmoid(braintrace.element_wise(self.decay.value))
        self.h.value = decay * self.h.value + jnp.tanh(drive)
        self.mean.value = self.pass_on(mean)
        return self.h.value


WAYS = {
    "as it is": lambda mean: mean,
    "copied": lambda mean: jnp.copy(mean).reshape(2, 2).reshape(-1),
    "held": jax.lax.stop_gradient,
    "in a call": jax.jit(lambda mean: mean + jnp.zeros((), int) if False else mean),
}


@functools.cache
def paths_of(batch=BATCH, rule="d_rtrl"):
    return Paths(functools.partial(Normalised, WAYS["as it is"]), inputs(batch), rule)


@functools.cache
def bptt(batch=BATCH):
    return paths_of(batch).bptt()


@pytest.mark.parametrize(("rule", "batch"), [("d_rtrl", 3), ("snap", 3)])
@pytest.mark.core
def test_statistics_are_no_recurrent_state(rule, batch):
    paths = paths_of(batch, rule)
    found = paths.sequence()
    (group,) = paths.learner.graph.hidden_groups
    assert [state.name for state in group.states] == ["h"]
    assert paths.learner.graph.diagnostics == ()
    assert_gradients_close(found, bptt(batch), 1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_whichever_way_they_are_returned(way):
    model = Normalised(WAYS[way])
    model.init_state(BATCH)
    graph = braintrace.compile_etrace_graph(model, inputs()[0])
    (leaf,) = [leaf for leaf in graph.traced.leaves if leaf.name == "mean"]
    assert leaf.out_var is None
    assert graph.diagnostics == ()


CHANGES = {
    "scaled": lambda mean: 0.9 * mean,
    "transposed": lambda mean: mean.reshape(2, 2).T.reshape(-1),
    "read by column": lambda mean: jax.lax.reshape(mean.reshape(2, 2), (4,), (1, 0)),
    "rounded": lambda mean: mean.astype(jnp.float32).astype(mean.dtype),
}


@pytest.mark.filterwarnings("ignore::braintrace.ApproximationWarning")
@pytest.mark.parametrize("name", CHANGES)
def test_what_is_not_the_same_is_a_state(name):
    model = Normalised(CHANGES[name])
    model.init_state(BATCH)
    graph = braintrace.compile_etrace_graph(model, inputs()[0])
    (leaf,) = [leaf for leaf in graph.traced.leaves if leaf.name == "mean"]
    assert leaf.out_var is not None


@pytest.mark.parametrize(
    "path",
    [
        Paths.sequence,
        Paths.stream,
        Paths.own_gradient,
        Paths.mapped_by_the_compiler,
        Paths.foreign_vmap,
    ],
)
def test_every_path(path):
    paths = paths_of()
    if path is Paths.after_a_reset:  # of all samples: the statistics have no axis for them
        paths.learner.reset_state(BATCH)
    assert_gradients_close(path(paths), bptt(), 1e-12)


@pytest.mark.parametrize(("batch", "rule"), [(3, "rtrl"), (4, "uoro"), (4, "d_rtrl")])
def test_batch_norm_of_brainstate_in_evaluation_mode(rule, batch):
    class Network(Normalised):
        def __init__(self):
            super().__init__(None)
            kind = brainstate.HiddenState
            self.norm = brainstate.nn.BatchNorm0d(
                (UNITS,), affine=False, dtype=jnp.float64, mean_type=kind
            )

        def update(self, x):
            drive = self.norm(braintrace.matmul(x, self.w.value))
            self.h.value = 0.8 * self.h.value + jnp.tanh(drive)
            self.norm.running_mean.value = jnp.copy(self.norm.running_mean.value)
            return self.h.value * self.decay.value

    with brainstate.environ.context(fit=False):
        paths = Paths(Network, inputs(batch), rule)
        found = paths.sequence()
        (group,) = paths.learner.graph.hidden_groups
        assert [state.name for state in group.states] == ["h"]
        if rule != "uoro":
            kept = {"w", "decay"} if rule == "d_rtrl" else set(found)
            wanted = paths.bptt()
            found, wanted = ({k: each[k] for k in kept} for each in (found, wanted))
            assert_gradients_close(found, wanted, 1e-12)


def test_the_step_of_a_module_of_flax_that_returns_all_of_its_state():
    from flax import nnx

    class Network(nnx.Module):
        def __init__(self, rngs):
            options = {"dtype": jnp.float64, "param_dtype": jnp.float64, "rngs": rngs}
            self.dense = nnx.Linear(INPUTS, UNITS, **options)
            self.norm = nnx.BatchNorm(UNITS, use_running_average=True, **options)

        def __call__(self, h, x):
            return 0.8 * h + jnp.tanh(self.norm(self.dense(x)))

    graphdef, params, rest = nnx.split(Network(nnx.Rngs(0)), nnx.Param, ...)

    def step(params, state, x):
        network = nnx.merge(graphdef, params, state[1])
        h = network(state[0], x)
        return (h, nnx.state(network, nnx.Not(nnx.Param))), h

    xs = inputs()
    start = (jnp.zeros((BATCH, UNITS)), rest)

    @jax.jit
    @jax.grad
    def by_scan(params):
        outputs = jax.lax.scan(functools.partial(step, params), start, xs)[1]
        return ((outputs - 0.3) ** 2).sum()

    for rule in ("d_rtrl", "rtrl"):
        model = braintrace.from_function(step, params, start)
        learner = braintrace.compile(model, rule, xs[0], batch_size=BATCH)
        found = learner.etrace_grad(
            xs, step_fn=lambda x, run=learner: ((run(x) - 0.3) ** 2).sum(), reduction="sum"
        )
        assert learner.graph.diagnostics == ()
        assert_gradients_close(found, by_scan(params), 1e-12)
