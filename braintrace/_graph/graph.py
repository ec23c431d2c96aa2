"""Compiled model: the weights that learn online, and the traces that a rule carries for them."""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from .._checks import path_name
from .._etrace_op.registry import role
from .._jax import Atom, Var, is_var
from .._typing import Path
from .flat_state import FlatState, operand_key, operands_of
from .hidden_group import HiddenGroup, HiddenParamOpRelation
from .report import DelayRow, Diagnostic, GroupRow, PlainRow, RelationRow, Report
from .traced_model import Batch, StateLeaf, TracedModel

# --- traces

TraceSpecs: TypeAlias = Mapping[str, Any]
"""The structure of traces, with a `TraceSpec` in the place of each array."""

Record = Literal["x", "values", "states", "step", "traces", "operands"]
"""Residuals that can be recorded of a step; see `Records`.

``'values'``: what its local steps read. ``'step'``: the inputs of its program. ``'traces'``: the
traces before the step; chunks then have one step, whatever length is requested, and the gradient is
the gradient of a single step. ``'operands'``: the operands of products with parameters. Under a
full-Jacobian rule, gradients can then be taken with respect to these operands, as well as to the
parameters themselves."""

Role = Literal["batch", "fan_out", "spatial", "group", "input", "output", "entry", "state"]
"""The meaning of an axis of a trace: samples, units that one output reaches, places of a
convolution, its groups, inputs, outputs, other entries, or the elements of a sample's flattened
state."""


@dataclasses.dataclass(frozen=True, eq=False)
class TraceSpec:
    """One array of the traces.

    Attributes
    ----------
    shape, dtype
        Shape and dtype of the array, in the dtype of the model.
    axes
        The meaning of each axis.
    relation
        Key of the relation that it belongs to; ``None``: none.
    state, operand
        Names of the state that it follows (``None``: no single one) and of the array, for reports.
    initial
        Value at the start of a sequence: a number, or an array of this shape.
    takes_trace_dtype
        Whether it has the dtype that a user gives as ``trace_dtype``.
    outlives_reset
        Whether it continues when a sequence is reset, for some samples or all, like a random
        stream. It then has a key at the top level of the traces.
    full_shape
        The shape if structural zeros were stored as well; ``None``: there are none.
    samples
        ``flags -> array``: for every entry, whether the flag of its sample is set, given one flag
        for all samples or one for each. An entry that all samples share is set if all flags are.
        ``None``: its axis ``'batch'`` has the samples.
    packed_with
        Key of another trace that may be stored together with it, as real and imaginary part of one
        complex array; see `complex_packing`.
    rule
        Name of the rule that carries it, in a model with several.
    behind
        Names of the States with earlier values that it serves instead of traces of their own.

    Examples
    --------
    The key of a random stream, which a `Rule` keeps through resets:

    >>> import braintrace, jax, jax.numpy as jnp
    >>> key = jax.random.PRNGKey(0)
    >>> spec = braintrace.TraceSpec((2,), jnp.uint32, ("entry",), initial=key, outlives_reset=True)
    >>> spec.nbytes
    8
    """

    shape: tuple[int, ...]
    dtype: jax.typing.DTypeLike
    axes: tuple[Role, ...]
    relation: str | None = None
    state: str | None = None
    operand: str = ""
    initial: float | jax.Array = 0
    takes_trace_dtype: bool = True
    outlives_reset: bool = False
    full_shape: tuple[int, ...] | None = None
    samples: Callable[[jax.Array], jax.Array] | None = None
    packed_with: str | None = None
    rule: str | None = None
    behind: str = ""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * int(np.dtype(self.dtype).itemsize)


def specs_of(specs: TraceSpecs) -> list[TraceSpec]:
    """Return the specifications of all arrays, in order."""
    arrays = []
    for entry in specs.values():
        arrays += [entry] if isinstance(entry, TraceSpec) else specs_of(entry)
    return arrays


# --- the compiled model


@dataclasses.dataclass(frozen=True, eq=False)
class ETraceGraph:
    """A compiled model: the analysis of one step for one learning rule.

    Attributes
    ----------
    traced
        The step as a flat program with named inputs and outputs.
    hidden_groups
        Hidden states with elementwise coupling.
    hidden_param_op_relations
        ETP operations that reach hidden groups, and their parameters.
    diagnostics
        Approximations that a user should know.
    needs, trace_specs
        The residuals that the learning rule needs of every step, and the arrays that it carries
        from step to step; see `TraceMethod`.
    batch
        The number of samples, and the batch axis of each state.
    flat_state
        The hidden states as one vector, for full-Jacobian rules.

    Examples
    --------
    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> class Leaky(brainstate.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = brainstate.ParamState(jnp.ones((2, 3)))
    ...
    ...     def init_state(self, batch_size=1):
    ...         self.h = brainstate.HiddenState(jnp.zeros((batch_size, 3)))
    ...
    ...     def update(self, x):
    ...         self.h.value = 0.9 * self.h.value + braintrace.matmul(x, self.w.value)
    ...         return self.h.value
    >>> model = Leaky()
    >>> model.init_state()
    >>> graph = braintrace.compile_etrace_graph(model, jnp.ones((1, 2)))
    >>> [relation.key for relation in graph.hidden_param_op_relations]
    ['w@mm0']
    """

    traced: TracedModel
    hidden_groups: tuple[HiddenGroup, ...]
    hidden_param_op_relations: tuple[HiddenParamOpRelation, ...]
    diagnostics: tuple[Diagnostic, ...]
    needs: frozenset[Record]
    trace_specs: TraceSpecs
    batch: Batch
    flat_state: FlatState | None = None

    @property
    def traced_groups(self) -> tuple[HiddenGroup, ...]:
        """Groups that some relation reaches."""
        reached = {i.group for r in self.hidden_param_op_relations for i in r.influences}
        return tuple(group for group in self.hidden_groups if group.index in reached)

    def batch_axis(self, group: HiddenGroup) -> int | None:
        """Return the batch axis of a group's units; ``None``: they have none."""
        for state, layout in zip(group.states, group.old_layouts, strict=True):
            axis = self.batch.axis(state)
            if layout is None:
                return axis
            if axis is not None and layout.size > group.num_positions:  # a slot of a State
                inside = np.nonzero(layout >= 0)
                places = np.unravel_index(layout[inside], group.shape)
                fits = (i for i, place in enumerate(places) if np.array_equal(place, inside[axis]))
                return next(fits, None)
        return None

    @property
    def traced_states(self) -> tuple[StateLeaf, ...]:
        """The hidden states that traces follow: of traced groups, or of the flattened state."""
        if self.flat_state is not None:
            return self.flat_state.leaves
        return tuple(state for group in self.traced_groups for state in group.hidden_states)

    @property
    def passes_weights(self) -> bool:
        """Whether gradients pass through the steps of a chunk to the traces before it."""
        return self.flat_state is not None and self.flat_state.structure is None

    @functools.cached_property
    def read_late(self) -> tuple[StateLeaf, ...]:
        """Traced states whose old value a loss of the step sees.

        It enters an output, another State or a state that it is upstream of, without a path through
        the new value of a traced state.
        """
        if self.flat_state is None:
            groups = self.traced_groups
            late = (group.states[a] for group in groups for a in group.read_late)
            return tuple(dict.fromkeys(late))
        new = [leaf.out_var for leaf in self.flat_state.leaves]
        written = [leaf.out_var for leaf in self.traced.leaves if leaf.out_var is not None]
        others = [var for var in written if var not in new]
        stops = frozenset(var for var in new if is_var(var))
        behind = self.traced.program.depends_on([*self.traced.output_atoms, *others], stops)
        return tuple(leaf for leaf in self.flat_state.leaves if leaf.in_var in behind)

    @property
    def new_hidden_vars(self) -> tuple[tuple[HiddenGroup, int, Var], ...]:
        """``(group, state, variable)`` of the traced groups, in the order of computation.

        Of the slots of a State in one variable, it is the first one.
        """
        producer = self.traced.program.producer
        entries = {
            var: (group, group.new_vars.index(var), var)
            for group in self.traced_groups
            for var in group.new_vars
        }
        return tuple(sorted(entries.values(), key=lambda entry: producer[entry[2]]))

    @property
    def recorded_inputs(self) -> list[Var]:
        """The inputs of the program, without its parameters."""
        parameters = {leaf.in_var for leaf in self.traced.parameters}
        return [var for var in self.traced.program.in_vars if var not in parameters]

    @property
    def operand_atoms(self) -> Mapping[str, Mapping[str, Atom]]:
        """Targets of gradients: the operands of each relation, or each parameter."""
        if self.flat_state is None:
            return {r.key: r.trainable_vars for r in self.hidden_param_op_relations}
        parameters = self.traced.parameters
        atoms: dict[str, Mapping[str, Atom]] = {s.name: {"value": s.in_var} for s in parameters}
        if "operands" in self.needs:
            program = self.traced.program
            atoms |= {operand_key(use): operands_of(program, use) for use in self.flat_state.uses}
        return atoms

    @functools.cached_property
    def held_paths(self) -> Mapping[str, tuple[Path, ...]]:
        """Paths of the States that the weights of each relation or use depend on, by key."""
        flat, program = self.flat_state, self.traced.program
        if flat is None:
            return {r.key: r.held_paths for r in self.hidden_param_op_relations}
        fixed = [s for s in self.traced.leaves if s.kind != "parameter" and s.out_var is None]
        behind = {use.key: program.depends_on(flat.operands(program, use)) for use in flat.uses}
        return {
            key: tuple(dict.fromkeys(leaf.path for leaf in fixed if leaf.in_var in ancestors))
            for key, ancestors in behind.items()
        }

    @functools.cached_property
    def opaque_equations(self) -> tuple[int, ...]:
        """Equations of the ETP operations at which traced gradients end."""
        equations = self.traced.program.equations
        return tuple(i for i, equation in enumerate(equations) if role(equation) == "opaque")

    def __str__(self) -> str:
        return str(report_of(self))

    def _repr_html_(self) -> str:
        return report_of(self)._repr_html_()


# --- its report


def report_of(graph: ETraceGraph) -> Report:
    """Return the report of a compiled model."""
    specs = specs_of(graph.trace_specs)
    of_relations = (
        _relation_row(relation, [spec for spec in specs if spec.relation == relation.key])
        for relation in graph.hidden_param_op_relations
    )
    return Report(
        relations=(*of_relations, *_flat_state_rows(graph, specs)),
        groups=tuple(map(_group_row, graph.hidden_groups)),
        without_trace=tuple(_plain_rows(graph)),
        diagnostics=graph.diagnostics,
        stored_bytes=sum(spec.nbytes for spec in specs),
        readouts=tuple(graph.traced.readouts),
        filter_bytes=sum(leaf.nbytes for leaf in graph.traced.filters),
        delays=tuple(_delay_rows(graph, specs)),
    )


def _relation_row(relation: HiddenParamOpRelation, specs: Sequence[TraceSpec]) -> RelationRow:
    x_var, groups = relation.x_var, relation.hidden_groups
    return RelationRow(
        key=relation.key,
        operation=relation.primitive.name,
        source=relation.source,
        parameters=relation.printed_paths,
        x_shape=None if x_var is None else tuple(x_var.aval.shape),
        y_shape=tuple(relation.y_var.aval.shape),
        states=tuple(tuple(state.name for state in group.hidden_states) for group in groups),
        rule=next((spec.rule for spec in specs), None),
        **_sizes(specs),
    )


def _sizes(specs: Sequence[TraceSpec]) -> dict[str, Any]:
    return {
        "traces": tuple((spec.state or "", spec.operand, spec.shape) for spec in specs),
        "stored_bytes": sum(spec.nbytes for spec in specs),
    }


def _flat_state_rows(graph: ETraceGraph, specs: Sequence[TraceSpec]) -> Iterator[RelationRow]:
    """Yield a row for each use and each parameter that has traces by a full-Jacobian rule."""
    flat, program, inside = graph.flat_state, graph.traced.program, set[str]()
    if flat is None:
        return
    names = tuple(leaf.name for leaf in flat.leaves)
    for use in flat.uses:
        own = [spec for spec in specs if spec.relation == use.key]
        if own:
            behind = program.depends_on(flat.operands(program, use))
            used = tuple(leaf.name for leaf in graph.traced.parameters if leaf.in_var in behind)
            inside.update(used)
            yield RelationRow(use.key, "any", "", used, None, None, (names,), **_sizes(own))
    for name, reached in flat.reached.items():
        own = [spec for spec in specs if spec.relation is None and spec.operand == name]
        if own or name not in inside:
            states = (tuple(names[index] for index in reached),)
            yield RelationRow(name, "any", "", (name,), None, None, states, **_sizes(own))


def _group_row(group: HiddenGroup) -> GroupRow:
    names = [state.name for state in group.states]
    transition = tuple(dict.fromkeys((names[c], names[a]) for a, c in group.transition))
    downstream = tuple(dict.fromkeys(names[a] for a in group.downstream))
    names = [state.name for state in group.hidden_states]
    return GroupRow(group.index, tuple(names), group.shape, transition, downstream)


def _delay_rows(graph: ETraceGraph, specs: Sequence[TraceSpec]) -> Iterator[DelayRow]:
    for behind in dict.fromkeys(spec.behind for spec in specs if spec.behind):
        size = sum(spec.nbytes for spec in specs if spec.behind == behind)
        yield DelayRow(behind, "one late trace, and factors of the steps since", size)
    for leaf, count, size in slot_sizes(graph, specs):
        if size and not leaf.is_grouped:
            yield DelayRow(leaf.name, f"a trace for each of {count} values", size)


def slot_sizes(
    graph: ETraceGraph, specs: Sequence[TraceSpec]
) -> Iterator[tuple[StateLeaf, int, int]]:
    """Yield each traced State with several slots, their number, and the bytes of their traces."""
    for group in graph.traced_groups:
        for leaf, count in collections.Counter(group.states).items():
            slots = [n for n, state in zip(group.names, group.states, strict=True) if state is leaf]
            if count > 1:
                yield leaf, count, sum(spec.nbytes for spec in specs if spec.state in slots)


def _plain_rows(graph: ETraceGraph) -> Iterator[PlainRow]:
    related = {p for r in graph.hidden_param_op_relations for p in r.parameter_paths}
    otherwise = "used by ordinary operations only"
    if graph.flat_state is not None:
        leaves, otherwise = graph.traced.leaves, "reaches no hidden state"
        related |= {leaf.path for leaf in leaves if leaf.name in graph.flat_state.reached}
    readouts = graph.traced.readouts.items()
    filtered = {
        path: f"exact by a filter of '{name}'" for name, paths in readouts for path in paths
    }
    for path in graph.traced.parameter_paths:
        if path not in related:
            name = path_name(path)
            kinds = dict.fromkeys(d.kind for d in graph.diagnostics if name in d.paths)
            yield PlainRow(name, ", ".join(kinds) or filtered.get(path, otherwise))
