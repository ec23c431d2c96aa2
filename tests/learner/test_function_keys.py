"""A key that is found again without a new reading is the key of a new reading."""

import functools
import itertools
import types

import brainstate
import pytest

from braintrace._learner.calls.function_key import FunctionKeys, ignoring_writes


class Part:
    unit = 1.0

    def __init__(self):
        self.factor, self.child, self.layers, self.named = 1.0, None, [], {}

    def __call__(self, x):
        x = self.factor * self.unit * x
        for each in (*self.layers, *self.named.values()):
            x = each(x)
        return x if self.child is None else self.child(x)


class Other(Part):
    def __call__(self, x):
        return self.offset + self.factor * x


class Uncalled:
    pass


def scaled(x, *, scale=1.0):
    return scale * x


class Functions:
    """Functions that read one object, a variable and defaults, all of which may change."""

    def __init__(self):
        self.part, value = Part(), 1.0

        def function(x, low=0.0, *, high=1.0):
            return low + high * value * self.part(x)

        def bind(new):
            nonlocal value
            value = new

        part = self.part
        self.bind, self.function = bind, function
        self.partial = functools.partial(scaled, scale=1.0)
        self.all = (function, self.partial, part, part.__call__, lambda x: part(self.partial(x)))
        self.keys = [FunctionKeys() for _ in self.all]

    def written_while_traced(self, value):
        with ignoring_writes(self.all):
            self.part.factor = value


CHANGES = {
    "variable": lambda own, value: own.bind(value),
    "variable of another type": lambda own, value: own.bind(Part()),
    "default": lambda own, value: setattr(own.function, "__defaults__", (value,)),
    "named default": lambda own, value: own.function.__kwdefaults__.update(high=value),
    "named argument": lambda own, value: own.partial.keywords.update(scale=value),
    "attribute": lambda own, value: setattr(own.part, "factor", value),
    "missing attribute": lambda own, value: vars(own.part).pop("factor", None),
    "attribute instead of the class's": lambda own, value: setattr(own.part, "unit", value),
    "unread attribute": lambda own, value: setattr(own.part, "epoch", value),
    "attribute while traced": lambda own, value: own.written_while_traced(value),
    "State": lambda own, value: setattr(own.part, "factor", brainstate.State(value)),
    "part": lambda own, value: setattr(own.part, "child", Part()),
    "attribute of a part": lambda own, value: setattr(own.part.child, "factor", value),
    "layer": lambda own, value: own.part.layers.append(Part()),
    "many layers": lambda own, value: own.part.layers.extend([Part()] * 60),
    "attribute of a layer": lambda own, value: setattr(own.part.layers[-1], "factor", value),
    "class of a layer": lambda own, value: setattr(own.part.layers[-1], "__class__", Uncalled),
    "no layers": lambda own, value: own.part.layers.clear(),
    "named layer": lambda own, value: own.part.named.update(a=Part()),
    "class": lambda own, value: setattr(own.part, "__class__", Other),
    "every attribute": lambda own, value: setattr(own.part, "__dict__", {"factor": value}),
}


@pytest.mark.parametrize("length", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_a_key_that_is_found_again_is_that_of_a_new_reading(length):
    for names in itertools.product(CHANGES, repeat=length):
        own = Functions()
        for name, value in zip(("unread attribute", *names), (0.0, 2.0, 3.0, 2.0), strict=False):
            try:
                CHANGES[name](own, value)
            except (AttributeError, IndexError):
                continue  # the part is not there
            for function, keys in zip(own.all, own.keys, strict=True):
                assert keys(function) == FunctionKeys()(function), names
                assert keys(function) is keys(function), names


def test_a_function_that_is_made_anew_has_the_key_of_the_last():
    keys, part = FunctionKeys(), types.SimpleNamespace(factor=1.0)

    def made():
        return lambda x: part.factor * x

    first = keys(made())
    assert keys(made()) is first
    part.factor = 2.0
    assert keys(made()) != first
