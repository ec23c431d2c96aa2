"""Meshes with `Explicit` axes, the default of ``jax.make_mesh``.

JAX types every intermediate result with its sharding on such an axis, and refuses operations with
an ambiguous sharding: a reshape of a sharded axis, a gather, a loop whose state changes its
sharding. A compiled model contains many of these operations. It therefore runs on the same devices
with `Auto` axes, for which XLA chooses the sharding, and its results get `Explicit` axes again. For
whole sequences, the mesh of every array is renamed, which keeps its buffers. For a step inside a
transformation, there is a region of `Auto` axes.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, TypeAlias, TypeVar

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ..._arguments import CONTAINERS, check_tree
from ..._brainstate import StatesAsRead, hold, peek_all
from ..._errors import Interrupted
from ..._jax import is_tracer, is_transforming, set_current_trace, take_current_trace
from ..._sharding import automatic_axes, put

_NO_MESH = Mesh(np.empty((), dtype=object), ())

_WITHOUT_MESH = frozenset({SingleDeviceSharding, type(None)})
"""Types of the shardings of most arrays, and of tracers, which have none."""

Function = TypeVar("Function", bound=Callable[..., Any])

_Renaming: TypeAlias = Callable[[Any], Any]


def on_automatic_axes(method: Function) -> Function:
    """Run a method of a learner or an algorithm on `Auto` instead of `Explicit` axes.

    The mesh of its arguments, of every State that it reads and of the context is renamed for the
    call; the mesh of its result and of the States is renamed back. The object is an algorithm, or
    has one.
    """

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        algorithm = getattr(self, "algorithm", self)
        _check_trees(method, arguments, options)
        mesh = _explicit_mesh((*arguments, *options.values()), algorithm)
        if mesh is None:
            return method(self, *arguments, **options)
        automatic = _on_auto(mesh)
        into = functools.partial(_renamed, mesh, automatic)
        back = functools.partial(_renamed, automatic, mesh)
        arguments, options = into((arguments, options))
        try:
            with _Region(algorithm, into, back):
                result = method(self, *arguments, **options)
        except Interrupted as interrupt:
            interrupt.results = back(interrupt.results)
            raise
        return back(result)

    return call  # type: ignore[return-value]


@contextlib.contextmanager
def as_users_have_it() -> Iterator[None]:
    """Restore the user's axes inside a method that is `on_automatic_axes`."""
    region = _REGION.get()
    if region is None:
        yield
        return
    region.close()
    try:
        yield
    finally:
        region.open()


@contextlib.contextmanager
def traced_on_automatic_axes(states: Iterable[brainstate.State], *arguments: Any) -> Iterator[Any]:
    """Trace functions of States and arguments for `Auto` axes, also inside of a transformation.

    Yield the arguments on these axes. The functions may read States, which `on_automatic_axes`
    does not rename inside a transformation; their values are restored at the end.
    """
    context = jax.sharding.get_abstract_mesh()
    values = jax.tree.leaves((peek_all(states), arguments))
    meshes = [context, *(found.mesh for found in map(_typed, values) if found is not None)]
    explicit = next(filter(_is_explicit, meshes), None)
    if explicit is None or _REGION.get() is not None:
        yield arguments
        return
    with take_current_trace() as outer:  # a State may be read inside another one
        pass

    def automatic(leaf: Any) -> Any:
        if _typed(leaf) is None:
            return leaf
        if not is_tracer(leaf):
            return _renamed(leaf.sharding.mesh, _on_auto(leaf.sharding.mesh), leaf)
        with set_current_trace(outer), jax.sharding.use_abstract_mesh(_on_auto(explicit)):
            return jax.sharding.reshard(leaf, PartitionSpec())

    seen = StatesAsRead(functools.partial(jax.tree.map, automatic))
    try:
        with seen, jax.sharding.use_abstract_mesh(_on_auto(explicit)):
            yield jax.tree.map(automatic, arguments)
    finally:
        for state, value in zip(seen.states, seen.original_state_values, strict=True):
            hold(state, value)


def in_automatic_region(
    function: Callable[..., Any],
    replaced: tuple[Sequence[Any], Any],
    *arguments: Any,
    steps: int | None = None,
) -> Any:
    """Return ``function(values, traces, ...)`` for arguments that JAX may have typed.

    Replaced values keep their sharding, so a loop can carry them. An output is sharded over an axis
    like the first sharded value over its first axis of that size.

    Parameters
    ----------
    function
        Returns outputs, new values, and traces or None.
    replaced
        The values and traces that it replaces.
    *arguments
        Arguments of the function.
    steps
        Length of sequences. Outputs that are not sequences of this length are replicated. ``None``:
        all outputs are sequences.
    """
    if not is_transforming():  # `on_automatic_axes` has renamed the arrays
        return function(*arguments)
    typed = [found for leaf in jax.tree.leaves(arguments) if (found := _typed(leaf)) is not None]
    if not typed:
        return function(*arguments)
    mesh = typed[0].mesh
    sharded = {
        size: name
        for leaf in reversed(jax.tree.leaves(arguments))
        if (found := _typed(leaf)) is not None
        for size, name in zip(leaf.shape[:1], found.spec, strict=False)
        if name is not None
    }

    def as_before(new: Any, old: Any) -> Any:
        sharding = _typed(old) or NamedSharding(mesh, PartitionSpec())
        return jax.sharding.reshard(new, sharding)

    def of_output(leaf: Any) -> Any:
        is_sequence = steps is None or leaf.shape[:1] == (steps,)
        names = [sharded.get(size) for size in leaf.shape] if is_sequence else []
        first = next((i for i, name in enumerate(names) if name is not None), 0)
        return jax.sharding.reshard(leaf, NamedSharding(mesh, PartitionSpec(*names[: first + 1])))

    with jax.sharding.use_abstract_mesh(_on_auto(mesh)):
        outputs, new, after = function(*jax.sharding.reshard(arguments, PartitionSpec()))
    values, traces = replaced
    new = jax.tree.map(as_before, new, values)
    after = None if after is None else jax.tree.map(as_before, after, traces)
    return jax.tree.map(of_output, outputs), new, after


def _typed(leaf: Any) -> NamedSharding | None:
    """Return the sharding in an array's type, if its mesh has `Explicit` axes."""
    if not isinstance(leaf, jax.Array):
        return None
    sharding = jax.typeof(leaf).sharding
    return sharding if _is_explicit(sharding.mesh) else None


def _check_trees(
    method: Callable[..., Any], arguments: tuple[Any, ...], options: Mapping[str, Any]
) -> None:
    """Refuse arguments that are not pytrees, before JAX processes them."""
    for index, value in enumerate(arguments):
        if isinstance(value, CONTAINERS):
            check_tree(f"arguments[{index}]", value, f"`{method.__name__}`: ")
    for name, value in options.items():
        if isinstance(value, CONTAINERS):
            check_tree(name, value, f"`{method.__name__}`: ")


def _explicit_mesh(given: Any, algorithm: Any) -> Mesh | None:
    """Return the mesh with `Explicit` axes of arguments, parameters or the context.

    Inside a transformation the result is None, since JAX has already typed the arguments.
    """
    leaves = jax.tree.leaves((given, peek_all(_parameters(algorithm))))
    shardings = list(map(getattr, leaves, repeat("sharding"), repeat(None)))
    if not _WITHOUT_MESH.issuperset(map(type, shardings)):
        for sharding in shardings:
            if isinstance(sharding, NamedSharding) and _is_explicit(sharding.mesh):
                return None if is_transforming() else sharding.mesh
    if _is_explicit(jax.sharding.get_abstract_mesh()) and not is_transforming():
        return jnp.zeros(()).sharding.mesh  # the mesh of a new array
    return None


def _parameters(algorithm: Any) -> Iterable[brainstate.State]:
    compiled = algorithm._compiled
    found: Iterable[brainstate.State] = (
        algorithm.model.states(brainstate.ParamState).values()
        if compiled is None
        else compiled.step.parameters
    )
    return found


def _is_explicit(mesh: Any) -> bool:
    return AxisType.Explicit in (mesh.axis_types or ())


def _on_auto(mesh: Any) -> Any:
    """Return a mesh, concrete or abstract, with `Auto` axes."""
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)
    return mesh.update_axis_types(dict(zip(mesh.axis_names, kinds, strict=True)))


def _renamed(old: Mesh, new: Mesh, tree: Any) -> Any:
    """Move the arrays of a tree from one mesh to another with the same devices."""

    def rename(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(leaf, jax.Array) or not isinstance(sharding, NamedSharding):
            return leaf
        if is_tracer(leaf) or sharding.mesh != old:
            return leaf
        with jax.ensure_compile_time_eval():  # a State may be read inside a trace
            return put(leaf, NamedSharding(new, sharding.spec))

    return jax.tree.map(rename, tree)


class _Region:
    """Context in which everything that a learner or an algorithm reads is on other axes.

    Parameters
    ----------
    algorithm
        The algorithm.
    into, back
        Return a tree with its arrays on these axes, and on the user's axes.
    """

    def __init__(self, algorithm: Any, into: _Renaming, back: _Renaming) -> None:
        self._states_renamed = functools.partial(_states_renamed, algorithm, into, back)
        self._entered = contextlib.ExitStack()

    def open(self) -> None:
        """Enter the region."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_without_context())
            stack.enter_context(automatic_axes())
            stack.enter_context(self._states_renamed())
            stack.callback(_REGION.reset, _REGION.set(self))
            self._entered = stack.pop_all()

    def close(self) -> None:
        """Leave the region."""
        self._entered.close()

    def __enter__(self) -> None:
        self.open()

    def __exit__(self, *error: object) -> None:
        self.close()


_REGION: contextvars.ContextVar[_Region | None] = contextvars.ContextVar("region", default=None)


@contextlib.contextmanager
def _without_context() -> Iterator[None]:
    """Remove the mesh of the context, so constants created inside fit any mesh."""
    if not _is_explicit(jax.sharding.get_abstract_mesh()):
        yield
        return
    with jax.set_mesh(_NO_MESH):
        yield


@contextlib.contextmanager
def _states_renamed(algorithm: Any, into: _Renaming, back: _Renaming) -> Iterator[None]:
    """Rename the mesh of every State's value when it is read, and rename all back at the end."""
    held = getattr(algorithm, "traces", None)
    traces = None if held is None else held.carried
    if traces is not None:
        traces.convert(into)
    seen = StatesAsRead(into)
    try:
        with seen:
            yield
    finally:
        seen.convert(back)
        if traces is not None:
            traces.convert(back)
