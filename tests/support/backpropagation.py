"""Backpropagation through time of a brainstate module, without the library."""

import functools

import brainstate


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
