"""Pure functions as modules: models written in Flax, Equinox or plain JAX.

Every array among the leaves of the two pytrees becomes a State under its key path, which the
compiler, reports and errors use as its name. Users of the model see the pytrees.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit

from ._brainstate import Hidden
from ._checks import is_quantity, path_name, shown
from ._errors import OptionError, ShapeError
from ._jax import strongly_typed
from ._typing import Path, PyTree


def from_function(
    step: Callable[..., tuple[PyTree, PyTree]],
    params: PyTree,
    state: PyTree,
    persistent: Collection[str] = (),
) -> FunctionModel:
    """Make a model from a pure step function, usable as a brainstate module.

    Parameters
    ----------
    step
        ``step(params, state, *inputs) -> (state, output)``, one time step. The new state must have
        the structure, shapes, dtypes and units of the old one.
    params
        Pytree. Its floating-point arrays learn. Other arrays are held constant. Leaves that are not
        arrays (a Python number or function in an Equinox module) do not change.
    state
        Pytree at the start of a sequence, or a function ``state(batch_size)`` that returns it, for
        batches of any size. Its floating-point arrays and numbers are hidden states. Counters and
        flags are carried and reset with them. A reset keeps typed random keys, so that the next
        sequence draws other numbers.
    persistent
        Paths of leaves or parts of ``state`` that a reset keeps as well (running statistics,
        counters of random numbers), such as ``"norm/mean"`` or ``"1"``. They have no traces.

    Returns
    -------
    FunctionModel
        Its States are the leaves, under paths such as ``params/cell/kernel`` and ``state/h``.

    Raises
    ------
    OptionError
        If ``step`` is not a function, ``params`` or ``state`` has no floating-point array, or
        ``state`` has nothing at a path of ``persistent``.

    Notes
    -----
    There are two ways to use a batch. If ``step`` is written for a batch, the batch is the first
    axis of the arrays of ``state``: compile with ``batch_size=B``. If ``step`` is written for one
    sample, compile with ``vmap=True``: each sample then starts from ``state``, with separate random
    keys.

    Gradients are a pytree like ``params``, with ``None`` for a leaf that does not learn. This holds
    for `Learner.etrace_grad`, for the ``update_fn`` of `Learner.etrace_online`, and for the pure
    functions of both. If you differentiate yourself, `FunctionModel.as_params` converts values by
    path, from brainstate or a `LearnerState`, to this pytree. Within a larger module, gradients
    have the paths of that module.

    The model can be pickled if its parts can. With ``cloudpickle``, ``step`` may be a lambda or a
    jitted function.

    Examples
    --------
    >>> import braintrace, jax, jax.numpy as jnp
    >>> def step(params, state, x):
    ...     decay = braintrace.element_wise(params["decay"])
    ...     h = decay * state["h"] + braintrace.matmul(x, params["w"])
    ...     return {"h": h}, jnp.tanh(h)
    >>> params = {"w": jnp.ones((2, 3)), "decay": jnp.full(3, 0.9)}
    >>> model = braintrace.from_function(step, params, lambda batch: {"h": jnp.zeros((batch, 3))})
    >>> xs = jnp.ones((20, 5, 2))
    >>> learner = braintrace.compile(model, "d_rtrl", xs[0], batch_size=5)
    >>> gradients = learner.etrace_grad(xs, step_fn=lambda x: jnp.mean(learner(x) ** 2))
    >>> jax.tree.map(jnp.shape, gradients)
    {'decay': (3,), 'w': (2, 3)}
    >>> descend = lambda value, gradient: value - 0.1 * gradient
    >>> model.set_params(jax.tree.map(descend, model.get_params(), gradients))
    """
    # A module of the user's own may be callable as a step; these are not.
    is_layer = isinstance(step, brainstate.nn.Module) or any(
        kind.__module__.startswith(("flax.", "equinox.nn")) for kind in type(step).__mro__
    )
    if is_layer:
        raise OptionError(
            f"`step` is the module {type(step).__name__}; expected a function `step(params, state, "
            "*inputs)` that returns the new state and the output. Take the arrays out of the "
            "module and call it inside, with Flax NNX for example:\n"
            "    graphdef, params = nnx.split(cell)\n"
            "    step = lambda params, state, x: nnx.merge(graphdef, params)(state, x)\n"
            "A brainstate module needs no `from_function`: give it to `compile`."
        )
    return FunctionModel(step, params, state, persistent)


class FunctionModel(brainstate.nn.Module):
    """A model made by `from_function`.

    Parameters
    ----------
    step, params, state, persistent
        See `from_function`.
    """

    def __init__(
        self,
        step: Callable[..., tuple[PyTree, PyTree]],
        params: PyTree,
        state: PyTree,
        persistent: Collection[str] = (),
    ) -> None:
        super().__init__()
        # A state may be given to a function that donates it, or be changed by its owner.
        kept = jax.tree.map(_copied, state, is_leaf=is_quantity)
        self._given = Hidden(_Given(step, kept, tuple(persistent)))
        slots, values = _slots("params", params, _is_array)
        self._slots_of_params = Hidden(slots)
        self.params = _nested(
            {
                path: (brainstate.ParamState if _learns(value) else brainstate.LongTermState)(value)
                for path, value in values.items()
            }
        )
        if not self._given.value.is_function:
            self.init_state()

    def init_state(self, batch_size: int | None = None) -> None:
        """Create the States, with the initial state.

        Parameters
        ----------
        batch_size
            Argument of ``state`` if that is a function; otherwise the batch size it must have.

        Raises
        ------
        ShapeError
            If ``state`` is not a function and its batch size differs.
        """
        self._hold(self._given.value.start(batch_size))

    def reset_state(self, batch_size: int | None = None) -> None:
        """Reset the existing States to the initial state; see `init_state`."""
        _, values = _slots("state", self._given.value.start(batch_size), _is_carried)
        for path, value in values.items():
            state = self._at(path)
            if isinstance(state, brainstate.ShortTermState):
                state.value = value

    def update(self, *inputs: PyTree) -> PyTree:
        """Run one step, and return its output.

        Raises
        ------
        OptionError
            If ``step`` does not return a pair.
        ShapeError
            If ``step`` returns a state with a different structure.
        """
        result = self._given.value.step(self.get_params(), self.get_state(), *inputs)
        if not (isinstance(result, (tuple, list)) and len(result) == 2):
            raise OptionError(f"`step` returns {shown(result)}; expected a pair `(state, output)`.")
        what = "The state that `step` returns, in `(state, output)`,"
        for path, value in _by_path(self._slots_of_state.value, result[0], what).items():
            self._at(path).value = value
        return result[1]

    def get_params(self) -> PyTree:
        """Return the current parameters, as a pytree like the initial one."""
        return self._filled(self._slots_of_params.value)

    def set_params(self, params: PyTree) -> None:
        """Write parameters.

        Parameters
        ----------
        params
            A pytree like the initial one. A leaf with ``None``, as in gradients for leaves that do
            not learn, does not change.

        Raises
        ------
        ShapeError
            If the structure differs.
        """
        for path, value in self.by_path(params).items():
            self._at(path).value = _copied(value)

    def get_state(self) -> PyTree:
        """Return the current state, as a pytree like the initial one."""
        return self._filled(self._slots_of_state.value)

    def as_params(self, by_path: Mapping[Path, Any]) -> PyTree:
        """Convert values by path to a pytree like the parameters.

        Parameters
        ----------
        by_path
            Gradients, the ``parameters`` of a `LearnerState`, or the States themselves, which
            ``brainstate.transform.grad`` accepts in this form. Leaves without an entry are
            ``None``.

        Raises
        ------
        OptionError
            For a path that is not the path of a parameter.

        Examples
        --------
        >>> import brainstate, braintrace, jax.numpy as jnp
        >>> step = lambda params, h, x: (params["a"] * h + x, h)
        >>> model = braintrace.from_function(step, {"a": jnp.ones(3)}, jnp.zeros(3))
        >>> weights = model.as_params(model.states(brainstate.ParamState))
        >>> loss = lambda: model(jnp.ones(3)).sum()
        >>> brainstate.transform.grad(loss, weights)()
        {'a': Array([0., 0., 0.], dtype=float32)}
        """
        slots = self._slots_of_params.value
        known = {slot.path for slot in jax.tree.leaves(slots)}
        if not known.issuperset(by_path):
            raise OptionError(f"Expected paths of parameters, some of {known}; got {[*by_path]}.")
        return jax.tree.map(lambda slot: by_path.get(slot.path), slots)

    def by_path(self, params: PyTree) -> dict[Path, Any]:
        """Undo `as_params`: return the leaves by path, without ``None``.

        Raises
        ------
        ShapeError
            If the pytree is not like the parameters.
        """
        found = _by_path(self._slots_of_params.value, params, "`params`")
        return {path: value for path, value in found.items() if value is not None}

    def __reduce__(self) -> tuple[Callable[..., FunctionModel], tuple[Any, ...]]:
        """Return a pickle of the model's parts, since States cannot be pickled."""
        state = (self.get_state(),) if hasattr(self, "state") else ()
        step, start, persistent = self._given.value
        return _as_it_was, (step, self.get_params(), start, persistent, *state)

    def _hold(self, state: PyTree) -> None:
        """Create the States of a pytree."""
        slots, values = _slots("state", state, _is_carried)
        self._slots_of_state = Hidden(slots)
        names = {path_name(path[1:]): path for path in values}
        kept = set[Path]()
        for part in self._given.value.persistent:
            own = {path for name, path in names.items() if f"{name}/".startswith(f"{part}/")}
            if not own:
                raise OptionError(f"`persistent` has {part!r}; expected paths of {[*names]}.")
            kept |= own
        self.state = _nested({path: _state_of(v, path in kept) for path, v in values.items()})

    def _filled(self, slots: PyTree) -> PyTree:
        return jax.tree.map(lambda s: self._at(s.path).value if s.path else s.fixed, slots)

    def _at(self, path: Path) -> Any:
        node = vars(self)[path[0]]
        for part in path[1:]:
            node = node[part]
        return node


def _as_it_was(
    step: Callable[..., tuple[PyTree, PyTree]],
    params: PyTree,
    start: PyTree,
    persistent: Collection[str],
    *state: PyTree,
) -> FunctionModel:
    """Restore a pickled model, with its current state if it had one."""
    model = FunctionModel(step, params, start, persistent)
    for now in state:
        model._hold(now)
    return model


def gradients_for(model: brainstate.nn.Module, by_path: dict[Path, Any]) -> PyTree:
    """Convert gradients by path to the form for the user of a model."""
    return model.as_params(by_path) if isinstance(model, FunctionModel) else by_path


def gradients_by_path(model: brainstate.nn.Module, gradients: PyTree) -> dict[Path, Any]:
    """Undo `gradients_for`."""
    return model.by_path(gradients) if isinstance(model, FunctionModel) else gradients


class _Given(NamedTuple):
    step: Callable[..., tuple[PyTree, PyTree]]
    state: PyTree
    persistent: tuple[str, ...]

    @property
    def is_function(self) -> bool:
        """Whether the state is a function, not a callable pytree (an Equinox module)."""
        return callable(self.state) and jax.tree_util.all_leaves([self.state])

    def start(self, batch_size: int | None) -> PyTree:
        """Return the initial state."""
        if self.is_function:
            return self.state() if batch_size is None else self.state(batch_size)
        leaves = jax.tree.leaves(self.state, is_leaf=is_quantity)
        hidden = [leaf for leaf in leaves if _is_carried(leaf) and _learns(leaf)]
        if batch_size is None or any(jnp.shape(leaf)[:1] == (batch_size,) for leaf in hidden):
            return self.state
        raise ShapeError(
            f"`state` is {shown(self.state)}, but `batch_size` is {batch_size}. Use a state whose "
            f"first axis is {batch_size}, or `state` as a function of the batch size; for a step "
            "of one sample, compile with `vmap=True`."
        )


# --- pytrees and paths


WITHOUT = {
    "params": "pass the values to train, numbers as arrays (`jnp.asarray`)",
    "state": "the model has no memory; pass the values that the next step needs",
}
"""What an error says of a pytree without a floating-point array."""


class _Slot:
    """The place of a leaf in a pytree: the path of its State, or a value that does not change."""

    def __init__(self, path: Path | None, fixed: Any = None) -> None:
        self.path, self.fixed = path, fixed


def _slots(
    root: str, tree: PyTree, is_kept: Callable[[Any], bool]
) -> tuple[PyTree, dict[Path, Any]]:
    """Return a pytree of slots, and the values of the leaves with States by path."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_quantity)
    pairs = list(zip(_paths(root, tree), leaves, strict=True))
    slots = [_Slot(path) if is_kept(leaf) else _Slot(None, leaf) for path, leaf in pairs]
    values = {path: _copied(leaf) for path, leaf in pairs if is_kept(leaf)}
    if not any(map(_learns, values.values())):
        raise OptionError(
            f"`{root}` is {shown(tree)}, without a floating-point array: {WITHOUT[root]}."
        )
    return jax.tree.unflatten(structure, slots), values


def _by_path(slots: PyTree, tree: PyTree, what: str) -> dict[Path, Any]:
    """Return the leaves of a pytree at the slots with a path."""
    places, structure = jax.tree.flatten(slots)
    try:
        leaves = structure.flatten_up_to(tree)
    except ValueError as error:
        raise ShapeError(f"{what} has another structure than at first: {error}") from error
    return {slot.path: leaf for slot, leaf in zip(places, leaves, strict=True) if slot.path}


def _paths(root: str, tree: PyTree) -> list[Path]:
    """Return the path of every leaf of a pytree.

    The name ``value``, which Flax uses in a box around a single array, is left out. Leaves with the
    same path are numbered.
    """
    keys = [keys for keys, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_quantity)]
    paths = [(root, *(jax.tree_util.keystr((key,), simple=True) for key in path)) for path in keys]
    sizes = collections.Counter(path[:-1] for path in paths)
    short = [p[:-1] if p[-1] == "value" and p[1:] and sizes[p[:-1]] == 1 else p for p in paths]
    times = collections.Counter(short)
    return [path if times[path] == 1 else (*path, str(n)) for n, path in enumerate(short)]


def _nested(by_path: Mapping[Path, Any]) -> Any:
    """Return States as nested dicts, without the first part of their paths."""
    tree: dict[str, Any] = {}
    for path, state in by_path.items():
        inner = tree
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = state
    return next(iter(tree.values()), {})


def _state_of(value: Any, is_persistent: bool) -> brainstate.State:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) and not value.shape:
        return brainstate.random.RandomState(value)  # each sample of a mapped model gets its own
    if is_persistent:
        return brainstate.LongTermState(value)
    return brainstate.HiddenState(value) if _learns(value) else brainstate.ShortTermState(value)


def _copied(leaf: Any) -> Any:
    """Return a leaf as the value of a State: a copy, without a weak type."""
    if not _is_carried(leaf):
        return leaf
    return strongly_typed(jax.tree.map(lambda array: jnp.array(array, copy=True), leaf))


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind not in "OSUMm"
    return is_quantity(leaf) or isinstance(leaf, jax.Array)


def _is_carried(leaf: Any) -> bool:
    return _is_array(leaf) or isinstance(leaf, (bool, int, float, complex))


def _learns(value: Any) -> bool:
    """Test whether a leaf is differentiated."""
    return bool(jnp.issubdtype(jnp.result_type(saiunit.get_mantissa(value)), jnp.inexact))
