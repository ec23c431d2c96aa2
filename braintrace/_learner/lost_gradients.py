"""Gradients that a step function loses in a State of the user's own."""

from .._core.step_program import StepProgram
from .._graph import Diagnostic
from .._jax import Var, is_var, source_line
from .._jaxpr import CONSTANT, carries_derivative
from .._typing import Path


def find_lost_gradients(step: StepProgram, paths: list[Path | None]) -> list[Diagnostic]:
    """Report the States that a step fills with values of the model, and whose loss reads them.

    No trace follows such a value, so its gradient is the one of a constant.

    Parameters
    ----------
    step
        A step that is differentiated alone.
    paths
        Paths of the carried leaves in the model; ``None``: of a State outside of it.
    """
    program, loss = step.program, step.results[0]
    read = program.depends_on([loss], frozenset(), CONSTANT, carries_derivative)
    moving = {*step.parameters, *step.probes}

    def is_filled(place: int) -> bool:
        new = step.written[place]
        if not is_var(new):
            return False
        behind = program.depends_on([new], frozenset(), CONSTANT, carries_derivative)
        return not behind.isdisjoint(moving)

    def line_of(var: Var) -> str:
        readers = (program.equations[index] for index, _ in program.readers.get(var, ()))
        lines = (source_line(e) for e in readers if not read.isdisjoint(e.outvars))
        return next(lines, "")  # the loss may be the State itself

    return [
        Diagnostic(
            "warning",
            "untraced-state",
            f"A State of shape {step.carried[place].aval.shape} that `step_fn` writes carries "
            "values that depend on weights to the loss of a later step, where they are constants. "
            "Compute the loss in a `window`, with `RTRL`, or write the State through "
            "`jax.lax.stop_gradient`; a `brainstate.HiddenState` that `update` writes has a trace.",
            (),
            line_of(step.carried[place]),
        )
        for place, path in enumerate(paths)
        if path is None and step.carried[place] in read and is_filled(place)
    ]
