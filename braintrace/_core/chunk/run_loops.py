"""Run the loops of a chunk, and the hoisted products between them; see `split`."""

from typing import Any

import jax

from ..._jax import Var
from ..._jaxpr import evaluate
from ..time_loops import scan_over_time
from .find_loops import Loop
from .over_time import values_over_time
from .split import Split
from .step_program import ByVar, StepProgram, equations_of, value_of, vars_of, zip_dict


def run_loops(
    step: StepProgram,
    split: Split,
    fixed: ByVar,
    start: list[jax.Array],
    over_time: ByVar,
    reverse: bool = False,
) -> tuple[list[Any], ByVar]:
    """Run the loops of a chunk; return the last States, and the recorded values over time.

    Parameters
    ----------
    step, split
        The program of one step, and its fission into loops.
    fixed, over_time
        Values that are equal in all steps, and slices of the steps.
    start
        States before the first step.
    reverse
        Whether the last step comes first.
    """
    over_time, states = dict(over_time), dict(enumerate(start))
    for loop in split.loops.in_order:
        hoisted = values_over_time(split.result_mode, split.values, loop.hoisted, fixed, over_time)
        over_time.update(zip_dict(loop.hoisted, hoisted))
        carry = [start[k] for k in loop.carried]
        last, recorded = _run_loop(step, split, loop, fixed, carry, over_time, reverse)
        states.update(zip_dict(loop.carried, last))
        over_time.update(recorded)
    at_last = [split.values.out_atoms[k] for k in split.loops.at_last]
    wanted = vars_of(at_last)
    read = split.values.depends_on(wanted, frozenset(over_time))
    end = 0 if reverse else -1
    now = {var: value[end] for var, value in over_time.items() if var in read}
    result = zip_dict(wanted, evaluate(split.values, wanted, {**fixed, **now}))
    values = [value_of(atom, result) for atom in at_last]
    states.update(zip_dict(split.loops.at_last, values))
    return [states[k] for k in range(len(start))], over_time


def _run_loop(
    step: StepProgram,
    split: Split,
    loop: Loop,
    fixed: ByVar,
    start: list[Any],
    over_time: ByVar,
    reverse: bool,
) -> tuple[list[Any], ByVar]:
    """Run one loop; return the last States, and its recorded values."""
    program = split.values
    carried = [step.carried[k] for k in loop.carried]
    written = [program.out_atoms[k] for k in loop.carried]
    recorded = [var for var in split.recorded if var in loop.made]
    read = {var: over_time[var] for var in over_time if var in loop.read}
    wanted = vars_of((written, recorded))
    fixed = _loop_invariants(step, split, loop, fixed, wanted)

    def one_step(carry: list[Any], now: list[Any]) -> Any:
        current = {**fixed, **zip_dict(carried, carry), **zip_dict(list(read), now)}
        values = evaluate(program, wanted, current, effects=loop.has_effects)
        result = zip_dict(wanted, values)
        return [value_of(a, result) for a in written], [result[v] for v in recorded]

    steps = len(next(iter(over_time.values())))
    last, result = scan_over_time(one_step, start, list(read.values()), steps, reverse)
    return last, zip_dict(recorded, result)


def _loop_invariants(
    step: StepProgram, split: Split, loop: Loop, fixed: ByVar, wanted: list[Var]
) -> ByVar:
    """Return the loop-invariant values that a loop reads."""
    program = split.values
    acting = [e for e in program.equations if e.effects and loop.has_effects]
    computed = [*equations_of(program, loop.made), *acting]
    read = vars_of((wanted, [equation.invars for equation in computed]))
    once = [var for var in read if var not in step.varying]
    return zip_dict(once, evaluate(program, once, fixed))
