"""Run the loops of a chunk, and the hoisted products between them; see `find_loops`."""

from typing import Any

import jax

from ..._jax import Var
from ..._jaxpr import evaluate
from ..time_loops import scan_over_time
from .find_loops import Loop
from .over_time import values_over_time
from .split import Split
from .step_program import ByVar, StepProgram, value_of, vars_of, zip_dict


def run_loops(
    step: StepProgram,
    split: Split,
    fixed: ByVar,
    start: list[jax.Array],
    slices: ByVar,
    reverse: bool = False,
) -> tuple[list[Any], ByVar]:
    """Run the loops of a chunk; return the last States, and values over time.

    Parameters
    ----------
    step, split
        The program of one step, and its split into loops.
    fixed, slices
        Values that are equal in all steps, and slices of the steps.
    start
        States before the first step.
    reverse
        Whether the last step comes first.
    """
    program, over_time, states = split.program, dict(slices), [*start]
    map_over_time = split.of_results.map_over_time
    once = _find_invariants(step, split)
    fixed = {**fixed, **zip_dict(once, evaluate(program, once, fixed))}
    for loop in split.loops:
        hoisted = values_over_time(map_over_time, program, loop.hoisted, fixed, over_time)
        over_time.update(zip_dict(loop.hoisted, hoisted))
        carry = [start[k] for k in loop.carried]
        last, recorded = _run_loop(step, split, loop, fixed, carry, over_time, reverse)
        over_time.update(recorded)
        for k, value in zip(loop.carried, last, strict=True):
            states[k] = value
    return states, over_time


def _find_invariants(step: StepProgram, split: Split) -> list[Var]:
    program = split.program
    acting = [equation.invars for equation in program.equations if equation.effects]
    made = [loop.made for loop in split.loops]
    written = program.out_atoms[: len(step.carried)]
    return [*program.depends_on(vars_of((written, made, acting))) - step.varying]


def _run_loop(
    step: StepProgram,
    split: Split,
    loop: Loop,
    fixed: ByVar,
    start: list[Any],
    over_time: ByVar,
    reverse: bool,
) -> tuple[list[Any], ByVar]:
    program = split.program
    carried = [step.carried[k] for k in loop.carried]
    written = [program.out_atoms[k] for k in loop.carried]
    recorded = [var for var in loop.made if var in split.recorded]
    wanted = vars_of((written, recorded))
    read = [var for var in over_time if var in loop.read]

    def one_step(carry: list[Any], now: list[Any]) -> Any:
        current = {**fixed, **zip_dict(carried, carry), **zip_dict(read, now)}
        values = evaluate(program, wanted, current, effects=loop.has_effects)
        result = zip_dict(wanted, values)
        return [value_of(a, result) for a in written], [result[v] for v in recorded]

    steps = len(next(iter(over_time.values())))
    now = [over_time[var] for var in read]
    last, result = scan_over_time(one_step, start, now, steps, reverse)
    return last, zip_dict(recorded, result)
