"""What a program needs beside its arguments and results, estimated from its equations.

XLA joins operations on single numbers with those that read them, so that most intermediate
results are never written out. What is: operands and results of products, what leaves a loop or a
branch, sums, and results that are costly and read more than once. Each takes its bytes from where
it is made to where it is last read; the most that are there at once is the working memory. What a
loop carries is written over what it carried before, unless that is still to be read.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from .._jax import AnyJaxpr, Atom, Equation, Var, call_body, is_var, open_jaxpr, scan_counts
from .._jaxpr import reached
from .._jaxpr.dataflow.bilinear import dot_axes

SizeOf: TypeAlias = Callable[[Any], int]
"""The bytes of a variable, given its type."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where a program runs.

    Attributes
    ----------
    size_of
        The bytes that a variable of a type takes there.
    platform
        The kind of device, ``'cpu'`` for example. That one runs whatever can be run at once, first
        come first; others run what leaves least in memory.
    """

    size_of: SizeOf
    platform: str = "cpu"


VIEWS = frozenset({"reshape", "squeeze", "expand_dims", "stop_gradient", "copy", "transpose"})
"""The same numbers in the same order, or in one that what reads them can follow."""

_ELEMENTWISE = """
abs add add_any and ceil clamp complex conj convert_element_type copy_p cos div eq erf erf_inv exp
exp2 expm1 floor ge gt imag integer_pow is_finite le log log1p logistic lt max min mul ne neg
nextafter not or population_count pow real rem round rsqrt select_n shift_left
shift_right_arithmetic shift_right_logical sign sin sqrt square sub tan tanh xor
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
JOINED = ELEMENTWISE | {
    "broadcast_in_dim",
    "dynamic_slice",
    "gather",
    "iota",
    "pad",
    "rev",
    "slice",
}
"""What may be computed where it is read."""

_COSTLY = "cos div erf erf_inv exp exp2 expm1 log log1p logistic pow rem rsqrt sin sqrt tan tanh"
COSTLY = frozenset(_COSTLY.split()) | {"gather"}
"""What is not computed twice."""

IN_PLACE = ELEMENTWISE | {"dynamic_update_slice", "scatter", "scatter-add", "while"}
"""What may be written over an operand."""

READS_NOTHING = frozenset({"zeros_mapped_like"})
"""What has operands for maps alone; see `_jax`."""

SUMS = frozenset(
    {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod"}
)
"""What joins with what it reads, but not with what reads it."""


@dataclasses.dataclass(eq=False)
class _Value:
    """What a variable holds in one run of a body."""

    size: int
    made_by: "_Operation | None" = None
    readers: list["_Operation"] = dataclasses.field(default_factory=list)
    is_result: bool = False


@dataclasses.dataclass(eq=False)
class _Operation:
    """An equation in one run of a body; calls, and what is for one platform, are run in place."""

    equation: Equation
    operands: list[_Value]
    results: list[_Value]

    @property
    def name(self) -> str:
        return str(self.equation.primitive.name)


@dataclasses.dataclass(frozen=True, eq=False)
class _Body:
    """The operations of a body, inputs and results."""

    inputs: list[_Value]
    operations: list[_Operation]
    results: list[_Value]


def working_bytes(jaxpr: AnyJaxpr, setting: Setting) -> int:
    """Return how many bytes a program needs beside its arguments and results.

    Parameters
    ----------
    jaxpr
        The program.
    setting
        Where it runs.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> program = jax.make_jaxpr(lambda x: (jnp.tanh(x @ x) @ x).sum())(jnp.ones((8, 8)))
    >>> working_bytes(program, Setting(lambda aval: 4 * aval.size))
    512
    """
    body = _body_of(jaxpr, setting)
    return _most(body, setting, {id(value): 0 for value in (*body.inputs, *body.results)})


def _body_of(jaxpr: AnyJaxpr, setting: Setting) -> _Body:
    opened, _ = open_jaxpr(jaxpr)
    inputs = [_Value(setting.size_of(var.aval)) for var in (*opened.constvars, *opened.invars)]
    known = dict(zip((*opened.constvars, *opened.invars), inputs, strict=True))
    operations: list[_Operation] = []
    results = _flattened(opened, known, operations, setting)
    for result in results:
        result.is_result = True
    kept = _needed(operations, results)
    for operation in kept:
        for operand in operation.operands:
            operand.readers.append(operation)
    return _Body(inputs[len(opened.constvars) :], kept, results)


def _flattened(
    jaxpr: Any, known: dict[Var, _Value], operations: list[_Operation], setting: Setting
) -> list[_Value]:
    """Add the operations of a body, and of the calls in it, and return its results."""

    def value_of(atom: Atom) -> _Value:
        return known[atom] if is_var(atom) else _Value(0)

    for equation in jaxpr.eqns:
        operands = [value_of(atom) for atom in equation.invars]
        body = _body_in_place(equation, operands, setting.platform)
        if body is None:
            results = [_Value(setting.size_of(var.aval)) for var in equation.outvars]
            reads_nothing = equation.primitive.name in READS_NOTHING
            operation = _Operation(equation, [] if reads_nothing else operands, results)
            for result in results:
                result.made_by = operation
            operations.append(operation)
        else:
            inner, _ = open_jaxpr(body)
            inside = {var: _Value(setting.size_of(var.aval)) for var in inner.constvars}
            given = operands[len(operands) - len(inner.invars) :]
            inside |= zip(inner.invars, given, strict=True)
            results = _flattened(inner, inside, operations, setting)
        known.update(zip(equation.outvars, results, strict=True))
    return [value_of(atom) for atom in jaxpr.outvars]


def _body_in_place(equation: Equation, operands: list[_Value], platform: str) -> AnyJaxpr | None:
    """Return the body of a call, or the branch for the platform that programs run on."""
    index = operands[0].made_by if equation.primitive.name == "cond" else None
    if index is None or index.name != "platform_index":
        return call_body(equation)
    platforms = index.equation.params["platforms"]
    here = [i for i, names in enumerate(platforms) if names is None or platform in names]
    branch: AnyJaxpr = equation.params["branches"][here[0]]
    return branch


def _needed(operations: list[_Operation], results: list[_Value]) -> list[_Operation]:
    """Return the operations that results, or effects, are computed from."""
    makers = [value.made_by for value in results if value.made_by is not None]
    acting = (operation for operation in operations if operation.equation.effects)

    def before(operation: _Operation) -> Iterable[_Operation]:
        return (value.made_by for value in operation.operands if value.made_by is not None)

    needed = reached([*makers, *acting], before)
    return [operation for operation in operations if operation in needed]


def _most(body: _Body, setting: Setting, sizes: dict[int, int]) -> int:
    """Return the most bytes that are there at once.

    Parameters
    ----------
    body
        The body.
    setting
        Where it runs.
    sizes
        Bytes of values by identity, where they are others than those of their types.
    """
    written = _written_out(body)
    sources = _Sources(written)
    runs = [o for o in body.operations if any(id(r) in written for r in o.results)]
    runs = _first_come(runs, sources) if setting.platform == "cpu" else runs
    last: dict[int, int] = {}
    values: dict[int, _Value] = {}
    for index, operation in enumerate(runs):
        for source in _unique(map(sources, operation.operands)):
            last[id(source)], values[id(source)] = index, source
    for source in _unique(map(sources, body.results)):
        last[id(source)], values[id(source)] = len(runs), source
    dying: dict[int, list[_Value]] = {}
    for key, index in last.items():
        dying.setdefault(index, []).append(values[key])

    def bytes_of(value: _Value) -> int:
        return sizes.get(id(value), value.size)

    made: set[int] = set()
    # Places for what loops stack wait for nothing, and come first of all.
    early = [v for o in runs if o.name == "scan" for v in _stacked(o)]
    early = early if setting.platform == "cpu" else []
    made.update(map(id, early))
    now = most = sum(map(bytes_of, early))
    for index, operation in enumerate(runs):
        over = [v for v in dying.get(index, ()) if id(v) in made]
        before = [v for v in over if _can_be_written_over(operation, v, sources)]
        now -= sum(map(bytes_of, before))
        results = [r for r in operation.results if id(r) in written and id(r) not in made]
        now += sum(map(bytes_of, results))
        made.update(map(id, results))
        most = max(most, now + _inside(operation, setting))
        now -= sum(bytes_of(v) for v in over if not any(v is b for b in before))
        now -= sum(bytes_of(r) for r in operation.results if id(r) in made and id(r) not in last)
    return most


def _first_come(runs: list[_Operation], sources: "_Sources") -> list[_Operation]:
    """Return operations in the order in which they have what they read."""
    waits: dict[int, int] = {}
    readers: dict[int, list[_Operation]] = {}
    ready: list[_Operation] = []
    for run in runs:
        needed = _unique(map(sources, run.operands))
        makers = {id(v.made_by): v.made_by for v in needed if v.made_by is not None}
        waits[id(run)] = len(makers)
        for key in makers:
            readers.setdefault(key, []).append(run)
        if not makers:
            ready.append(run)
    for run in ready:
        for reader in readers.get(id(run), ()):
            waits[id(reader)] -= 1
            if not waits[id(reader)]:
                ready.append(reader)
    return ready


def _unique(groups: Iterable[Sequence[_Value]]) -> list[_Value]:
    return list({id(value): value for value in itertools.chain(*groups)}.values())


class _Sources:
    """The values in memory that are read where a value is computed."""

    def __init__(self, written: set[int]) -> None:
        self._written = written
        self._known: dict[int, list[_Value]] = {}

    def __call__(self, value: _Value) -> list[_Value]:
        """Return them."""
        if id(value) not in self._known:
            is_there = value.made_by is None or id(value) in self._written
            operands = [] if value.made_by is None else value.made_by.operands
            self._known[id(value)] = [value] if is_there else _unique(map(self, operands))
        return self._known[id(value)]


def _written_out(body: _Body) -> set[int]:
    """Return the values that are written to memory, by identity."""
    written: set[int] = set()
    for operation in reversed(body.operations):
        for result in operation.results:
            is_read = bool(result.readers) or result.is_result
            if is_read and not _is_joined(operation, result):
                written.add(id(result))
    return written


def _is_joined(operation: _Operation, result: _Value) -> bool:
    """Tell whether a value is computed where it is read, or lies where another one does."""
    if operation.name in VIEWS:
        return operation.operands[0].made_by is not None or not result.is_result
    if operation.name not in JOINED or result.is_result:
        return False
    readers = _real_readers(result)
    is_once = len(readers) <= 1 or operation.name not in COSTLY
    return is_once and all(reader.name in JOINED | SUMS for reader in readers)


def _real_readers(value: _Value) -> list[_Operation]:
    """Return what reads a value, behind views of it."""
    found: list[_Operation] = []
    for reader in value.readers:
        if reader.name in VIEWS:
            result = reader.results[0]
            found += [reader] if result.is_result else _real_readers(result)
        else:
            found.append(reader)
    return found


def _can_be_written_over(operation: _Operation, value: _Value, sources: _Sources) -> bool:
    """Tell whether results may lie where an operand did that is not read any more."""
    if operation.name in ELEMENTWISE:
        return value.size <= sum(r.size for r in operation.results)
    if operation.name == "scan":
        constants, carried = scan_counts(operation.equation)
        begins = operation.operands[constants : constants + carried]
        return any(value is source for begin in begins for source in sources(begin))
    return operation.name in IN_PLACE


def _inside(operation: _Operation, setting: Setting) -> int:
    """Return what the body of a loop or a branch needs."""
    params = operation.equation.params
    if operation.name == "dot_general":
        return _brought_in_order(operation)
    if operation.name == "scan":
        constants, carried = scan_counts(operation.equation)
        return _in_loop(params["jaxpr"], constants, carried, setting)
    if operation.name == "while":
        carried = len(operation.results)
        return _in_loop(params["body_jaxpr"], params["body_nconsts"], carried, setting)
    if operation.name == "cond":
        return max(working_bytes(branch, setting) for branch in params["branches"])
    return 0


def _stacked(operation: _Operation) -> list[_Value]:
    """Return what a loop stacks that somebody reads."""
    stacked = operation.results[scan_counts(operation.equation)[1] :]
    return [value for value in stacked if value.readers or value.is_result]


def _brought_in_order(operation: _Operation) -> int:
    """Return the bytes of operands that are copied: a batch of products wants its axes first."""
    return sum(
        operand.size
        for operand, batch in zip(
            operation.operands, dot_axes(operation.equation).batch, strict=True
        )
        if batch and (batch != tuple(range(len(batch))) or _is_transposed(operand))
    )


def _is_transposed(value: _Value) -> bool:
    return value.made_by is not None and value.made_by.name == "transpose"


def _in_loop(jaxpr: AnyJaxpr, constants: int, carried: int, setting: Setting) -> int:
    """Return what one run of the body of a loop needs beside what it carries and stacks."""
    body = _body_of(jaxpr, setting)
    sizes = {id(value): 0 for value in body.inputs}
    before = body.inputs[constants : constants + carried]
    for old, new in zip(before, body.results[:carried], strict=True):
        if not _is_read_after(body, old, new):
            sizes[id(new)] = 0
    for stacked in body.results[carried:]:
        if stacked.made_by is not None and stacked.made_by.name in JOINED:
            sizes.setdefault(id(stacked), 0)
    return _most(body, setting, sizes)


def _is_read_after(body: _Body, old: _Value, new: _Value) -> bool:
    """Tell whether what a loop carries is read when, or after, it gets its new value."""
    order = {id(operation): index for index, operation in enumerate(body.operations)}
    made = -1 if new.made_by is None else order[id(new.made_by)]
    is_itself = new.made_by is not None and new.made_by.name not in IN_PLACE
    return any(order[id(r)] > made - is_itself for r in old.readers)
