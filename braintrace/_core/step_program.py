"""Program of one step of a chunk, with the roles of its variables."""

import dataclasses
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from .._etrace_op.dense import etp_mm_p
from .._etrace_op.registry import ETP_PRIMITIVES
from .._jax import Atom, Equation, Var, is_var
from .._jaxpr.equal import equal_with_derivatives, merged
from .._jaxpr.evaluate import inlined
from .._jaxpr.primitives import DRAWS, PRODUCTS
from .._jaxpr.program import Program, program_of
from .._typing import PyTree

Values: TypeAlias = tuple[PyTree, PyTree, PyTree, PyTree]
"""Values of the parameters, of the other States, of the perturbations, and of fixed values."""

ByVar: TypeAlias = dict[Var, Any]
"""Values by variable."""


class PureStep(Protocol):
    """``(values of States, probes, fixed values, slices) -> (written values, results)``."""

    def __call__(self, values: list[PyTree], *arguments: PyTree) -> tuple[PyTree, PyTree]:
        """Return the new values of the States that are written, and the results of the step."""

    def written_of(self, items: list[PyTree]) -> PyTree:
        """Select those of written States from one item per State."""


@dataclasses.dataclass(frozen=True, eq=False)
class StepProgram:
    """The program of one step, and the roles of its variables.

    Attributes
    ----------
    program
        The program.
    parameters, probes
        Inputs with respect to which the loss is differentiated.
    inputs
        All inputs but the slices, in the order of `Values`.
    carried, slices
        Inputs that vary over the steps: States that it writes, slices of sequences.
    written
        New values of the carried States.
    results
        ``(loss, aux, records)`` of the step, as a pytree of variables and constants.
    """

    program: Program
    parameters: tuple[Var, ...]
    probes: tuple[Var, ...]
    inputs: tuple[Var, ...]
    carried: tuple[Var, ...]
    slices: tuple[Var, ...]
    written: tuple[Atom, ...]
    results: PyTree

    @functools.cached_property
    def varying(self) -> set[Var]:
        """The variables that vary over the steps."""
        acting = (e for e in self.program.equations if e.effects or e.primitive.name in DRAWS)
        result = [var for equation in acting for var in equation.outvars]
        return self.program.dependents_of([*self.carried, *self.slices, *result])

    def fixed(self, values: Values) -> ByVar:
        """Return the values of the loop-invariant inputs."""
        given = zip_dict(self.inputs, jax.tree.leaves(values))
        return {var: value for var, value in given.items() if var not in self.carried}


def traced_step(step: PureStep, values: Values, slices: PyTree) -> StepProgram:
    """Trace a step; calls are inlined.

    Parameters
    ----------
    step
        ``(probes, constants, slices) -> (loss, aux, records)``.
    values, slices
        Example values.
    """
    arguments = (*values, slices)

    def run(parameters: list[PyTree], others: list[PyTree], *rest: PyTree) -> Any:
        return step([*parameters, *others], *rest)

    closed, shapes = jax.make_jaxpr(run, return_shape=True)(*arguments)
    program = program_of(inlined(closed, _with_one_axis_of_rows))
    # The trace repeats subexpressions that several States share.
    program = merged(program, equal_with_derivatives(program))
    written, results = jax.tree.unflatten(jax.tree.structure(shapes), program.out_atoms)
    *given, own_slices = jax.tree.unflatten(jax.tree.structure(arguments), program.in_vars)
    parameters, others, probes, _ = given

    def flat(tree: PyTree) -> tuple[Atom, ...]:
        return tuple(jax.tree.leaves(tree))

    return StepProgram(
        program,
        flat(parameters),
        flat(probes),
        inputs=flat(given),
        carried=flat(step.written_of([*parameters, *others])),
        slices=flat(own_slices),
        written=flat(written),
        results=results,
    )


def _with_one_axis_of_rows(equation: Equation, operands: list[Any]) -> list[Any] | None:
    """Run a product with a matrix as an ETP operation, which folds time into the axis of rows.

    With two axes of rows, XLA transposes an operand for the gradient of the matrix: a quarter of
    the time of a gradient (linear recurrent units, 100 steps of 64 samples, CPU).
    """
    params = {"dimension_numbers": (((1,), (0,)), ((), ())), "precision": None}
    is_product = equation.primitive.name == "dot_general" and [x.ndim for x in operands] == [2, 2]
    if not is_product or any(equation.params[name] != value for name, value in params.items()):
        return None
    y = etp_mm_p.bind(*operands, has_bias=False)
    return [y] if y.dtype == equation.outvars[0].aval.dtype else None


Key = TypeVar("Key")
Value = TypeVar("Value")


def zip_dict(keys: Iterable[Key], values: Iterable[Value]) -> dict[Key, Value]:
    """Return a dict of keys and values of the same number."""
    return dict(zip(keys, values, strict=True))


def vars_of(atoms: PyTree) -> list[Var]:
    """Return the variables of a pytree of atoms, each once."""
    return list(dict.fromkeys(atom for atom in jax.tree.leaves(atoms) if is_var(atom)))


def value_of(atom: Atom, known: Mapping[Var, Any]) -> jax.Array:
    """Return the value of a known variable, or of a literal."""
    return known[atom] if is_var(atom) else jnp.asarray(atom.val, atom.aval.dtype)


def equations_of(program: Program, variables: Iterable[Var]) -> Iterator[Equation]:
    """Yield the equations that make some variables, in execution order."""
    return (program.equations[index] for index in program.making(variables))


def find_varying(
    step: StepProgram, program: Program, targets: Iterable[Atom], stops: Collection[Var] = ()
) -> set[Var]:
    """Return the varying variables that some targets depend on, up to stops, both included."""
    return program.depends_on(targets, frozenset(stops)) & step.varying


def zeros_of(variables: Iterable[Var]) -> list[jax.Array]:
    """Return arrays of zeros like some variables."""
    return [jnp.zeros(var.aval.shape, var.aval.dtype) for var in variables]


def zeros_over_time(variables: Iterable[Var], steps: int) -> list[jax.Array]:
    """Return arrays of zeros like some variables, time first."""
    return [jnp.zeros((steps, *var.aval.shape), var.aval.dtype) for var in variables]


def size_of(var: Var) -> int:
    """Return the bytes of a variable."""
    return int(var.aval.size * var.aval.dtype.itemsize)


def is_product(equation: Equation) -> bool:
    """Test whether an equation is a product with weights, whose result is materialised."""
    return equation.primitive.name in PRODUCTS or equation.primitive in ETP_PRIMITIVES
