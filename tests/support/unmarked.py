"""Models without an ETP operation in them: what a user has who has never heard of marks."""

import dataclasses

import brainstate

import braintrace


def without_marks(model):
    """The model itself, with every ETP operation of its step replaced by plain ones."""
    step = model.update

    def update(*arguments):
        every = [*model.states().values(), brainstate.random.DEFAULT]
        states = [state for state in every if not isinstance(state, brainstate.ParamState)]

        def pure(values, arguments):
            for state, value in zip(states, values, strict=True):
                state.value = value
            output = step(*arguments)
            return output, [state.value for state in states]

        output, after = braintrace.inline(pure)([state.value for state in states], arguments)
        for state, value in zip(states, after, strict=True):
            state.value = value
        return output

    model.update = update
    return model


def unmarked(entry):
    """An entry of the catalogue whose model has no marks."""
    return dataclasses.replace(
        entry, name=f"{entry.name}, unmarked", module=lambda: without_marks(entry.module())
    )
