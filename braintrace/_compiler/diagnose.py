"""Diagnostics: the parts of the gradient that a rule leaves out, and why."""

import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence

from .._errors import CompilationError
from .._graph import (
    FOLLOWS_ALL,
    ApproximationWarning,
    Diagnostic,
    HiddenParamOpRelation,
    Jacobian,
)
from .._graph.diagnostics import quoted
from .._jax import Atom, Var, is_var, source_line
from .._jaxpr import CONSTANT, Program, carries_derivative
from .grouped_step import GroupedStep
from .truncated import nonlinear_paths, partly_truncated, truncated_paths
from .weights import (
    also_untagged,
    inside_rules,
    nonlinear_weights,
    not_marked,
    unseen,
    unused,
    without_trace,
)


def diagnose(
    step: GroupedStep,
    relations: Sequence[HiddenParamOpRelation],
    carried: Sequence[HiddenParamOpRelation],
    jacobian: Jacobian,
) -> Iterator[Diagnostic]:
    """Yield the diagnostics of a model that concern a rule, in a fixed order.

    A full-Jacobian rule follows every path, or refuses the model. A rule without traces leaves out
    every path from earlier steps.

    Parameters
    ----------
    step, relations, carried
        The step, the relations that can learn online in it, and those that learn by the rule.
    jacobian
        The learning rule's treatment of products; see `TraceMethod`.
    """
    yield from unused(step)
    if jacobian in FOLLOWS_ALL:
        return
    if jacobian == "none":
        yield from without_trace(step, relations, carried, (), is_past=False)
        return
    into_groups = [
        diagnostic
        for group, walks in zip(step.groups, step.walks, strict=True)
        for diagnostic in truncated_paths(step, group, walks)
    ]
    yield from into_groups
    for group in step.groups:
        yield from nonlinear_paths(step, group)
    yield from nonlinear_weights(step, carried)
    named = {path for d in into_groups if d.level == "warning" for path in d.paths}
    yield from without_trace(step, relations, carried, named)
    yield from inside_rules(step)
    yield from step.traced.unmarked
    yield from not_marked(step)
    yield from partly_truncated(step, carried)
    yield from also_untagged(step, carried)
    yield from unseen(step, carried)
    yield from untraced_states(step, step.graph.opaque)


def publish(diagnostics: Iterable[Diagnostic], strict: bool) -> None:
    """Warn of diagnostics that cost accuracy, or raise an error if ``strict``."""
    costly = [diagnostic for diagnostic in diagnostics if diagnostic.level == "warning"]
    if strict and costly:
        listed = "".join(f"\n- {diagnostic}" for diagnostic in costly)
        raise CompilationError(f"Traces cannot carry parts of the gradient:{listed}")
    for diagnostic in costly:
        warnings.warn(str(diagnostic), ApproximationWarning, stacklevel=3)


def untraced_states(step: GroupedStep, ends: frozenset[Var]) -> Iterator[Diagnostic]:
    """Yield the other States that carry a gradient from step to step.

    The variables in ``ends`` are the outputs of the operations at which traces end.
    """
    gradients, new = step.graph.gradients, {var: state.name for state, var in step.new_states}
    starts = [state.in_var for state, _ in step.new_states]
    starts += [operation.y_var for operation in step.operations]
    carriers = gradients.descendants_over_time(starts)
    outputs = gradients.ancestors(step.traced.output_atoms, ends)
    for leaf in step.traced.leaves:
        if leaf.kind != "other" or not is_var(leaf.out_var) or leaf.out_var not in carriers:
            continue
        directly = gradients.descendants([leaf.in_var], ends)
        reached = [name for var, name in new.items() if var in directly]
        what = f"State '{leaf.name}' carries values that depend on weights from step to step, and"
        if reached or leaf.in_var in outputs:
            yield Diagnostic(
                "warning",
                "untraced-state",
                f"{what} reaches {quoted(reached) or 'the output of `update`'}. It depends on "
                "hidden states by coupled units only, so it has no trace. Write it through "
                "`jax.lax.stop_gradient` to exclude it, or use `RTRL`.",
                (leaf.name, *reached),
            )
        elif not gradients.descendants([leaf.in_var]).isdisjoint(new):
            yield Diagnostic(
                "info",
                "truncated",
                f"{what} reaches hidden states through ETP operations. Their weights learn online; "
                "the rule truncates the path through them.",
                (leaf.name,),
            )


def lost_gradients(
    program: Program,
    loss: Atom,
    moving: Collection[Var],
    carried: Sequence[tuple[Var, Atom, bool]],
) -> Iterator[Diagnostic]:
    """Yield the States that a step fills with values of the model, and whose loss reads them.

    No trace follows such a value, so its gradient is the one of a constant.

    Parameters
    ----------
    program, loss
        A step that is differentiated alone, and its loss.
    moving
        Its inputs with a derivative.
    carried
        Old and new values of States, and whether the model has the State.
    """

    def behind(atom: Atom) -> set[Var]:
        return program.depends_on([atom], frozenset(), CONSTANT, carries_derivative)

    read = behind(loss)
    for old, new, is_of_model in carried:
        if is_of_model or old not in read or not is_var(new) or behind(new).isdisjoint(moving):
            continue
        readers = (program.equations[index] for index, _ in program.readers.get(old, ()))
        lines = (source_line(e) for e in readers if not read.isdisjoint(e.outvars))
        yield Diagnostic(
            "warning",
            "untraced-state",
            f"A State of shape {old.aval.shape} that `step_fn` writes carries values that depend "
            "on weights to the loss of a later step, where they are constants. Compute the loss in "
            "a `window`, with `RTRL`, or write the State through `jax.lax.stop_gradient`; a "
            "`brainstate.HiddenState` that `update` writes has a trace.",
            (),
            next(lines, ""),  # the loss may be the State itself
        )
