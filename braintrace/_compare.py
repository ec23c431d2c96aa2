"""Comparison of learning rules with backpropagation through time, on a model and its data."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import saiunit
from jax.typing import ArrayLike

from ._checks import is_quantity
from ._errors import BraintraceError, MissingPackageError, OptionError, optional_import
from ._gradient_check import GradientCheck, GradientRow, Program, Result, Task, compared
from ._learner.chunks import default_budget
from ._learner.compile import algorithm_of, rule_and_options
from ._learner.learner import Learner
from ._rules import Rule
from ._tables import Table, in_bytes
from ._typing import Path, PyTree

RULES = ("d_rtrl", "es_d_rtrl", "immediate")
SMALL = 100
"""Maximum number of states per sample for which `RTRL` is compared by default."""


@dataclasses.dataclass(frozen=True)
class ComparedRule(Result):
    """One row of a comparison: a rule with a window.

    Attributes
    ----------
    rule, window
        Name of the rule, and the number of steps that are differentiated in full.
    gradient
        Its gradient compared with backpropagation through time, for every parameter; ``None`` for a
        refused rule.
    seconds
        Median time of a gradient of the sequence, divided by the number of steps.
    temp, traces
        Bytes of temporary memory of the compiled program, and of the traces.
    refused
        Reason why the rule was not run; ``None`` if it was run.
    cosine, deviation
        Cosine to the gradient by backpropagation through time, and norm of the difference relative
        to its norm, of all parameters together.
    """

    rule: str
    window: int | None = None
    gradient: GradientCheck | None = None
    seconds: float = math.nan
    temp: int = 0
    traces: int = 0
    refused: str | None = None
    cosine: float = math.nan
    deviation: float = math.nan

    def _parts(self) -> Iterator[Table | str]:
        yield _table("Gradient compared with backpropagation through time", [self])


@dataclasses.dataclass(frozen=True)
class RuleComparison(Result):
    """Result of `compare_rules`; ``print`` shows a table.

    Attributes
    ----------
    steps, length
        Number of compared steps, and of steps of the given sequence.
    memory_budget
        Limit in bytes for backpropagation and for each rule.
    bptt
        Backpropagation through time, without a learner.
    checkpointed
        The same with the memory of about ``sqrt(steps)`` steps, each of which runs twice.
    rows
        One row per rule and window, in the order of the call.
    """

    steps: int
    length: int
    memory_budget: int
    bptt: ComparedRule
    checkpointed: ComparedRule
    rows: tuple[ComparedRule, ...]

    def plot(self, ax: Any = None) -> Any:
        """Draw cosine over memory (temporary memory and traces) with Matplotlib; return the axes.

        Each rule is a line, and each of its windows is a point. ``ax=None`` makes new axes.
        """
        pyplot = optional_import("matplotlib.pyplot", "examples")
        if ax is None:
            _, ax = pyplot.subplots(layout="constrained")
        rows = [r for r in (self.bptt, self.checkpointed, *self.rows) if r.refused is None]
        for rule in dict.fromkeys(row.rule for row in rows):
            own = sorted(
                (r.temp + r.traces, r.cosine, str(r.window or "")) for r in rows if r.rule == rule
            )
            ax.plot([p[0] for p in own], [p[1] for p in own], marker="o", label=rule)
            for memory, cosine, window in own:
                ax.annotate(window, (memory, cosine), xytext=(4, 4), textcoords="offset points")
        ax.set(xlabel="temporary memory and traces in bytes", ylabel="cosine to BPTT", xscale="log")
        ax.legend()
        return ax

    def _parts(self) -> Iterator[Table | str]:
        title = f"Gradients over {self.steps:,} steps, compared with backpropagation through time"
        yield _table(title, [self.bptt, self.checkpointed, *self.rows])
        if self.steps < self.length:
            yield (
                f"The sequence of {self.length:,} steps is shortened to its first {self.steps:,}: "
                "backpropagation over more of them needs more than `memory_budget`, "
                f"{in_bytes(self.memory_budget)}."
            )
        own = {f"#{n}": r.gradient.rows for n, r in enumerate(self.rows, 2) if r.gradient}
        cells = [
            [rows[0].parameter, *map(_cosine_of_parameter, rows)]
            for rows in zip(*own.values(), strict=True)
        ]
        if cells:
            yield Table(
                "Cosine of each parameter", ["parameter", *own], cells[:-1], range(1, len(own) + 1)
            )
        for rule, reason in dict.fromkeys((r.rule, r.refused) for r in self.rows if r.refused):
            yield f"{rule} is refused: {reason}"


def _table(title: str, rows: Sequence[ComparedRule]) -> Table:
    heads = ["#", "rule", "window", "cosine", "deviation", "ms per step", "temporary", "traces"]
    return Table(title, heads, list(itertools.starmap(_cells, enumerate(rows))), range(3, 8))


def _lacks_gradient(row: GradientRow) -> bool:
    return row.norm == 0 < row.bptt_norm


def _cosine_of_parameter(row: GradientRow) -> str:
    if row.bptt_norm == 0:
        return "-"
    return "no gradient" if _lacks_gradient(row) else f"{row.cosine:.3f}"


def _cosine(row: ComparedRule) -> str:
    """Print the cosine of a rule, which is 1 only if every parameter has a gradient."""
    lacks = row.gradient is not None and any(map(_lacks_gradient, row.gradient.rows))
    printed = f"{row.cosine:.4f}"
    return "<1.0000" if lacks and printed == "1.0000" else printed


def _cells(number: int, row: ComparedRule) -> list[str]:
    start = [str(number), row.rule, str(row.window or "-")]
    if row.refused is not None:
        return [*start, "refused", "", "", "", ""]
    numbers = _cosine(row), f"{row.deviation:.1e}", f"{1e3 * row.seconds:.3g}"
    return [*start, *numbers, in_bytes(row.temp), in_bytes(row.traces)]


def compare_rules(
    model: brainstate.nn.Module,
    xs: Any,
    *,
    step_fn: Callable[..., Any] | None = None,
    rules: Sequence[Any] | None = None,
    windows: Sequence[int | None] | None = None,
    mask: ArrayLike | None = None,
    batch_size: int | None = None,
    vmap: bool = False,
    memory_budget: int | None = None,
    repeats: int = 5,
    progress: bool = True,
    **options: Any,
) -> RuleComparison:
    """Compare learning rules and windows with backpropagation through time, on your data.

    Each row is the gradient of one sequence by one rule and window: its direction and error, its
    time and its memory. Backpropagation through time (BPTT) is ``jax.grad`` through the model's own
    step. Every gradient starts from the same states and random keys. Only copies of the model run:
    the model, its learners and the keys of ``brainstate.random`` do not change.

    Parameters
    ----------
    model
        A brainstate module, as for `braintrace.compile`.
    xs
        Sequence: a pytree of arrays, time first, such as ``inputs`` or ``(inputs, targets)``.
    step_fn
        ``step_fn(model, x) -> scalar``, the loss of one step. ``model`` is the model or a learner,
        and ``step_fn`` calls it exactly once; ``x`` is the slice of ``xs`` at that step. The loss
        of a sequence is the mean over its steps. ``None``: the mean of the squares of ``model(x)``.
    rules
        Rules: names, classes or instances as for `braintrace.compile`, or pairs of a rule and its
        options, ``("ottt", {"decay": 0.9})``. ``None``: `D_RTRL`, `ES_D_RTRL` and `Immediate`, and
        `RTRL` for models of at most 100 states per sample.
    windows
        Numbers of steps, used with every rule; an entry ``None`` is the rule without a window.
        ``None``: no window, and windows of a sixteenth and of a quarter of the sequence.
    mask
        Weights ``(T,)`` of the steps' losses; see `Learner.etrace_grad`.
    batch_size, vmap
        See `braintrace.compile`.
    memory_budget
        Bytes of memory. The sequence is shortened until the temporary memory of BPTT fits, and a
        rule is refused if its traces and temporary memory do not fit. ``None``: a tenth of the
        device's memory, and at most 1 GiB.
    repeats
        Number of timed rounds, each of which runs all gradients in turn.
    progress
        Show a progress bar if tqdm is installed.
    **options
        Options of every rule, as for `braintrace.compile`: ``strict``, ``mark``, ``trace_dtype``.

    Raises
    ------
    OptionError
        If a rule is unknown or an option value is not accepted; if ``step_fn`` does not call the
        model exactly once or returns no scalar; if the gradient by BPTT is zero.
    ShapeError, DtypeError
        For sequences that are empty or differ in length.

    Examples
    --------
    A leaky network has recurrent weights, so `D_RTRL` needs a window. `RTRL` is exact:

    >>> import brainstate, braintrace, jax.numpy as jnp, numpy as np
    >>> brainstate.random.seed(0)
    >>> model = braintrace.nn.LeakyRNN(2, 8, alpha=0.1)
    >>> xs = jnp.asarray(np.random.default_rng(0).normal(size=(32, 4, 2)), jnp.float32)
    >>> table = braintrace.compare_rules(
    ...     model,
    ...     xs,
    ...     step_fn=lambda model, x: (model(x) ** 2).mean(),
    ...     rules=["d_rtrl", "rtrl"],
    ...     windows=[None, 16],
    ...     batch_size=4,
    ...     progress=False,
    ... )
    >>> [(row.rule, row.window) for row in table.rows]
    [('D_RTRL', None), ('D_RTRL', 16), ('RTRL', None), ('RTRL', 16)]
    >>> cosines = [round(row.cosine, 3) for row in table.rows]
    >>> cosines[0] < cosines[1] < cosines[2] == 1.0
    True
    """
    if "window" in options:
        raise OptionError("`compare_rules` has no `window`; pass a list of them as `windows`.")
    entries = _entries(model, RULES if rules is None else rules, options)
    own = {"batch_size": batch_size, "vmap": vmap}
    task = Task.of(model, step_fn or _mean_of_squares, xs, mask, own)
    length, budget = task.steps, memory_budget or default_budget()
    if windows is None:
        windows = [None, *sorted({length // 16, length // 4} - {0})]
    # An error about the model or its data is not a reason of one rule: it is raised here.
    task = task.with_reference({"mark": options["mark"]} if "mark" in options else {})
    if rules is None and task.states_of_sample <= SMALL:
        entries += _entries(model, ["rtrl"], options)
    with _bar(progress, 1 + len(entries) * len(windows) + repeats) as tick:
        program = task.exact()
        while program.temp > budget and task.steps > 1:  # the memory is about proportional
            steps = max(1, min(task.steps - 1, 9 * task.steps * budget // (10 * program.temp)))
            task = task.cut(steps)
            program = task.exact()
        exact = program.run()
        in_parts = _measured(task, "BPTT in checkpoints", task.exact(in_parts=True), exact)
        every = [(None, _measured(task, "BPTT", program, exact)), (None, in_parts)]
        known: dict[tuple[int, int | None], _Measured] = {}
        tick()
        for (number, entry), window in itertools.product(enumerate(entries), windows):
            # `RTRL` ignores windows, and a window cannot be longer than the sequence.
            used = entry.instance.window_of(window) if entry.instance else None
            used = min(used, task.steps) if isinstance(used, int) else None
            if (number, used) not in known:
                known[number, used] = _measure(task, entry, used, exact, budget)
            every.append((window, known[number, used]))
            tick()
        times: list[list[float]] = [[] for _ in every]
        for _ in range(repeats):
            for own_times, (_, measured) in zip(times, every, strict=True):
                begin = time.perf_counter()
                jax.block_until_ready(measured.run())
                own_times.append((time.perf_counter() - begin) / task.steps)
            tick()
    medians = [
        math.nan if measured.row.refused else statistics.median(own_times)
        for own_times, (_, measured) in zip(times, every, strict=True)
    ]
    bptt, checkpointed, *rows = (
        dataclasses.replace(measured.row, window=window, seconds=seconds)
        for seconds, (window, measured) in zip(medians, every, strict=True)
    )
    return RuleComparison(task.steps, length, budget, bptt, checkpointed, tuple(rows))


class _Measured(NamedTuple):
    row: ComparedRule
    run: Callable[[], PyTree] = lambda: None


def _measured(
    task: Task, name: str, program: Program, exact: Mapping[Path, PyTree], traces: int = 0
) -> _Measured:
    check = compared(name, task.steps, program.run(), exact)
    row = ComparedRule(
        name,
        gradient=check,
        temp=program.temp,
        traces=traces,
        cosine=check.rows[-1].cosine,
        deviation=check.rows[-1].deviation,
    )
    return _Measured(row, program.run)


def _measure(
    task: Task, entry: _Entry, window: int | None, exact: Mapping[Path, PyTree], budget: int
) -> _Measured:
    try:
        if entry.instance is None:
            raise OptionError(entry.refused)
        own = {} if window is None else {"window": window}
        learner = task.learner(type(entry.instance), {**entry.options, **own})
        size = traces = learner.report().carried_bytes or 0
        if traces <= budget:
            program = task.online(learner)
            size += program.temp
        if size > budget:
            raise OptionError(
                f"traces and temporary memory of {in_bytes(size)} are more than `memory_budget`, "
                f"{in_bytes(budget)}."
            )
        return _measured(task, entry.name, program, exact, traces)
    except BraintraceError as error:
        return _Measured(ComparedRule(entry.name, refused=str(error)))


class _Entry(NamedTuple):
    name: str
    options: Mapping[str, Any]
    instance: Learner | None = None
    refused: str | None = None  # why these options make no rule


def _entries(
    model: brainstate.nn.Module, rules: Sequence[Any], options: Mapping[str, Any]
) -> list[_Entry]:
    entries = []
    for index, rule in enumerate(rules):
        given, own = rule_and_options(rule)
        algorithm = algorithm_of(given, f"rules[{index}]")
        told = ", ".join(f"{name}={value!r}" for name, value in own.items())
        name = algorithm.__name__ + (f"({told})" if told else "")
        entry = _Entry(name, {**options, **own})
        try:
            made = algorithm(model, **entry.options)
            text = made.rule if isinstance(given, Rule) else name
            entry = entry._replace(name=text, instance=made)
        except TypeError as error:
            reason = f'{error}; give the options with the rule, ("{given}", {{"option": ...}}).'
            entry = entry._replace(refused=reason)
        entries.append(entry)
    return entries


def _mean_of_squares(model: Callable[..., PyTree], x: PyTree) -> PyTree:
    leaves = jax.tree.leaves(model(x), is_leaf=is_quantity)
    return sum(jnp.mean(jnp.abs(saiunit.get_mantissa(leaf)) ** 2) for leaf in leaves)


@contextlib.contextmanager
def _bar(is_shown: bool, total: int) -> Iterator[Callable[[], Any]]:
    with contextlib.ExitStack() as stack:
        tick: Callable[[], Any] = int
        if is_shown:
            with contextlib.suppress(MissingPackageError):
                tqdm = optional_import("tqdm.auto", "examples").tqdm
                bar = tqdm(total=total, unit="row", desc="compare_rules")
                tick = stack.enter_context(bar).update
        yield tick
