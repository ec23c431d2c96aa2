"""Program of one step of a chunk, and the values of its variables for all steps.

On an accelerator, an iteration of a loop costs at least as much as about three small kernels. Four
steps per iteration take 0.4 to 0.7 of the time on an H200 (64 to 256 steps of 256 units: one leaky
layer 0.69, an LSTM 0.50, four leaky layers 0.45, windows of 16 steps 0.61), and programs compile
about as fast. A CPU gains nothing.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._etrace_op.dense import etp_mm_p
from .._etrace_op.registry import ETP_PRIMITIVES
from .._jax import Atom, Equation, Var, equations_inside, is_var
from .._jax_kernels import current_device
from .._jaxpr.equal import equal_values, merged
from .._jaxpr.primitives import DRAWS, PRODUCTS
from .._jaxpr.program import Program, evaluate, inlined, program_of
from .._jaxpr.vjp import nonlinear_operands
from .._typing import PyTree
from .masks import map_masked, map_one_by_one

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
    program = merged(program, equal_values(program, with_derivatives=True))
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


# --- all steps

STEPS_AN_ITERATION = 4

Carry = TypeVar("Carry")
Now = TypeVar("Now")
Result = TypeVar("Result")


def scan_over_time(
    step: Callable[[Carry, Now], tuple[Carry, Result]],
    start: Carry,
    sequences: Now,
    steps: int | None = None,
    reverse: bool = False,
) -> tuple[Carry, Result]:
    """Scan over the first axis of sequences, on accelerators several steps per iteration."""
    unroll = 1 if current_device().platform == "cpu" else STEPS_AN_ITERATION
    return jax.lax.scan(step, start, sequences, length=steps, reverse=reverse, unroll=unroll)


def scan_records(
    step: Callable[[Carry, PyTree], tuple[Carry, Result]],
    start: Carry,
    records: PyTree,
    steps: int,
    reverse: bool = False,
) -> tuple[Carry, Result]:
    """Scan over recorded steps; residuals of length 1 are equal in all steps.

    A single step runs without a loop.
    """
    if steps == 1:
        last, results = step(start, jax.tree.map(lambda leaf: leaf[0], records))
        return last, jax.tree.map(lambda leaf: leaf[None], results)
    leaves, tree = jax.tree.flatten(records)
    is_fixed = [leaf.shape[0] == 1 for leaf in leaves]
    fixed = [leaf[0] for leaf, once in zip(leaves, is_fixed, strict=True) if once]
    varying = [leaf for leaf, once in zip(leaves, is_fixed, strict=True) if not once]

    def body(carry: Carry, now: list[jax.Array]) -> tuple[Carry, Result]:
        sources = iter(fixed), iter(now)
        merged = [next(sources[0] if once else sources[1]) for once in is_fixed]
        return step(carry, jax.tree.unflatten(tree, merged))

    return scan_over_time(body, start, varying, steps, reverse)


STEP_BY_STEP = frozenset({"cond", "while", "rng_bit_generator", "rng_uniform", "ffi_call"})
"""Operations that differ, or cost more, when mapped over time: both branches of a `cond` would run,
and some random number generators would return other numbers."""

MapOverTime: TypeAlias = Callable[[Callable[[Any], Any], PyTree], PyTree]
"""``(function, slices over time) -> results over time``."""


def map_at_once(function: Callable[[Any], Any], over_time: PyTree) -> PyTree:
    """Map a function over time."""
    return jax.vmap(function)(over_time)


def choose_map(
    step: StepProgram, targets: PyTree, made: Collection[Var], live: Collection[Var], has_mask: bool
) -> MapOverTime:
    """Return how some variables of a step are computed and differentiated for all steps.

    Parameters
    ----------
    step
        The step.
    targets, made
        The variables, and those that are computed for them.
    live
        Variables with a derivative.
    has_mask
        Whether some steps may be masked.
    """
    # If the gradient of a sum over time differs from the sum of the gradients:
    if (
        any(map(is_step_by_step, equations_of(step.program, made)))
        or _is_nonlinear_in_sum(step, live)
        or _adds_up_in_half_precision(step, targets, live)
    ):
        return map_one_by_one
    return map_masked if has_mask else map_at_once


def is_step_by_step(equation: Equation) -> bool:
    """Test whether an equation is not mapped over time."""
    names = (inner.primitive.name for inner in (equation, *equations_inside(equation)))
    return any(n in STEP_BY_STEP or "random" in n or "callback" in n for n in names)


def _is_nonlinear_in_sum(step: StepProgram, live: Collection[Var]) -> bool:
    """Test whether a nonlinear backward rule would receive the sum of all gradients.

    A loop-invariant value exists once, so its gradient is the sum over the steps.
    """
    fixed = {var for var in live if var not in step.varying}
    readers = (e for e in step.program.equations if _any_in(e.invars, fixed))
    return any(
        _any_in([equation.invars[operand] for operand in nonlinear_operands(equation)], fixed)
        for equation in readers
    )


def _adds_up_in_half_precision(step: StepProgram, targets: PyTree, live: Collection[Var]) -> bool:
    """Test whether the gradient of a parameter is a plain sum over time in half precision.

    Products accumulate in single precision; elsewhere a sum of ones in bfloat16 stops at 256.
    """
    program = step.program
    half = [var for var in step.parameters if is_half(var.aval.dtype) and var in live]
    ancestors = program.ancestors(vars_of(targets))
    of_half = program.dependents_of(half) - step.varying
    met = (e for e in equations_of(program, ancestors & step.varying) if not is_product(e))
    return any(_any_in(e.invars, of_half & ancestors) for e in met)


def _any_in(atoms: Iterable[Atom], variables: set[Var]) -> bool:
    return any(is_var(atom) and atom in variables for atom in atoms)


def values_over_time(
    run: MapOverTime, program: Program, targets: Sequence[Atom], fixed: ByVar, over_time: ByVar
) -> list[jax.Array]:
    """Return variables for every step, from values that are equal in all steps and per step."""

    def of_step(now: list[Any]) -> list[Any]:
        current = {**narrowed(fixed), **zip_dict(list(over_time), now)}
        return evaluate(program, targets, current)

    return list(run(of_step, list(over_time.values()))) if targets else []


def zero_sum(value: ArrayLike) -> jax.Array:
    """Return the initial value of a sum of arrays like ``value``.

    It has at least single precision: in bfloat16 a sum of ones stops at 256.
    """
    dtype = jnp.result_type(value)  # that of a NumPy array may be one that JAX does not use
    return jnp.zeros(jnp.shape(value), jnp.float32 if is_half(dtype) else dtype)


def widened(values: ByVar) -> ByVar:
    """Return values in at least single precision, in which their gradients are then summed."""
    return {
        var: x.astype(jnp.float32) if is_half(var.aval.dtype) else x for var, x in values.items()
    }


def narrowed(values: ByVar) -> ByVar:
    """Return the values before `widened`."""
    return {
        var: x.astype(var.aval.dtype) if is_half(var.aval.dtype) else x for var, x in values.items()
    }


def is_half(dtype: Any) -> bool:
    """Test whether a dtype is floating-point with less than single precision."""
    return bool(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4)


# --- results of a step, from the values of other variables


@dataclasses.dataclass(frozen=True)
class SourceValues:
    """Values of the variables from which results of a chunk are computed; see `Results`.

    Attributes
    ----------
    over_time, once
        Values per step, and loop-invariant values.
    steps
        Number of steps.
    """

    over_time: list[jax.Array]
    once: list[jax.Array]
    steps: int


jax.tree_util.register_dataclass(SourceValues, ["over_time", "once"], ["steps"])


@dataclasses.dataclass(frozen=True, eq=False)
class Results:
    """Some results of a step, and the sources of their values over time.

    Attributes
    ----------
    step, results
        The step, and a pytree of its variables and of constants.
    source
        For variables with values over time: the variable that has the value.
    sources
        These variables.
    computed
        Variables computed from these.
    once
        Loop-invariant results and operands; those of literals alone are not stored.
    map_over_time
        How the variables are computed for all steps.
    """

    step: StepProgram
    results: PyTree
    source: Mapping[Var, Var]
    sources: tuple[Var, ...]
    computed: tuple[Var, ...]
    once: tuple[Var, ...]
    map_over_time: MapOverTime

    def compute(self, values: SourceValues) -> PyTree:
        """Return the results, time first, with a time axis of length 1 if loop-invariant."""
        program, once = self.step.program, zip_dict(self.once, values.once)
        over_time = zip_dict(self.sources, values.over_time)
        varying = {var: over_time[first] for var, first in self.source.items()}
        same = [var for var in vars_of(self.results) if var not in self.step.varying]
        once.update(zip_dict(same, evaluate(program, same, {}, once)))
        computed = values_over_time(self.map_over_time, program, self.computed, once, varying)
        varying.update(zip_dict(self.computed, computed))

        def of_atom(atom: Atom) -> jax.Array:
            is_varying = is_var(atom) and atom in varying
            return varying[atom] if is_varying else value_of(atom, once)[None]

        return jax.tree.map(of_atom, self.results)


def find_sources(step: StepProgram, results: PyTree, known: Mapping[Var, Var]) -> Results:
    """Find the sources of some results of a step.

    Parameters
    ----------
    step, results
        The step, and a pytree of its variables and of constants.
    known
        For all variables with values over time: the variable that has the value.
    """
    targets, program = vars_of(results), step.program
    behind = find_varying(step, program, targets, known)
    source = {var: first for var, first in known.items() if var in behind}
    computed = behind - source.keys()
    run = list(equations_of(program, computed))
    operands = [equation.invars for equation in run]
    map_over_time = map_one_by_one if any(map(is_step_by_step, run)) else map_at_once
    of_arrays = program.dependents_of([*program.in_vars, *program.constants]) - step.varying
    once = tuple(var for var in vars_of((targets, operands)) if var in of_arrays)
    in_order = tuple(var for var in targets if var in computed)
    sources = tuple(dict.fromkeys(source.values()))
    return Results(step, results, source, sources, in_order, once, map_over_time)
