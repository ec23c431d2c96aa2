"""A model without an ETP operation in it learns as the one that is marked by hand."""

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
from catalogue_runs import CHUNK_SIZES, Runs, named, runs_of
from nn_swaps import SWAPS, pair
from random_cells import chunk_size, entry_of, random_programs
from unmarked import unmarked

import braintrace

TOLERANCE = 1e-12
WITHOUT_MARKS = {"LoraRNN", "RandomFeedback", "Words"}
"""Models whose operations the compiler does not find: it reports them."""
MODELS = [entry for entry in catalogue.MODELS if entry.name not in WITHOUT_MARKS]

pytestmark = pytest.mark.usefixtures("float64", "time_step")


MORE = {
    "PlainEncoder": {"w_skip"},
    "PlainInputRNN": {"w_in"},
    "PlainRecurrentRNN": {"w_rec"},
    "TwoLayersPlainLink": {"w_link"},
}
"""What such a model leaves plain on purpose."""


@pytest.mark.rows(
    "SignedHalves",
    "GRU",
    "LSTMFused",
    "PlainRecurrentRNN",
    "ConductanceSynapses",
    "GatedByCond",
    "NestedParameters",
    "ConvolutionalLIF",
)
@pytest.mark.parametrize("entry", MODELS, ids=lambda entry: entry.name)
def test_learns_as_by_hand(entry):
    by_hand = runs_of(entry, "d_rtrl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", braintrace.ApproximationWarning)
        found = Runs(unmarked(entry), "d_rtrl", mark="auto")
    assert tuple(map(named, found.learner.graph.hidden_groups)) == entry.reported_groups
    own, more = parameters_of(by_hand.learner.graph), MORE.get(entry.name, set())
    assert parameters_of(found.learner.graph) == own | more
    both = (
        {k: g for k, g in run.sequence(CHUNK_SIZES[1]).items() if k not in more}
        for run in (found, by_hand)
    )
    assert_gradients_close(*both, TOLERANCE, entry.name)


def parameters_of(graph):
    return {name for r in graph.hidden_param_op_relations for name in r.printed_paths}


REPORTED = {
    "SparseLinear": "`braintrace.sparse_matmul`",
    "SparseLinear, bias": "`braintrace.sparse_matmul`",
    "Embedding": "derivative rule of its own",
}


@pytest.mark.parametrize("row", [pytest.param(r, id=r.id) for r in SWAPS if r.id in REPORTED])
def test_layers_of_brainstate_without_marks_are_reported(row):
    name, arguments, options, ours, shape, _ = row.values
    theirs, _ = pair(name, arguments, options, ours, np.float64)
    example = jnp.ones((2, *shape))
    message = f"(?s)'layer/.*weight' enters.*{REPORTED[row.id]}"
    with pytest.raises(braintrace.CompilationError, match=message):
        braintrace.compile(
            Filtered(theirs), "d_rtrl", example, batch_size=2, mark="auto", strict=True
        )


@pytest.mark.rows("Linear", "Conv1d, channel first", "GRUCell", "LSTMCell")
@pytest.mark.parametrize("row", [pytest.param(r, id=r.id) for r in SWAPS])
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
    (found, parameters), (expected, wanted) = outcomes
    assert parameters == wanted
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
    learner = braintrace.compile(model, "d_rtrl", xs[0], batch_size=2, mark=mark)
    gradients = learner.etrace_grad(xs, step_fn=lambda x: jnp.sum(learner(x) ** 2))
    by_path = {"/".join(path): jax.tree.leaves(g) for path, g in gradients.items()}
    return by_path, parameters_of(learner.graph)


def test_random_cells_without_marks(examples=2):
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
