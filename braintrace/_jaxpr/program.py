"""Program: a flat jaxpr with lookup tables for analyses, and its interpreter.

The interpreter runs each equation by a rule, or as it is. Under ``jax.make_jaxpr`` it produces a
new jaxpr: JAX writes the new equations, and variables never have to be substituted by hand. Every
rewriting of a jaxpr uses this.
"""

import dataclasses
import functools
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import jax
from jax.typing import ArrayLike

from .._jax import (
    TRANSPARENT_CALLS,
    AnyJaxpr,
    Atom,
    ClosedJaxpr,
    Equation,
    Var,
    at_source_of,
    bind,
    call_body,
    is_var,
    open_jaxpr,
    runs_library_code,
    scan_counts,
    trace_to_jaxpr,
)

# --- graph searches

Node = TypeVar("Node", bound=Hashable)


def reached(starts: Iterable[Node], successors: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Return the nodes reachable from some start nodes, these included.

    Examples
    --------
    >>> from braintrace._jaxpr.program import reached
    >>> sorted(reached([3], lambda node: [node // 2]))
    [0, 1, 3]
    """
    nodes: set[Node] = set()
    pending = [*starts]
    while pending:
        node = pending.pop()
        if node not in nodes:
            nodes.add(node)
            pending.extend(successors(node))
    return nodes


def components(successors: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the strongly connected components, each after all reachable from it.

    This is Kosaraju's algorithm, in time linear in the number of edges.

    Parameters
    ----------
    successors
        For each node, the ends of its outgoing edges.

    Examples
    --------
    >>> from braintrace._jaxpr.program import components
    >>> components([[1], [2], [1], [0, 3]])
    [[1, 2], [0], [3]]
    """
    before: list[list[int]] = [[] for _ in successors]
    for node, following in enumerate(successors):
        for other in following:
            before[other].append(node)
    seen: set[int] = set()
    order = [node for root in range(len(successors)) for node in _finished(root, before, seen)]
    seen.clear()
    found = (sorted(_finished(root, successors, seen)) for root in reversed(order))
    return [component for component in found if component]


def _finished(root: int, successors: Sequence[Sequence[int]], seen: set[int]) -> list[int]:
    """Return the nodes that a depth-first search from a root is the first to see, in its order."""
    if root in seen:
        return []
    finished, path = [], [(root, iter(successors[root]))]
    seen.add(root)
    while path:
        following = next((other for other in path[-1][1] if other not in seen), None)
        if following is None:
            finished.append(path.pop()[0])
        else:
            seen.add(following)
            path.append((following, iter(successors[following])))
    return finished


# --- programs


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Equations in execution order, with the producer and readers of each variable.

    Attributes
    ----------
    jaxpr
        The jaxpr itself.
    in_vars, out_atoms
        Inputs and outputs, in order. An output may be a literal or an input.
    equations
        Equations in execution order: each variable is written before it is read.
    constants
        Values of variables that are neither inputs nor results of equations.
    """

    jaxpr: AnyJaxpr
    in_vars: tuple[Var, ...]
    out_atoms: tuple[Atom, ...]
    equations: tuple[Equation, ...]
    constants: Mapping[Var, jax.Array]

    @functools.cached_property
    def producer(self) -> Mapping[Var, int]:
        """Index of the equation that writes a variable."""
        return {var: i for i, equation in enumerate(self.equations) for var in equation.outvars}

    @functools.cached_property
    def readers(self) -> Mapping[Var, Sequence[tuple[int, int]]]:
        """``(equation index, operand index)`` of every use of a variable."""
        readers: dict[Var, list[tuple[int, int]]] = {}
        for index, equation in enumerate(self.equations):
            for operand, atom in enumerate(equation.invars):
                if is_var(atom):
                    readers.setdefault(atom, []).append((index, operand))
        return readers

    def making(self, variables: Iterable[Var]) -> list[int]:
        """Return the indices of the equations that write some variables, in order."""
        return sorted({self.producer[var] for var in variables if var in self.producer})

    def maker(self, atom: Atom) -> Equation | None:
        """Return the equation that writes a variable; ``None``: no equation does."""
        index = self.producer.get(atom) if is_var(atom) else None
        return None if index is None else self.equations[index]

    def made_by(self, equations: Iterable[int]) -> frozenset[Var]:
        """Return the results of some equations."""
        return frozenset(var for index in equations for var in self.equations[index].outvars)

    # --- by value

    @functools.cached_property
    def _operands(self) -> Mapping[Var, Sequence[Var]]:
        """The variables that each result is computed from."""
        return {var: [*filter(is_var, e.invars)] for e in self.equations for var in e.outvars}

    def depends_on(self, targets: Iterable[Atom], stops: Container[Var] = ()) -> set[Var]:
        """Return what the values of some targets depend on, the targets included.

        Variables in ``stops`` are included, what they depend on is not.
        """
        return _followed(targets, self._operands, stops)

    def dependents_of(self, starts: Iterable[Var]) -> set[Var]:
        """Return what depends on some variables by value, these included."""
        dependents = set(starts)
        for index in self.forward(dependents):
            dependents.update(self.equations[index].outvars)
        return dependents

    # --- by gradient

    @functools.cached_property
    def _moving(self) -> Mapping[Var, Sequence[Var]]:
        """The variables that a gradient of each result passes to."""
        each = ((e.outvars, e.invars if _has_derivative(e) else ()) for e in self.equations)
        return {v: [*filter(carries_derivative, read)] for results, read in each for v in results}

    @functools.cached_property
    def _moved(self) -> Mapping[Var, Sequence[Var]]:
        """The results that a gradient of each variable passes from."""
        moved: dict[Var, list[Var]] = {}
        for result in filter(carries_derivative, self._moving):
            for var in self._moving[result]:
                moved.setdefault(var, []).append(result)
        return moved

    def ancestors(self, targets: Iterable[Atom], ends: Container[Var] = ()) -> set[Var]:
        """Return what some targets depend on by gradient, the targets included.

        Variables in ``ends`` are included, what they depend on is not.
        """
        return _followed(targets, self._moving, ends)

    def descendants(
        self,
        starts: Iterable[Var],
        ends: Container[Var] = (),
        before: Mapping[Atom, Iterable[Var]] = MappingProxyType({}),
    ) -> set[Var]:
        """Return what depends on some variables by gradient, these included.

        Variables in ``ends`` are included, what depends on them is not. Given ``before``, the old
        values of the States with a new value, what depends on them in a later step counts as well.
        """
        moved, starts = self._moved, filter(carries_derivative, starts)
        if before:
            moved = {v: [*moved.get(v, ()), *before.get(v, ())] for v in moved.keys() | before}
        return _followed(starts, moved, ends)

    def uses_of(self, var: Var) -> list[int]:
        """Return the equations with a derivative that read a variable, in order."""
        readers = dict.fromkeys(index for index, _ in self.readers.get(var, ()))
        return [index for index in readers if _has_derivative(self.equations[index])]

    # --- in order

    def forward(self, reached: Container[Var]) -> Iterator[int]:
        """Yield the equations that read a reached variable, in execution order.

        The caller may add results of each yielded equation to ``reached``.
        """
        for index, equation in enumerate(self.equations):
            if any(is_var(atom) and atom in reached for atom in equation.invars):
                yield index

    def backward(self, starts: Container[Var], reached: Container[Var]) -> Iterator[int]:
        """Yield the equations that write a start or a reached variable, the last one first.

        The caller may add operands of each yielded equation to ``reached``.
        """
        for index in reversed(range(len(self.equations))):
            if any(var in starts or var in reached for var in self.equations[index].outvars):
                yield index


def _followed(
    starts: Iterable[Atom], following: Mapping[Var, Iterable[Var]], ends: Container[Var]
) -> set[Var]:
    def after(var: Var) -> Iterable[Var]:
        return () if var in ends else following.get(var, ())

    return reached(filter(is_var, starts), after)


# Identities without a derivative.
STOPS_GRADIENT = frozenset({"stop_gradient"})


def _has_derivative(equation: Equation) -> bool:
    return equation.primitive.name not in STOPS_GRADIENT


def program_of(jaxpr: AnyJaxpr) -> Program:
    """Index a jaxpr; an open one must have no constants."""
    opened, constants = open_jaxpr(jaxpr)
    return Program(
        jaxpr=jaxpr,
        in_vars=tuple(opened.invars),
        out_atoms=tuple(opened.outvars),
        equations=tuple(opened.eqns),
        # Since jax 0.11.2, constants may be listed among the inputs as well.
        constants=dict(zip(opened.constvars, constants, strict=True)),
    )


def carries_derivative(atom: Atom) -> bool:
    """Test whether an operand is a variable through which a gradient can pass."""
    return is_var(atom) and _has_derivatives(atom.aval.dtype)


@functools.cache
def _has_derivatives(dtype: Any) -> bool:
    """Test whether a dtype is inexact, including dtypes unknown to NumPy."""
    return bool(jax.numpy.issubdtype(dtype, jax.numpy.inexact))


# --- evaluation

# ``(equation, operand values) -> output values``, or ``None`` to run it as it is.
Rule: TypeAlias = Callable[[Equation, list[ArrayLike]], Sequence[ArrayLike] | None]

# A rule for every equation, or rules for some of them by index.
Rules: TypeAlias = Rule | Mapping[int, Rule]


def evaluate(
    program: Program,
    targets: Sequence[Atom],
    inputs: Mapping[Var, ArrayLike],
    overrides: Mapping[Var, ArrayLike] | None = None,
    rules: Rules | None = None,
    effects: bool = False,
) -> list[ArrayLike]:
    """Return the values of ``targets``, running only the equations that they need.

    Parameters
    ----------
    program
        The program.
    targets
        Variables or literals of it.
    inputs
        Values of the program's inputs; inputs that the targets do not need may be missing.
    overrides
        Values that replace variables, inputs included; ancestors of these variables are not needed.
    rules
        Rules that run equations.
    effects
        Also run the equations that have an effect (a print, a check).

    Examples
    --------
    >>> import jax
    >>> from braintrace._jaxpr.program import evaluate, program_of
    >>> program = program_of(jax.make_jaxpr(lambda x: (x + 1.0) * 3.0)(0.0))
    >>> (x,), (total,) = program.in_vars, program.equations[0].outvars
    >>> evaluate(program, program.out_atoms, {x: 1.0}, overrides={total: 5.0})
    [Array(15., dtype=float32, weak_type=True)]
    """
    known: dict[Var, ArrayLike] = {**program.constants, **inputs, **(overrides or {})}
    extra = [i for i, e in enumerate(program.equations) if e.effects] if effects else []
    read = [*targets, *(atom for index in extra for atom in program.equations[index].invars)]
    computed = program.depends_on(read, known) - known.keys()
    needed = sorted({*program.making(computed), *extra})
    _run_each(((index, program.equations[index]) for index in needed), known, rules)
    return _values_of(targets, known)


def evaluate_all(jaxpr: AnyJaxpr, values: Sequence[ArrayLike], rules: Rules) -> list[ArrayLike]:
    """Return the values of a jaxpr's outputs, running every equation in order.

    Parameters
    ----------
    jaxpr
        The jaxpr. An open one must have no constants.
    values
        One value per input.
    rules
        Rules that run equations.
    """
    opened, constants = open_jaxpr(jaxpr)
    known = dict(zip(opened.constvars, constants, strict=True))
    known.update(zip(opened.invars, values, strict=True))
    _run_each(enumerate(opened.eqns), known, rules)
    return _values_of(opened.outvars, known)


def _run_each(
    equations: Iterable[tuple[int, Equation]], known: dict[Var, ArrayLike], rules: Rules | None
) -> None:
    """Add the outputs of equations to ``known``, without replacing known values."""
    for index, equation in equations:
        rule = rules if rules is None or callable(rules) else rules.get(index)
        operands, results = _values_of(equation.invars, known), None
        if rule is not None:
            with at_source_of(equation):
                results = rule(equation, operands)
        if results is None:
            results = bind(equation, operands)
        for var, value in zip(equation.outvars, results, strict=True):
            known.setdefault(var, value)


def _values_of(atoms: Iterable[Atom], known: Mapping[Var, ArrayLike]) -> list[ArrayLike]:
    return [known[atom] if is_var(atom) else atom.val for atom in atoms]


def evaluate_inlined(
    jaxpr: AnyJaxpr,
    values: Sequence[ArrayLike],
    rule: Rule | None = None,
    caller: Equation | None = None,
) -> list[ArrayLike]:
    """Return the values of a jaxpr's outputs, with calls inlined.

    Parameters
    ----------
    jaxpr, values
        The jaxpr, and its inputs.
    rule
        The rule for equations that are not calls, also inside of calls.
    caller
        The equation whose source line all equations get; ``None``: each keeps its own.
    """

    def run(equation: Equation, operands: list[ArrayLike]) -> Sequence[ArrayLike] | None:
        if equation.primitive.name in TRANSPARENT_CALLS:
            # JAX traces each of its library functions once, at the first call.
            is_library = caller is not None or runs_library_code(equation)
            inside = (caller or equation) if is_library else None
            return evaluate_inlined(call_body(equation), operands, rule, inside)
        equation = equation if caller is None else equation.replace(source_info=caller.source_info)
        results = None if rule is None else rule(equation, operands)
        return bind(equation, operands) if results is None else results

    return evaluate_all(jaxpr, values, run)


def inlined(jaxpr: AnyJaxpr, rule: Rule | None = None) -> ClosedJaxpr:
    """Return a jaxpr with its calls inlined; a rule may run its other equations.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from braintrace._jaxpr.program import inlined
    >>> def rule(equation, operands):
    ...     return [jnp.cos(*operands)] if equation.primitive.name == "sin" else None
    >>> jaxpr = jax.make_jaxpr(lambda x: 2.0 * jax.jit(jnp.sin)(x))(0.0)
    >>> [equation.primitive.name for equation in inlined(jaxpr, rule).eqns]
    ['cos', 'mul']
    """
    avals = [var.aval for var in open_jaxpr(jaxpr)[0].invars]
    return trace_to_jaxpr(lambda *values: evaluate_inlined(jaxpr, values, rule), avals)


Value = TypeVar("Value")


def split_scan(
    equation: Equation, operands: Sequence[Value]
) -> tuple[Sequence[Value], Sequence[Value], Sequence[Value]]:
    """Return the operands of a ``scan`` that are fixed, carried, and read slice by slice."""
    fixed, carried = scan_counts(equation)
    return operands[:fixed], operands[fixed : fixed + carried], operands[fixed + carried :]
