"""Shift registers of a step: carried States that only hold the last values of a variable.

A loop that carries a register copies all its slots at every step, and records them. If the variable
does not depend on the register, nor on what reads it, the loop does without: before step ``t``, the
slot of age ``a`` has the value that the variable had at step ``t - 1 - a``. A program that reads
some slots for all steps then computes no other (ten slots after a leaky layer: 1.0 instead of 1.7
of the time without a delay, on a CPU). A ring buffer is a register between two conversions, of
which a chunk needs the first and the last.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import Atom, Equation, Var, is_var
from .._jax_kernels import MIRROR, mirrored
from .._jaxpr.primitives import COPIES, Constants, moved_operands, sources_of
from .._jaxpr.program import Program


class Numbers(dict[Var, np.ndarray]):
    """A number for each element of some variables, which elements that move keep.

    Elements that are computed have numbers of their own; an element that is a constant has -1.
    """

    def of(self, atom: Atom) -> np.ndarray:
        """Return the numbers of the elements of a variable."""
        if not is_var(atom):
            return np.full(np.shape(atom.aval), -1)
        if atom not in self:
            first = max((int(own.max(initial=-1)) for own in self.values()), default=-1) + 1
            self[atom] = first + np.arange(atom.aval.size).reshape(atom.aval.shape)
        return self[atom]

    def follow(self, program: Program, targets: Iterable[Var]) -> None:
        """Give numbers to the elements of some variables of a program."""
        constants = Constants(program)
        moves = [index for index, e in enumerate(program.equations) if _moved_operands(e)]
        stops = program.producer.keys() - program.made_by(moves) | self.keys()
        behind = program.depends_on(targets, stops)
        for index in program.making(behind - stops):
            equation = program.equations[index]
            is_copy = equation.primitive.name in COPIES
            every = [np.arange(equation.outvars[0].aval.size)]
            sources = every if is_copy else sources_of(constants, equation)
            if sources is not None:
                flat = [self.of(equation.invars[p]).ravel() for p in _moved_operands(equation)]
                given = np.append(np.concatenate(flat), -1)  # the last is that of `NOWHERE`
                for var, source in zip(equation.outvars, sources, strict=True):
                    self[var] = given[source].reshape(var.aval.shape)


def _moved_operands(equation: Equation) -> Sequence[int]:
    return (0,) if equation.primitive.name in COPIES else moved_operands(equation)


@dataclasses.dataclass(frozen=True, eq=False)
class Register:
    """A carried State whose slots hold the last values of a variable.

    Attributes
    ----------
    state, old
        Index of the State, and the variable that has its value before a step.
    pushed
        The variable.
    axis, newest_first
        Axis of the slots, and their order.
    mirrors
        Of a ring buffer, the variables of `mirrored` before and after a step; else empty.
    """

    state: int
    old: Var
    pushed: Var
    axis: int
    newest_first: bool
    mirrors: tuple[Var, ...]

    def run(
        self, start: jax.Array, pushed: jax.Array, *mirrors: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the State after some steps, and its slots in order before each of them.

        Parameters
        ----------
        start
            The State before the first step.
        pushed, *mirrors
            Values of the variables, time first.
        """
        if mirrors:
            start = mirrored(start, mirrors[0][0], axis=self.axis)
        steps, slots = len(pushed), start.shape[self.axis]
        first = jnp.moveaxis(start, self.axis, 0)
        oldest_first = jnp.flip(first, 0) if self.newest_first else first
        history = jnp.concatenate([oldest_first, pushed.reshape(steps, *first.shape[1:])])
        ages = range(slots)[:: -1 if self.newest_first else 1]
        last = jnp.stack([history[steps + age] for age in ages], self.axis)
        if mirrors:
            last = mirrored(last, mirrors[1][-1], axis=self.axis)
        return last, jnp.stack([history[age : age + steps] for age in ages], self.axis + 1)


def find_registers(program: Program, states: Mapping[int, tuple[Var, Atom]]) -> Iterator[Register]:
    """Yield the shift registers among States; what they hold may depend on them.

    ``states`` are the old and the new value of States, by their index.
    """
    for state, pair in states.items():
        (old, new), mirrors = _without_mirrors(program, *pair)
        moving = program.dependents_of([old]) & program.depends_on([new])
        equations = [program.equations[index] for index in program.making(moving - {old})]
        operands = [e.invars[part] for e in equations for part in moved_operands(e)]
        given = {atom for atom in operands if is_var(atom) and atom not in moving}
        if all(map(moved_operands, equations)) and len(given) == 1:
            (pushed,) = given
            for axis, newest_first in _orders(program, old, new, pushed):
                yield Register(state, old, pushed, axis, newest_first, mirrors)


def _without_mirrors(
    program: Program, old: Var, new: Atom
) -> tuple[tuple[Var, Atom], tuple[Var, ...]]:
    """Return the variables of the register that a ring buffer is, and of the two conversions."""
    after, uses = program.maker(new), program.readers.get(old, ())
    readers = [program.equations[index] for index, _ in uses]
    is_mirrored = all(e.primitive is MIRROR for e in (after, *readers) if e is not None)
    read = [e for e in readers if e.outvars[0] in program.readers]
    if after is None or len(read) != 1 or not is_mirrored:
        return (old, new), ()
    return (read[0].outvars[0], after.invars[0]), (read[0].invars[1], after.invars[1])


def _orders(program: Program, old: Var, new: Var, pushed: Var) -> Iterator[tuple[int, bool]]:
    """Yield the axis along which the elements of a State move by one, and their order."""
    shape, size = old.aval.shape, old.aval.size
    before = np.arange(size).reshape(shape)
    given = size + np.arange(pushed.aval.size).reshape(pushed.aval.shape)
    numbers = Numbers({old: before, pushed: given})
    numbers.follow(program, [new])
    for axis, slots in enumerate(shape):
        if slots > 1 and pushed.aval.size * slots == size:
            newest = given.reshape(*shape[:axis], 1, *shape[axis + 1 :])
            for newest_first in (True, False):
                kept = np.delete(before, -1 if newest_first else 0, axis)
                parts = [newest, kept] if newest_first else [kept, newest]
                if np.array_equal(numbers.of(new), np.concatenate(parts, axis)):
                    yield axis, newest_first
                    return
