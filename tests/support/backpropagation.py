"""Backpropagation through time without the library, of a function or a brainstate module."""

import functools

import brainstate
import jax
import oracles


@oracles.compiled
def through_time(step, params, start, *sequences):
    """Gradient of the sum of losses of ``step(params, states, *now) -> (states, loss)``."""

    def total(params):
        def body(states, now):
            return step(params, states, *now)

        return jax.lax.scan(body, start, sequences)[1].sum()

    return jax.grad(total)(params)


def backpropagated(model, loss, *sequences, batch_size=None, reduction="sum", **options):
    """{path: gradient of the reduced losses} of a model whose states are initialised first.

    loss: ``(model, x, ...) -> scalar``, of one step.
    reduction: a method of the losses.
    options: of `brainstate.transform.grad`.
    """
    brainstate.nn.init_all_states(model, batch_size=batch_size)

    def total():
        losses = brainstate.transform.for_loop(functools.partial(loss, model), *sequences)
        return getattr(losses, reduction)()

    weights = model.states(brainstate.ParamState)
    gradient = brainstate.transform.grad(total, weights, check_states=False, **options)
    return brainstate.transform.jit(gradient)()


def of_squares(model, *sequences, **options):
    """The same for the sum of all squared outputs."""
    return backpropagated(
        model, lambda model, *now: (model(*now) ** 2).sum(), *sequences, **options
    )
