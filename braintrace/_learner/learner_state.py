"""Learner state: parameters, states, traces and random keys as one pytree."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import brainstate
import jax
import jax.export

from .._brainstate import peek, values_of
from .._checks import differences, shown
from .._errors import OptionError, ShapeError
from .._graph import Traces
from .._typing import Path, PyTree, path_name
from .base import BaseLearner
from .leaves import by_path, holds_keys, like_current, like_leaves, raw, same_type
from .traces import Form, is_settled

BY_PATH = ("parameters", "hidden", "others", "random", "optimizer")
FIELDS = (*BY_PATH, "traces")
UNSETTLED = "unsettled"


@dataclasses.dataclass(frozen=True)
class LearnerState:
    """The complete state of a learner: a pytree, created by `FunctionalLearner.state`.

    Its leaves are plain arrays. Each has a name that is the same in every process and on every
    backend, such as ``parameters/cell/w`` or ``traces/cell/w@mm0>cell/V/weight``: the string
    ``jax.tree_util.keystr(path, simple=True, separator="/")`` of its path.

    Attributes
    ----------
    parameters
        Values of the `brainstate.ParamState` of the model by path, keyed like gradients.
    hidden
        Values of the short-term States, which are reset with a sequence.
    others
        Values of all other States, including the user's own; and the number of skipped
        updates.
    random
        Keys of random numbers, as ``jax.random.key_data``: of the model's States with keys, and of
        ``brainstate.random``.
    traces
        Eligibility traces by ``{parameter path}@{operation}>{state}``; `Zero` after a reset, or
        `Deferred` after a gradient. `FunctionalLearner.settle` makes arrays of them.
    rule
        The rule of the traces, ``"SnAp(n=1)"``: a part of the structure, like the paths.
    optimizer
        Leaves of the state of the learner's ``optimizer`` by path; empty before it is initialised.

    Examples
    --------
    Save a dict of arrays by name:

    >>> import braintrace, jax, jax.numpy as jnp
    >>> model = braintrace.nn.IndRNN(2, 3)
    >>> learner = braintrace.compile(model, "d_rtrl", jnp.ones((1, 2)), batch_size=1)
    >>> functional = learner.functional()
    >>> state = functional.state()
    >>> paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(state))
    >>> names = [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]
    >>> saved = dict(zip(names, leaves))
    >>> saved["hidden/h"].shape, saved["parameters/W/weight/bias"].shape
    ((1, 3), (3,))

    A learner that is built in the same way can continue from it:

    >>> structure = jax.tree.structure(functional.state())
    >>> functional.restore(jax.tree.unflatten(structure, [saved[name] for name in names]))
    """

    parameters: dict[Path, PyTree]
    hidden: dict[Path, PyTree]
    others: dict[Path, PyTree]
    random: dict[Path, PyTree]
    traces: Form
    rule: str = ""
    optimizer: dict[Path, PyTree] = dataclasses.field(default_factory=dict)


@functools.lru_cache(maxsize=1000)
def _in_order(keys: tuple[Path | str, ...]) -> tuple[Path | str, ...]:
    """Return keys in the order of their printed names, since some paths cannot be sorted."""
    return tuple(sorted(keys, key=_printed))


def _flatten(state: LearnerState) -> tuple[list[PyTree], PyTree]:
    held = [getattr(state, field) for field in BY_PATH]
    held.append(state.traces if is_settled(state.traces) else {UNSETTLED: state.traces})
    keys = [_in_order(tuple(entries)) for entries in held]
    children = [entries[key] for entries, own in zip(held, keys, strict=True) for key in own]
    return children, (state.rule, *keys)


def _flatten_with_names(state: LearnerState) -> tuple[list[tuple[PyTree, PyTree]], PyTree]:
    children, (told, *keys) = _flatten(state)
    names = [f"{f}/{_printed(key)}" for f, own in zip(FIELDS, keys, strict=True) for key in own]
    named = zip(map(jax.tree_util.DictKey, names), children, strict=True)
    return list(named), (told, *keys)


def _unflatten(structure: PyTree, children: Iterable[PyTree]) -> LearnerState:
    rest, (rule, *keys) = iter(children), structure
    fields = {
        field: {key: next(rest) for key in own} for field, own in zip(FIELDS, keys, strict=True)
    }
    if UNSETTLED in fields["traces"]:
        fields["traces"] = fields["traces"][UNSETTLED]
    return LearnerState(**fields, rule=rule)


jax.tree_util.register_pytree_with_keys(LearnerState, _flatten_with_names, _unflatten, _flatten)


def _to_bytes(structure: PyTree) -> bytes:
    return json.dumps(structure).encode()


def _from_bytes(data: bytearray | bytes) -> PyTree:
    told, *keys = json.loads(bytes(data))
    return (told, *(tuple(map(_path_of, own)) for own in keys))


def _path_of(key: list[Any] | str) -> Path | str:
    return tuple(key) if isinstance(key, list) else key


jax.export.register_pytree_node_serialization(
    LearnerState,
    serialized_name="braintrace.LearnerState",
    serialize_auxdata=_to_bytes,
    deserialize_auxdata=_from_bytes,
)


def _printed(key: Path | str) -> str:
    return path_name(key) if isinstance(key, tuple) else str(key)


class Place(NamedTuple):
    """Field and path of the value of a State in a `LearnerState`.

    For an optimizer's States, every leaf has a separate path. ``is_whole`` is true if the entry is
    the value itself: it has no random keys.
    """

    state: brainstate.State
    field: str
    path: Path
    is_whole: bool

    def entries(self, value: PyTree) -> dict[Path, PyTree]:
        """Return the entries of the field for a value of the State."""
        return by_path(value, self.path) if self.field == "optimizer" else {self.path: raw(value)}

    def value_in(self, state: LearnerState) -> PyTree:
        """Return the value of the State in a learner state.

        Raises
        ------
        OptionError
            If it is missing.
        """
        entries = getattr(state, self.field)
        if self.is_whole:
            return entries[self.path]
        (held,) = values_of([self.state])
        if self.field != "optimizer":
            return like_current(entries[self.path], held)
        if not entries and jax.tree.leaves(held):
            raise OptionError(
                "This `LearnerState` has no state of the `optimizer`: call "
                "`learner.init_optimizer(optimizer)` before `functional.state()`."
            )
        return like_leaves(held, entries, self.path)


class Places(dict[int, Place]):
    """The place of every State by its identity."""

    def add(self, path: Path, state: brainstate.State, field: str) -> None:
        """Add the place of a State, which random keys have in the field for them.

        Raises
        ------
        OptionError
            If another State has the same name.
        """
        if id(state) in self:
            return
        field = "random" if isinstance(state, brainstate.random.RandomState) else field
        if any(_printed(p.path) == _printed(path) for p in self.values() if p.field == field):
            raise OptionError(
                f"'{_printed(path)}' is the name of another State: choose a different name for "
                f"`{path[0]}` in `learner.functional`."
            )
        is_whole = field not in ("optimizer", "random") and not holds_keys(peek(state))
        self[id(state)] = Place(state, field, path, is_whole)

    def of(self, state: brainstate.State) -> Place:
        """Return the place of a State.

        Raises
        ------
        OptionError
            If there is none.
        """
        if id(state) not in self:
            raise OptionError(
                f"`step_fn` or `update_fn` uses a State that the state of the learner does not "
                f"have: {shown(state)} of {shown(state.value)}. Pass its holder under a name: "
                "`learner.functional(optimizer=optimizer)`."
            )
        return self[id(state)]

    def replaced(
        self, state: LearnerState, states: Iterable[brainstate.State], values: Iterable[PyTree]
    ) -> LearnerState:
        """Return a state with new values of some States."""
        fields: dict[str, Any] = {field: dict(getattr(state, field)) for field in BY_PATH}
        for each, value in zip(states, values, strict=True):
            if id(each) in self:
                place = self[id(each)]
                fields[place.field].update(place.entries(value))
        return dataclasses.replace(state, **fields)


def places_of(learner: BaseLearner, own: Mapping[str, PyTree]) -> Places:
    """Return the place of every State of a learner, and of the user's own holders by name.

    Raises
    ------
    OptionError
        If a holder has no States, or two States have the same name.
    """
    places, optimizer = Places(), learner.held_optimizer
    for path, state in learner.states_of_model.items():
        places.add(path, state, _field(state))
    places.add(("brainstate", "random"), brainstate.random.DEFAULT, "random")
    for path, state in learner.compiled.outside.items():
        places.add(path, state, "others")
    for name, holder in own.items():
        for path, state in states_in(name, holder).items():
            places.add(path, state, "others")
    places.add(("braintrace", "skipped_updates"), optimizer.skipped, "others")
    for path, state in optimizer.states.items():
        places.add(path, state, "optimizer")
    return places


def state_of(places: Places, traces: Traces, rule: str) -> LearnerState:
    """Return the current values of States, with given traces."""
    fields: dict[str, dict[Path, PyTree]] = {field: {} for field in BY_PATH}
    values = values_of(place.state for place in places.values())
    for place, value in zip(places.values(), values, strict=True):
        fields[place.field].update(place.entries(value))
    return LearnerState(**fields, traces=traces, rule=rule)


def _field(state: brainstate.State) -> str:
    """Return the field of the value of a State of the model."""
    if isinstance(state, brainstate.ParamState):
        return "parameters"
    return "hidden" if isinstance(state, brainstate.ShortTermState) else "others"


def states_in(name: str, holder: PyTree) -> dict[Path, brainstate.State]:
    """Return the States of a holder in `Learner.functional`, by path.

    Raises
    ------
    OptionError
        If there are none.
    """
    if isinstance(holder, brainstate.State):
        return {(name,): holder}
    result = brainstate.graph.states(holder)
    if not result:
        raise OptionError(
            f"`{name}` is {shown(holder)}; expected a State, a module, or a list or dict of them."
        )
    return {(name, *_flat(path)): state for path, state in result.items()}


def _flat(path: Path) -> Path:
    """Return a path whose parts are not paths; dicts keyed by path have such parts."""
    parts = (_flat(part) if isinstance(part, tuple) else (part,) for part in path)
    return tuple(itertools.chain.from_iterable(parts))


def check_like(state: LearnerState, own: LearnerState) -> None:
    """Refuse a value that does not fit a learner as its state.

    Raises
    ------
    OptionError
        If it is not a learner state, or belongs to another rule or to other options.
    ShapeError
        If its entries differ in name, structure, shape or dtype.
    """
    if not isinstance(state, LearnerState):
        raise OptionError(f"`state` is {shown(state)}; expected a `LearnerState`.")
    if state.rule != own.rule:
        raise OptionError(
            f"This state belongs to a learner with `{state.rule}`, but this learner has "
            f"`{own.rule}`: their traces differ, even if they have the same names. Compile the "
            "model with the same rule and options, or take only the parameters."
        )
    # The optimizer is compared only if both have one: the learner may not know it yet.
    is_compared = {
        "optimizer": state.optimizer and own.optimizer,
        "traces": is_settled(state.traces),
    }
    fields = [f for f in FIELDS if is_compared.get(f, True)]
    lines = [
        line
        for field in fields
        for line in _differences(field, getattr(state, field), getattr(own, field))
    ]
    if lines:
        raise ShapeError(
            f"This state does not belong to this learner:{''.join(lines)}\nUse the state of the "
            "same model, learner, batch and options; for another batch call `reset_state` of "
            "the learner with its size first."
        )


def _differences(
    field: str, found: Mapping[Any, PyTree], expected: Mapping[Any, PyTree]
) -> list[str]:
    if found.keys() == expected.keys() and all(
        same_type(found[key], expected[key]) for key in found
    ):
        return []
    named, wanted = (
        {f"{field}/{_printed(key)}": value for key, value in entries.items()}
        for entries in (found, expected)
    )
    return differences(named, wanted, same_type)
