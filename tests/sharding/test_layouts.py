"""Which axes of states, parameters and traces a mesh shards, without any device."""

import brainstate
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sharding_program
from drawn import drawn
from jax.sharding import AbstractMesh
from sharding_program import BATCH, MODELS, UNITS

import braintrace
from braintrace._graph import Records
from braintrace._sharding import layout_of
from braintrace._sharding.division import Division, sharding_on
from braintrace._sharding.parts import (
    ANYWHERE,
    is_sharded_along,
    parts_along,
    parts_of,
    sharded_axis,
)
from braintrace._sharding.placement import placement_of

DENSE = {"h": "data model", "w": "- model", "weight": "data - model"}
BIASED = {**DENSE, "b": "model", "bias": "data model"}
ENTRIES = {**DENSE, "s": "model", "s weight": "data model"}
REPLICATED = {"h": "data -", "weight": "data - -"}
EXPECTED = {
    "dense": BIASED,
    "recurrent": {**BIASED, "r": "- model"},
    "masked": {**DENSE, "w": "model -", "r": "- model"},
    "conv": {
        **{"h": "data - model", "w": "- - model", "b": "model"},
        **{"weight": "data - - - model", "bias": "data - model"},
    },
    "by_source": {**REPLICATED, "s weight": "data -"},
    "by_target": ENTRIES,
    "padded": ENTRIES,
    "mixed": {**BIASED, **ENTRIES, "r": "- model"},
    "lora": {"h": "data model", "right": "- model", "effective": "data - model"},
    "element_wise": {"h": "data model", "u": "model", "weight": "data model"},
    "embedding": DENSE,
    "readout": BIASED,
    "gru": {**REPLICATED, "bias": "data -"},
}


def layout(name, mesh, data="data", model="model"):
    learner, _ = sharding_program.learner_of(name)
    division = Division(AbstractMesh(mesh, ("data", "model")), data, model)
    return layout_of(learner.graph, learner.graph.trace_specs, division)


def printed(found):
    """{last part of a path, or operand of a trace: its axes}, those of sparse entries apart."""
    lines = {path[-1]: names for (path, _), names in found.leaves.items()}
    for key, by_operand in found.traces.items():
        prefix = "s " if "@sp_mm" in key else ""
        lines |= {prefix + operand: names for operand, names in by_operand.items()}
    return {name: " ".join(axis or "-" for axis in names) for name, names in lines.items()}


@pytest.mark.parametrize("name", EXPECTED)
def test_samples_and_units_are_sharded(name):
    found = layout(name, (2, 4))
    assert printed(found) == EXPECTED[name]
    expected = {"by_source": 3, "gru": 5, "lora": 1}.get(name, 0)
    assert len(found.replicated) == expected, found.replicated


def test_every_model_of_the_program_has_its_axes_here():
    assert {*EXPECTED} == {*MODELS} - {"lstm"}  # its gates are those of the GRU


@pytest.mark.parametrize("examples", [20])
def test_axes_are_sharded_where_they_divide(examples):
    """By any mesh, with or without one of its axes."""
    sizes, axes = st.integers(1, 20), st.sampled_from(["both", "data", "model"])

    @drawn(examples, st.sampled_from(["dense", "recurrent", "by_source"]), sizes, sizes, axes)
    def check(name, data, model, given):
        options = {} if given == "both" else {{"data": "model", "model": "data"}[given]: None}
        found = layout(name, (data, model), **options)
        divides = given != "data" and model > 1 and UNITS % model == 0 and name != "by_source"
        state = printed(found)["h"].split(" ")
        assert state == ["-" if given == "model" else "data", "model" if divides else "-"]
        is_whole = not divides and model > 1 and given != "data"
        assert bool(found.replicated) == is_whole, (name, data, model, given)


def test_parts_of_axes():
    along = parts_along((2, 6), 1, 3)
    np.testing.assert_array_equal(along, [[0, 0, 1, 1, 2, 2]] * 2)
    np.testing.assert_array_equal(parts_of(np.asarray([3, -1, 0, 11]), along), [1, ANYWHERE, 0, 2])
    assert is_sharded_along(1, along, 3)
    assert not is_sharded_along(0, along, 2)
    assert not is_sharded_along(1, along, 4)  # six elements
    assert not is_sharded_along(1, along[:, ::-1], 3)
    assert is_sharded_along(1, np.where(along == 1, ANYWHERE, along), 3)
    assert not is_sharded_along(1, np.full((2, 6), ANYWHERE), 3)
    assert not is_sharded_along(1, np.zeros((0, 6), int), 3)
    assert (sharded_axis(along, 3), sharded_axis(along.T, 3), sharded_axis(along, 2)) == (
        1,
        0,
        None,
    )


def test_a_division_counts_its_parts():
    mesh = AbstractMesh((2, 4), ("data", "model"))
    assert [
        (d.data_parts, d.model_parts)
        for d in (
            Division(mesh, "data", "model"),
            Division(mesh, None, "model"),
            Division(mesh, "data", None),
        )
    ] == [(2, 4), (1, 4), (2, 1)]
    one = jax.sharding.Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    assert str(Division(one, "data", None)) == "1 devices, 1 'data'"
    assert sharding_on(one, ("data", None, None)).spec == jax.sharding.PartitionSpec("data")


def test_a_batch_is_a_multiple_of_its_parts():
    learner, _ = sharding_program.learner_of("dense")
    graph, mesh = learner.graph, AbstractMesh((3, 1), ("data", "model"))
    division = Division(mesh, "data", "model")
    with pytest.raises(
        braintrace.ShapeError, match="batch of 8 cannot be sharded over the 3 devices"
    ):
        placement_of(graph, graph.trace_specs, division)


def test_a_mesh_that_shards_samples_needs_a_batch():
    learner = braintrace.compile(braintrace.nn.IndRNN(3, 4), "d_rtrl", np.zeros(3, np.float32))
    mesh, graph = AbstractMesh((2, 2), ("data", "model")), learner.graph
    with pytest.raises(braintrace.OptionError, match="this model has no batch axis"):
        placement_of(graph, graph.trace_specs, Division(mesh, "data", "model"))
    found = placement_of(graph, graph.trace_specs, Division(mesh, None, "model"))
    assert printed(found.layout)["h"] == "model"


class Flat(brainstate.nn.Module):
    """Hidden units, and a State with the numbers of all samples in one axis."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((3, 4)))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)))
        self.flat = brainstate.ShortTermState(jnp.zeros(batch_size * 4))

    def update(self, x):
        self.flat.value = 0.5 * self.flat.value + self.h.value.ravel()
        self.h.value = 0.5 * self.h.value + braintrace.matmul(x, self.w.value)
        return self.h.value


def test_a_state_whose_batch_axis_is_unknown_is_refused_where_samples_are_sharded():
    graph = braintrace.compile(Flat(), "d_rtrl", jnp.ones((4, 3)), batch_size=4).graph
    two, one = (AbstractMesh(parts, ("data", "model")) for parts in ((2, 1), (1, 2)))
    with pytest.raises(braintrace.OptionError, match="batch axis of State 'flat' is unknown"):
        placement_of(graph, graph.trace_specs, Division(two, "data", "model"))
    assert placement_of(graph, graph.trace_specs, Division(one, "data", "model")).devices == 2


def test_inputs_of_a_chunk_lie_where_their_samples_do():
    """A residual of an operation without a batch axis is whole everywhere."""
    graph = sharding_program.learner_of("dense")[0].graph
    one = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("data",))
    found = placement_of(graph, graph.trace_specs, Division(one, "data", None))
    (key,) = found.layout.batched

    def placed(x):
        return found.records(Records(x={key: x, "of one sample": x}, D={}, Df={})).x

    equations = jax.make_jaxpr(placed)(jnp.zeros((2, BATCH, 3))).eqns
    specs = [tuple(equation.params["sharding"].spec) for equation in equations]
    assert specs == [(None, "data"), ()]


class SharedGain(brainstate.nn.Module):
    """One gain for all samples and units; samples are the first axis of the state, or the last."""

    def __init__(self, samples_first):
        super().__init__()
        self.gain = brainstate.ParamState(jnp.ones(1))
        self.samples_first = samples_first

    def init_state(self, batch_size=None, **kwargs):
        shape = (batch_size, 4) if self.samples_first else (4, batch_size)
        self.h = brainstate.HiddenState(jnp.zeros(shape))

    def update(self, x):
        drive = x if self.samples_first else x.T
        self.h.value = 0.5 * self.h.value + drive * braintrace.element_wise(self.gain.value)
        return self.h.value


@pytest.mark.parametrize(("samples_first", "expected"), [(True, "data -"), (False, "- -")])
def test_the_trace_of_a_shared_weight_is_sharded_where_samples_come_first(samples_first, expected):
    x = jnp.ones((BATCH, 4))
    learner = braintrace.compile(SharedGain(samples_first), "d_rtrl", x, batch_size=BATCH)
    division = Division(AbstractMesh((2, 1), ("data", "model")), "data", "model")
    found = layout_of(learner.graph, learner.graph.trace_specs, division)
    assert printed(found)["weight"] == expected
