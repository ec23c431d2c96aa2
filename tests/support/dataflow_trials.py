"""What each element of a program's results depends on, found by trial without the library."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives
from jax.flatten_util import ravel_pytree

ROUNDING = 1e-9
FEWEST, MOST = 4, 400
TOGETHER = 16


def _exported(module):
    found = (getattr(module, name) for name in dir(module) if name.endswith("_p"))
    return {primitive.name: primitive for primitive in found}


PRIMITIVES = {**_exported(lax), **_exported(lax.linalg), **_exported(primitives)}
"""The primitives that this version of JAX exports, by name."""


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A small program around a primitive.

    name: of the primitive.
    function, operands: the program.
    what: tells cases of one primitive apart.
    is_exact: whether each element that the engine names has an influence in some trial.
    followed: the operands whose elements are followed; by default all of them.
    """

    name: str
    function: Callable
    operands: tuple
    what: str = ""
    is_exact: bool = True
    followed: tuple[int, ...] | None = None

    @property
    def places(self):
        return range(len(self.operands)) if self.followed is None else self.followed

    def __str__(self):
        return f"{self.name}{self.what and '-' + self.what}"


def floats(*shape, low=0.1, high=0.9):
    return _with_ends(np.random.default_rng(5).uniform(low, high, shape), low, high)


def integers(*shape, low=1, high=100):
    drawn = np.random.default_rng(6).integers(low, high, shape)
    return _with_ends(np.asarray(drawn, np.int32), low, high - 1)


def _with_ends(x, low, high):
    """Let an array show the range that it is drawn from."""
    x.flat[: 2 * (x.size > 1)] = low, high
    return x


def in_groups(cases):
    """For each case, a few of them in one program: most of the time is that of programs as such."""
    known = [case for case in cases if case.name in PRIMITIVES]
    groups = [tuple(known[i : i + TOGETHER]) for i in range(0, len(known), TOGETHER)]
    return {case: group for group in groups for case in group}


def dependences_by_trial(case, expected, group):
    """Whether each element of the results changes with each element that is followed.

    Every element is replaced by that of another draw, at several points, until all that is
    expected has been seen, for a few draws at least.
    """
    program, place_of = _program(group), group.index(case)
    operands_of = jax.device_put([c.operands for c in group])

    def function(*operands):
        operands_of[place_of] = operands
        return program(operands_of)[place_of]

    shown, generator = np.zeros_like(expected), np.random.default_rng(0)
    for trial in range(MOST if case.is_exact else FEWEST):
        operands, others = ([drawn(generator, x) for x in case.operands] for _ in range(2))
        before, after = np.asarray(function(*operands)), []
        for place in case.places:
            for element in range(operands[place].size):
                changed = [np.copy(x) for x in operands]
                changed[place].flat[element] = others[place].flat[element]
                after.append(function(*changed))
        columns = np.stack(after, 1)
        shown |= ~np.isclose(columns, before[:, None], ROUNDING, ROUNDING, equal_nan=True)
        if trial >= FEWEST and (shown | ~expected).all():
            break
    return shown


@functools.cache
def _program(group):
    return jax.jit(lambda operands: [results(c, x) for c, x in zip(group, operands, strict=True)])


def results(case, operands):
    """All results in a row; the two parts of a complex number count as one element."""

    def flat(leaf):
        parts = leaf.real + 1.7 * leaf.imag if jnp.iscomplexobj(leaf) else leaf
        return jnp.ravel(parts).astype(float)

    return jnp.concatenate([flat(leaf) for leaf in jax.tree.leaves(case.function(*operands))])


def drawn(generator, x):
    """Other values from the same range; a scalar from a range around it."""
    if x.dtype == bool:
        return generator.random(x.shape) < 0.5
    if np.issubdtype(x.dtype, np.integer):
        low, high = (x.min(), x.max()) if x.size > 1 else (0, 2)
        return generator.integers(low, high, x.shape, endpoint=True).astype(x.dtype)
    margin = 0 if x.size > 1 else 0.05
    low, high = x.real.min(initial=np.inf) - margin, x.real.max(initial=-np.inf) + margin
    drawn = generator.uniform(low, high, x.shape)
    if np.iscomplexobj(x):
        drawn = drawn + 1j * generator.uniform(low, high, x.shape)
    return drawn.astype(x.dtype)


def jacobian(case, group):
    """JAX's own, column by column, or row by row where there is no forward mode."""
    found = _jacobians(group)[case]
    if isinstance(found, Exception):
        raise found
    return found


@functools.cache
def _jacobians(group):
    """Of all cases of a group, or why there is none."""
    every = {case: [*map(jnp.asarray, case.operands)] for case in group}
    sizes = {case: _size(case) for case in group}
    errors = {}

    @jax.jit
    def in_direction(operands, directions):
        found = {}
        for i, case in enumerate(group):
            try:
                found[i] = _derivative(case, operands[i], directions[i])
            except (NotImplementedError, TypeError, ValueError) as error:
                errors[case] = error
        return found

    columns = {case: [] for case in group}
    for number in range(max(sizes.values())):
        directions = [np.eye(1, sizes[case], number)[0] for case in group]
        for i, column in in_direction([*every.values()], directions).items():
            columns[group[i]].append(np.asarray(column))
    stacked = {
        case: np.stack(columns[case][: sizes[case]], 0 if _has_no_forward_mode(case) else 1)
        for case in group
        if case not in errors
    }
    return stacked | errors


def _has_no_forward_mode(case):
    return case.name == "custom_vjp_call"


def _size(case):
    """The number of directions of a case: elements of its results, or of what is followed."""
    if _has_no_forward_mode(case):
        return jax.eval_shape(lambda *x: results(case, x), *case.operands).size
    return sum(case.operands[i].size for i in case.places)


def _derivative(case, operands, direction):
    def function(*followed):
        every = {**dict(enumerate(operands)), **dict(zip(case.places, followed, strict=True))}
        return results(case, every.values())

    followed = [operands[i] for i in case.places]
    if _has_no_forward_mode(case):
        return ravel_pytree(jax.vjp(function, *followed)[1](direction))[0]
    _, unflatten = ravel_pytree(followed)
    return jax.jvp(function, tuple(followed), tuple(unflatten(direction)))[1]
