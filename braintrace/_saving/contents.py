"""What a learner has to be like, for a checkpoint to be restored into it."""

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
from .._learner.state import STEP_MARK, places_of
from .._typing import path_name
from .units import UNIT, unit_as_data, unit_of_data

OPTIMIZER = "optimizer/"
"""Beginning of the names of what the optimizer of a learner keeps."""

_MARK = jax.tree_util.DictKey(f"others/{path_name(STEP_MARK)}")

CONTENTS = {
    "options": {str: str},
    "entries": {str: {"dtype": str, "shape": [int], "unit?": UNIT, "keys?": str}},
    "optimizer": bool,
}
"""Schema of the data of `Contents`."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One array.

    Attributes
    ----------
    dtype, shape
        Of the array.
    unit
        Of what it is the mantissa of.
    keys
        The kind of random keys that it is the data of.
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
    """What a learner is like.

    Attributes
    ----------
    options
        The learning rule and what changes its traces or its gradient, in words.
    entries
        Its arrays by name.
    has_optimizer
        Whether its optimizer has begun; one without arrays has none in `entries`.
    """

    options: dict[str, str]
    entries: dict[str, Entry]
    has_optimizer: bool

    def as_data(self) -> dict[str, Any]:
        """Return it as plain data."""

        def of_entry(entry: Entry) -> dict[str, Any]:
            data: dict[str, Any] = {"dtype": entry.dtype, "shape": list(entry.shape)}
            if entry.unit is not None:
                data["unit"] = unit_as_data(entry.unit)
            return data if entry.keys is None else {**data, "keys": entry.keys}

        entries = {name: of_entry(entry) for name, entry in self.entries.items()}
        begun = self.has_optimizer or any(name.startswith(OPTIMIZER) for name in entries)
        return {"options": self.options, "entries": entries, "optimizer": begun}


def contents_of_data(data: Mapping[str, Any]) -> Contents:
    """Return what plain data say of a learner."""

    def entry(data: Mapping[str, Any]) -> Entry:
        unit = unit_of_data(data["unit"]) if "unit" in data else None
        return Entry(data["dtype"], tuple(data["shape"]), unit, data.get("keys"))

    entries = {name: entry(own) for name, own in data["entries"].items()}
    # Older files name the `vjp_method`; a call chooses its window, and the entries have the traces.
    options = {name: word for name, word in data["options"].items() if name != "vjp_method"}
    return Contents(options, entries, data["optimizer"])


def check_arrays(saved: Contents, arrays: Mapping[str, Any]) -> None:
    """Raise a `ValueError` unless arrays are what a checkpoint says of them."""
    for name, entry in saved.entries.items():
        if name not in arrays:
            raise ValueError(f"there is no array '{name}'")
        found = Entry(str(arrays[name].dtype), tuple(arrays[name].shape))
        if found != dataclasses.replace(entry, unit=None, keys=None):
            raise ValueError(f"'{name}' is {found}; expected {entry}")


def contents_of(learner: Learner, leaves: Mapping[str, Any]) -> Contents:
    """Return what a learner is like, given the leaves of its state by name."""
    algorithm = learner.algorithm
    options = {"rule": algorithm.rule}
    kinds = _kinds_of_keys(learner)
    entries = {name: _entry(leaf, kinds.get(name)) for name, leaf in leaves.items()}
    return Contents(options, entries, bool(learner.held_optimizer.states))


def leaves_by_name(state: LearnerState) -> dict[str, Any]:
    """Return the leaves of the state of a learner by name; a quantity counts as one.

    The mark of its steps is left out, which is zero between its calls.

    Raises
    ------
    OptionError
        If two have one name.
    """
    found = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_quantity)
    named = [(_name(keys), leaf) for keys, leaf in found if keys != (_MARK,)]
    leaves = dict(named)
    if len(leaves) < len(named):
        names = [name for name, _ in named]
        twice = next(name for name in names if names.count(name) > 1)
        raise OptionError(
            f"Two arrays of this learner are both called '{twice}'. Give the attributes or keys "
            "that they stand under names that differ."
        )
    return leaves


def array_of(leaf: Any) -> Any:
    """Return a leaf as an array of JAX or NumPy in native byte order, without its unit."""
    mantissa = saiunit.get_mantissa(leaf) if is_quantity(leaf) else leaf
    if isinstance(mantissa, np.ndarray):
        return mantissa.astype(mantissa.dtype.newbyteorder("="), copy=False)
    return mantissa if isinstance(mantissa, jax.Array) else jnp.asarray(mantissa)


def differences(saved: Contents, own: Contents) -> list[str]:
    """Return a line for everything in which a learner is not like the one that was saved.

    What the optimizer keeps counts where both have one: one of them may have begun later.
    """
    here = "this learner has"
    lines = [
        f"\n- `{name}` is {saved.options.get(name)}; {here} {own.options.get(name)}"
        for name in sorted(saved.options.keys() | own.options.keys())
        if saved.options.get(name) != own.options.get(name)
    ]
    optimizers = saved.has_optimizer and own.has_optimizer
    there, found = (
        {n: e for n, e in one.entries.items() if optimizers or not n.startswith(OPTIMIZER)}
        for one in (saved, own)
    )
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
    for place in places_of(learner.algorithm, {}, learner.held_optimizer).values():
        start = jax.tree_util.DictKey(f"{place.field}/{path_name(place.path)}")
        for keys, leaf in jax.tree_util.tree_leaves_with_path(place.state.value):
            if jnp.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
                found[_name((start, *keys))] = str(jax.random.key_impl(leaf))
    return found
