"""Every derivative of a step that the compiler calls zero is zero; what it truncates is reported.

The Jacobian is JAX's own, of the ordinary step (`step_jacobian.py`), at a few points. The claims of
the compiler are read from its graph (`step_claims.py`).
"""

import functools

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import readouts
from catalogue import BATCH, Model, verdict
from catalogue_runs import data
from drivers import quietly_compiled
from random_cells import Program, entry_of
from step_claims import FullState, Group, Relations
from step_jacobian import ROUNDING, NotFiniteError, StepJacobian

import braintrace

MODELS = [*catalogue.MODELS, *catalogue.LAYERS]
TESTED = {
    "LateralInhibition",
    "DelayLineForAMarkedOperation",
    "PlainRecurrentRNN",
    "MarkedAndPlain",
}
SNAP = {"LSTMPeephole", "PlainRecurrentRNN", "SparseLIF"}
REFUSED = {"DelayedRecurrence", "DelayedSelfInhibition", "FilteredReadout"}
FULL = {"GRU", "Stacked", "SparseLIF", "SharedDrive"}

pytestmark = pytest.mark.usefixtures("float64_in_every_thread", "time_step")


def each(names):
    rows = [pytest.param(m, id=m.name) for m in MODELS if m.name in names]
    return pytest.mark.parametrize("entry", rows)


@functools.cache
def jacobian_of(entry):
    return StepJacobian(entry, data(entry)[0])


def graph_of(entry, rule, **options):
    """The compiled graph."""
    brainstate.random.seed(7)
    x = data(entry)[0][0]
    return quietly_compiled(entry.module(), rule, x, batch_size=BATCH, **options).graph


def is_hidden(name):
    return "#" not in name


# --- rules that follow each element -------------------------------------------------------------


NO_TRACE = {"truncated, warning", "no-trace", "no-trace, warning"}


class Truncations:
    """Collects what a graph truncates, by the Jacobian, and no diagnostic of it names."""

    def __init__(self, entry, graph):
        self.jacobian, self.graph = jacobian_of(entry), graph
        self.groups = [Group(self.jacobian, group) for group in graph.hidden_groups]
        self.relations = Relations(graph, self.jacobian)
        self.marked = [("marked", name) for name in self.jacobian.names("marked")]
        self.edges = self.jacobian.edges()
        self.read = {
            name
            for name in self.jacobian.names("old")
            if self.edges[:, self.jacobian.rows["old", name]].any()
        }
        self.silent = []

    def is_reported(self, kinds, source, sinks=()):
        """Whether a diagnostic of such a kind names a source and, as its end, some sinks."""
        for diagnostic in self.graph.diagnostics:
            paths = [path.split("#")[0] for path in diagnostic.paths]
            sources = paths[: len(paths) - len(sinks)]
            is_about_sinks = verdict(diagnostic) in kinds and paths[len(sources) :] == list(sinks)
            if is_about_sinks and source.split("#")[0] in sources:
                return True
        return False

    def expect(self, condition, text):
        if not condition:
            self.silent.append(text)

    def check(self):
        for group in self.groups:
            for name in group.names:
                passed = group.passed(name)
                held = [("new", n) for n in self.jacobian.names("new") if n not in passed]
                plain = self.jacobian.total([*self.marked, *held])
                full = self.jacobian.total(held)
                self._check_states(group, name, plain, full)
                self._check_outputs_of_operations(group, name, plain)
                self._check_weights(group, name, plain, full)
        self._check_reads()
        self._check_other_states()
        assert not self.silent, "\n".join(self.silent)

    def _check_states(self, group, a, plain, full):
        """States that reach one by ordinary operations, and through marked ones."""
        remembered = not group.is_delay_line and not self.read.isdisjoint(group.names)
        for kind, c in [node for node in self.jacobian.rows if node[0] in ("old", "new")]:
            is_own = c in group.names
            if not is_hidden(c) or (kind == "new" and (is_own or not remembered)):
                continue
            truncated = by_plain = self.jacobian.block(plain, ("new", a), (kind, c))
            if is_own:
                truncated = truncated & ~group.is_carried(a, c)
            if truncated.any() and not group.is_delay_line:
                reported = self.is_reported({"truncated, warning"}, c, group.names)
                self.expect(reported, f"{kind} {c} -> {a} by ordinary operations")
            by_marked = self.jacobian.block(full, ("new", a), (kind, c)) & ~by_plain
            if by_marked.any():
                reported = self.is_reported({"truncated"}, c, group.names)
                self.expect(reported, f"{kind} {c} -> {a} by ETP operations")

    def _check_outputs_of_operations(self, group, a, plain):
        """Elements of ETP outputs that reach a state, and are in no relation with it."""
        for operation, weights in self.relations.weights.items():
            there = self.jacobian.block(plain, ("new", a), ("marked", operation))
            if (there & ~self.relations.allowed(group, a, operation)).any():
                for weight in weights:
                    self.expect(self._has_reason(weight, group), f"{weight}, {operation} -> {a}")

    def _has_reason(self, weight, group, more=frozenset()):
        kinds = NO_TRACE | more
        return self.is_reported(kinds, weight, group.names) or self.is_reported(kinds, weight)

    def _check_weights(self, group, a, plain, full):
        """Weights that reach a state, and have no relation with it or an ordinary use as well."""
        remembered = not self.read.isdisjoint(group.names)
        marked = frozenset().union(*self.relations.weights.values())
        for weight in self.jacobian.names("parameter"):
            ends = ("new", a), ("parameter", weight)
            if weight in self.relations.with_traces and remembered:
                used = self.jacobian.block(plain, *ends).any()
                names = [*([name] for name in group.names), group.names]
                reported = any(self.is_reported({"no-trace, warning"}, weight, n) for n in names)
                self.expect(not used or reported, f"{weight} -> {a} by ordinary operations")
            if weight in marked and (weight, group.index) not in self.relations.pairs:
                reached = self.jacobian.block(full, *ends).any()
                more = set()
                if weight not in self.relations.with_traces:
                    more = {"not-marked", "not-marked, warning"}
                reported = self._has_reason(weight, group, more)
                self.expect(not reached or reported, f"{weight} -> {a} without a relation")

    def _check_reads(self):
        """Old states that the output reads are known; states in no group are not read at all."""
        grouped = {name for group in self.groups for name in group.names}
        for group in self.groups:
            for name in group.names:
                read = self.jacobian.block(self.edges, ("output", ""), ("old", name)).any()
                self.expect(not read or name in group.read_by_output, f"old {name} -> output")
        for name in filter(is_hidden, self.jacobian.names("old")):
            self.expect(name in grouped or name not in self.read, f"{name}, read, in no group")

    def _check_other_states(self):
        """States that are no hidden states, and carry what depends on weights."""
        full = self.jacobian.total()
        old, new = self.jacobian.names("old"), self.jacobian.names("new")
        starts = self.marked + [("old", name) for name in old if is_hidden(name)]
        carriers, count = [], -1
        while count < len(carriers):
            count = len(carriers)
            starts += [("old", name) for name in carriers]
            carriers = [
                name
                for name in new
                if not is_hidden(name)
                and any(self.jacobian.block(full, ("new", name), start).any() for start in starts)
            ]
        ends = [("new", name) for name in new if is_hidden(name)] + [("output", "")]
        for name in carriers:
            reaches = any(self.jacobian.block(full, end, ("old", name)).any() for end in ends)
            reported = any(
                verdict(d) in ("untraced-state, warning", "truncated")
                and d.paths[0].split("#")[0] == name.split("#")[0]
                for d in self.graph.diagnostics
            )
            self.expect(not reaches or reported, f"State {name} -> hidden states or output")


def check_elements(entry, rule):
    graph = graph_of(entry, rule, readout_filters=False)
    Truncations(entry, graph).check()
    return graph


@each(TESTED)
def test_what_d_rtrl_truncates_is_reported(entry):
    check_elements(entry, "d_rtrl")


@each(SNAP)
def test_what_snap_truncates_is_reported(entry):
    check_elements(entry, "snap")


@pytest.mark.rows("rates-plain", "lif-marked_decay")
@pytest.mark.parametrize("row", readouts.LINEAR, ids=lambda row: row.name)
def test_filtered_readouts_are_linear_and_read_by_no_other_state(row):
    """Their value before the step returns times one number, for all units and at all points."""
    shape = readouts.data()[0][0].shape
    entry = Model(row.name, row.module, (), (), frozenset(), shape=shape)
    graph, jacobian = graph_of(entry, "d_rtrl"), jacobian_of(entry)
    names = {leaf.name for leaf in graph.traced.filtered}
    assert names
    held = [(kind, name) for kind in ("marked", "new") for name in jacobian.names(kind)]
    for name in names:
        sink, source = ("new", name), ("old", name)
        direct = jacobian.direct[:, jacobian.rows[sink]][:, :, jacobian.rows[source]]
        decay = direct[0, 0, 0] * np.eye(len(jacobian.rows[sink]))
        through = jacobian.total([node for node in held if node != sink])
        assert np.abs(direct - decay).max() < ROUNDING, name
        assert not (jacobian.block(through, sink, source) & (decay == 0)).any(), name
        for other in {*filter(is_hidden, jacobian.names("new"))} - names:
            for kind in ("old", "new"):
                assert not jacobian.block(jacobian.edges(), ("new", other), (kind, name)).any()


# --- rules that follow the full Jacobian --------------------------------------------------------


def full_state(entry, rule, **options):
    """The graph and its claims; `None` for a model that these rules refuse."""
    if entry.name in REFUSED:
        with pytest.raises(braintrace.CompilationError):
            graph_of(entry, rule, **options)
        return None
    graph = graph_of(entry, rule, **options)
    return graph, FullState(jacobian_of(entry), graph.flat_state)


@each(FULL)
def test_samples_and_the_sparsity_of_snap(entry):
    found = full_state(entry, "snap", n=2)
    if found is not None:
        check_full_state(entry, *found)


def check_full_state(entry, graph, state):
    check_states(entry, graph, state)
    jacobian, whole = jacobian_of(entry), graph.flat_state
    total = jacobian.total()
    covered = {name.split("#")[0] for name in whole.structure.of_parameters}
    for operation, weights in Relations(graph, jacobian).weights.items():
        assert weights <= covered or is_covered(jacobian, state, whole, total, operation), operation


def check_states(entry, graph, state):
    """What each new state depends on: old states of its own sample, and parameters."""
    jacobian, whole = jacobian_of(entry), graph.flat_state
    total = jacobian.total()
    new, old = state.rows("new", state.names), state.rows("old", state.names)
    for i in range(state.samples):
        own = total[np.ix_(new[i], old[i])]
        assert not (own & ~whole.structure.transition).any(), "the sparsity of dS'/dS"
        for j in {*range(state.samples)} - {i}:
            assert not total[np.ix_(new[i], old[j])].any(), "samples depend on each other"
    for weight in jacobian.names("parameter"):
        reached = [i for name, own in whole.reached.items() if same(name, weight) for i in own]
        for index, name in enumerate(state.names):
            block = jacobian.block(total, ("new", name), ("parameter", weight))
            assert index in reached or not block.any(), f"{weight} reaches {name}"


def same(name, weight):
    return name.split("#")[0] == weight


def is_covered(jacobian, state, whole, total, operation):
    """Whether the sparsity of some product holds for what an operation gives the first sample.

    Its outputs may be in another order inside: then only their number for each state is compared.
    """
    columns = jacobian.rows["marked", operation].reshape(state.samples, -1)[0]
    reached = total[np.ix_(state.rows("new", state.names)[0], columns)].T
    masks = [m for m in whole.structure.of_outputs.values() if m.shape == reached.shape]
    if operation_has_axes(jacobian, operation):
        masks, reached = [mask.sum(0) >= reached.sum(0) for mask in masks], np.True_
    return not reached.any() or any((reached <= mask).all() for mask in masks)


def operation_has_axes(jacobian, operation):
    """Whether an operation has several axes of units."""
    return len(jacobian.shapes["marked", operation]) > 2


@each(FULL)
def test_layers_are_in_order_and_what_they_truncate_is_reported(entry):
    found = full_state(entry, "ostl_recurrent")
    if found is None:
        return
    graph, _ = found
    jacobian = jacobian_of(entry)
    total, edges = jacobian.total(), jacobian.edges()
    layers = [[leaf.name for leaf in layer.leaves] for layer in graph.flat_state.layers]
    for i, upper in enumerate(layers):
        ends = [(a, j, c) for a in upper for j, layer in enumerate(layers) for c in layer]
        reads = {j for a, j, c in ends if jacobian.block(total, ("new", a), ("old", c)).any()}
        assert max(reads, default=i) <= i, f"{upper} comes before a layer that it reads"
        held = jacobian.total([("new", c) for _, j, c in ends if j != i])
        directly = {
            j
            for a, j, c in ends
            for kind in ("old", "new")
            if jacobian.block(held, ("new", a), (kind, c)).any()
        }
        if any(edges[:, jacobian.rows["old", name]].any() for name in upper):
            for j in directly - {i}:
                assert any(
                    d.kind == "truncated" and d.paths == (*layers[j], *upper)
                    for d in graph.diagnostics
                ), f"{layers[j]} -> {upper}"


# --- random cells -------------------------------------------------------------------------------

CELLS = [
    (("roll", 1, 0), ("gain", 0, 0)),
    (("mean", 1, 0), ("recurrent", 0, 1), ("multiply", 0, 2)),
    (("halves", 0, 1), ("fused", 0, 1), ("shift", 0, 2)),
    (("cumsum", 1, 0), ("select", 0, 2)),
    (("spike", 1, 0), ("sparse", 0, 1), ("padded", 0, 1), ("low rank", 0, 2)),
]
INNER = [
    (("loop", 1, 0), ("roll", 2, 0), ("recurrent", 0, 1), ("branch", 0, 3)),
    (("branch", 1, 0), ("spike", 0, 0), ("cumsum", 2, 0), ("loop", 0, 1)),
]


def check_cell(program):
    try:
        check_elements(entry_of(program), "d_rtrl")
    except (braintrace.CompilationError, NotFiniteError) as error:
        return type(error).__name__
    return "checked"


@pytest.mark.parametrize("instructions", CELLS)
def test_what_is_truncated_in_a_random_cell_is_reported(instructions):
    assert check_cell(Program(2, instructions)) == "checked"


def check_sparsity(program):
    try:
        entry = entry_of(program)
        check_states(entry, *full_state(entry, "snap", n=2))
    except (braintrace.CompilationError, NotFiniteError) as error:
        return type(error).__name__
    return "checked"


@pytest.mark.parametrize(
    "instructions",
    [
        (("roll", 1, 0), ("gain", 0, 0)),
        (("halves", 0, 1), ("fused", 0, 1), ("shift", 0, 2)),
        (("cumsum", 1, 0), ("select", 0, 2)),
        (("loop", 1, 0), ("roll", 2, 0), ("recurrent", 0, 1), ("branch", 0, 3)),
        (("branch", 1, 0), ("spike", 0, 0), ("cumsum", 2, 0), ("loop", 0, 1)),
    ],
)
def test_the_sparsity_of_snap_in_a_random_cell(instructions):
    assert check_sparsity(Program(2, instructions)) == "checked"


# --- functions with a derivative of their own ---------------------------------------------------


def sine_with(tangent):
    """A function whose derivative is not that of its value."""
    sine = jax.custom_jvp(jnp.sin)
    sine.defjvp(lambda x, t: (jnp.sin(x[0]), tangent(x[0], t[0])))
    return sine


DERIVATIVES = {
    "rolled and in place": (lambda x, t: t + 0.5 * jnp.roll(t, 1, -1), True),
    "mean": (lambda x, t: t - t.mean(-1, keepdims=True), True),
    "branch": (lambda x, t: jax.lax.cond(x.sum() > 9, jnp.negative, lambda t: 0.5 * t, t), False),
    "running": (lambda x, t: jnp.cumsum(t, -1), True),
    "there and back": (lambda x, t: jnp.roll(jnp.roll(t, 1, -1) * 0.5, -1, -1), False),
}


class OwnDerivative(brainstate.nn.Module):
    """A state that reads itself through such a function."""

    def __init__(self, function):
        super().__init__()
        self.w, self.function = brainstate.ParamState(jnp.eye(3, 4)), function

    def init_state(self, batch_size=None):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)))

    def update(self, x):
        self.h.value = 0.5 * self.function(self.h.value) + braintrace.matmul(x, self.w.value)
        return self.h.value


@pytest.mark.parametrize(("tangent", "couples"), DERIVATIVES.values(), ids=DERIVATIVES)
def test_what_a_custom_derivative_couples_is_reported(tangent, couples):
    entry = Model(
        "custom derivative rule",
        lambda: OwnDerivative(sine_with(tangent)),
        (),
        (),
        frozenset(),
        shape=(BATCH, 3),
    )
    graph = check_elements(entry, "d_rtrl")
    assert any(verdict(d) == "truncated, warning" for d in graph.diagnostics) == couples
    assert graph.hidden_groups[0].transition == (() if couples else ((0, 0),))
    check_states(entry, *full_state(entry, "snap", n=2))
