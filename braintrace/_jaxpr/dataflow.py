"""Forward dataflow through a jaxpr: the sources of each element or variable.

The analysis visits equations in order. It follows calls into their bodies, joins the results of
branches, and iterates loops to a fixpoint. Primitives of the tables below are followed element by
element. For any other primitive, every element of every result depends on all elements of all
operands. Rules are about values: a result may depend on an element and have no derivative with
respect to it.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from .._jax import TRANSPARENT_CALLS, AnyJaxpr, Atom, Equation, Var, call_body, is_var
from .bodies import loop_of
from .constants import Constants
from .lattices import Flow, Lattice, along, everything, filled, joined, same, spread
from .moves import READS, TAKE, WRITES, read, through_move, write
from .program import carries_derivative

# --- primitives


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE = _names(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
    clamp clz complex conj convert_element_type copy copy_p cos cosh device_put digamma div eq erf
    erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow
    is_finite le lgamma log log1p log2 logistic lt max min mul mulhi name ne neg nextafter not
    one_minus_square optimization_barrier or pcast polygamma population_count pow pvary
    random_gamma_grad real reduce_precision regularized_incomplete_beta rem round rsqrt select_n
    sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
    square sub tan tanh with_derivative_of xor zeta
    """
)
"""A result element depends on the operand elements at the same index (scalars aside)."""

CONSTANT = frozenset({"stop_gradient"})
"""Identities without a derivative."""

PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
DRAWS = frozenset({"rng_uniform"})

IN_ORDER = _names("convert_element_type copy copy_p expand_dims name reshape squeeze stop_gradient")
"""Primitives whose result has the elements of the only operand, in order."""


def _last(count: int) -> Callable[[Equation], Sequence[int]]:
    """Return the axes of a matrix or vector along the last axes of the first operand."""
    return lambda equation: range(len(equation.invars[0].aval.shape) - count, 99)


_MATRICES = "cholesky eig eigh hessenberg lu qr schur svd triangular_solve tridiagonal"
_CUMULATIVE = "cumlogsumexp cummax cummin cumprod cumsum"

JOINED_ALONG: Mapping[str, Callable[[Equation], Sequence[int]]] = {
    **dict.fromkeys(_names(_CUMULATIVE), lambda e: [e.params["axis"]]),
    **dict.fromkeys(_names(_MATRICES), _last(2)),
    **dict.fromkeys(["lu_pivots_to_permutation", "tridiagonal_solve"], _last(1)),
    "fft": lambda e: _last(len(e.params["fft_lengths"]))(e),
    "sort": lambda e: [e.params["dimension"]],
    "top_k": lambda e: [e.params.get("axis", -1) % len(e.outvars[0].aval.shape)],
}
"""Operations that couple the elements along some axes, and keep all others apart."""


SOLVES: Mapping[str, int] = {"triangular_solve": 1, "tridiagonal_solve": 3}
"""Solvers of linear equations, with the number of operands that make up the matrix.

Columns of the right-hand side are independent."""


def through_primitive(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], constants: Constants
) -> Sequence[Flow]:
    """Return the flows of an equation's results; at least one operand has a flow."""
    name, shape = equation.primitive.name, equation.outvars[0].aval.shape
    if name in ELEMENTWISE | CONSTANT:
        return [joined(lattice, [f if f is None else spread(lattice, f, shape) for f in operands])]
    if name in TAKE:
        return through_move(lattice, equation, operands)
    if name in READS:
        return read(lattice, equation, operands, constants)
    if name in WRITES or name.startswith("scatter-"):
        return write(lattice, equation, operands, constants)
    if name in SOLVES and all(flow is None for flow in operands[: SOLVES[name]]):
        axis = -2 if equation.params.get("left_side", True) else -1
        flow = filled(lattice, operands[-1], shape)
        return [along(lattice, flow, [axis % len(shape)])]
    if name in JOINED_ALONG:
        return _joined_along(lattice, equation, operands)
    if name == "dot_general":
        return _dot(lattice, equation, operands)
    if name == "conv_general_dilated" and operands[1] is None:
        return _conv(lattice, equation, operands)
    if name in _WINDOWS:
        return [_WINDOWS[name](lattice, equation, operands)]
    if name.startswith(("reduce", "arg")) and ("axes" in equation.params or name == "reduce"):
        return _reduction(lattice, equation, operands)
    if name == "zeros_mapped_like":
        return [None] * len(equation.outvars)
    return coupled(lattice, equation, operands)


def coupled(lattice: Lattice, equation: Equation, operands: Sequence[Flow]) -> list[Flow]:
    """Return the flows of results whose every element depends on all elements."""
    one = everything(lattice, operands)
    return [None if one is None else spread(lattice, one, v.aval.shape) for v in equation.outvars]


def _joined_along(lattice: Lattice, equation: Equation, operands: Sequence[Flow]) -> list[Flow]:
    every = JOINED_ALONG[equation.primitive.name](equation)
    ones = [
        lattice.over(f, [axis for axis in every if axis < f.ndim - lattice.rank])
        for f in operands
        if f is not None
    ]
    one = joined(lattice, ones)
    shapes = [var.aval.shape for var in equation.outvars]
    axes = [tuple(axis for axis in every if axis < len(shape)) for shape in shapes]
    pairs = zip(axes, shapes, strict=True)
    return [spread(lattice, np.expand_dims(one, own), shape) for own, shape in pairs]


def _reduction(lattice: Lattice, equation: Equation, operands: Sequence[Flow]) -> list[Flow]:
    """Join along axes; ``reduce`` joins all of its operands, and the start values."""
    axes = equation.params.get("axes", equation.params.get("dimensions"))
    shape, count = equation.outvars[0].aval.shape, len(equation.outvars)
    flows = [f if f is None else lattice.over(f, axes) for f in operands[:count]]
    starts = [f if f is None else spread(lattice, f, shape) for f in operands[count:]]
    return [joined(lattice, [*flows, *starts])] * count


def dot_letters(equation: Equation) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the letters of a ``dot_general`` as an einsum: of its operands, and of its result.

    Axes with the same letter correspond. The letters that the result does not have are summed over.
    """
    summed, batch = equation.params["dimension_numbers"]
    first, second = (
        [f"{name}{axis}" for axis in range(len(atom.aval.shape))]
        for name, atom in zip("ab", equation.invars, strict=True)
    )
    for a, b in (*zip(*summed, strict=True), *zip(*batch, strict=True)):
        second[b] = first[a]
    shared = [first[axis] for axis in batch[0]]
    free = [a for a in first if a not in second] + [b for b in second if b not in first]
    return tuple(first), tuple(second), (*shared, *free)


def _dot(lattice: Lattice, equation: Equation, operands: Sequence[Flow]) -> list[Flow]:
    """Join along contracted axes, and broadcast along the axes of the other factor."""
    (*letters, result), flows = dot_letters(equation), []
    for names, flow in zip(letters, operands, strict=True):
        if flow is None:
            continue
        kept = [names.index(a) for a in result if a in names]
        order = (*kept, *(i for i, a in enumerate(names) if a not in result))
        flow = flow.transpose(*order, *range(len(order), flow.ndim))
        flow = lattice.over(flow, range(len(kept), len(order)))
        missing = tuple(i for i, a in enumerate(result) if a not in names)
        flows.append(spread(lattice, np.expand_dims(flow, missing), equation.outvars[0].aval.shape))
    return [joined(lattice, flows)]


def _conv(lattice: Lattice, equation: Equation, operands: Sequence[Flow]) -> list[Flow]:
    """Keep samples apart, and couple everything else."""
    numbers, shape = equation.params["dimension_numbers"], equation.outvars[0].aval.shape
    if equation.params["batch_group_count"] != 1:
        return coupled(lattice, equation, operands)
    one = lattice.over(filled(lattice, operands[0], ()), numbers.lhs_spec[1:])
    others = tuple(axis for axis in range(len(shape)) if axis != numbers.out_spec[0])
    return [spread(lattice, np.expand_dims(one, others), shape)]


def _reduce_window(lattice: Lattice, equation: Equation, operands: Sequence[Flow]) -> Flow:
    """Join the elements of each window, tap by tap."""
    params, made = equation.params, equation.outvars[0].aval.shape
    if min(min(sides) for sides in params["padding"]) < 0:
        return coupled(lattice, equation, operands)[0]
    flow: np.ndarray = joined(lattice, operands)
    gaps = (1,) * len(made)
    places = _window_places(
        params["padding"], params.get("base_dilation") or gaps, flow.shape[: len(made)]
    )
    padded = np.array(lattice.empty([total for _, total in places]))
    padded[tuple(place for place, _ in places)] = flow
    rates = params.get("window_dilation") or gaps
    parts = []
    for tap in np.ndindex(*params["window_dimensions"]):
        offsets = [t * rate for t, rate in zip(tap, rates, strict=True)]
        parts.append(padded[_at_tap(params["window_strides"], made, offsets)])
    one: Flow = joined(lattice, parts)
    return one


def _at_tap(strides: Sequence[int], count: Sequence[int], tap: Sequence[int]) -> tuple[slice, ...]:
    """Return the places that all windows read at one tap."""
    sides = zip(tap, strides, count, strict=True)
    return tuple(slice(t, t + (n - 1) * s + 1, s) for t, s, n in sides)


def _window_places(
    padding: Sequence[tuple[int, int]], dilation: Sequence[int], shape: Sequence[int]
) -> list[tuple[slice, int]]:
    """Return along each axis the places of elements after padding, and their number."""
    sides = zip(shape, dilation, padding, strict=True)
    ends = [(low, low + (n - 1) * d + 1, d, high) for n, d, (low, high) in sides]
    return [(slice(low, end, d), end + high) for low, end, d, high in ends]


def _scatter_windows(lattice: Lattice, equation: Equation, operands: Sequence[Flow]) -> Flow:
    """Add the element of each window to all elements of the window, tap by tap."""
    params, shape = equation.params, equation.outvars[0].aval.shape
    is_cropped = min(min(sides) for sides in params["padding"]) < 0
    if operands[1] is not None or lattice.rank or is_cropped:
        return coupled(lattice, equation, operands)[0]
    source = filled(lattice, operands[0], ())
    places = _window_places(params["padding"], (1,) * len(shape), shape)
    total = lattice.empty([size for _, size in places])
    for tap in np.ndindex(*params["window_dimensions"]):
        at = _at_tap(params["window_strides"], source.shape, tap)
        total[at] = lattice.join(total[at], source)
    return total[tuple(place for place, _ in places)]


_WINDOWS: Mapping[str, Callable[[Lattice, Equation, Sequence[Flow]], Flow]] = {
    **dict.fromkeys(
        ("reduce_window_max", "reduce_window_min", "reduce_window_sum", "select_and_gather_add"),
        _reduce_window,
    ),
    "select_and_scatter_add": _scatter_windows,
}


# --- analyses


class PerVariable(abc.ABC):
    """A lattice with one entry for each variable, constants included.

    Its entries are immutable values. `through` is the rule of all equations without bodies.
    """

    @abc.abstractmethod
    def of_value(self, value: Any) -> Any:
        """Return the entry of a literal or of a constant."""

    @abc.abstractmethod
    def join(self, first: Any, second: Any) -> Any:
        """Return the least upper bound of two entries."""

    @abc.abstractmethod
    def through(self, equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        """Return the entries of an equation's results, given the entries of its operands."""


Special: TypeAlias = Callable[[Equation, Sequence[Any]], Sequence[Any] | None]
"""``(equation, flows of its operands) -> flows of its results``, or ``None`` for no answer."""

LONGEST_WALK = 256
"""A scan with more steps is not followed step by step."""


@dataclasses.dataclass(frozen=True)
class Question:
    """The lattice of an analysis, and the dependence that it follows.

    Attributes
    ----------
    lattice
        The facts about an element, or about a variable.
    derivatives
        Whether only derivatives are followed, not values. A function with a custom derivative then
        couples everything, unless ``special`` answers: its body is not its derivative.
    special
        A rule that is tried first for every equation, also in bodies.
    """

    lattice: Any
    derivatives: bool = False
    special: Special | None = None

    def join(self, flows: Sequence[Any]) -> Any:
        """Return the least upper bound of several flows."""
        return joined(self.lattice, flows)


def flows_to(
    question: Question,
    constants: Constants,
    starts: Mapping[Var, Flow],
    targets: Sequence[Atom],
) -> list[Flow]:
    """Return the flows of some variables of a program, given the flows of others."""
    program = constants.program
    between = program.depends_on(targets, frozenset(starts)).difference(starts)
    known = dict(starts)
    _pass(question, constants, (program.equations[i] for i in program.making(between)), known)
    return [known.get(atom) if is_var(atom) else None for atom in targets]


def flows_from(
    question: Question, constants: Constants, starts: Mapping[Var, Flow], last: int | None = None
) -> dict[Var, Flow]:
    """Return the flows of all variables that depend on some others.

    Equations after the one with index ``last`` are ignored.
    """
    known, program = dict(starts), constants.program
    equations = (program.equations[index] for index in program.forward(starts, known, last))
    _pass(question, constants, equations, known)
    return known


def flows_of_outputs(question: Question, constants: Constants, inputs: Sequence[Any]) -> list[Any]:
    """Return the flows of a program's outputs, given the flows of its inputs."""
    known = flows_of_variables(question, constants, inputs)
    return [_flow_of(question.lattice, atom, known) for atom in constants.program.out_atoms]


def flows_of_variables(
    question: Question, constants: Constants, inputs: Sequence[Any]
) -> dict[Var, Any]:
    """Return the flows of all variables of a program, given the flows of its inputs."""
    program, lattice = constants.program, question.lattice
    known: dict[Var, Any] = dict(zip(program.in_vars, inputs, strict=True))
    if isinstance(lattice, PerVariable):
        known.update((var, lattice.of_value(value)) for var, value in program.constants.items())
    _pass(question, constants, program.equations, known)
    return known


def _flow_of(lattice: Any, atom: Atom, known: Mapping[Var, Any]) -> Any:
    if is_var(atom):
        return known.get(atom)
    return lattice.of_value(atom.val) if isinstance(lattice, PerVariable) else None


def _pass(
    question: Question,
    constants: Constants,
    equations: Iterable[Equation],
    known: dict[Var, Any],
) -> None:
    """Add the flows of the results of equations; known flows do not change."""
    is_sparse = not isinstance(question.lattice, PerVariable)
    for equation in equations:
        operands = [_flow_of(question.lattice, atom, known) for atom in equation.invars]
        if is_sparse and all(flow is None for flow in operands):
            continue
        flows = flows_of_results(question, constants, equation, operands)
        for var, flow in zip(equation.outvars, flows, strict=True):
            if not question.derivatives or carries_derivative(var):
                known.setdefault(var, flow)


def flows_of_results(
    question: Question, constants: Constants, equation: Equation, operands: Sequence[Any]
) -> Sequence[Any]:
    """Return the flows of one equation's results, given the flows of its operands.

    Parameters
    ----------
    question, constants
        The question, and the constants of the program of the equation.
    equation, operands
        The equation, and one flow for each operand.
    """
    lattice, name = question.lattice, equation.primitive.name
    flows = None if question.special is None else question.special(equation, operands)
    if flows is not None:
        return flows
    if question.derivatives and name in CONSTANT:
        return [None] * len(equation.outvars)
    if name == "optimization_barrier":  # operand by operand
        return list(operands)
    body = call_body(equation)
    if body is not None and (name in TRANSPARENT_CALLS or not question.derivatives):
        return flows_of_outputs(question, constants.body(body, equation.invars), operands)
    if name == "cond":
        return _cond(question, constants, equation, operands)
    if name in ("scan", "while"):
        return _loop(question, constants, equation, operands)
    if isinstance(lattice, PerVariable):
        return lattice.through(equation, operands)
    if name == "custom_linear_solve":
        return _linear_solve(question, constants, equation, operands)
    return through_primitive(lattice, equation, operands, constants)


def flows_into_bodies(
    question: Question, constants: Constants, equation: Equation, operands: Sequence[Any]
) -> list[tuple[AnyJaxpr, list[Any]]]:
    """Return the bodies of a branch, loop or call, with the flows of their inputs.

    For a loop, the lattice is `PerVariable`, and the flows are for the inputs of any step.
    """
    name = equation.primitive.name
    if name == "cond":
        return [(branch, list(operands[1:])) for branch in equation.params["branches"]]
    if name in ("scan", "while"):
        loop = loop_of(equation, operands)
        results = flows_of_results(question, constants, equation, operands)
        carried = results[: len(loop.carried)]
        return [(loop.body, [*loop.fixed, *carried, *loop.sequences])]
    return [(call_body(equation), list(operands))] if name in TRANSPARENT_CALLS else []


def _cond(
    question: Question, constants: Constants, equation: Equation, operands: Sequence[Any]
) -> list[Any]:
    """Join the results of the branches, and the flow of the index that selects one."""
    choice, *arguments = operands
    bodies = [constants.body(body, equation.invars[1:]) for body in equation.params["branches"]]
    every = [flows_of_outputs(question, body, arguments) for body in bodies]
    every.append(_decided(question.lattice, choice, equation.outvars))
    return [question.join(flows) for flows in zip(*every, strict=True)]


def _decided(lattice: Any, choice: Any, atoms: Sequence[Atom]) -> list[Any]:
    """Return flows of variables that depend, in every element, on all of a choice."""
    if isinstance(lattice, PerVariable):
        return [choice] * len(atoms)
    one = everything(lattice, [choice])
    return [None if one is None else spread(lattice, one, atom.aval.shape) for atom in atoms]


def _loop(
    question: Question, constants: Constants, equation: Equation, operands: Sequence[Any]
) -> list[Any]:
    """Follow a loop to a fixpoint of its carry, or step by step if the slices of a scan differ."""
    lattice, loop = question.lattice, loop_of(equation, operands)
    atoms, count = loop_of(equation, equation.invars), len(loop.carried)
    body, per_variable = constants.body(loop.body, atoms.fixed), isinstance(lattice, PerVariable)

    def run(carried: Sequence[Any], slices: Sequence[Any]) -> list[Any]:
        after = flows_of_outputs(question, body, [*loop.fixed, *carried, *slices])
        if loop.condition is None:
            return after
        test = constants.body(loop.condition, atoms.tested)
        (goes_on,) = flows_of_outputs(question, test, [*loop.tested, *carried])
        decided = _decided(lattice, goes_on, atoms.carried)
        return [question.join(pair) for pair in zip(after, decided, strict=True)]

    differ = not per_variable and any(s is not None and (s != s[:1]).any() for s in loop.sequences)
    if differ and equation.params["length"] <= LONGEST_WALK:
        return _walk(lattice, equation, run, loop.carried, loop.sequences)
    slices = [s if per_variable or s is None else lattice.over(s, [0]) for s in loop.sequences]
    join = lambda first, second: question.join([first, second])  # noqa: E731
    carried = fixpoint(join, lambda c: run(c, slices)[:count], loop.carried)
    stacked = run(carried, slices)[count:]
    if not per_variable:
        pairs = zip(stacked, equation.outvars[count:], strict=True)
        stacked = [f if f is None else spread(lattice, f, v.aval.shape) for f, v in pairs]
    return [*carried, *stacked]


def _walk(
    lattice: Lattice,
    equation: Equation,
    run: Callable[[Sequence[Flow], Sequence[Flow]], list[Flow]],
    carried: Sequence[Flow],
    sequences: Sequence[Flow],
) -> list[Flow]:
    """Follow a scan step by step."""
    length, count, by_step = equation.params["length"], len(carried), {}
    for step in range(length)[::-1] if equation.params["reverse"] else range(length):
        flows = run(carried, [None if s is None else s[step] for s in sequences])
        carried, by_step[step] = flows[:count], flows[count:]
    stacked: list[Flow] = []
    for index, var in enumerate(equation.outvars[count:]):
        column = [by_step[step][index] for step in range(length)]
        full = [filled(lattice, flow, var.aval.shape[1:]) for flow in column]
        stacked.append(None if all(flow is None for flow in column) else np.stack(full))
    return [*carried, *stacked]


def fixpoint(
    join: Callable[[Any, Any], Any],
    step: Callable[[Sequence[Any]], Sequence[Any]],
    carried: Sequence[Any],
) -> list[Any]:
    r"""Return the least :math:`c` with :math:`c = c_0 \vee f(c)`, by iteration.

    Parameters
    ----------
    join
        Returns the least upper bound of two values.
    step
        Maps all values through one step of a loop.
    carried
        The values before the first step.
    """
    while True:
        after = [*map(join, carried, step(carried))]
        if all(same(a, b) for a, b in zip(carried, after, strict=True)):
            return after
        carried = after


def _linear_solve(
    question: Question, constants: Constants, equation: Equation, operands: Sequence[Flow]
) -> list[Flow]:
    """Follow the solver of a linear equation whose matrix is not followed.

    The solution is linear in the right-hand side, so its derivative runs the same program on
    values.
    """
    lengths = equation.params["const_lengths"]
    count, start = sum(lengths), lengths.matvec + lengths.vecmat
    if any(flow is not None for flow in operands[:count]):
        return coupled(question.lattice, equation, operands)
    atoms = [*equation.invars[start : start + lengths.solve], *equation.invars[count:]]
    body = constants.body(equation.params["jaxprs"].solve, atoms)
    inputs = [None] * lengths.solve + list(operands[count:])
    return flows_of_outputs(Question(question.lattice), body, inputs)
