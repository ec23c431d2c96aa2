"""Updates: functions of the gradient of a step, or of a block of steps.

An update is a function of a `Found` that writes parameters, and other States. It comes from
the user's ``update_fn``, from a gradient transformation, or from an object with its own States; all
other code treats them alike. Wrappers determine whether it runs.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import brainstate
import jax
import jax.numpy as jnp

from .._arguments import shown
from .._errors import OptionError, ShapeError
from .._foreign import in_words
from .._function_model import gradients_by_path
from .._runtime import values_by_path
from .._typing import PyTree
from .finite import first_not_finite, is_not_finite, samples_with
from .optimizer import is_transformation
from .options import Options
from .parts import LearnerParts
from .step_function import update_parameters


@dataclasses.dataclass(frozen=True)
class Found:
    """Result of a step, or of a block of steps.

    Attributes
    ----------
    gradients
        In the structure for the user.
    losses
        Loss of the step, or of every step of the block.
    aux
        Auxiliary results of ``step_fn``.
    counts
        Whether a weight of the mask is not 0; ``None``: there is no mask.
    """

    gradients: PyTree
    losses: jax.Array
    aux: PyTree
    counts: jax.Array | None


Update: TypeAlias = Callable[[Found], jax.Array | None]
"""Returns the index of the first parameter with a non-finite gradient, if this is checked."""


def check_updates(options: Options) -> None:
    """Refuse options with no update, or with two.

    Raises
    ------
    OptionError
        If both ``update_fn`` and ``optimizer`` are given, or none.
    """
    if options.update_fn is None and options.optimizer is None:
        raise OptionError(
            "`update_fn` and `optimizer` are both None; expected one of them, which changes the "
            "parameters after a step."
        )
    if options.update_fn is not None and options.optimizer is not None:
        raise OptionError(
            f"Both `update_fn` and `optimizer` are given ({shown(options.optimizer)}); expected "
            "one of them. In an `update_fn`, call the optimizer there."
        )


def update_of(learner: LearnerParts, options: Options) -> Update:
    """Return the update of a call."""
    if options.update_fn is not None:
        update = by_function(options.update_fn, options.has_aux)
    elif is_transformation(options.optimizer):
        update = by_transformation(learner, options.optimizer)
    else:
        update = by_object(learner, options.optimizer)
    guard: Callable[[LearnerParts, Update], Update] = GUARDS[options.nonfinite]
    return guard(learner, update)


def by_function(update_fn: Callable[..., PyTree], has_aux: bool) -> Update:
    """Return the update by the user's function."""

    def update(found: Found) -> None:
        update_parameters(update_fn, found.gradients, *((found.aux,) if has_aux else ()))

    return update


FEW = 10_000
"""Numbers of a gradient that are computed again sooner than a branch is taken."""


def by_transformation(learner: LearnerParts, optimizer: Any) -> Update:
    """Return the update by an ``optax.GradientTransformation``, whose state the learner stores."""
    state, model = learner.held_optimizer.transformed, learner.algorithm.model
    takes_loss = _takes_more(optimizer.update)

    def update(found: Found) -> None:
        now = learner.parameters_for_optimizer()
        gradients = _computed_once(_downhill(found.gradients, now), found.losses)
        more = {"value": jnp.mean(found.losses)} if takes_loss else {}
        with in_words(OptionError, lambda: "`optimizer.update` fails for the gradients"):
            changes, state.value = optimizer.update(gradients, state.value, now, **more)
        if (wanted := jax.tree.structure(now)) != (given := jax.tree.structure(changes)):
            raise ShapeError(
                f"`optimizer.update` returns updates of structure {given}; the parameters have "
                f"structure {wanted}. Return one update for each parameter, in the same structure."
            )
        new = jax.tree.map(lambda old, change: (old + change).astype(old.dtype), now, changes)
        states = learner.algorithm.param_states
        for path, value in gradients_by_path(model, new).items():
            states[path].value = value

    return update


def _computed_once(gradients: PyTree, losses: jax.Array) -> PyTree:
    """Return gradients that a CPU computes once, and not again for each moment of an optimizer.

    XLA fuses the contraction of traces into every reader of a gradient, also through an
    `optimization_barrier`, but not through a branch. It does not know that the condition holds for
    all losses. An unmasked stream with Adam takes 0.8 of the time: recurrent ALIF neurons, 256
    units, 16 samples, two cores. For a few numbers, the branch takes longer.
    """
    if sum(leaf.size for leaf in jax.tree.leaves(gradients)) < FEW:
        return gradients

    def once(gradients: PyTree) -> PyTree:
        always = ~jnp.any(jnp.isnan(losses) & jnp.isfinite(losses))
        zeros = jax.tree.map(jnp.zeros_like, gradients)
        return jax.lax.cond(always, lambda: gradients, lambda: zeros)

    return jax.lax.platform_dependent(gradients, cpu=once, default=lambda same: same)


def by_object(learner: LearnerParts, optimizer: Any) -> Update:
    """Return the update by an object with a method ``update(gradients)``."""
    model = learner.algorithm.model

    def update(found: Found) -> None:
        gradients = _downhill(found.gradients, learner.parameters_for_optimizer())
        with in_words(OptionError, lambda: "`optimizer.update` fails for the gradients"):
            optimizer.update(gradients_by_path(model, gradients))

    return update


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


def where_counted(update: Update, otherwise: Callable[[], None] = lambda: None) -> Update:
    """Return an update that is omitted for masked steps, or replaced by ``otherwise``."""

    def counted(found: Found) -> None:
        if found.counts is None:
            update(found)
        else:
            _only_if(found.counts, lambda: update(found), otherwise)

    return counted


def _ignoring(learner: LearnerParts, update: Update) -> Update:
    return where_counted(update)


def _raising(learner: LearnerParts, update: Update) -> Update:
    update = where_counted(update)

    def judged(found: Found) -> jax.Array:
        verdict = _verdict(learner, found)  # before an `update_fn` writes to the dict
        update(found)
        return verdict

    return judged


def _skipping(learner: LearnerParts, update: Update) -> Update:
    skipped = learner.held_optimizer.skipped

    def guarded(found: Found) -> None:
        algorithm = learner.algorithm
        left = values_by_path(algorithm.short_term_states), algorithm.traces.carried.read()

        def leave_out() -> None:
            skipped.value = skipped.value + 1
            algorithm.reset_state(where=samples_with(algorithm, is_not_finite, *left))

        def start_anew() -> None:
            algorithm.reset_state(where=samples_with(algorithm, jnp.isnan, *left))

        counted, is_bad = where_counted(update, start_anew), _verdict(learner, found) >= 0
        brainstate.transform.cond(is_bad, leave_out, lambda: _nothing(counted(found)))

    return guarded


GUARDS: dict[str, Callable[[LearnerParts, Update], Update]] = {
    "ignore": _ignoring,
    "raise": _raising,
    "skip": _skipping,
}


def _verdict(learner: LearnerParts, found: Found) -> jax.Array:
    gradients = gradients_by_path(learner.algorithm.model, found.gradients)
    first = first_not_finite(found.losses, gradients)
    return first if found.counts is None else jnp.where(found.counts, first, -1)


def _only_if(flag: jax.Array, run: Callable[[], Any], otherwise: Callable[[], None]) -> None:
    brainstate.transform.cond(flag, lambda: _nothing(run()), otherwise)


def _nothing(_: Any) -> None:
    """Return None, whatever there is."""
