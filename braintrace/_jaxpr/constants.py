"""Constant folding: values that depend on no input of a program, computed with NumPy.

Moves of elements and the arithmetic of integers run with NumPy: an index needs no program of XLA.
All other equations run with JAX.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.typing import ArrayLike

from .._jax import AnyJaxpr, Atom, Equation, Var, is_var
from .evaluate import evaluate
from .program import Program, program_of

# --- moves
#
# Moves without index operands run with NumPy, on the numbers of the elements of their operands.

# Number of an element that has no source in any operand.
NOWHERE = -1

Params: TypeAlias = Mapping[str, Any]
Moved: TypeAlias = list[np.ndarray]

# ``(params, shape of the first result, *operands) -> results``: a move of any arrays.
Take: TypeAlias = Callable[..., Moved]


def _reshape(params: Params, shape: tuple[int, ...], x: np.ndarray) -> Moved:
    order = params.get("dimensions") if "new_sizes" in params else None  # `order="F"` of NumPy
    return [(x if order is None else x.transpose(order)).reshape(shape)]


def _broadcast(params: Params, shape: tuple[int, ...], x: np.ndarray) -> Moved:
    aligned = [1] * len(shape)
    for axis, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
        aligned[axis] = size
    return [np.broadcast_to(x.reshape(aligned), shape)]


def _slice(params: Params, shape: tuple[int, ...], x: np.ndarray) -> Moved:
    steps = params["strides"] or (1,) * x.ndim
    limits = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
    return [x[tuple(slice(*limit) for limit in limits)]]


def _pad(params: Params, shape: tuple[int, ...], x: np.ndarray, value: np.ndarray) -> Moved:
    padded, read, places = np.full(shape, value, x.dtype), [], []
    for old, new, (low, _, gap) in zip(x.shape, shape, params["padding_config"], strict=True):
        step = gap + 1
        first, last = max(0, -(low // step)), min(old, -((low - new) // step))
        read.append(slice(first, max(first, last)))
        places.append(slice(low + first * step, low + max(first, last) * step, step))
    padded[tuple(places)] = x[tuple(read)]
    return [padded]


TAKE: Mapping[str, Take] = {
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "pad": _pad,
    "transpose": lambda params, shape, x: [x.transpose(params["permutation"])],
    "rev": lambda params, shape, x: [np.flip(x, params["dimensions"])],
    "tile": lambda params, shape, x: [np.tile(x, params["reps"])],
    "concatenate": lambda params, shape, *xs: [np.concatenate(xs, params["dimension"])],
    "stack": lambda params, shape, *xs: [np.stack(xs, params["axis"])],
    "split": lambda p, shape, x: np.split(x, np.cumsum(p["sizes"])[:-1], p["axis"]),
    "unstack": lambda params, shape, x: [*np.moveaxis(x, params["axis"], 0)],
}


# --- arithmetic of integers

_ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    "abs": np.abs,
    "add": np.add,
    "and": np.bitwise_and,
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "convert_element_type": lambda x: x,
    "copy": lambda x: x,
    "div": lambda x, y: (x - np.fmod(x, y)) // y,  # toward zero
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "rem": np.fmod,
    "select_n": lambda which, *cases: np.choose(which.astype(int), cases),
    "sign": np.sign,
    "sub": np.subtract,
    "xor": np.bitwise_xor,
}


def run_with_numpy(equation: Equation, operands: Sequence[ArrayLike]) -> list[np.ndarray] | None:
    """Run a move or arithmetic of integers; ``None`` for any other equation."""
    name, params, out = equation.primitive.name, equation.params, equation.outvars[0].aval
    dtypes = [out.dtype, *(atom.aval.dtype for atom in equation.invars)]
    if not all(isinstance(dtype, np.dtype) for dtype in dtypes):  # a random key
        return None
    if name == "iota":
        numbers = np.indices(out.shape, out.dtype, sparse=True)[params["dimension"]]
        return [np.broadcast_to(numbers, out.shape)]
    values = [*map(np.asarray, operands)]
    if name in TAKE:
        return TAKE[name](params, out.shape, *values)
    if name not in _ARITHMETIC or any(dtype.kind not in "biu" for dtype in dtypes):
        return None
    with np.errstate(all="ignore"):
        return [np.asarray(_ARITHMETIC[name](*values), out.dtype)]


# --- constants


class Constants:
    """Values that depend on no input of a program, each computed once.

    Parameters
    ----------
    program
        The program.
    outer, inputs
        For the body of an equation: the constants of the surrounding program, and its atoms that
        are inputs of the body.
    """

    def __init__(
        self,
        program: Program,
        outer: "Constants | None" = None,
        inputs: Mapping[Var, Atom] | None = None,
    ) -> None:
        self.program = program
        self._outer: Any = outer
        self._inputs = inputs or {}
        self._values: dict[Var, np.ndarray] = {}
        self._bodies: dict[tuple[int, ...], Constants] = {}

    @functools.cached_property
    def _varying(self) -> set[Var]:
        known = {v for v, atom in self._inputs.items() if self._outer.has(atom)}
        return self.program.dependents_of(v for v in self.program.in_vars if v not in known)

    def has(self, atom: Atom) -> bool:
        """Test whether an atom depends on no input."""
        return not is_var(atom) or atom not in self._varying

    def value(self, atom: Atom) -> np.ndarray | None:
        """Return the value of ``atom``, or ``None`` if it depends on an input."""
        if not is_var(atom):
            return np.asarray(atom.val)
        if not self.has(atom):
            return None
        if atom not in self._values:
            needed = self.program.depends_on([atom]) & self._inputs.keys()
            known = {var: self._outer.value(self._inputs[var]) for var in needed}
            with jax.ensure_compile_time_eval():
                (value,) = evaluate(self.program, [atom], known, rules=run_with_numpy)
            self._values[atom] = np.asarray(value)
        return self._values[atom]

    def outside(self, atom: Atom) -> "tuple[Constants, Atom] | None":
        """Return the surrounding program, and its atom that is this input of a body."""
        if self._outer is None or not is_var(atom) or atom not in self._inputs:
            return None
        return self._outer, self._inputs[atom]

    def body(self, jaxpr: AnyJaxpr, inputs: Sequence[Atom]) -> "Constants":
        """Return the constants of a body in the program.

        Parameters
        ----------
        jaxpr
            The body.
        inputs
            Its first inputs, as atoms of the program; the others vary from run to run.
        """
        key = (id(jaxpr), *map(id, inputs))
        if key not in self._bodies:
            program = program_of(jaxpr)
            known = dict(zip(program.in_vars, inputs, strict=False))
            self._bodies[key] = Constants(program, self, known)
        return self._bodies[key]
