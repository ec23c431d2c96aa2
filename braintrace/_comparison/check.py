"""Gradient check: an online gradient compared with backpropagation through time, on your data."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import numpy as np
import saiunit

from .._algorithms import ETraceAlgorithm
from .._errors import OptionError
from .._rules import Rule
from .._tables import Table, as_html, as_text
from .._typing import Path, path_name
from .bptt import bptt_of
from .run import RuleRun
from .workload import Workload, checked_sequences, restored

_HEADS = ("parameter", "relative deviation", "cosine", "norm", "norm by BPTT")


@dataclasses.dataclass(frozen=True)
class GradientRow:
    """Comparison for one parameter.

    Attributes
    ----------
    parameter
        Printed path.
    deviation
        Norm of the difference of the two gradients, relative to the norm by BPTT.
    cosine
        Cosine of the angle between them; 1 is the same direction.
    norm, bptt_norm
        Norms of the online gradient and of the gradient by BPTT.
    """

    parameter: str
    deviation: float
    cosine: float
    norm: float
    bptt_norm: float


@dataclasses.dataclass(frozen=True)
class GradientCheck:
    """Result of `gradient_check`: one row per parameter, and the last row for all parameters.

    ``print`` shows a table.

    Attributes
    ----------
    algorithm, steps
        The algorithm, and the number of steps.
    rows
        One per parameter, and ``'all parameters'``.
    """

    algorithm: str
    steps: int
    rows: tuple[GradientRow, ...]

    def __str__(self) -> str:
        return as_text([self._table()])

    def to_dict(self) -> dict[str, Any]:
        """Return the result as dicts, lists, strings and numbers, ready for JSON."""
        return {**dataclasses.asdict(self), "rows": [dataclasses.asdict(r) for r in self.rows]}

    def _repr_html_(self) -> str:
        return as_html([self._table()])

    def _table(self) -> Table:
        title = f"{self.algorithm} against backpropagation through time over {self.steps} steps"
        return Table(title, _HEADS, self._cells(), numbers=range(1, len(_HEADS)))

    def _cells(self) -> list[list[str]]:
        return [
            [
                row.parameter,
                f"{row.deviation:.2e}",
                f"{row.cosine:.6f}",
                f"{row.norm:.3e}",
                f"{row.bptt_norm:.3e}",
            ]
            for row in self.rows
        ]


def gradient_check(
    model: brainstate.nn.Module,
    algorithm: str | type[ETraceAlgorithm] | Rule,
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

    Returns
    -------
    GradientCheck
        A printable table.

    Raises
    ------
    ShapeError
        For sequences that are empty or differ in length.
    OptionError
        If the gradients by backpropagation are all zero.
    CompilationError, DtypeError
        See `compile_etrace_graph`.

    Examples
    --------
    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> class Leaky(brainstate.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = brainstate.ParamState(jnp.ones((2, 3)))
    ...
    ...     def init_state(self, batch_size=1):
    ...         self.h = brainstate.HiddenState(jnp.zeros((batch_size, 3)))
    ...
    ...     def update(self, x):
    ...         self.h.value = 0.5 * self.h.value + braintrace.matmul(x, self.w.value)
    ...         return self.h.value
    >>> xs, ys = jnp.ones((4, 1, 2)), jnp.zeros((4, 1, 3))
    >>> squared = lambda output, y: ((output - y) ** 2).mean()
    >>> check = braintrace.gradient_check(Leaky(), "d_rtrl", xs, ys, squared, batch_size=1)
    >>> check.rows[0].parameter, check.rows[0].deviation < 1e-6
    ('w', True)
    """
    (xs, ys), steps = checked_sequences("gradient_check", model, {"xs": xs, "ys": ys})
    inputs = xs if isinstance(xs, tuple) else (xs,)
    work = Workload(
        model=model,
        step_fn=lambda run, step: loss(run(*step[0]), step[1]),
        xs=(inputs, ys),
        mask=None,
        arguments=jax.tree.map(lambda leaf: leaf[0], inputs),
        batch_size=options.pop("batch_size", None),
        vmap=options.pop("vmap", False),
    )
    with restored([*model.states().values(), brainstate.random.DEFAULT]) as rewind:
        run = RuleRun(work, algorithm, options)
        bptt = bptt_of(work)
        rewind()
        _, exact = bptt.program(steps)
        with restored(bptt.outside):
            online = run(bptt.start)
        return compared(type(run.learner.algorithm).__name__, steps, online, exact())


def compared(
    algorithm: str, steps: int, online: dict[Path, Any], exact: dict[Path, Any]
) -> GradientCheck:
    """Compare two gradients by path.

    Raises
    ------
    OptionError
        If the exact gradient is zero.
    """
    vectors = {path: (_flat(online[path]), _flat(exact[path])) for path in exact}
    together = tuple(np.concatenate(both) for both in zip(*vectors.values(), strict=True))
    if not np.any(together[1]):
        raise OptionError(
            f"The gradients by backpropagation over {steps} steps are all zero, so there is "
            "nothing to compare. Check that the loss depends on the output, and that neurons "
            "spike; or use a longer sequence."
        )
    rows = [_row(path_name(path), *both) for path, both in vectors.items()]
    return GradientCheck(algorithm, steps, (*rows, _row("all parameters", *together)))


def _flat(gradient: Any) -> np.ndarray:
    """Return all numbers of a gradient in double precision; complex numbers are two."""
    leaves = jax.tree.leaves(gradient, is_leaf=lambda leaf: isinstance(leaf, saiunit.Quantity))
    arrays = [np.ravel(saiunit.get_mantissa(leaf)) for leaf in leaves]
    parts = [p for a in arrays for p in ((a.real, a.imag) if np.iscomplexobj(a) else (a,))]
    return np.concatenate(parts).astype(np.float64)


def _row(name: str, online: np.ndarray, exact: np.ndarray) -> GradientRow:
    """Compare in double precision; a zero gradient has no direction and no scale."""
    norm, bptt_norm = float(np.linalg.norm(online)), float(np.linalg.norm(exact))
    difference = float(np.linalg.norm(online - exact))
    agree = 0.0 if difference == 0 else math.inf
    return GradientRow(
        parameter=name,
        deviation=difference / bptt_norm if bptt_norm else agree,
        cosine=float(online @ exact) / (norm * bptt_norm) if norm and bptt_norm else math.nan,
        norm=norm,
        bptt_norm=bptt_norm,
    )
