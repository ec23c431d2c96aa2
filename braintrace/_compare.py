"""Comparison of learning rules with backpropagation through time, on a model and its data."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from timeit import timeit
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit
from jax.typing import ArrayLike

from ._bptt import Program, Task
from ._checks import is_quantity, path_name
from ._errors import BraintraceError, MissingPackageError, OptionError, optional_import
from ._learner.chunks import DEFAULT_BUDGET
from ._learner.compile import algorithm_of, rule_and_options
from ._learner.learner import Learner
from ._rules.protocol import Rule
from ._tables import Printed, Table, in_bytes
from ._typing import Path, PyTree

RULES = ("d_rtrl", "es_d_rtrl", "immediate")
FORMATS = "", ".2e", ".6f", ".3e", ".3e"
HEADS = ["#", "rule", "window", "cosine", "deviation", "ms per step", "temporary", "traces"]
SMALL = 100
"""Maximum number of states per sample for which `RTRL` is compared by default."""


@dataclasses.dataclass(frozen=True)
class GradientRow:
    """Comparison for one parameter; see `GradientCheck`."""

    parameter: str
    deviation: float
    cosine: float
    norm: float
    bptt_norm: float


@dataclasses.dataclass(frozen=True)
class GradientCheck(Printed):
    """Result of `gradient_check`; ``print`` shows a table.

    Attributes
    ----------
    algorithm, steps
        The algorithm, and the number of steps.
    rows
        One per parameter, and the last one for ``'all parameters'``: ``parameter`` (its printed
        path), ``deviation`` (norm of the difference of the two gradients, relative to the norm by
        BPTT), ``cosine`` of the angle between them, and their norms ``norm`` and ``bptt_norm``.
    """

    algorithm: str
    steps: int
    rows: tuple[GradientRow, ...]

    def _parts(self) -> Iterator[Table | str]:
        title = f"{self.algorithm} against backpropagation through time over {self.steps} steps"
        heads = ["parameter", "relative deviation", "cosine", "norm", "norm by BPTT"]
        cells = [[*map(format, dataclasses.astuple(row), FORMATS)] for row in self.rows]
        yield Table(title, heads, cells, numbers=range(1, 5))


@dataclasses.dataclass(frozen=True)
class ComparedRule:
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


@dataclasses.dataclass(frozen=True)
class RuleComparison(Printed):
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
        rows = map(_cells, itertools.count(), [self.bptt, self.checkpointed, *self.rows])
        yield Table(title, HEADS, [*rows], range(3, 8))
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


def gradient_check(
    model: brainstate.nn.Module,
    algorithm: str | type[Learner] | Rule,
    xs: Any,
    ys: Any,
    loss: Callable[[Any, Any], Any],
    **options: Any,
) -> GradientCheck:
    """Compare the gradients of an algorithm with backpropagation through time.

    Both gradients are of the mean over time of ``loss(output, y)``, from the initial states of the
    model's ``init_state``. Backpropagation stores every step: choose a sequence that fits into
    memory and is longer than the time constants of the model. Over a single step, all algorithms
    agree. `compare_rules` compares several rules and windows, with their costs.

    Parameters
    ----------
    model
        Copies of it run: it does not change, nor do the keys of ``brainstate.random``.
    algorithm
        As for `braintrace.compile`.
    xs, ys
        Inputs of ``update`` and targets, time first; a tuple of inputs has one for each argument.
    loss
        ``(output, y) -> scalar`` of one step.
    **options
        Options of `braintrace.compile`: ``batch_size``, ``vmap`` and the options of the algorithm.

    Raises
    ------
    OptionError
        If the gradients by backpropagation are all zero.
    ShapeError, CompilationError, DtypeError
        For sequences of different lengths, and see `compile_etrace_graph`.

    Examples
    --------
    >>> import braintrace, jax.numpy as jnp
    >>> model = braintrace.nn.IndRNN(2, 3, activation="tanh")
    >>> xs, ys = jnp.ones((4, 1, 2)), jnp.zeros((4, 1, 3))
    >>> squared = lambda output, y: ((output - y) ** 2).mean()
    >>> check = braintrace.gradient_check(model, "d_rtrl", xs, ys, squared, batch_size=1)
    >>> check.rows[-1].parameter, check.rows[-1].deviation < 1e-6
    ('all parameters', True)
    """
    inputs = xs if isinstance(xs, tuple) else (xs,)

    def step_fn(run: Callable[..., PyTree], step: PyTree) -> PyTree:
        return loss(run(*step[0]), step[1])

    own = {name: options.pop(name) for name in ("batch_size", "vmap") if name in options}
    task = Task.of(model, step_fn, (inputs, ys), None, own)
    exact, learner = task.with_reference({}).exact(), task.learner(algorithm, options)
    found = task.online(learner).run()
    return compared(type(learner).__name__, task.steps, found, exact.run())


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
        rule is refused if its traces and temporary memory do not fit. ``None``: 1 GiB.
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
    length, budget = task.steps, memory_budget or DEFAULT_BUDGET
    if windows is None:
        windows = [None, *sorted({length // 16, length // 4} - {0})]
    # An error about the model or its data is not a reason of one rule: it is raised here.
    task = task.with_reference({"mark": options["mark"]} if "mark" in options else {})
    if rules is None and task.states_of_sample <= SMALL:
        entries += _entries(model, ["rtrl"], options)
    with _bar(progress, 1 + len(entries) * len(windows) + repeats) as bar:
        tick, program = getattr(bar, "update", lambda: None), task.exact()
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
        rounds = []
        for _ in range(repeats):
            rounds.append([_seconds(measured.run) / task.steps for _, measured in every])
            tick()
    bptt, checkpointed, *rows = (
        dataclasses.replace(measured.row, window=window, seconds=statistics.median(times))
        for times, (window, measured) in zip(zip(*rounds, strict=True), every, strict=True)
    )
    return RuleComparison(task.steps, length, budget, bptt, checkpointed, tuple(rows))


def _seconds(run: Callable[[], PyTree] | None) -> float:
    return math.nan if run is None else timeit(lambda: jax.block_until_ready(run()), number=1)


class _Measured(NamedTuple):
    row: ComparedRule
    run: Callable[[], PyTree] | None = None  # none of a refused rule


def _measured(
    task: Task, name: str, program: Program, exact: Mapping[Path, PyTree], traces: int = 0
) -> _Measured:
    check = compared(name, task.steps, program.run(), exact)
    last = check.rows[-1]
    costs: dict[str, Any] = {"temp": program.temp, "traces": traces}
    row = ComparedRule(name, None, check, cosine=last.cosine, deviation=last.deviation, **costs)
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
            name = made.rule if isinstance(given, Rule) else name
            entries.append(entry._replace(name=name, instance=made))
        except TypeError as error:
            reason = f'{error}; give the options with the rule, ("{given}", {{"option": ...}}).'
            entries.append(entry._replace(refused=reason))
    return entries


def _mean_of_squares(model: Callable[..., PyTree], x: PyTree) -> PyTree:
    leaves = jax.tree.leaves(model(x), is_leaf=is_quantity)
    return sum(jnp.mean(jnp.abs(saiunit.get_mantissa(leaf)) ** 2) for leaf in leaves)


def _bar(is_shown: bool, total: int) -> Any:
    """Return a progress bar if tqdm is installed, or a context without one."""
    with contextlib.suppress(MissingPackageError):
        if is_shown:
            tqdm = optional_import("tqdm.auto", "examples").tqdm
            return tqdm(total=total, unit="row", desc="compare_rules")
    return contextlib.nullcontext()


# --- numbers


def compared(
    rule: str, steps: int, online: Mapping[Path, PyTree], exact: Mapping[Path, PyTree]
) -> GradientCheck:
    vectors = {path_name(path): (_flat(online[path]), _flat(exact[path])) for path in exact}
    both = [np.concatenate(own) for own in zip(*vectors.values(), strict=True)]
    if not np.any(both[1]):
        raise OptionError(
            f"The gradients by backpropagation over {steps} steps are all zero, so there is "
            "nothing to compare. Check that the loss depends on the output, and that neurons "
            "spike; or use a longer sequence."
        )
    rows = [_row(name, *own) for name, own in [*vectors.items(), ("all parameters", both)]]
    return GradientCheck(rule, steps, tuple(rows))


def _flat(gradient: PyTree) -> np.ndarray:
    leaves = jax.tree.leaves(gradient, is_leaf=is_quantity)
    return np.concatenate([np.ravel(saiunit.get_mantissa(leaf)) for leaf in leaves]).astype(complex)


def _row(name: str, online: np.ndarray, exact: np.ndarray) -> GradientRow:
    norm, bptt_norm, difference = map(np.linalg.norm, (online, exact, online - exact))
    with np.errstate(divide="ignore", invalid="ignore"):  # a zero gradient has no direction
        cosine = np.vdot(online, exact).real / (norm * bptt_norm)
        deviation = difference / bptt_norm if difference else 0.0
    return GradientRow(name, *map(float, (deviation, cosine, norm, bptt_norm)))
