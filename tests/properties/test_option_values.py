"""Any value that the description of an option rejects raises, and leaves the learner as it was.

A description is the end of the error for an object: "expected a positive integer or None".
"""

import re
import types
import warnings

import attacked_calls
import bad_values
import brainstate
import hypothesis.strategies as st
import jax
import matplotlib
import numpy as np
import pytest
from assertions import assert_same_bits
from drawn import by_day_and_night, drawn
from drivers import snapshot
from wrong_calls import Frame

import braintrace

matplotlib.use("agg")


def is_integer(value, low, high=2**63 - 1):
    return isinstance(value, (int, np.integer)) and value is not True and low <= value <= high


def is_float(value, is_inside):
    return isinstance(value, (float, np.floating)) and is_inside(value)


def is_number(value, is_inside):
    """Test for a number of any type, and for arrays."""
    if isinstance(value, (jax.Array, np.ndarray)):
        return True
    try:
        return is_inside(float(value))
    except Exception:
        return False


def is_size(value, *lengths):
    """Test for a positive integer, or a tuple or list of them."""
    if isinstance(value, (tuple, list)):
        return (not lengths or len(value) in lengths) and all(is_integer(n, 1) for n in value)
    return is_integer(value, 1)


def is_no_array(value):
    """Test for what no reader takes for an array of numbers."""
    if isinstance(value, jax.core.Tracer):
        return True
    if isinstance(value, jax.Array):
        return value.is_deleted()
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "OSUMV" or isinstance(value, np.ma.MaskedArray)
    kinds = (str, dict, set, brainstate.State, types.FunctionType, Frame)
    return isinstance(value, kinds)


MEANT = {
    "True or False": lambda v: isinstance(v, (bool, np.bool_)),
    "a string": lambda v: isinstance(v, str),
    "a function": lambda v: v is None or callable(v),  # None: the default of some
    "a function, or the name of one in `brainstate.nn`": (
        lambda v: callable(v) or (isinstance(v, str) and hasattr(brainstate.nn, v))
    ),
    "a dict of parameters of the model, some of `model.states(ParamState)`": (
        lambda v: v is None or isinstance(v, dict)  # None: the default
    ),
    "a class of States": lambda v: isinstance(v, type),
    **dict.fromkeys(
        ["an array of numbers", "a number, an array or a quantity"], lambda v: not is_no_array(v)
    ),
    "a number, an array or a function of the shape": lambda v: callable(v) or not is_no_array(v),
    "a positive integer": lambda v: is_integer(v, 1),
    "a positive integer or a tuple of them": is_size,
    "a positive integer or a tuple of one": lambda v: is_size(v, 1),
    "an integer of at least 0": lambda v: is_integer(v, 0),
    "an integer from 0 to 2**32 - 1": lambda v: is_integer(v, 0, 2**32 - 1),
    "an integer from 1 to 1000": lambda v: is_integer(v, 1, 1000),
    "a float in [0, 1)": lambda v: is_float(v, lambda v: 0 <= v < 1),
    "a number from 0 to 1": lambda v: is_number(v, lambda v: 0 <= v <= 1),
    "a positive number": lambda v: is_number(v, lambda v: v > 0),
    "a number of at least 0": lambda v: is_number(v, lambda v: v >= 0),
    "a decay (a float in [0, 1)) or a rank (an integer of at least 1)": (
        lambda v: is_float(v, lambda v: 0 <= v < 1) or is_integer(v, 1)
    ),
    "a floating-point dtype such as `jnp.bfloat16`": (
        lambda v: isinstance(v, (str, type, np.dtype)) and bool(re.search("float|half", str(v)))
    ),
}
"""What a reader takes from a description."""
WORDS = ["auto", "mean", "sum", "skip", "int32", "foo", "explicit", "soft", "relu", "yes"]
VALUES = st.one_of(
    st.integers(-3, 3),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=3) | st.sampled_from(WORDS),
    st.lists(st.integers(-1, 4) | st.floats(0, 1), max_size=3).map(tuple),
    st.sampled_from([*bad_values.VALUES]).map(lambda name: bad_values.VALUES[name]()),
)


def is_meant(description, value):
    """Tell whether a reader of a description would give an option this value."""
    for end, meant in ((" or None", None), (" or 'auto'", "auto")):
        if description.endswith(end):
            is_this = value is None if meant is None else isinstance(value, str) and value == meant
            return is_this or is_meant(description.removesuffix(end), value)
    if re.fullmatch(r"('[\w-]+'(, | or )?)+", description):
        return isinstance(value, str) and repr(value) in re.findall(r"'[^']*'", description)
    return MEANT[description](value)


def refusal(call, argument, value):
    """Return the error of a call with one argument replaced, or none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call(attacked_calls.bench(), **{argument: value})
        except braintrace.BraintraceError as error:
            return str(error)
    return ""


def described(call):
    """Yield the arguments of a call that have a description that `is_meant` can read."""
    for argument in call.names:
        message = refusal(call, argument, object())
        name = ALIASES.get(argument, argument)
        found = re.search(rf"`{name}` is a object; expected (.*?)\.( |$)", message)
        try:
            is_meant(found[1], object())
        except (KeyError, TypeError):  # other descriptions, and none
            continue
        yield argument, name, found[1]


ALIASES = {"sequence": "sequence 0", "target": "sequence 1"}
OTHERS = "expected a pytree|contains itself|cannot be hashed|`pre_val`"
"""Errors that come before an argument is known by its name."""
DAY = [
    *("matmul", "sparse_matmul", "einsum", "embedding", "conv", "element_wise"),
    *("three_factor_loss", "__call__", "a mapped call", "etrace_grad", "etrace_online", "predict"),
    *("reset_state", "compile", "plan", "compile_graph", "SnAp", "ES_D_RTRL", "UORO"),
    *("nn.surrogate.arctan", "nn.Linear", "nn.Embedding", "nn.LRUCell", "nn.Conv2d", "nn.LIF"),
    "nn.Expon",
]


@by_day_and_night(60, 300)
@pytest.mark.by_day(*(f"{name}-few" for name in DAY))
@pytest.mark.parametrize("name", attacked_calls.EVERY)
def test_a_value_that_a_description_rejects_raises_and_changes_nothing(name, examples):
    call, learner = attacked_calls.EVERY[name], attacked_calls.bench().learner
    options, before = [*described(call)], snapshot(learner)
    assert options or name not in DAY

    if not options:
        return

    @drawn(examples, st.sampled_from(options), VALUES)
    def check(option, value):
        argument, shown, description = option
        is_tree = argument in ALIASES and isinstance(value, dict)
        if is_tree or is_meant(description, value):
            return
        message = refusal(call, argument, value)
        is_named = f"`{shown}`" in message or re.search(OTHERS, message)
        assert is_named, (option, type(value), message)
        if isinstance(value, brainstate.State) and "array" in description:
            assert "Give its `.value`" in message
        assert name not in attacked_calls.OPERATIONS or f"`{name}`: " in message, message
        assert_same_bits(snapshot(learner), before)
