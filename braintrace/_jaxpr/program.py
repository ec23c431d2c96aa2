"""Program: a flat jaxpr with lookup tables for analyses."""

import dataclasses
import functools
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeVar

import jax

from .._jax import AnyJaxpr, Atom, Equation, Var, is_var, open_jaxpr

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
    producer
        Index of the equation that writes a variable.
    readers
        ``(equation index, operand index)`` of every use of a variable.
    """

    jaxpr: AnyJaxpr
    in_vars: tuple[Var, ...]
    out_atoms: tuple[Atom, ...]
    equations: tuple[Equation, ...]
    constants: Mapping[Var, jax.Array]
    producer: Mapping[Var, int]
    readers: Mapping[Var, tuple[tuple[int, int], ...]]

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

    def depends_on(self, targets: Iterable[Atom], stops: Container[Var] = frozenset()) -> set[Var]:
        """Return what the values of some targets depend on, the targets included.

        Variables in ``stops`` are included, what they depend on is not.
        """
        return self._behind(targets, stops, lambda equation: filter(is_var, equation.invars))

    def ancestors(self, targets: Iterable[Atom], ends: Container[Var] = frozenset()) -> set[Var]:
        """Return what some targets depend on by gradient, the targets included.

        Variables in ``ends`` are included, what they depend on is not.
        """
        return self._behind(targets, ends, _differentiated)

    def _behind(
        self,
        targets: Iterable[Atom],
        stops: Container[Var],
        operands: Callable[[Equation], Iterable[Var]],
    ) -> set[Var]:
        def before(var: Var) -> Iterable[Var]:
            index = None if var in stops else self.producer.get(var)
            return () if index is None else operands(self.equations[index])

        return reached(filter(is_var, targets), before)

    def dependents_of(self, starts: Iterable[Var]) -> set[Var]:
        """Return what depends on some variables by value, these included."""
        dependents = set(starts)
        for index in self.forward(dependents):
            dependents.update(self.equations[index].outvars)
        return dependents

    def uses_of(self, var: Var) -> Iterable[int]:
        """Return the equations with a derivative that read a variable, in order."""
        readers = (index for index, _ in self.readers.get(var, ()))
        return dict.fromkeys(i for i in readers if _has_derivative(self.equations[i]))

    def descendants(
        self,
        starts: Iterable[Var],
        ends: Container[Var] = frozenset(),
        before: Mapping[Atom, Iterable[Var]] = MappingProxyType({}),
    ) -> set[Var]:
        """Return what depends on some variables by gradient, these included.

        Variables in ``ends`` are included, what depends on them is not. Given ``before``, the old
        values of the States with a new value, what depends on them in a later step counts as well.
        """

        def after(var: Var) -> Iterable[Var]:
            if var in ends:
                return ()
            results = (self.equations[index].outvars for index in self.uses_of(var))
            return chain(filter(carries_derivative, chain(*results)), before.get(var, ()))

        return reached(filter(carries_derivative, starts), after)

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


# Identities without a derivative.
CONSTANT = frozenset({"stop_gradient"})


def _has_derivative(equation: Equation) -> bool:
    return equation.primitive.name not in CONSTANT


def _differentiated(equation: Equation) -> Iterable[Var]:
    return filter(carries_derivative, equation.invars) if _has_derivative(equation) else ()


def program_of(jaxpr: AnyJaxpr) -> Program:
    """Index a jaxpr; an open one must have no constants."""
    opened, constants = open_jaxpr(jaxpr)
    producer = {v: index for index, equation in enumerate(opened.eqns) for v in equation.outvars}
    # Since jax 0.11.2, constants may be listed among the inputs as well.
    constant_vars = tuple(opened.constvars)
    return Program(
        jaxpr=jaxpr,
        in_vars=tuple(opened.invars),
        out_atoms=tuple(opened.outvars),
        equations=tuple(opened.eqns),
        constants=MappingProxyType(dict(zip(constant_vars, constants, strict=True))),
        producer=MappingProxyType(producer),
        readers=readers_of(opened.eqns),
    )


def readers_of(equations: Iterable[Equation]) -> Mapping[Var, tuple[tuple[int, int], ...]]:
    """Return ``(equation index, operand index)`` of every use of a variable."""
    readers: dict[Var, list[tuple[int, int]]] = {}
    for index, equation in enumerate(equations):
        for operand, atom in enumerate(equation.invars):
            if is_var(atom):
                readers.setdefault(atom, []).append((index, operand))
    return MappingProxyType({var: tuple(uses) for var, uses in readers.items()})


def carries_derivative(atom: Atom) -> bool:
    """Test whether an operand is a variable through which a gradient can pass."""
    return is_var(atom) and _has_derivatives(atom.aval.dtype)


@functools.cache
def _has_derivatives(dtype: Any) -> bool:
    """Test whether a dtype is inexact, including dtypes unknown to NumPy."""
    return bool(jax.numpy.issubdtype(dtype, jax.numpy.inexact))
