"""Networks of several kinds of projections of `brainpy.state` learn unmarked, as they are."""

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from assertions import assert_gradients_close
from backpropagation import of_squares
from test_nn_brainpy import (
    BATCH,
    INPUTS,
    UNITS,
    brainpy_state,
    constant,
    gradients,
    inputs,
    loss_after_descent,
    surrogate,
)

import braintrace

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("float64", "time_step")]


@pytest.fixture
def time_step():
    with brainstate.environ.context(dt=1.0 * u.ms, precision=64):
        yield


def neurons(count, rest=0.0):
    """Driven by currents; at a resting potential, by conductances."""
    rest = rest * u.mV
    return brainpy_state().LIF(
        count,
        R=1.0 * (u.ohm if rest == 0 * u.mV else u.kohm),
        tau=10.0 * u.ms,
        V_rest=rest,
        V_reset=rest,
        V_th=rest + 1.0 * u.mV,
        V_initializer=constant(rest),
        spk_fun=surrogate("ReluGrad"),
    )


class Network(brainstate.nn.Module):
    """Weights of one seed, currents from the inputs, a plain readout of the spikes."""

    def __init__(self, post, current=1.0 * u.mA):
        super().__init__()
        self.draw = np.random.default_rng(5).random
        self.post = post
        self.w_out = brainstate.ParamState(jnp.linspace(-0.5, 1.0, post.out_size[-1])[:, None])
        if current is not None:
            out = brainpy_state().CUBA(scale=1.0)
            self.current = self.onto(self.dense(INPUTS, UNITS, current), out)

    def dense(self, count, units, unit):
        weight = 2 * self.draw((count, units)) * unit
        return brainstate.nn.Linear(count, units, w_init=weight, b_init=None)

    def onto(self, comm, out):
        return brainpy_state().CurrentProj(comm=comm, out=out, post=self.post)

    def update(self, x):
        self.currents(x)
        return self.post() @ self.w_out.value


class TwoPopulations(Network):
    """Excitation and inhibition, each onto both, as conductances; synapses are shared."""

    def __init__(self):
        super().__init__(neurons(UNITS, -60.0), None)
        self.inhibitory = neurons(2, -60.0)
        both = {"E": (self.post, UNITS), "I": (self.inhibitory, 2)}
        self.projections = {
            (source, name): self.projection(count, *both[name], source)
            for source, count in (("x", INPUTS), ("E", UNITS), ("I", 2))
            for name in both
        }

    def projection(self, count, post, units, source):
        unit, state = 0.02 * u.mS, brainpy_state()
        tau, reversal = (8.0 * u.ms, -80 * u.mV) if source == "I" else (5.0 * u.ms, 0 * u.mV)
        return state.AlignPostProj(
            comm=self.dense(count, units, unit),
            syn=state.Expon.desc(units, tau=tau, g_initializer=constant(0 * unit)),
            out=state.COBA.desc(E=reversal),
            post=post,
            label="inhibition" if source == "I" else "excitation",
        )

    def currents(self, x):
        sources = {"x": x, "E": self.post.get_spike(), "I": self.inhibitory.get_spike()}
        for (source, _), projection in self.projections.items():
            projection(sources[source])
        self.inhibitory()


class Jumps(Network):
    """Spikes that move potentials at once."""

    def __init__(self):
        super().__init__(neurons(UNITS))
        comm = self.dense(UNITS, UNITS, 0.1 * u.mV)
        self.within = brainpy_state().DeltaProj(comm=comm, post=self.post)

    def currents(self, x):
        self.current(x)
        self.within(self.post.get_spike())


class BlockedByMagnesium(Network):
    """A synapse of two time constants before the weights, and a conductance with a block."""

    def __init__(self):
        super().__init__(neurons(UNITS, -60.0), None)
        state, unit = brainpy_state(), 0.04 * u.mS
        self.current = self.onto(self.dense(INPUTS, UNITS, unit), state.COBA(E=0.0 * u.mV))
        options = {"tau_decay": 6.0 * u.ms, "tau_rise": 2.0 * u.ms}
        self.synapse = state.DualExpon(UNITS, g_initializer=constant(0.0), **options)
        block = state.MgBlock(E=0.0 * u.mV, V_offset=0.0 * u.mV, alpha=0.062 / u.mV)
        self.within = self.onto(self.dense(UNITS, UNITS, unit), block)

    def currents(self, x):
        self.current(x)
        self.within(self.synapse(self.post.get_spike()))


class Plastic(Network):
    """Synapses that tire, before the weights, and an alpha function behind them."""

    def __init__(self, plasticity="STP"):
        super().__init__(neurons(UNITS))
        state = brainpy_state()
        self.plasticity = getattr(state, plasticity)(UNITS)
        self.comm = self.dense(UNITS, UNITS, 4 * u.mA)
        self.alpha = state.Alpha(UNITS, tau=4.0 * u.ms, g_initializer=constant(0.0 * u.mA))
        self.out = state.CUBA(scale=1.0)
        self.post.add_current_input("within", self.out)

    def currents(self, x):
        self.current(x)
        self.out.bind_cond(self.alpha(self.comm(self.plasticity(self.post.get_spike()))))


class Gaps(Network):
    """Gap junctions, each with a parameter."""

    def __init__(self):
        super().__init__(neurons(UNITS))
        ring = jnp.arange(UNITS), (jnp.arange(UNITS) + 1) % UNITS
        weight = 0.3 * jnp.ones(UNITS) * u.siemens
        gaps = brainpy_state().SymmetryGapJunction
        self.gaps = gaps(self.post, "V", lambda pre, post: ring, weight)

    def currents(self, x):
        self.current(x)
        self.gaps()


class Adapting(Network):
    """Neurons of two variables whose potential runs away."""

    def __init__(self):
        spike = surrogate("ReluGrad")
        super().__init__(brainpy_state().AdExIF(UNITS, spk_fun=spike, R=1.0 * u.ohm), 30 * u.mA)
        out = brainpy_state().CUBA(scale=1.0)
        self.within = self.onto(self.dense(UNITS, UNITS, 5 * u.mA), out)

    def currents(self, x):
        self.current(x)
        self.within(self.post.get_spike())


class Delayed(Network):
    """Spikes that are on their way for some steps; of one sample."""

    def __init__(self):
        super().__init__(neurons(UNITS))
        state = brainpy_state()
        self.within = state.AlignPostProj(
            comm=self.dense(UNITS, UNITS, u.mA),
            syn=state.Expon.desc(UNITS, tau=8.0 * u.ms, g_initializer=constant(0 * u.mA)),
            out=state.CUBA.desc(scale=1.0),
            post=self.post,
            delay=2.0 * u.ms,
        )

    def currents(self, x):
        self.current(x)
        self.within(self.post.get_spike())


NETWORKS = {
    "two populations": TwoPopulations,
    "jumps of potentials": Jumps,
    "a magnesium block": BlockedByMagnesium,
    "facilitation and depression": Plastic,
    "depression": lambda: Plastic("STD"),
    "gap junctions": Gaps,
    "adaptation": Adapting,
}


@pytest.mark.filterwarnings("ignore::braintrace.ApproximationWarning")
@pytest.mark.parametrize("rule", ["rtrl", "d_rtrl"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_of_brainpy_learns_unmarked(name, rule):
    """All parameters; by RTRL with the gradient of backpropagation."""
    xs = jnp.abs(inputs())
    learner = braintrace.compile(NETWORKS[name](), rule, xs[0], batch_size=BATCH, mark="auto")
    assert "<class" not in str(learner.report())
    assert not [d for d in learner.graph.diagnostics if d.kind == "not-marked"]
    found, before = gradients(learner, xs)
    expected, value = of_squares(NETWORKS[name](), xs, batch_size=BATCH, return_value=True)
    assert value > 0.1  # they spike
    np.testing.assert_allclose(before.sum(), value)
    if rule == "rtrl":
        assert_gradients_close(found, expected, 1e-9, name)
    assert loss_after_descent(learner, xs) < 0.9 * before.sum()


@pytest.mark.filterwarnings("ignore::braintrace.ApproximationWarning")
def test_a_delay_is_told():
    """What is on its way is in a State that no trace follows."""
    xs = jnp.abs(inputs())
    with pytest.raises(braintrace.CompilationError, match=r"delay_seam/_buffer/history") as refused:
        braintrace.compile(Delayed(), "rtrl", xs[0], vmap=True)
    assert "<class" not in str(refused.value)
    learner = braintrace.compile(Delayed(), "d_rtrl", xs[0], vmap=True, mark="auto")
    kinds = {d.kind: d.paths for d in learner.graph.diagnostics}
    assert kinds["untraced-state"] == ("within/delay_seam/_buffer/history",)
    before = gradients(learner, xs)[1].sum()
    assert loss_after_descent(learner, xs) < 0.9 * before
