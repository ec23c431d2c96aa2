"""A model without an ETP operation in it learns as the one that is marked by hand."""

import functools
import warnings

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from assertions import assert_gradients_close
from catalogue.layer_models import Filtered, ReadOut
from catalogue_runs import CHUNK_SIZES, Runs, data, named, reported, runs_of
from nn_swaps import SWAPS, pair
from random_cells import chunk_size, entry_of, random_programs
from unmarked import unmarked

import braintrace

TOLERANCE = 1e-12
MODELS = [*catalogue.MODELS, *catalogue.LAYERS]

pytestmark = pytest.mark.usefixtures("float64", "time_step")


MORE = {
    "PlainEncoder": ["w_skip -> h"],
    "PlainInputRNN": ["w_in -> h"],
    "PlainRecurrentRNN": ["w_rec -> h"],
    "TwoLayersPlainLink": ["w_link -> upper"],
    "FeedbackLinear": ["layer/weight -> h"],  # the bias, behind a backward rule of its own
}
"""What such a model leaves plain on purpose, by the relation that it then has."""

BIASES = dict.fromkeys(("SparseLinear", "SparseLinear, signs"), ("layer/weight -> h",))
"""Relations of the biases of sums, whose terms are marked one by one."""

ONCE = {"Rotation": ["angle -> im, re"]}
"""Relations of a parameter that is marked once, before two functions of it."""

OTHER_KINDS = {
    "Dale's law": {"plain-mixing"},  # marked at its weights, before a plain sparse product
    "LeakyRNNWithFeedback": {"recurrent-mixing"},  # its way back is no operation
    "PlainEncoder": {"nested-weights"},
    "PlainInputRNN": {"recurrent-mixing"},
    "PlainRecurrentRNN": {"recurrent-mixing"},  # its recurrent weight is marked
    "TwoLayersPlainLink": {"layer-to-layer", "not-a-linear-readout"},
    "LRUCell": set(),  # its outputs reach no state, and are not marked
    "RandomFeedback": {"plain-mixing", "not-a-linear-readout"},  # the way back is a plain product
}


BY_ENTRIES = {"Dale's law", "SparseLIF", "SparseLinear", "SparseLinear, signs"}
"""Sparse products that are marked entry by entry: no input remains that ES_D_RTRL could filter."""

each_model = pytest.mark.parametrize("entry", MODELS, ids=lambda entry: entry.name)


def graph_of(entry):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", braintrace.ApproximationWarning)
        example = data(entry)[0][0]
        return braintrace.compile_etrace_graph(unmarked(entry).started(), example, mark="auto")


def relations_of(graph):
    found = (reported(relation) for relation in graph.hidden_param_op_relations)
    return sorted(_sorted_parameters(relation) for relation in found)


def _sorted_parameters(relation):
    parameters, arrow, groups = relation.partition(" -> ")
    return ",".join(sorted(parameters.split(","))) + arrow + groups


@pytest.mark.rows(
    "SignedHalves",
    "DelayedSelfInhibition",
    "GRU",
    "PlainRecurrentRNN",
    "ConductanceSynapses",
    "TransposedPair",
    "NestedParameters",
    "SharedDrive",
    "FeedbackLinear",
    "AllToAll",
    "ScaledWSConv3d",
    "LSTMCell",
    "LIF",
)
@each_model
def test_marks_are_found_again(entry):
    graph = graph_of(entry)
    wanted = [*map(_sorted_parameters, entry.reported_relations), *MORE.get(entry.name, ())]
    wanted += BIASES.get(entry.name, ())
    for relation in ONCE.get(entry.name, ()):
        wanted.remove(relation)
    assert relations_of(graph) == sorted(wanted)
    assert tuple(map(named, graph.hidden_groups)) == entry.reported_groups
    kinds = {diagnostic.kind for diagnostic in graph.diagnostics}
    assert kinds == OTHER_KINDS.get(entry.name, set(entry.diagnostics))


def compared(entry, chunk_sizes, paths=(), algorithm="d_rtrl"):
    """The gradients of what is marked by hand, and by the compiler, are the same."""
    by_hand, found = runs_of(entry, algorithm), Runs(unmarked(entry), algorithm, mark="auto")
    more = {relation.partition(" -> ")[0] for relation in MORE.get(entry.name, ())}
    for path in (*(functools.partial(Runs.sequence, chunk_size=c) for c in chunk_sizes), *paths):
        both = ({k: g for k, g in path(r).items() if k not in more} for r in (found, by_hand))
        assert_gradients_close(*both, TOLERANCE, f"{entry.name}, {path}")


@pytest.mark.rows("SignedHalves", "LIF")
@each_model
def test_learns_as_by_hand(entry):
    compared(entry, CHUNK_SIZES[1:2])


STORED = r"'layer/weight' enters.*Call `braintrace.sparse_matmul`, or use `braintrace.nn.Sparse"
REPORTED = {
    "SparseLinear": STORED,
    "SparseLinear, bias": STORED,
    "Embedding, of a largest norm": "'layer/table/weight' enters `add`.*its other summand",
}
"""What is said of layers of brainstate that are not marked: of matrices that are stored by their
entries, and of a weight plus a correction that is held."""


@pytest.mark.parametrize("row", [pytest.param(r, id=r.id) for r in SWAPS if r.id in REPORTED])
def test_layers_of_brainstate_without_marks_are_reported(row):
    name, arguments, options, ours, shape, _ = row.values
    theirs, own = pair(name, arguments, options, ours, np.float64)
    example = jnp.ones((2, *shape))

    def learner(layer, mark):
        return braintrace.compile(Filtered(layer), "d_rtrl", example, batch_size=2, mark=mark)

    assert learner(own, "explicit").graph.diagnostics == ()
    if row.id == "SparseLinear, bias":  # which learns
        with pytest.warns(braintrace.ApproximationWarning, match=REPORTED[row.id]):
            learner(theirs, "auto")
    else:
        with pytest.raises(braintrace.CompilationError, match=REPORTED[row.id]):
            learner(theirs, "auto")


@pytest.mark.rows("Linear", "AllToAll, others only, wide", "Conv1d, channel first")
@pytest.mark.parametrize("row", [pytest.param(r, id=r.id) for r in SWAPS if r.id not in REPORTED])
def test_layers_of_brainstate_learn_as_their_marked_twins(row):
    name, arguments, options, ours, shape, unit = row.values
    is_cell = row.id.partition(",")[0].endswith("Cell")
    if is_cell:
        options = {**options, "state_init": np.linspace(-0.3, 0.5, arguments[1])}
    xs = np.random.default_rng(1).standard_normal((4, 2, *shape)) * unit
    outcomes = []
    for layer, mark in zip(
        pair(name, arguments, options, ours, np.float64), ("auto", "explicit"), strict=True
    ):
        model = ReadOut(layer) if is_cell else Filtered(Plain(layer))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", braintrace.ApproximationWarning)
            outcomes.append(outcome_of(model, mark, xs))
    (found, relations, kinds), (expected, wanted, own_kinds) = outcomes
    assert (relations, kinds) == (wanted, own_kinds)
    assert (wanted is None) == (row.id == "Embedding, frozen")  # no weight is left
    if wanted is not None:
        assert_gradients_close(found, expected, TOLERANCE, row.id)


class Plain(brainstate.nn.Module):
    """A layer whose outputs have no unit."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.in_size, self.out_size = layer.in_size, layer.out_size

    def update(self, x):
        return u.get_mantissa(self.layer(x))


def outcome_of(model, mark, xs):
    try:
        learner = braintrace.compile(model, "d_rtrl", xs[0], batch_size=2, mark=mark)
    except braintrace.CompilationError as error:
        assert "No ETP operation" in str(error)
        return None, None, None
    gradients = learner.etrace_grad(xs, step_fn=lambda x: jnp.sum(learner(x) ** 2))
    by_path = {"/".join(path): jax.tree.leaves(g) for path, g in gradients.items()}
    kinds = {diagnostic.kind for diagnostic in learner.graph.diagnostics}
    return by_path, relations_of(learner.graph), kinds


class Looked(brainstate.nn.Module):
    """A leaky state of what a table of brainstate's gives."""

    def __init__(self, **options):
        super().__init__()
        self.table = brainstate.nn.Embedding(5, 3, **options)
        values = np.random.default_rng(2).standard_normal((5, 3))
        self.table.weight.value = jnp.asarray(values)

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.zeros((2, 3)))

    def update(self, indices):
        self.h.value = 0.8 * self.h.value + jnp.tanh(self.table(indices))
        return self.h.value

    def gradient(self, xs):
        """The gradient that brainstate's own backward rule gives through all steps."""

        def loss():
            h, total = jnp.zeros((2, 3)), 0.0
            for x in xs:
                h = 0.8 * h + jnp.tanh(self.table(x))
                total += jnp.sum(h**2)
            return total

        return brainstate.transform.grad(loss, self.table.weight)()


@pytest.mark.parametrize("examples", [2])
def test_random_cells_without_marks(examples):
    """They learn as marked by hand, unless something more is reported."""
    equal = []

    @random_programs(examples)
    def check(program):
        entry = entry_of(program)
        try:
            by_hand = Runs(entry, "d_rtrl")
            found = Runs(unmarked(entry), "d_rtrl", mark="auto")
        except braintrace.CompilationError:
            return
        warned, own = (
            {d.kind for d in runs.learner.graph.diagnostics if d.level == "warning"}
            for runs in (found, by_hand)
        )
        if warned <= own:
            size = chunk_size(program)
            expected = by_hand.sequence(size)
            assert_gradients_close(found.sequence(size), expected, TOLERANCE, str(program))
            equal.append(program)

    check()
    assert len(equal) >= 0.3 * examples
