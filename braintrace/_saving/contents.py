"""Description of a checkpoint: the properties that a learner must have to be restored."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import saiunit

from .._arguments import is_quantity
from .._errors import OptionError
from .._learner import Learner, LearnerState
from .._learner.state.learner_state import FORECASTS, places_of
from .._typing import path_name
from .units import unit_as_data, unit_of_data

OPTIMIZER = "optimizer/"
"""Prefix of the names of the optimizer's arrays."""

FORECASTS_OF_STATE = f"others/{path_name(FORECASTS)}/"
"""Prefix of the names of the arrays of forecasts."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One array of a checkpoint.

    Attributes
    ----------
    dtype, shape
        Type and shape of the array.
    unit
        Unit of the quantity whose mantissa it is.
    keys
        Kind of random keys, if the array contains their data.
    """

    dtype: str
    shape: tuple[int, ...]
    unit: saiunit.Unit | None = None
    keys: str | None = None

    def __str__(self) -> str:
        unit = "" if self.unit is None else f" in {self.unit}"
        keys = "" if self.keys is None else f", keys of '{self.keys}'"
        return f"an array of dtype {self.dtype} and shape {self.shape}{unit}{keys}"


@dataclasses.dataclass(frozen=True)
class Contents:
    """Properties of a learner that its checkpoint depends on.

    Attributes
    ----------
    options
        The learning rule, and all options that change its traces or its gradient, as text.
    entries
        Its arrays by name.
    has_optimizer
        Whether its optimizer has been initialised. An optimizer without arrays has no `entries`.
    """

    options: dict[str, str]
    entries: dict[str, Entry]
    has_optimizer: bool

    def as_data(self) -> dict[str, Any]:
        """Return the contents as plain data."""

        def of_entry(entry: Entry) -> dict[str, Any]:
            data: dict[str, Any] = {"dtype": entry.dtype, "shape": list(entry.shape)}
            if entry.unit is not None:
                data["unit"] = unit_as_data(entry.unit)
            return data if entry.keys is None else {**data, "keys": entry.keys}

        entries = {name: of_entry(entry) for name, entry in self.entries.items()}
        begun = self.has_optimizer or any(name.startswith(OPTIMIZER) for name in entries)
        return {"options": self.options, "entries": entries, "optimizer": begun}


def contents_of_data(data: Mapping[str, Any]) -> Contents:
    """Return the contents that plain data describe."""

    def entry(data: Mapping[str, Any]) -> Entry:
        unit = unit_of_data(data["unit"]) if "unit" in data else None
        return Entry(data["dtype"], tuple(data["shape"]), unit, data.get("keys"))

    entries = {name: entry(own) for name, own in data["entries"].items()}
    # Older files contain the `vjp_method`. It is ignored: the window is an option of each call,
    # and the entries determine the traces.
    options = {name: word for name, word in data["options"].items() if name != "vjp_method"}
    return Contents(options, entries, data["optimizer"])


def has_forecasts(saved: Contents) -> bool:
    """Test whether a checkpoint contains forecasts that may wait for a label."""
    return any(name.startswith(FORECASTS_OF_STATE) for name in saved.entries)


def check_arrays(saved: Contents, arrays: Mapping[str, Any]) -> None:
    """Raise a `ValueError` if arrays differ from the description in their checkpoint."""
    for name, entry in saved.entries.items():
        if name not in arrays:
            raise ValueError(f"there is no array '{name}'")
        found = Entry(str(arrays[name].dtype), tuple(arrays[name].shape))
        if found != dataclasses.replace(entry, unit=None, keys=None):
            raise ValueError(f"'{name}' is {found}; expected {entry}")


def contents_of(learner: Learner, leaves: Mapping[str, Any]) -> Contents:
    """Return the contents of a learner, given the leaves of its state by name."""
    algorithm = learner.algorithm
    options, flat = {"rule": algorithm.rule}, algorithm.graph.flat_state
    if flat is not None:
        options["order of states"] = ", ".join(flat.names)
    kinds = _kinds_of_keys(learner)
    entries = {name: _entry(leaf, kinds.get(name)) for name, leaf in leaves.items()}
    return Contents(options, entries, bool(learner.held_optimizer.states))


def leaves_by_name(state: LearnerState) -> dict[str, Any]:
    """Return the leaves of the state of a learner by name; a quantity is one leaf.

    Raises
    ------
    OptionError
        If two leaves have the same name.
    """
    found = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_quantity)
    named = [(_name(keys), leaf) for keys, leaf in found]
    leaves = dict(named)
    if len(leaves) < len(named):
        names = [name for name, _ in named]
        twice = next(name for name in names if names.count(name) > 1)
        raise OptionError(
            f"Two arrays of this learner have the same name '{twice}'. Give their attributes or "
            "keys different names."
        )
    return leaves


def array_of(leaf: Any) -> Any:
    """Return a leaf as an array of JAX or NumPy in native byte order, without its unit."""
    mantissa = saiunit.get_mantissa(leaf) if is_quantity(leaf) else leaf
    if isinstance(mantissa, np.ndarray):
        return mantissa.astype(mantissa.dtype.newbyteorder("="), copy=False)
    return mantissa if isinstance(mantissa, jax.Array) else jnp.asarray(mantissa)


def differences(saved: Contents, own: Contents) -> list[str]:
    """Return one line for each difference between a saved learner and this learner.

    Optimizer arrays are compared only if both have an optimizer: one may have been initialised
    later. A learner with forecasts may be restored to the time before the first one.
    """
    here = "this learner has"
    lines = [
        f"\n- `{name}` is {saved.options[name]}; {here} {own.options.get(name)}"
        for name in sorted(saved.options)  # older files have fewer
        if saved.options[name] != own.options.get(name)
    ]
    optimizers = saved.has_optimizer and own.has_optimizer
    there, found = (
        {n: e for n, e in one.entries.items() if optimizers or not n.startswith(OPTIMIZER)}
        for one in (saved, own)
    )
    if not has_forecasts(saved):
        found = {n: e for n, e in found.items() if not n.startswith(FORECASTS_OF_STATE)}
    for name in sorted(there.keys() | found.keys()):
        if name not in there:
            lines.append(f"\n- '{name}' is not in it; {here} {found[name]}")
        elif name not in found:
            lines.append(f"\n- '{name}' is {there[name]}; {here} none")
        elif there[name] != found[name]:
            lines.append(f"\n- '{name}' is {there[name]}; {here} {found[name]}")
    return lines


def _name(keys: tuple[Any, ...]) -> str:
    name: str = jax.tree_util.keystr(keys, simple=True, separator="/")
    return name


def _entry(leaf: Any, keys: str | None) -> Entry:
    unit, array = saiunit.get_unit(leaf) if is_quantity(leaf) else None, array_of(leaf)
    return Entry(str(array.dtype), tuple(map(int, array.shape)), unit, keys)


def _kinds_of_keys(learner: Learner) -> dict[str, str]:
    """Return the kind of random keys whose data are leaves of the state, by name."""
    found = {}
    for place in places_of(
        learner.algorithm, {}, learner.held_optimizer, learner.held_forecasts.waiting
    ).values():
        start = jax.tree_util.DictKey(f"{place.field}/{path_name(place.path)}")
        for keys, leaf in jax.tree_util.tree_leaves_with_path(place.state.value):
            if jnp.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
                found[_name((start, *keys))] = str(jax.random.key_impl(leaf))
    return found
