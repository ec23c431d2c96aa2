"""Argument checks of all layers, by the names of the arguments.

Most layers are brainstate's with other products, and have brainstate's constructors. An argument of
one name means the same in all layers, so one check serves all of them.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import brainstate
import jax
import numpy as np
import saiunit

from .._arguments import (
    BATCH_SIZE,
    BOOLEAN,
    CONTAINERS,
    FUNCTION,
    NOT_NEGATIVE,
    POSITIVE,
    Kind,
    check_option,
    check_tree,
    named,
    not_an_array,
    one_of,
    shown,
)
from .._brainstate import ConstructorSignature
from .._errors import BraintraceError, OptionError, ShapeError
from .._foreign import in_words
from .._jax import is_there

Layer = TypeVar("Layer", bound=type)


def _all_positive(value: Any) -> bool:
    return bool(isinstance(value, (tuple, list)) and value and all(map(POSITIVE.accepts, value)))


def _is_initializer(value: Any) -> bool:
    return callable(value) or isinstance(value, brainstate.State) or _is_number(value)


def _is_number(value: Any) -> bool:
    """Test whether a value supports arithmetic, also if its class is the user's."""
    unusable = (str, bytes, list, tuple, type, brainstate.State, np.ma.MaskedArray)
    is_of_others = isinstance(value, np.ndarray) and value.dtype.kind in "OSUMV"
    array = value.mantissa if isinstance(value, saiunit.Quantity) else value
    is_deleted = isinstance(array, jax.Array) and not is_there(array)
    is_usable = not (isinstance(value, unusable) or is_of_others or is_deleted)
    return is_usable and hasattr(type(value), "__mul__")


def _is_activation(value: Any) -> bool:
    return callable(getattr(brainstate.nn, value, None) if isinstance(value, str) else value)


SIZE = Kind(
    "a positive integer or a tuple of them", lambda v: POSITIVE.accepts(v) or _all_positive(v)
)
INITIALIZER = Kind("a number, an array or a function of the shape", _is_initializer)
NUMBER = Kind("a number, an array or a quantity", _is_number)
SIGNS = Kind("an array of signs", lambda v: _is_number(v) or isinstance(v, (list, tuple)))
ACTIVATION = Kind("a function, or the name of one in `brainstate.nn`", _is_activation)
KINDS: dict[str, Kind] = {
    **dict.fromkeys(("in_size", "kernel_size", "stride", "lhs_dilation", "rhs_dilation"), SIZE),
    **dict.fromkeys(("num_in", "num_out", "in_features", "out_features"), POSITIVE),
    **dict.fromkeys(("out_channels", "lora_rank", "groups", "num_embeddings"), POSITIVE),
    "embedding_size": SIZE,
    "padding_idx": NOT_NEGATIVE.or_else(None),
    "max_norm": NUMBER.or_else(None),
    "out_size": SIZE,
    "num_hidden": POSITIVE.or_else(None),
    **dict.fromkeys(
        ("w_init", "u_init", "feedback_init", "state_init", "kernel_init", "embedding_init"),
        INITIALIZER,
    ),
    "b_init": INITIALIZER.or_else(None),
    "lora_b_init": INITIALIZER.or_else(None),
    "w_mask": INITIALIZER.or_else(None),
    "w_sign": SIGNS.or_else(None),
    "synapse": FUNCTION,
    **dict.fromkeys(("R", "tau", "tau_a", "tau_rise", "tau_decay", "beta", "alpha", "E"), NUMBER),
    **dict.fromkeys(("V_th", "V_reset", "V_rest", "V_th_inf", "V_th_reset"), NUMBER),
    **dict.fromkeys(("A1", "A2", "R1", "R2", "a", "b", "k1", "k2"), NUMBER),
    **dict.fromkeys(("r_min", "r_max", "max_phase", "eps", "norm_type"), NUMBER),
    "activation": ACTIVATION,
    "spk_fun": FUNCTION,
    "spk_reset": one_of("soft", "hard"),
    **dict.fromkeys(
        ("reset_after", "include_self", "channel_first", "ws_gain", "adaptive", "freeze"), BOOLEAN
    ),
    "base_module": FUNCTION.or_else(None),
    "param_type": Kind("a class of States", lambda v: isinstance(v, type)),
    "batch_size": BATCH_SIZE,
    "name": Kind("a string or None", lambda v: v is None or isinstance(v, str)),
}
"""Accepted values of the arguments of constructors and of ``init_state``."""

ONE_AXIS = Kind(
    "a positive integer or a tuple of one",
    lambda v: POSITIVE.accepts(v) or (_all_positive(v) and len(v) == 1),
)
OTHER_NAMES = {
    "in_size": ("num_in",),
    "out_size": ("num_out",),
    "d_model": ("num_in", "num_out"),
    "d_hidden": ("num_hidden",),
}
"""Other names of a cell's sizes, with the arguments that they set."""


def kind_of(name: str) -> Kind | None:
    """Return the accepted values of an argument, by its name; ``None``: anything."""
    return INITIALIZER if name.endswith("_initializer") else KINDS.get(name)


def checked(layer: Layer) -> Layer:
    """Check a layer's arguments, and explain errors of brainstate and JAX.

    This is a class decorator: the constructor raises `OptionError`, a call raises `ShapeError`.
    """
    kinds = {"__init__": OptionError, "init_state": OptionError, "update": ShapeError}
    for name, kind in kinds.items():
        method = getattr(layer, name)
        if method is not getattr(brainstate.nn.Module, name):
            setattr(layer, name, _checked(method, kind))
    layer.__signature__ = ConstructorSignature()  # type: ignore[attr-defined]
    return layer


def _checked(method: Callable[..., Any], kind: type[BraintraceError]) -> Callable[..., Any]:
    signature = inspect.signature(method)
    name = method.__name__
    others = _other_names(signature) if name == "__init__" else ()

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        layer_name = f"`{type(self).__name__}`"
        if not options.keys().isdisjoint(others):
            first = list(signature.parameters)[1 : 1 + len(arguments)]
            options = _by_first_names(layer_name, others, first, options)
        try:
            bound = signature.bind(self, *arguments, **options).arguments
        except TypeError:  # Python says which argument is missing
            return method(self, *arguments, **options)
        bound_arguments = {key: value for key, value in bound.items() if key != "self"}
        for key, value in bound_arguments.items():
            if isinstance(value, CONTAINERS):
                check_tree(key, value, f"{layer_name}: ")
            if name == "update":
                _check_input(self, key, value, f"{layer_name}: ")
            elif (expected := kind_of(key)) is not None:
                check_option(key, value, expected, f"{layer_name}: ")
        with in_words(
            kind, lambda: f"{layer_name}: `{name}` fails for {_told(bound_arguments, self)}"
        ):
            return method(self, *arguments, **options)

    call.__signature__ = _with_keywords(signature, others)  # type: ignore[attr-defined]
    call.__doc__ = method.__doc__ or getattr(brainstate.nn.Module, name).__doc__
    return call


def _sizes(values: Any) -> list[int]:
    """Return the integers among arguments, most of which are sizes."""
    leaves = jax.tree.leaves(values, is_leaf=lambda v: not isinstance(v, (dict, tuple, list)))
    return [int(leaf) for leaf in leaves if POSITIVE.accepts(leaf)]


def _own_sizes(layer: Any) -> list[int]:
    """Return the numbers of inputs and outputs of a layer without states yet."""
    return _sizes([getattr(layer, name, None) for name in ("in_size", "out_size")])


def _other_names(signature: inspect.Signature) -> tuple[str, ...]:
    """Return the other names of sizes that a cell's constructor takes."""
    taken = signature.parameters
    sizes = ("in_size", "out_size") if "num_in" in taken else ()
    return (*sizes, "d_model", "d_hidden") if sizes and "num_hidden" in taken else sizes


def _by_first_names(
    layer_name: str, others: tuple[str, ...], first: list[str], options: dict[str, Any]
) -> dict[str, Any]:
    """Return keyword arguments with sizes under the constructor's own names.

    Raises
    ------
    OptionError
        If a size is passed twice, or does not have a single axis.
    """
    renamed = {name: value for name, value in options.items() if name not in others}
    by = dict.fromkeys([*first, *renamed])
    for other in others:
        if other not in options:
            continue
        check_option(other, options[other], ONE_AXIS, f"{layer_name}: ")
        (size,) = (options[other],) if POSITIVE.accepts(options[other]) else options[other]
        for name in OTHER_NAMES[other]:
            if name in by:
                raise OptionError(
                    f"{layer_name} got `{name}` by two names, as `{by[name] or name}` and as "
                    f"`{other}`: leave out one of the two."
                )
            by[name], renamed[name] = other, size
    return renamed


def _with_keywords(signature: inspect.Signature, names: tuple[str, ...]) -> inspect.Signature:
    """Return a signature with additional keywords."""
    kind = inspect.Parameter.KEYWORD_ONLY
    more = [inspect.Parameter(name, kind, default=None) for name in names]
    return signature.replace(parameters=[*signature.parameters.values(), *more])


def _check_input(layer: Any, name: str, value: Any, where: str) -> None:
    if value is None or isinstance(value, (str, brainstate.State)):
        raise not_an_array(name, value, where)
    features, shape = getattr(layer, "num_in", None), getattr(value, "shape", None)
    if features is not None and shape is not None and shape[-1:] != (features,):
        raise ShapeError(
            f"{where}expected `{name}` of shape (..., {features}), got {shown(value)}."
        )


def _told(call: dict[str, Any], layer: Any) -> str:
    """Print arguments, and the layer's own States."""
    hidden = (
        value for value in vars(layer).items() if isinstance(value[1], brainstate.HiddenState)
    )
    states = [f"State '{name}' = {shown(state.value)}" for name, state in hidden]
    return " and ".join([named(list(call), list(call.values())), *states])
