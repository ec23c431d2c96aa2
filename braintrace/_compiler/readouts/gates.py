r"""Splitting of fused gates into one operation per gate, for sharding.

The product of a gated cell has the outputs :math:`[y_1, \ldots, y_G]`, gate after gate, each with
all units. Sharded into equal parts, a device would have one gate of many units without their other
gates, and each step would communicate all gates. Instead, each device should have all gates of its
units. The program is rewritten to :math:`y_g = x W_g`. The weight, seen as ``(in, gate, unit)``, is
one array, sharded by unit. The last axis of each output, and of each trace, is then the units.

An array is a row of gates if all its readers take single gates. Elementwise readers count if their
results are read in the same way.

Inputs that are concatenated from several arrays, ``[x, h]``, are concatenated as replicated arrays.
Otherwise XLA would reshard the concatenated row and send parts of both.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ..._etrace_op import ETP_PRIMITIVE_SPECS, select_outputs
from ..._graph import TracedModel
from ..._jax import Atom, Equation, Var, bind, is_var, struct_of, unsharded
from ..._jaxpr import Program, Rule
from ..._jaxpr.dataflow import ELEMENTWISE
from ..frontend.rewritten import rewritten


@dataclasses.dataclass(frozen=True)
class Gate:
    """One of the gates that an operation of a model computes together.

    Attributes
    ----------
    equation
        Index of the operation in the program of the model.
    index, count
        Index of the gate, and the number of gates; 0 and 1 for an operation that is not split.
    """

    equation: int
    index: int
    count: int


def with_split_gates(
    traced: TracedModel, parts: int, mesh: Any
) -> tuple[TracedModel, dict[int, Gate]] | None:
    """Split the ETP operations of a step into one operation per gate.

    Parameters
    ----------
    traced
        The step.
    parts
        The number of parts that units are sharded into; gates of other sizes are not split.
    mesh
        The mesh; ``None``: not sharded yet.

    Returns
    -------
    step, gates
        The new step, and its gates by the equation of the new program that computes them; ``None``:
        nothing is split.
    """
    program = traced.program
    counts = _gates_to_take_apart(program, parts)
    rules = {**_rules_of_joined(program, mesh), **_rules_of_gates(program, counts)}
    if not rules:
        return None
    new = rewritten(traced, rules)
    before = [
        Gate(i, gate, count)
        for i, equation in enumerate(program.equations)
        if equation.primitive in ETP_PRIMITIVE_SPECS
        for count in [counts.get(equation.outvars[0], 1)]
        for gate in range(count)
    ]
    after = [i for i, e in enumerate(new.program.equations) if e.primitive in ETP_PRIMITIVE_SPECS]
    if traced.unfiltered is not None:
        inside = with_split_gates(traced.unfiltered, parts, mesh)
        new = dataclasses.replace(new, unfiltered=inside[0] if inside else traced.unfiltered)
    return new, dict(zip(after, before, strict=True))


# --- which arrays are rows of gates


def _gates_to_take_apart(program: Program, parts: int) -> dict[Var, int]:
    """Return the number of gates of each operation's output and of its descendants."""
    counts = _counts(program)
    taken_apart: dict[Var, int] = {}
    for equation in program.equations:
        count = counts.get(equation.outvars[0]) if len(equation.outvars) == 1 else None
        if count is None:
            continue
        if equation.primitive in ETP_PRIMITIVE_SPECS:
            units = equation.outvars[0].aval.shape[-1] // count
            is_apart = units % parts == 0 and _computes_gates(equation, count)
        else:  # a gate that is taken out may be read in parts, but is not a row of gates
            is_of_row = any(is_var(atom) and atom in taken_apart for atom in equation.invars)
            is_apart = is_of_row and equation.primitive.name in _BY_ELEMENT
        if is_apart:
            taken_apart[equation.outvars[0]] = count
    return taken_apart


def _counts(program: Program) -> dict[Var, int]:
    """Return the number of gates of each array that is read gate by gate."""
    results = {atom for atom in program.out_atoms if is_var(atom)}
    counts: dict[Var, int] = {}
    for equation in reversed(program.equations):
        for var in equation.outvars:
            uses = [(program.equations[i], counts) for i, _ in program.readers.get(var, ())]
            read_counts = {_count_read(var, *use) for use in uses}
            count = read_counts.pop() if len(read_counts) == 1 and var not in results else None
            # More pieces than entries in each: the pieces are units with their gates, sharded as
            # they are.
            if count is not None and 1 < count <= var.aval.shape[-1] // count:
                counts[var] = count
    return counts


def _count_read(var: Var, reader: Equation, counts: Mapping[Var, int]) -> int | None:
    """Return the number of gates that a reader splits an array into; ``None``: none."""
    shape, (out, *more) = var.aval.shape, reader.outvars
    name, size = reader.primitive.name, shape[-1] if shape else 0
    if name in _BY_ELEMENT and not more and out.aval.shape == shape:
        return counts.get(out)
    if name == "split" and reader.params["axis"] == len(shape) - 1:
        sizes = set(reader.params["sizes"])
        return int(size // sizes.pop()) if len(sizes) == 1 else None
    if name == "slice" and size and _gate_of_slice(reader) is not None:
        return int(size // out.aval.shape[-1])
    is_row_major = name == "reshape" and reader.params["dimensions"] is None
    if is_row_major and out.aval.shape[:-2] == shape[:-1] and out.aval.ndim == len(shape) + 1:
        return int(out.aval.shape[-2])
    return None


_BY_ELEMENT = ELEMENTWISE - {"optimization_barrier", "sharding_constraint", "braintrace_unsharded"}


def _gate_of_slice(equation: Equation) -> int | None:
    """Return the gate that a slice takes; ``None`` if it takes anything else."""
    shape, params = equation.invars[0].aval.shape, equation.params
    first, last, strides = (params[k] for k in ("start_indices", "limit_indices", "strides"))
    is_last_axis = (*first[:-1],) == (0,) * (len(shape) - 1) and last[:-1] == shape[:-1]
    units = last[-1] - first[-1]
    is_plain = strides is None or set(strides) == {1}
    if not is_plain or not is_last_axis or not 0 < units < shape[-1]:
        return None
    is_gate = shape[-1] % units == first[-1] % units == 0
    return int(first[-1] // units) if is_gate else None


def _computes_gates(equation: Equation, count: int) -> bool:
    """Test whether an operation can compute a single gate."""
    avals = [struct_of(atom.aval) for atom in equation.invars]
    gates = jax.eval_shape(lambda *values: _of_gates(equation, list(values), count), *avals)
    return gates is not None


# --- rules for the equations


class _Gates(tuple[Any, ...]):
    """The gates of a row, used instead of the array."""


def _rules_of_gates(program: Program, counts: Mapping[Var, int]) -> dict[int, Rule]:
    rules: dict[int, Rule] = {}
    for index, equation in enumerate(program.equations):
        reads = any(is_var(atom) and atom in counts for atom in equation.invars)
        count = counts.get(equation.outvars[0]) if equation.outvars else None
        if count is not None and equation.primitive in ETP_PRIMITIVE_SPECS:
            rules[index] = _operation(count)
        elif count is not None:
            rules[index] = _element_by_element(count)
        elif reads:
            rules[index] = _READERS[equation.primitive.name]
    return rules


def _operation(count: int) -> Rule:
    def run(equation: Equation, operands: list[Any]) -> list[Any]:
        gates = _of_gates(equation, operands, count)
        assert gates is not None  # checked by `_computes_gates`
        return [_Gates(gates)]

    return run


def _of_gates(equation: Equation, operands: list[Any], count: int) -> list[Any] | None:
    """Return the gates, each computed from its own columns of the weights.

    ``None`` if the operation cannot select columns.
    """
    spec = ETP_PRIMITIVE_SPECS[equation.primitive]
    positions = spec.resolve_trainable_invars(equation.params)
    weights = {name: operands[position] for name, position in positions.items()}
    pick_of = _Columns(count)
    gates = []
    for gate in range(count):
        columns = select_outputs(equation.primitive, equation.params, weights, pick_of(gate))
        if columns is None:
            return None
        gate_operands = list(operands)
        for name, position in positions.items():
            gate_operands[position] = columns[name]
        gates += bind(equation, gate_operands)
    return gates


class _Columns:
    """Take gates out of arrays; each array is reshaped to ``(..., gate, unit)`` once.

    With a reshape for each gate, XLA gathers the whole array for each of them on a mesh.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._seen: dict[int, tuple[Any, Any]] = {}

    def __call__(self, gate: int) -> Callable[[Any], Any]:
        """Return the function that takes one gate."""

        def pick(value: Any) -> Any:
            if id(value) not in self._seen:
                self._seen[id(value)] = value, _by_gate(value, self._count)
            return self._seen[id(value)][1][..., gate, :]

        return pick


def _by_gate(value: Any, count: int) -> Any:
    return value.reshape(*value.shape[:-1], count, value.shape[-1] // count)


def _element_by_element(count: int) -> Rule:
    def run(equation: Equation, operands: list[Any]) -> list[Any]:
        shape = equation.outvars[0].aval.shape

        def gates_of(atom: Atom, value: Any) -> Any:
            if isinstance(value, _Gates):
                return value
            if atom.aval.shape != shape:  # a scalar
                return [value] * count
            rows = _by_gate(value, count)
            return [rows[..., gate, :] for gate in range(count)]

        by_operand = map(gates_of, equation.invars, operands)
        return [
            _Gates(bind(equation, list(of_gate))[0] for of_gate in zip(*by_operand, strict=True))
        ]

    return run


def _of_slice(equation: Equation, operands: list[Any]) -> list[Any]:
    gate = _gate_of_slice(equation)
    assert gate is not None  # checked by `_count_read`
    return [operands[0][gate]]


def _of_split(_: Equation, operands: list[Any]) -> list[Any]:
    return list(operands[0])


def _of_reshape(_: Equation, operands: list[Any]) -> list[Any]:
    rows = [jax.lax.expand_dims(gate, [gate.ndim - 1]) for gate in operands[0]]
    return [jax.lax.concatenate(rows, rows[0].ndim - 2)]


_READERS: dict[str, Rule] = {"slice": _of_slice, "split": _of_split, "reshape": _of_reshape}


def _rules_of_joined(program: Program, mesh: Any) -> dict[int, Rule]:
    """Return the rules for equations that concatenate the inputs of operations."""
    if mesh is None:
        return {}
    inputs = (
        equation.invars[spec.x_invar_index]
        for equation in program.equations
        if (spec := ETP_PRIMITIVE_SPECS.get(equation.primitive)) is not None
        and spec.x_invar_index is not None
    )
    makers = program.making(atom for atom in inputs if is_var(atom))

    def joined(equation: Equation, operands: list[Any]) -> list[Any]:
        axis = equation.params["dimension"]
        return bind(equation, [unsharded(value, mesh, axis) for value in operands])

    return {
        index: joined
        for index in makers
        if program.equations[index].primitive.name == "concatenate"
        and program.equations[index].params["dimension"]
        == program.equations[index].outvars[0].aval.ndim - 1
    }
