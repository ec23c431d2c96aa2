"""Meshes whose axes are `Explicit`, as ``jax.make_mesh`` gives them.

On such an axis JAX types every intermediate result with its sharding, and refuses operations that
leave it open: a reshape of a divided axis, a lookup by indices, a loop whose state changes its
sharding. A compiled model is full of these. It therefore runs on the same devices with `Auto` axes,
where XLA divides the work, and its results get `Explicit` axes again: whole sequences by renaming
the mesh of every array, which keeps its buffers; a step inside a transformation by a region of
`Auto` axes.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .._arguments import CONTAINERS, check_tree
from .._brainstate import StatesAsRead, peek, values_of
from .._errors import Interrupted
from .._jax import is_tracer, is_transforming
from .._sharding import automatic_axes, put

_NO_MESH = Mesh(np.empty((), dtype=object), ())
_NO_ABSTRACT_MESH = AbstractMesh((), ())

Function = TypeVar("Function", bound=Callable[..., Any])

_Renaming: TypeAlias = Callable[[Any], Any]


def on_automatic_axes(method: Function) -> Function:
    """Let a method of a learner or an algorithm see `Auto` axes in the place of `Explicit` ones.

    Its arguments, every State that it reads and the mesh of the context are renamed for it, its
    result and those States back again. The object is an algorithm, or has one.
    """

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        algorithm = getattr(self, "algorithm", self)
        _check_trees(method, arguments, options)
        mesh = _explicit_mesh((arguments, options), algorithm)
        if mesh is None:
            return method(self, *arguments, **options)
        automatic = Mesh(mesh.devices, mesh.axis_names, axis_types=_all(mesh, AxisType.Auto))
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
    """Within a method that is `on_automatic_axes`, let everything lie as it does outside."""
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
def traced_on_automatic_axes(algorithm: Any) -> Iterator[None]:
    """Let functions be traced, inside of a transformation as well, for `Auto` axes.

    It is for what reads States, which `on_automatic_axes` has not renamed there.
    """
    values = jax.tree.leaves([peek(state) for state in _parameters(algorithm)])
    meshes = (getattr(getattr(leaf, "sharding", None), "mesh", None) for leaf in values)
    mesh = next((mesh for mesh in meshes if isinstance(mesh, Mesh) and _is_explicit(mesh)), None)
    if mesh is None or _REGION.get() is not None:
        yield
        return
    automatic = Mesh(mesh.devices, mesh.axis_names, axis_types=_all(mesh, AxisType.Auto))
    seen = StatesAsRead(functools.partial(_renamed, mesh, automatic))
    context = jax.sharding.get_abstract_mesh()
    try:
        with (
            seen,
            jax.sharding.use_abstract_mesh(_NO_ABSTRACT_MESH if _is_explicit(context) else context),
        ):
            yield
    finally:
        with jax.ensure_compile_time_eval():
            seen.convert(functools.partial(_renamed, automatic, mesh))


def in_automatic_region(
    function: Callable[..., Any],
    replaced: tuple[Sequence[Any], Any],
    *arguments: Any,
    steps: int | None = None,
) -> Any:
    """Return ``function(values, traces, ...)`` where JAX may have typed the arguments.

    What is replaced keeps the sharding that it has, so that a loop can carry it. An output
    is divided over an axis as the first divided value is over its first axis of that size.

    Parameters
    ----------
    function
        Returns outputs, new values, and traces or None.
    replaced
        What it replaces: values and traces.
    *arguments
        Of the function.
    steps
        If some outputs are no sequences, and lie on every device: length of those that are.
    """
    typed = [found for leaf in jax.tree.leaves(arguments) if (found := _typed(leaf)) is not None]
    if not typed:
        return function(*arguments)
    mesh = typed[0].mesh
    divided = {
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
        names = [divided.get(size) for size in leaf.shape] if is_sequence else []
        first = next((i for i, name in enumerate(names) if name is not None), 0)
        return jax.sharding.reshard(leaf, NamedSharding(mesh, PartitionSpec(*names[: first + 1])))

    automatic = mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Auto))
    with jax.sharding.use_abstract_mesh(automatic):
        outputs, new, after = function(*jax.sharding.reshard(arguments, PartitionSpec()))
    values, traces = replaced
    new = jax.tree.map(as_before, new, values)
    after = None if after is None else jax.tree.map(as_before, after, traces)
    return jax.tree.map(of_output, outputs), new, after


def _typed(leaf: Any) -> NamedSharding | None:
    """Return the sharding that an array is typed with, if its mesh has `Explicit` axes."""
    sharding = jax.typeof(leaf).sharding
    return sharding if _is_explicit(sharding.mesh) else None


def _check_trees(
    method: Callable[..., Any], arguments: tuple[Any, ...], options: Mapping[str, Any]
) -> None:
    """Refuse arguments that JAX cannot take apart, before it has to."""
    for index, value in enumerate(arguments):
        if isinstance(value, CONTAINERS):
            check_tree(f"arguments[{index}]", value, f"`{method.__name__}`: ")
    for name, value in options.items():
        if isinstance(value, CONTAINERS):
            check_tree(name, value, f"`{method.__name__}`: ")


def _explicit_mesh(given: Any, algorithm: Any) -> Mesh | None:
    """Return the mesh with `Explicit` axes that arguments, parameters or the context lie on.

    Inside a transformation there is none: JAX has typed what is given already.
    """
    if is_transforming():
        return None
    leaves = jax.tree.leaves((given, values_of(_parameters(algorithm))))
    if any(map(is_tracer, leaves)):
        return None
    meshes = (getattr(getattr(leaf, "sharding", None), "mesh", None) for leaf in leaves)
    found = next((mesh for mesh in meshes if mesh is not None and _is_explicit(mesh)), None)
    if found is None and _is_explicit(jax.sharding.get_abstract_mesh()):
        found = jnp.zeros(()).sharding.mesh  # a new array lies there
    return found


def _parameters(algorithm: Any) -> Iterable[brainstate.State]:
    found: Iterable[brainstate.State] = (
        algorithm.compiled.parameters
        if algorithm.is_compiled
        else algorithm.model.states(brainstate.ParamState).values()
    )
    return found


def _is_explicit(mesh: Any) -> bool:
    return AxisType.Explicit in (mesh.axis_types or ())


def _all(mesh: Mesh, kind: AxisType) -> tuple[AxisType, ...]:
    return (kind,) * len(mesh.axis_names)


def _renamed(old: Mesh, new: Mesh, tree: Any) -> Any:
    """Return the arrays of a tree that lie on one mesh on another with the same devices."""

    def rename(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(leaf, jax.Array) or not isinstance(sharding, NamedSharding):
            return leaf
        is_here = not is_tracer(leaf) and sharding.mesh == old
        return put(leaf, NamedSharding(new, sharding.spec)) if is_here else leaf

    return jax.tree.map(rename, tree)


class _Region:
    """While it is open, all that a learner or an algorithm reads lies on other axes.

    Parameters
    ----------
    algorithm
        The algorithm.
    into, back
        Return a tree with its arrays on those axes, and on the user's.
    """

    def __init__(self, algorithm: Any, into: _Renaming, back: _Renaming) -> None:
        self._states_renamed = functools.partial(_states_renamed, algorithm, into, back)
        self._entered = contextlib.ExitStack()

    def open(self) -> None:
        """Enter it."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_without_context())
            stack.enter_context(automatic_axes())
            stack.enter_context(self._states_renamed())
            stack.callback(_REGION.reset, _REGION.set(self))
            self._entered = stack.pop_all()

    def close(self) -> None:
        """Leave it."""
        self._entered.close()

    def __enter__(self) -> None:
        self.open()

    def __exit__(self, *error: object) -> None:
        self.close()


_REGION: contextvars.ContextVar[_Region | None] = contextvars.ContextVar("region", default=None)


@contextlib.contextmanager
def _without_context() -> Iterator[None]:
    """Take away the mesh of the context: constants made inside are to fit any other."""
    if not _is_explicit(jax.sharding.get_abstract_mesh()):
        yield
        return
    with jax.set_mesh(_NO_MESH):
        yield


@contextlib.contextmanager
def _states_renamed(algorithm: Any, into: _Renaming, back: _Renaming) -> Iterator[None]:
    """Rename the value of every State when it is read, and of all of them at the end."""
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
