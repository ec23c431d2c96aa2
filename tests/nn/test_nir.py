"""Graphs of the Neuromorphic Intermediate Representation: of other packages, and node by node."""

import pathlib

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace.nn import from_nir, to_nir

nir = pytest.importorskip("nir")
DATA = pathlib.Path(__file__).parents[1] / "data"
STORED = np.load(DATA / "nir_outputs.npz")
STEPS, UNITS = 12, 3


def run(model, xs):
    brainstate.nn.init_all_states(model, batch_size=xs.shape[1])
    return np.asarray(brainstate.transform.for_loop(model, jnp.asarray(xs)))


@pytest.mark.parametrize(
    ("name", "inputs", "dt"),
    [
        ("snntorch_recurrent", "spikes", 1e-4),
        ("snntorch_convolutional", "images", 1e-4),
        ("norse", "spikes", 1e-6),
    ],
)
def test_graphs_of_other_packages_give_their_outputs(name, inputs, dt):
    graph = nir.read(DATA / f"{name}.nir")
    model = from_nir(graph, dt=dt)
    assert STORED[name].std() > 0.1
    np.testing.assert_allclose(run(model, STORED[inputs]), STORED[name], atol=1e-7)
    again = to_nir(model)
    assert set(map(tuple, again.edges)) == set(map(tuple, graph.edges))
    for key, node in graph.nodes.items():
        for field, value in vars(node).items():
            np.testing.assert_equal(vars(again.nodes[key])[field], value)


def test_a_changed_weight_is_written():
    model = from_nir(nir.read(DATA / "norse.nir"))
    weights = model.states(brainstate.ParamState)
    for state in weights.values():
        state.value = {name: 2 * value for name, value in state.value.items()}
    for name in ("weight", "bias"):
        before, after = (vars(g.nodes["0"])[name] for g in (model.graph, to_nir(model)))
        np.testing.assert_array_equal(after, 2 * before)


# --- node by node


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def lif(size=UNITS, **changed):
    constants = {"tau": 0.01, "r": 2.0, "v_leak": 0.1, "v_threshold": 0.5, "v_reset": -0.1}
    return nir.LIF(**{name: np.full(size, changed.get(name, c)) for name, c in constants.items()})


def alone(node, xs, dt=1e-3):
    """Run a graph of one node."""
    shape = {"input": np.array(xs.shape[2:])}
    nodes = {"in": nir.Input(shape), "node": node, "out": nir.Output(None)}
    edges = [("in", "node"), ("node", "out")]
    return run(from_nir(nir.NIRGraph(nodes, edges), dt=dt), xs)


def convolved(x, node):
    """A one-dimensional convolution, sum by sum."""
    outputs, _, size = node.weight.shape
    x = np.pad(x, [(0, 0), (node.padding, node.padding)])
    starts = range(0, x.shape[1] - size + 1, node.stride)
    return np.array(
        [
            [node.bias[o] + (node.weight[o] * x[:, s : s + size]).sum() for s in starts]
            for o in range(outputs)
        ]
    )


@pytest.mark.usefixtures("float64")
def test_nodes_equal_their_equations():
    xs = draw(0, STEPS, 2, UNITS)
    v, of_if, of_li = 0.0, [], []
    for x in xs:
        v = v + 1e-3 * 300.0 * x
        of_if.append(v > 0.5)
        v = np.where(v > 0.5, 0.0, v)
    node = nir.IF(r=np.full(UNITS, 300.0), v_threshold=np.full(UNITS, 0.5))
    np.testing.assert_array_equal(alone(node, xs), of_if)
    v = np.full(UNITS, 0.2)
    for x in xs:
        v = v + 0.1 * (0.2 - v + 3.0 * x)
        of_li.append(v)
    node = nir.LI(tau=np.full(UNITS, 0.01), r=np.full(UNITS, 3.0), v_leak=np.full(UNITS, 0.2))
    np.testing.assert_allclose(alone(node, xs), of_li, rtol=1e-12)
    np.testing.assert_array_equal(alone(nir.Threshold(np.zeros(UNITS)), xs), xs > 0)
    steps = np.array([0, 1, 3])
    expected = np.stack(
        [np.pad(xs, [(d, 0), (0, 0), (0, 0)])[:STEPS, :, i] for i, d in enumerate(steps)], -1
    )
    np.testing.assert_array_equal(alone(nir.Delay(steps * 1e-3), xs), expected)


@pytest.mark.usefixtures("float64")
def test_nodes_of_space_equal_their_sums():
    xs = draw(1, 1, 2, 2, 6, 4)
    node = nir.SumPool2d(np.array([2, 2]), np.array([2, 1]), np.array([0, 0]))
    expected = np.array(
        [[xs[..., 2 * i : 2 * i + 2, j : j + 2].sum((-1, -2)) for j in range(3)] for i in range(3)]
    )
    np.testing.assert_allclose(alone(node, xs), np.moveaxis(expected, (0, 1), (-2, -1)))
    xs = draw(2, 1, 1, 2, 7)
    node = nir.Conv1d(7, draw(3, 4, 2, 3), 2, 1, 1, 1, draw(4, 4))
    np.testing.assert_allclose(alone(node, xs)[0, 0], convolved(xs[0, 0], node), rtol=1e-12)


def cyclic(dt, node):
    """Neurons that send their spikes back to themselves through a node."""
    weights = [nir.Affine(draw(5, UNITS, UNITS), draw(6, UNITS)), nir.Linear(draw(7, UNITS, UNITS))]
    nodes = {"in": nir.Input({"input": np.array([UNITS])}), "w": weights[0], "v": weights[1]}
    nodes |= {"lif": lif(), "back": node, "out": nir.Output({"output": np.array([UNITS])})}
    edges = [
        ("in", "w"),
        ("w", "lif"),
        ("lif", "v"),
        ("v", "back"),
        ("back", "lif"),
        ("lif", "out"),
    ]
    return from_nir(nir.NIRGraph(nodes, edges), dt=dt)


@pytest.mark.usefixtures("float64")
def test_delays_in_a_cycle_learn_exactly_by_rtrl():
    xs, model = 2 * draw(8, STEPS, 1, UNITS), cyclic(1e-3, nir.Delay(np.array([1, 2, 3]) * 1e-3))
    assert model.late == set()  # the delays themselves carry the past
    brainstate.nn.init_all_states(model, batch_size=1)

    def total():
        outputs = brainstate.transform.for_loop(model, jnp.asarray(xs))
        return jnp.sum(outputs * draw(9, UNITS))

    weights = model.states(brainstate.ParamState)
    expected = brainstate.transform.grad(total, weights)()
    learner = braintrace.compile(model, "rtrl", xs[0], batch_size=1, strict=True)

    def step_fn(x):
        return jnp.sum(learner(x) * draw(9, UNITS))

    found = learner.etrace_grad(xs, step_fn=step_fn, reduction="sum")
    for path, value in expected.items():
        for name, own in value.items():
            assert np.abs(own).max() > 1e-3
            np.testing.assert_allclose(found[path][name], own, atol=1e-9)


def test_what_no_order_or_no_node_is_known_for_is_refused():
    nodes = {"a": nir.Linear(np.eye(2)), "b": nir.Linear(np.eye(2))}
    nodes |= {
        "in": nir.Input({"input": np.array([2])}),
        "out": nir.Output({"output": np.array([2])}),
    }
    edges = [("in", "a"), ("a", "b"), ("b", "a"), ("b", "out")]
    with pytest.raises(braintrace.CompilationError, match=r"nir\.Delay"):
        from_nir(nir.NIRGraph(nodes, edges))
    with pytest.raises(braintrace.OptionError, match=r"'a' .*nir\.Scale"):
        from_nir(nir.NIRGraph({**nodes, "a": nir.Scale(np.ones(2))}, edges))


def test_a_model_that_is_no_graph_is_refused():
    with pytest.raises(braintrace.OptionError, match="from_nir"):
        to_nir(braintrace.nn.Linear(2, 3))
