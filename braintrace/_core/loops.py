r"""Loops over time in a chunk, and functions of all steps at once between them.

A loop over time is slow compared with a single product over time and batch. A loop contains only
the operations that the next step's States depend on, and States that depend on each other over the
steps share it. Between two loops, products are computed for all steps at once, from the recorded
values of earlier loops: a stack of layers runs like a sequence of single layers. The level of a
loop is the number of products on the longest path to it. States of one level share a loop; an
elementwise operation runs in each loop that reads it, unless an earlier one records it.

On an accelerator, an iteration of a loop costs at least as much as about three small kernels. Four
steps per iteration take 0.4 to 0.7 of the time on an H200 (64 to 256 steps of 256 units: one leaky
layer 0.69, an LSTM 0.50, four leaky layers 0.45, windows of 16 steps 0.61), and programs compile
about as fast. A CPU gains nothing.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._etrace_op.registry import ETP_PRIMITIVES
from .._jax import Atom, Equation, Var, bind, equations_inside, is_var
from .._jax_kernels import current_device
from .._jaxpr.evaluate import Rule, evaluate
from .._jaxpr.primitives import CONSTANT, DRAWS, PRODUCTS, moved_operands
from .._jaxpr.program import Program, components
from .._jaxpr.vjp import nonlinear_operands
from .._typing import PyTree
from .masked import map_masked, pass_no_zero
from .registers import Register, find_registers
from .step_program import (
    ByVar,
    StepProgram,
    equations_of,
    find_varying,
    is_product,
    value_of,
    vars_of,
    zeros_of,
    zip_dict,
)

STEPS_AN_ITERATION = 4

Carry = TypeVar("Carry")
Now = TypeVar("Now")
Results = TypeVar("Results")


def scan_over_time(
    step: Callable[[Carry, Now], tuple[Carry, Results]],
    start: Carry,
    sequences: Now,
    steps: int | None = None,
    reverse: bool = False,
) -> tuple[Carry, Results]:
    """Scan over the first axis of sequences, on accelerators several steps per iteration."""
    unroll = 1 if current_device().platform == "cpu" else STEPS_AN_ITERATION
    result: tuple[Carry, Results] = jax.lax.scan(
        step, start, sequences, length=steps, reverse=reverse, unroll=unroll
    )
    return result


def scan_records(
    step: Callable[[Carry, PyTree], tuple[Carry, Results]],
    start: Carry,
    records: PyTree,
    steps: int,
    reverse: bool = False,
) -> tuple[Carry, Results]:
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

    def body(carry: Carry, now: list[jax.Array]) -> tuple[Carry, Results]:
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


def map_one_by_one(function: Callable[[Any], Any], over_time: PyTree) -> PyTree:
    """Run a function step after step, with the derivatives of `map_masked`."""
    return jax.lax.map(pass_no_zero(function), over_time)


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
    ancestors = program.depends_on(vars_of(targets), blocked=CONSTANT)
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


def stretched(tree: PyTree, steps: int) -> PyTree:
    """Broadcast arrays with a time axis of length 1 to all steps."""

    def of_leaf(leaf: jax.Array) -> jax.Array:
        return jnp.broadcast_to(leaf, (steps, *leaf.shape[1:]))

    return jax.tree.map(of_leaf, tree)


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


PullBack: TypeAlias = Callable[[list[Any]], tuple[list[Any], list[Any]]]
"""``cotangents of some values over time -> cotangents of parameters, of States before them``."""


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """A loop over time, and the products that are computed for all steps before it.

    Attributes
    ----------
    hoisted
        Results of these products.
    carried
        Indices of the States that it carries.
    made
        Variables that it computes or carries, so it can record their values.
    read
        Variables made by earlier loops, hoisted products and slices that it or its products read.
    has_effects
        Whether it runs the equations with effects.
    registers, behind
        Shift registers that are known after it, and the variables behind their values.
    """

    hoisted: tuple[Var, ...]
    carried: tuple[int, ...]
    made: tuple[Var, ...]
    read: frozenset[Var]
    has_effects: bool
    registers: tuple[Register, ...]
    behind: frozenset[Var]

    @property
    def held(self) -> list[Var]:
        """The old values of the registers."""
        return [register.old for register in self.registers]


@dataclasses.dataclass(frozen=True, eq=False)
class Loops:
    """The loops of a step.

    Attributes
    ----------
    step, program
        The step, and the program that the loops evaluate.
    loops
        The loops, in order.
    once
        Loop-invariant values that they read.
    live
        Variables with a derivative; used only if derivatives pass from step to step.
    tapped
        Products with weights in the loops through which derivatives pass.
    has_mask
        Whether some steps may be masked.
    map_products
        How hoisted products are computed for all steps.
    recorded
        Variables whose values over time are read: a loop records those that it makes.
    """

    step: StepProgram
    program: Program
    loops: tuple[Loop, ...]
    once: tuple[Var, ...]
    live: Collection[Var]
    tapped: tuple[Equation, ...]
    has_mask: bool
    map_products: MapOverTime
    recorded: frozenset[Var] = frozenset()

    @property
    def made(self) -> dict[Var, None]:
        """The variables whose values over time can be known, in order."""
        own = (var for loop in self.loops for var in (*loop.hoisted, *loop.made, *loop.held))
        return dict.fromkeys([*self.step.slices, *own])

    def record(self, variables: Collection[Var]) -> "Loops":
        """Return loops that record some variables, and what they read themselves."""
        operands = vars_of([e.invars for e in self.tapped])
        varying = (v for v in operands if v in self.step.varying)
        read = frozenset(variables).union(varying)
        read = read.union(*(loop.read | loop.behind for loop in self.loops))
        return dataclasses.replace(self, recorded=read)

    def run(
        self, fixed: ByVar, start: Sequence[Any], slices: ByVar, taps: ByVar | None = None
    ) -> tuple[list[Any], ByVar]:
        """Run the loops of a chunk; return the last States, and values over time.

        Parameters
        ----------
        fixed, slices
            Values that are equal in all steps, and slices of the steps.
        start
            States before the first step.
        taps
            Terms to add to the results of products in the loops; ``None``: it is not
            differentiated.
        """
        over_time, states = dict(slices), [*start]
        fixed = {**fixed, **zip_dict(self.once, evaluate(self.program, self.once, fixed))}
        if taps is not None:
            fixed = widened(fixed)
        for loop in self.loops:
            hoisted = values_over_time(
                self.map_products, self.program, loop.hoisted, fixed, over_time
            )
            over_time.update(zip_dict(loop.hoisted, hoisted))
            if loop.made or loop.has_effects:
                carry = [start[k] for k in loop.carried]
                last, recorded = self._run_loop(loop, fixed, carry, over_time, taps)
                over_time.update(recorded)
                for k, value in zip(loop.carried, last, strict=True):
                    states[k] = value
            given = [register.pushed for register in loop.registers]
            given = values_over_time(self.map_products, self.program, given, fixed, over_time)
            for register, values in zip(loop.registers, given, strict=True):
                k = register.state
                states[k], over_time[register.old] = register.run(start[k], values)
        return states, over_time

    def _run_loop(
        self, loop: Loop, fixed: ByVar, start: list[Any], over_time: ByVar, taps: ByVar | None
    ) -> tuple[list[Any], ByVar]:
        carried = [self.step.carried[k] for k in loop.carried]
        written = [self.program.out_atoms[k] for k in loop.carried]
        recorded = [var for var in loop.made if var in self.recorded]
        wanted = vars_of((written, recorded))
        read = [var for var in over_time if var in loop.read]
        own_taps = {var: term for var, term in (taps or {}).items() if var in loop.made}

        def one_step(carry: list[Any], now: tuple[list[Any], list[Any]]) -> Any:
            current = {**narrowed(fixed), **zip_dict(carried, carry), **zip_dict(read, now[0])}
            rule = self._tap(zip_dict(own_taps, now[1]))
            effects = loop.has_effects
            found = evaluate(self.program, wanted, current, rules=rule, effects=effects)
            result = zip_dict(wanted, found)
            return [value_of(a, result) for a in written], [result[v] for v in recorded]

        steps = len(next(iter(over_time.values())))
        now = [over_time[var] for var in read], list(own_taps.values())
        body: Any = one_step
        if taps is not None and not loop.has_effects:
            # Of the values in a loop, the reverse loop reads the products; it computes the others
            # again, in which an LSTM takes 0.9 of the time, and 0.6 of the memory.
            body = jax.checkpoint(body, prevent_cse=False, policy=_is_kept)
        if taps is not None and self.has_mask:
            body = pass_no_zero(body)
        last, result = scan_over_time(body, start, now, steps)
        return last, zip_dict(recorded, result)

    def _tap(self, terms: ByVar) -> Rule:
        """Return a rule that adds terms to products, in which weights are constant."""

        def rule(equation: Equation, operands: list[Any]) -> list[Any] | None:
            if terms.keys().isdisjoint(equation.outvars):
                return None
            varying = [is_var(atom) and atom in self.step.varying for atom in equation.invars]
            pairs = zip(varying, operands, strict=True)
            held = [x if varies else jax.lax.stop_gradient(x) for varies, x in pairs]
            return [bind(equation, held)[0] + terms[equation.outvars[0]]]

        return rule

    def passing(self, leaves: Sequence[Any]) -> list[Any]:
        """Select, from one item per carried State, those through which derivatives pass."""
        return [x for x, var in zip(leaves, self.step.carried, strict=True) if var in self.live]

    def run_with_derivative(
        self,
        fixed: ByVar,
        start: list[Any],
        slices: ByVar,
        parameters: Sequence[Var],
        places: Sequence[Var],
        steps: int,
    ) -> tuple[tuple[list[Any], ByVar], PullBack]:
        """Run the loops; also return a function that pulls cotangents back through all steps.

        In the reverse loop, the gradient of a weight would be a product and a sum at each step. The
        weights of products in the loops are therefore constant there; the products have taps, from
        whose cotangents the gradient is computed for all steps at once.

        Parameters
        ----------
        fixed, start, slices
            The arguments of `run`.
        parameters, places
            Parameters with a gradient, and the variables whose cotangents are pulled back.
        steps
            Number of steps.
        """
        passing, names = self.passing(self.step.carried), list[Var]()
        tapped = [equation.outvars[0] for equation in self.tapped]

        def run(own: list[Any], entering: list[Any], terms: list[Any]) -> Any:
            given = zip_dict(passing, entering)
            before = [given.get(v, x) for v, x in zip(self.step.carried, start, strict=True)]
            now = {**fixed, **zip_dict(parameters, own)}
            last, over_time = self.run(now, before, slices, zip_dict(tapped, terms))
            names[:] = over_time
            return [over_time[var] for var in places], (last, list(over_time.values()))

        own, entering = [fixed[var] for var in parameters], self.passing(start)
        terms = [jnp.zeros((steps, *zero.shape), zero.dtype) for zero in zeros_of(tapped)]
        _, pull, (last, values) = jax.vjp(run, own, entering, terms, has_aux=True)
        over_time = zip_dict(names, values)
        operands = {var: value for var, value in over_time.items() if var not in tapped}

        def products(own: list[Any]) -> list[jax.Array]:
            now = widened({**fixed, **zip_dict(parameters, own)})
            return values_over_time(self.map_products, self.program, tapped, now, operands)

        def pull_back(cotangents: list[Any]) -> tuple[list[Any], list[Any]]:
            gradients, before, of_taps = pull(cotangents)
            (of_products,) = jax.vjp(products, own)[1](of_taps)
            return jax.tree.map(jnp.add, gradients, of_products), before

        return (last, over_time), pull_back


def _is_kept(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name in PRODUCTS | DRAWS or primitive in ETP_PRIMITIVES


def find_loops(
    step: StepProgram,
    program: Program,
    in_loops: Collection[int],
    live: Collection[Var],
    passes: bool,
    has_mask: bool,
) -> Loops:
    """Return the loops of a step.

    Parameters
    ----------
    step, program
        The step, and the program that the loops evaluate.
    in_loops
        Indices of other equations that must run in a loop: branches, random numbers, effects.
    live
        Variables with a derivative.
    passes, has_mask
        Whether derivatives pass from step to step, and whether some steps may be masked.
    """
    levels, products, registers = _find_levels(step, program, in_loops)
    count, available, loops = len(program.equations), set(step.slices), list[Loop]()
    for level in sorted({*levels.values(), *registers.values()}):
        nodes = sorted(node for node in levels if levels[node] == level)
        own = tuple(register for register in registers if registers[register] == level)
        run = [program.equations[node] for node in nodes if node < count]
        carried = [node - count for node in nodes if node >= count]
        targets = [program.out_atoms[k] for k in carried]
        targets += [atom for equation in run for atom in (*equation.invars, *equation.outvars)]
        inside = find_varying(step, program, targets, available | products)
        pushed = [register.pushed for register in own]
        behind = find_varying(step, program, pushed, available | products | inside)
        needed = (inside | behind) & products - available
        before = find_varying(step, program, needed, available)
        hoisted = _results_in_order(program, before & products - available)
        made = [step.carried[k] for k in carried]
        made += _results_in_order(program, inside - available - products)
        read = (inside & (available | products)) | (before & available)
        has_effects = any(equation.effects for equation in run)
        loop = Loop(
            tuple(hoisted),
            tuple(carried),
            tuple(made),
            frozenset(read),
            has_effects,
            own,
            frozenset(behind),
        )
        loops.append(loop)
        available.update(hoisted, made, loop.held)

    in_a_loop = {var for loop in loops for var in loop.made}
    hoisted = [var for loop in loops for var in loop.hoisted]
    hoisted += [register.pushed for loop in loops for register in loop.registers]
    stops = in_a_loop.union(step.slices, *(loop.held for loop in loops))
    between = find_varying(step, program, hoisted, stops) - stops
    passing = live if passes else ()
    map_products = choose_map(step, hoisted, between, passing, passes and has_mask)
    once = () if passes and map_products is map_one_by_one else _find_once(step, program, in_a_loop)
    tapped = [
        equation
        for equation in equations_of(program, in_a_loop.intersection(passing))
        if is_product(equation)
        and any(v in passing and v not in step.varying for v in vars_of(equation.invars))
    ]
    return Loops(step, program, tuple(loops), once, live, tuple(tapped), has_mask, map_products)


def _find_once(step: StepProgram, program: Program, made: set[Var]) -> tuple[Var, ...]:
    acting = [equation.invars for equation in program.equations if equation.effects]
    written = program.out_atoms[: len(step.carried)]
    read = program.depends_on(vars_of((written, list(made), acting))) - step.varying
    results = (var for equation in program.equations for var in equation.outvars)
    return tuple(var for var in (*program.in_vars, *results) if var in read)


def _find_levels(
    step: StepProgram, program: Program, in_loops: Collection[int]
) -> tuple[dict[int, int], set[Var], dict[Register, int]]:
    """Return the levels of nodes that run in a loop, the hoisted results, and the registers."""
    sources, count = _build_graph(step, program, in_loops), len(program.equations)
    registers = {count + r.state: r for r in find_registers(program, step.carried)}
    levels, in_a_loop, hoisted, moved = dict[int, int](), list[int](), set[int](), set[int]()
    for group in components(sources):
        before = {source for node in group for source in sources[node]}
        after = (levels[s] + (s in hoisted) for s in before.difference(group))
        levels.update(dict.fromkeys(group, max(after, default=0)))
        states = registers.keys() & set(group)
        if states and sum(node >= count for node in group) == 1:
            hoisted |= states
            moved.update(group)
        # A node that depends on itself depends on the step before.
        elif before.intersection(group) or group[0] >= count or group[0] in in_loops:
            in_a_loop += group
        elif is_product(program.equations[group[0]]):
            hoisted.add(group[0])
        elif before and before <= moved and moved_operands(program.equations[group[0]]):
            hoisted.add(group[0])
            moved.add(group[0])
    products = set(program.made_by(node for node in hoisted if node < count))
    held = {register: levels[node] for node, register in registers.items() if node in hoisted}
    return {node: levels[node] for node in in_a_loop}, products, held


def _build_graph(step: StepProgram, program: Program, in_loops: Collection[int]) -> list[list[int]]:
    """Return the nodes that each node depends on: equations by index, then the carried States."""
    equations, count = program.equations, len(program.equations)
    written = program.out_atoms[: len(step.carried)]
    operands = [a for i in in_loops for a in (*equations[i].invars, *equations[i].outvars)]
    needed = find_varying(step, program, [*written, *operands])
    run = {*program.making(needed), *in_loops}
    node_of = {var: index for index in run for var in equations[index].outvars}
    node_of.update({var: count + k for k, var in enumerate(step.carried)})
    read = [equation.invars if i in run else () for i, equation in enumerate(equations)]
    # The value of a State depends on the value written in the step before.
    read += [[atom] for atom in written]
    sources = [[node_of[a] for a in atoms if is_var(a) and a in node_of] for atoms in read]
    # Equations with effects run in order: each depends on the one before, the first on the last.
    in_turn = sorted(index for index in in_loops if equations[index].effects)
    for before, index in zip(in_turn[-1:] + in_turn[:-1], in_turn, strict=True):
        sources[index].append(before)
    return sources


def _results_in_order(program: Program, variables: set[Var]) -> list[Var]:
    made = (var for equation in equations_of(program, variables) for var in equation.outvars)
    return [var for var in made if var in variables]
