"""Learner state: parameters, states, traces and random keys as one pytree."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .._brainstate import peek, peek_all
from .._checks import differences, shown
from .._errors import OptionError, ShapeError
from .._graph.method import Traces
from .._typing import Path, PyTree, path_name
from .base import BaseLearner
from .carried import Form, is_settled

BY_PATH = ("parameters", "hidden", "others", "random")


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
        The state of the learner's ``optimizer``; ``None`` before it is initialised.

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
    optimizer: PyTree = None


# --- as a pytree


@functools.lru_cache(maxsize=1000)
def _in_order(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    """Return paths in the order of their printed names, since some paths cannot be sorted."""
    return tuple(sorted(paths, key=path_name))


class _ByPath(dict[Path, PyTree]):
    """A field of a state as a pytree with names."""


def _flatten_field(field: _ByPath) -> tuple[list[tuple[PyTree, PyTree]], tuple[Path, ...]]:
    paths = _in_order(tuple(field))
    return [(jax.tree_util.DictKey(path_name(path)), field[path]) for path in paths], paths


def _flatten(state: LearnerState) -> tuple[list[tuple[PyTree, PyTree]], str]:
    children = {name: _ByPath(getattr(state, name)) for name in BY_PATH}
    children |= {"optimizer": state.optimizer, "traces": state.traces}
    return [(jax.tree_util.DictKey(name), child) for name, child in children.items()], state.rule


def _unflatten(rule: str, children: Iterable[PyTree]) -> LearnerState:
    *fields, optimizer, traces = children
    return LearnerState(*map(dict, fields), traces, rule, optimizer)  # type: ignore[arg-type]


jax.tree_util.register_pytree_with_keys(
    _ByPath, _flatten_field, lambda paths, values: _ByPath(zip(paths, values, strict=True))
)
jax.tree_util.register_pytree_with_keys(LearnerState, _flatten, _unflatten)

# --- values of States as its entries


class Places(dict[int, tuple[str, Path]]):
    """Field and path of the value of every State of a learner, by the identity of the State.

    Attributes
    ----------
    states
        The States by field and path.
    """

    def __init__(self, learner: BaseLearner, own: Mapping[str, PyTree]) -> None:
        super().__init__()
        self.states: dict[tuple[str, Path], brainstate.State] = {}
        optimizer, of_model = learner.held_optimizer, learner.states_of_model
        others = [
            (("brainstate", "random"), brainstate.random.DEFAULT),
            *learner.compiled.outside.items(),
            *(pair for name, holder in own.items() for pair in _states_in(name, holder)),
            (("braintrace", "skipped_updates"), optimizer.skipped),
        ]
        for path, state in (*of_model.items(), *others):
            self._add(_field(state, of_model.get(path) is state), path, state)
        if peek(optimizer.transformed) is not None:
            self._add("optimizer", (), optimizer.transformed)

    def _add(self, field: str, path: Path, state: brainstate.State) -> None:
        if id(state) in self:
            return
        if (field, path) in self.states:
            raise OptionError(
                f"'{path_name(path)}' is the name of another State: choose a different name for "
                f"`{path[0]}` in `learner.functional`."
            )
        self[id(state)], self.states[field, path] = (field, path), state

    def state(self, traces: Traces, rule: str) -> LearnerState:
        """Return the current values of the States, with given traces."""
        states = self.states.values()
        return self.replaced(LearnerState({}, {}, {}, {}, traces, rule), states, peek_all(states))

    def value_in(self, state: LearnerState, of: brainstate.State) -> PyTree:
        """Return the value of a State in a learner state, with keys instead of their data."""
        if id(of) not in self:
            raise OptionError(
                f"`step_fn` or `update_fn` uses a State that the state of the learner does not "
                f"have: {shown(of)} of {shown(of.value)}. Pass its holder under a name: "
                "`learner.functional(optimizer=optimizer)`."
            )
        field, path = self[id(of)]
        entries = getattr(state, field)
        return jax.tree.map(_like, peek(of), entries[path] if path else entries)

    def replaced(
        self, state: LearnerState, states: Iterable[brainstate.State], values: Iterable[PyTree]
    ) -> LearnerState:
        """Return a state with new values of some States; ``None``: they stay."""
        fields: dict[str, Any] = {field: dict(getattr(state, field)) for field in BY_PATH}
        for each, value in zip(states, values, strict=True):
            if id(each) in self and value is not None:
                field, path = self[id(each)]
                arrays = jax.tree.map(_without_key, value)
                fields |= {field: {**fields[field], path: arrays} if path else arrays}
        return dataclasses.replace(state, **fields)

    def check(self, state: LearnerState, traces: Traces, rule: str) -> None:
        """Refuse a value that does not fit a learner as its state."""
        if state.rule != rule:
            raise OptionError(
                f"This state belongs to a learner with `{state.rule}`, but this learner has "
                f"`{rule}`: their traces differ, even if they have the same names. Compile the "
                "model with the same rule and options, or take only the parameters."
            )
        own = self.state(traces, rule)
        # The optimizer is compared only if both have one: the learner may not know it yet.
        ignored: dict[str, Any] = {} if is_settled(state.traces) else {"traces": {}}
        if state.optimizer is None or own.optimizer is None:
            ignored["optimizer"] = None
        both = (dataclasses.replace(each, **ignored) for each in (state, own))
        if lines := differences(*both):
            raise ShapeError(
                f"This state does not belong to this learner:{''.join(lines)}\nUse the state of "
                "the same model, learner, batch and options; for another batch call `reset_state` "
                "of the learner with its size first."
            )


def _field(state: brainstate.State, is_of_model: bool) -> str:
    if isinstance(state, brainstate.random.RandomState):
        return "random"
    if is_of_model and isinstance(state, brainstate.ParamState):
        return "parameters"
    is_hidden = is_of_model and isinstance(state, brainstate.ShortTermState)
    return "hidden" if is_hidden else "others"


def _states_in(name: str, holder: PyTree) -> list[tuple[Path, brainstate.State]]:
    if isinstance(holder, brainstate.State):
        return [((name,), holder)]
    return [((name, *path), state) for path, state in brainstate.graph.states(holder).items()]


def _is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return not isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _like(held: Any, leaf: Any) -> Any:
    if not _is_key(held):
        return leaf
    return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(held))


def _without_key(leaf: Any) -> Any:
    if _is_key(leaf):
        return jax.random.key_data(leaf)
    return jnp.asarray(leaf) if isinstance(leaf, (bool, int, float, complex)) else leaf
