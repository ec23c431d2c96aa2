"""Updates: functions of the gradient of a step, or of a block of steps.

An update is a function of a `StepResult` that writes parameters, and other States. It comes from
the user's ``update_fn``, from a gradient transformation, or from an object with its own States; all
other code treats them alike. Wrappers determine whether it runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
from brainstate.nn import Module

from .._brainstate import held
from .._errors import OptionError, ShapeError, in_words
from .._from_function import gradients_by_path
from .._graph import Traces
from .._typing import PyTree, path_name
from .base import BaseLearner
from .nonfinite import Skip, any_not_finite, first_not_finite
from .optimizer import is_transformation
from .options import Options
from .pure_step import run_if
from .traces import EligibilityTraces
from .user_step import first_written, intercepting, traced_values, update_parameters


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Result of a step, or of a block of steps.

    Attributes
    ----------
    gradients
        In the structure for the user.
    losses
        Loss of the step, or of every step of the block.
    aux
        Auxiliary results of ``step_fn``.
    weights
        Weight of the step, or of every step of the block, in the mask; ``None``: there is none.
    is_computed
        Whether the gradients are computed, so that an update can read them several times.
    """

    gradients: PyTree
    losses: jax.Array
    aux: PyTree
    weights: jax.Array | None
    is_computed: bool = False

    @property
    def counts(self) -> jax.Array | None:
        """Whether a weight of the mask is not 0; ``None``: there is no mask."""
        return None if self.weights is None else jnp.any(self.weights != 0)

    @property
    def mean_loss(self) -> jax.Array:
        """The loss that has these gradients."""
        if self.weights is None:
            return jnp.mean(self.losses)
        weights = self.weights.astype(self.losses.dtype)
        total = jnp.sum(weights)
        return jnp.sum(weights * self.losses) / jnp.where(total == 0, 1, total)


Verdict: TypeAlias = jax.Array | Skip | None
"""Index of the first parameter with a non-finite gradient (``'raise'``), or a `Skip`."""

Update: TypeAlias = Callable[[StepResult], Verdict]
"""Updates the parameters, and returns what a check has found."""


def update_of(learner: BaseLearner, options: Options) -> Update:
    """Return the update of a call."""
    if options.update_fn is not None:
        update = by_function(options.update_fn, options.has_aux)
    elif is_transformation(options.optimizer):
        update = by_transformation(learner, options.optimizer)
    else:
        update = by_object(learner, options.optimizer)
    guard: Callable[[BaseLearner, Update], Update] = GUARDS[options.nonfinite]
    return guard(learner, update)


def by_function(update_fn: Callable[..., PyTree], has_aux: bool) -> Update:
    """Return the update by the user's function."""

    def update(found: StepResult) -> None:
        update_parameters(update_fn, found.gradients, *((found.aux,) if has_aux else ()))

    return update


FEW = 10_000
"""Maximum number of scalars of a gradient that are recomputed instead of branching."""


def by_transformation(learner: BaseLearner, optimizer: Any) -> Update:
    """Return the update by an ``optax.GradientTransformation``, whose state the learner stores."""
    state, model = learner.held_optimizer.transformed, learner.module
    takes_loss = _takes_more(optimizer.update)

    def update(found: StepResult) -> None:
        now = learner.parameters_for_optimizer()
        gradients = _downhill(_computed_once(found).gradients, now)
        more = {"value": found.mean_loss} if takes_loss else {}
        with in_words(lambda: "`optimizer.update` fails for the gradients"):
            changes, state.value = optimizer.update(gradients, state.value, now, **more)
        if (wanted := jax.tree.structure(now)) != (given := jax.tree.structure(changes)):
            raise ShapeError(
                f"`optimizer.update` returns updates of structure {given}; the parameters have "
                f"structure {wanted}. Return one update for each parameter, in the same structure."
            )
        new = jax.tree.map(lambda old, change: (old + change).astype(old.dtype), now, changes)
        states = learner.param_states
        for path, value in gradients_by_path(model, new).items():
            states[path].value = value

    return update


def _computed_once(found: StepResult) -> StepResult:
    """Return a result with gradients that a CPU computes once, not for each moment of an optimizer.

    XLA fuses the contraction of traces into every reader of a gradient, also through an
    `optimization_barrier`, but not through a branch. It does not know that the condition holds for
    all losses. An unmasked stream with Adam takes 0.8 of the time: recurrent ALIF neurons, 256
    units, 16 samples, two cores. For a few numbers, the branch takes longer.
    """
    if found.is_computed or sum(x.size for x in jax.tree.leaves(found.gradients)) < FEW:
        return found

    def once(gradients: PyTree) -> PyTree:
        always = ~jnp.any(jnp.isnan(found.losses) & jnp.isfinite(found.losses))
        zeros = jax.tree.map(jnp.zeros_like, gradients)
        return jax.lax.cond(always, lambda: gradients, lambda: zeros)

    same = jax.lax.platform_dependent(found.gradients, cpu=once, default=lambda same: same)
    return dataclasses.replace(found, gradients=same, is_computed=True)


def by_object(learner: BaseLearner, optimizer: Any) -> Update:
    """Return the update by an object with a method ``update(gradients)``."""
    model = learner.module

    def update(found: StepResult) -> None:
        gradients = _downhill(found.gradients, learner.parameters_for_optimizer())
        with in_words(lambda: _failure(optimizer)):
            optimizer.update(gradients_by_path(model, gradients))

    return update


def _failure(optimizer: Any) -> str:
    result = "`optimizer.update` fails for the gradients"
    if hasattr(optimizer, "gradient_transformation"):  # `optax.MultiSteps`
        result += ", which `optimizer.gradient_transformation()` accepts: pass this instead"
    return result


def _takes_more(function: Callable[..., Any]) -> bool:
    """Test whether a transformation accepts additional keyword arguments, such as the loss."""
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _downhill(gradients: PyTree, parameters: PyTree) -> PyTree:
    """Return gradients in the containers of their parameters, which optimizers subtract.

    JAX's derivative with respect to a complex number is the conjugate of the direction of ascent.
    """
    leaves = [
        leaf.conj() if jnp.iscomplexobj(leaf) else leaf for leaf in jax.tree.leaves(gradients)
    ]
    return jax.tree.unflatten(jax.tree.structure(parameters), leaves)


def _ignoring(learner: BaseLearner, update: Update) -> Update:
    """Return an update that is omitted for masked steps."""
    model = learner.module

    def counted(found: StepResult) -> None:
        if found.counts is None:
            update(found)
        else:
            _update_if(found.counts, model, update, found)

    return counted


def _raising(learner: BaseLearner, update: Update) -> Update:
    update = _ignoring(learner, update)

    def judged(found: StepResult) -> jax.Array:
        gradients = gradients_by_path(learner.module, found.gradients)
        first = first_not_finite(found.losses, gradients)  # before `update_fn` writes to the dict
        update(found)
        return first if found.counts is None else jnp.where(found.counts, first, -1)

    return judged


def _skipping(learner: BaseLearner, update: Update) -> Update:
    skipped, model = learner.held_optimizer.skipped, learner.module

    def guarded(found: StepResult) -> Skip:
        is_bad, runs = any_not_finite(found.losses, found.gradients), jnp.ones((), bool)
        if found.counts is not None:
            is_bad, runs = is_bad & found.counts, found.counts
        _update_if(runs & ~is_bad, model, update, found)
        skipped.value = skipped.value + is_bad
        return Skip(is_bad, None if found.weights is None else jnp.any(found.weights == 0))

    return guarded


GUARDS: dict[str, Callable[[BaseLearner, Update], Update]] = {
    "ignore": _ignoring,
    "raise": _raising,
    "skip": _skipping,
}


def _update_if(flag: jax.Array, model: Module, update: Update, found: StepResult) -> None:
    """Run an update if a flag is true."""
    values = found.gradients, found.losses, found.aux

    def run(_: None, values: tuple[PyTree, jax.Array, PyTree]) -> None:
        update(StepResult(*values, found.weights, is_computed=True))

    run_if(flag, model, run, None, values)


def run_update(learner: BaseLearner, update: Update, found: StepResult, traces: Traces) -> Verdict:
    """Run an update, and return its verdict.

    Parameters
    ----------
    learner
        The learner of the learner.
    update, found
        The update, and its argument.
    traces
        Traces after the step, which the update can read.

    Raises
    ------
    OptionError
        If it runs a step, or writes hidden states or traces.
    """
    left = traced_values(learner)
    with intercepting(learner, _refuse_step), _showing(learner, traces):
        verdict = update(found)
    path = first_written(left, traced_values(learner))
    if path is not None:
        raise _refusal(f"writes the hidden State '{path_name(path)}'")
    return verdict


@contextlib.contextmanager
def _showing(learner: BaseLearner, traces: Traces) -> Iterator[None]:
    """Replace the learner's traces by the traces after the step, read-only."""
    own = learner.traces
    learner.traces = shown = EligibilityTraces(traces)
    shown.carried.zeros = own.carried.zeros
    try:
        yield
    finally:
        learner.traces = own
    leaves, now = jax.tree.leaves(traces), jax.tree.leaves(held(shown.carried))
    is_kept = len(leaves) == len(now) and all(a is b for a, b in zip(leaves, now, strict=True))
    if not is_kept:
        raise _refusal("writes the traces")


def _refuse_step(*arguments: PyTree) -> NoReturn:
    raise _refusal("calls the learner, which runs a step")


def _refusal(what: str) -> OptionError:
    return OptionError(
        f"`update_fn` {what}. It may change parameters and its own States; hidden states and "
        "traces keep their values from after the step. Change hidden states in `update` of the "
        "model; to start a new sequence, use `reset`."
    )
