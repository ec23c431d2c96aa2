"""The step graph: which named values of a step reach which, against JAX's own derivatives."""

import brainstate
import jax
import jax.numpy as jnp
import pytest

import braintrace
from braintrace._compiler.core.analysis import Analysis
from braintrace._compiler.core.candidates import candidates_of
from braintrace._compiler.core.step_graph import step_graph
from braintrace._compiler.frontend.trace import trace_model


class Step(brainstate.nn.Module):
    """Two layers, a running mean that is no hidden state, and a state read as a constant."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((3, 4)))
        self.v = brainstate.ParamState(jnp.ones((4, 4)))
        self.decay = brainstate.ParamState(jnp.ones(4))
        self.low, self.high, self.still = (brainstate.HiddenState(jnp.ones(4)) for _ in range(3))
        self.mean = brainstate.ShortTermState(jnp.ones(4))

    def update(self, x):
        low = self.low.value * jax.nn.sigmoid(self.decay.value)
        self.low.value = low + braintrace.matmul(x, self.w.value)
        self.high.value = jnp.tanh(self.high.value) + braintrace.matmul(
            self.low.value, self.v.value
        )
        self.still.value = self.still.value + jax.lax.stop_gradient(self.high.value)
        self.mean.value = 0.9 * self.mean.value + self.high.value
        return self.high.value + self.mean.value


@pytest.fixture(scope="module")
def step():
    traced, _ = trace_model(Step(), (jnp.ones(3),), None, 32)
    analysis = Analysis(traced.program)
    graph = step_graph(traced, analysis, candidates_of(traced, analysis, ()))
    return traced, analysis, graph


def names_of(step, nodes):
    """Print nodes: a State by its name, with a prime after the step; an ETP operation by `mm`."""
    traced, analysis, _ = step
    names = {leaf.in_var: leaf.name for leaf in traced.leaves} | dict.fromkeys(
        traced.argument_vars, "x"
    )
    names |= {leaf.out_var: f"{leaf.name}'" for leaf in traced.leaves if leaf.out_var is not None}
    operations = [traced.program.equations[index] for index in analysis.roles]
    names |= {e.outvars[0]: f"mm{number}" for number, e in enumerate(operations)}
    return {names[node] for node in nodes}


def old(step, name):
    return next(leaf.in_var for leaf in step[0].leaves if leaf.name == name)


def new(step, name):
    return next(leaf.out_var for leaf in step[0].leaves if leaf.name == name)


def test_direct_uses_end_at_the_next_node(step):
    gradients = step[2].gradients
    behind = {use.node for use in gradients.direct_uses(new(step, "high"))}
    assert names_of(step, behind) == {"high", "mm1"}
    (use,) = gradients.uses_of(old(step, "decay"))
    assert step[0].program.equations[use.equation].invars[0] is old(step, "decay")
    assert names_of(step, gradients.sinks(use)) == {"low'"}


def test_nodes_behind_a_state_end_where_they_are_told_to(step):
    traced, _, graph = step
    high = [new(step, "high")]
    everything = {"high'", "high", "mm1", "v", "low'", "low", "decay", "mm0", "w", "x"}
    assert names_of(step, graph.gradients.ancestors(high)) == everything
    short = graph.gradients.ancestors(high, graph.operations)
    assert names_of(step, short) == {"high'", "high", "mm1"}
    assert "mean" in names_of(step, graph.gradients.ancestors(traced.output_atoms))


def test_a_gradient_does_not_pass_where_only_a_constant_is_read(step):
    _, _, graph = step
    for paths in (graph.values, graph.gradients):
        assert names_of(step, paths.ancestors([new(step, "still")])) == {"still'", "still"}


def test_paths_over_time_go_on_with_the_state_of_the_next_step(step):
    gradients = step[2].gradients
    within = {"w", "mm0", "low'", "mm1", "high'", "mean'"}
    assert names_of(step, gradients.descendants([old(step, "w")])) == within
    over_time = {*within, "low", "high", "mean"}
    assert names_of(step, gradients.descendants_over_time([old(step, "w")])) == over_time
    ends = {new(step, "high")}
    found = names_of(step, gradients.descendants_over_time([old(step, "w")], ends))
    assert found == {"w", "mm0", "low'", "low", "mm1", "high'"}


def plain_step(states, x):
    """What `Step` computes, without the library."""
    low = states["low"] * jax.nn.sigmoid(states["decay"]) + x @ states["w"]
    high = jnp.tanh(states["high"]) + low @ states["v"]
    still = states["still"] + jax.lax.stop_gradient(high)
    return {"low": low, "high": high, "still": still, "mean": 0.9 * states["mean"] + high}


@pytest.mark.usefixtures("float64")
def test_a_path_by_gradient_is_where_jax_has_a_derivative(step):
    values = {path[-1]: jnp.asarray(state.value) for path, state in Step().states().items()}
    jacobian = jax.jacrev(plain_step)(values, jnp.asarray([0.3, -0.2, 0.5]))
    for source in values:
        ahead = step[2].gradients.descendants([old(step, source)])
        for sink, row in jacobian.items():
            assert bool(jnp.any(row[source] != 0)) == (new(step, sink) in ahead), (source, sink)
