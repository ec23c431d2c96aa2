"""Axes of a product of two arrays."""

from typing import TypeAlias

from ..._jax import Equation

Letters: TypeAlias = tuple[str, ...]
"""Names of the axes of an array."""


def dot_letters(equation: Equation) -> tuple[Letters, Letters, Letters]:
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
