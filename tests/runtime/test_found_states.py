"""The States of a model are those that it has now, though few calls walk through it."""

import copy
import pickle
import typing

import brainstate
import jax
import jax.numpy as jnp
import pytest

from braintrace._runtime.states.found_states import FoundStates
from braintrace._runtime.states.model_states import all_states


def state():
    return brainstate.ParamState(jnp.zeros(2))


class Part(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = state()


class Pair(typing.NamedTuple):
    first: brainstate.State
    second: list


class Whole(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.part, self.a = Part(), state()
        self.calls, self.scale, self.other = 0, jnp.ones(3), None
        self.lists = {"all": [state(), {"one": Part()}], "some": (state(), [])}
        self.pair = Pair(state(), [])
        self.parent = self.lists["all"]  # the same list by another name


def _rename(model):
    model.c = model.a
    del model.a


CHANGES = {
    "replaced": lambda model: setattr(model, "a", state()),
    "replaced below": lambda model: setattr(model.part, "w", state()),
    "replaced module": lambda model: setattr(model, "part", Part()),
    "added": lambda model: setattr(model, "b", state()),
    "in the place of a number": lambda model: setattr(model, "calls", state()),
    "in the place of nothing": lambda model: setattr(model, "other", Part()),
    "removed": lambda model: delattr(model, "a"),
    "renamed": _rename,
    "appended": lambda model: model.lists["all"].append(state()),
    "in a list in a tuple": lambda model: model.lists["some"][1].append(state()),
    "in a named tuple": lambda model: model.pair.second.append(state()),
    "in a module in a dict in a list": lambda model: setattr(
        model.lists["all"][1]["one"], "w", state()
    ),
    "taken out": lambda model: model.lists["all"].pop(0),
    "renamed in a dict": lambda model: model.lists.update(every=model.lists.pop("some")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(change):
    model, find = Whole(), FoundStates()
    assert dict(find(model)) == all_states(model)
    assert find(model) is find(model)
    CHANGES[change](model)
    assert dict(find(model)) == all_states(model)
    assert list(find(model)) == list(all_states(model))
    assert find(model) is find(model)


def test_a_new_version_follows_every_change_but_those_of_values():
    model, find = Whole(), FoundStates()
    found, version = find(model), find.version
    model.a.value = jnp.ones(2)
    assert find(model) is found and find.version is version
    model.calls, model.scale, model.other = 1, jnp.zeros(2), "other"
    assert dict(find(model)) == dict(found)
    assert find.version is not version


class Holder:
    """A container of somebody else's."""

    def __init__(self, *items):
        self.items = list(items)


jax.tree_util.register_pytree_node(
    Holder, lambda holder: (holder.items, None), lambda _, items: Holder(*items)
)


def test_what_is_not_understood_is_walked_through():
    model, find = Part(), FoundStates()
    model.holder = Holder(state())
    assert dict(find(model)) == all_states(model)
    model.holder.items.append(state())
    assert len(find(model)) == 3
    assert dict(find(model)) == all_states(model)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))]
)
def test_copies_find_those_of_their_own_model(copied):
    model, find = Whole(), FoundStates()
    find(model)
    twin, other = brainstate.graph.clone(model), copied(find)
    assert dict(other(twin)) == all_states(twin)
    assert dict(find(model)) == all_states(model)
