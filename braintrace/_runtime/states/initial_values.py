"""Initial values of a model's states.

These are the values that ``init_state`` assigns in a copy of the model: a function of the States
that it reads (parameters, random keys). The function is traced once for a batch size and compiled.
It is valid while other values that it may read are unchanged: attributes of modules with their
contents, and ``brainstate.environ``. A module-level variable is read when it is traced. An
``init_state`` is run without compilation if it cannot be traced, or if its result changes without a
random State.
"""

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit

from ..._arguments import did_you_mean, named
from ..._brainstate import StatefulTrace, hold, is_watched, peek, trace_stateful
from ..._errors import OptionError, ShapeError
from ..._jax import holds_tracers, open_jaxpr, strongly_typed
from ..._jaxpr import fingerprint
from ..._typing import Path
from ..environment.attributes import BY_VALUE, part_of
from ..environment.captured import CapturedEnvironment
from .lru_cache import LRUCache

Shapes = tuple[tuple[int, ...], ...]

InitialFunction: TypeAlias = Callable[[Sequence[Any]], tuple[Sequence[Any], dict[Path, Any]]]
"""``values of States -> (new values or None, initial values by path)``."""

Size = int | None
"""A batch size; ``None``: the default of ``init_state``."""

Assigned: TypeAlias = tuple[Path, str, Any]
"""Path of a module, and name and value of its attribute."""

MOST_REMADE = 3
"""Number of times a function is compiled before its dependences count as always changing."""
MOST_KEPT = 16
"""Maximum number of functions that are kept, one per model and batch size."""


KNOWN = ("batch_size", "where")
"""Options of `reset_state` that need no declaration."""


def check_init_options(model: brainstate.nn.Module, names: Collection[str]) -> None:
    """Refuse options that no ``init_state`` of a model's modules declares.

    ``**kwargs`` declare nothing: most layers have them, and would ignore a misspelt name.

    Raises
    ------
    OptionError
        Naming the first unknown option, and the known ones.
    """
    if not names:
        return
    known = dict.fromkeys(KNOWN)
    for node in model.nodes().values():
        if callable(init := getattr(node, "init_state", None)):
            parameters = inspect.signature(init).parameters.values()
            known |= dict.fromkeys(p.name for p in parameters if p.kind in _BY_NAME)
    for name in names:
        if name not in known:
            raise OptionError(
                f"`reset_state` got `{name}`, which no `init_state` of `{type(model).__name__}` "
                f"and its modules declares; {did_you_mean(name, known)}expected one of "
                f"{', '.join(f'`{other}`' for other in known)}."
            )


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Fresh(NamedTuple):
    """What ``init_state`` assigns in a copy of a model.

    Attributes
    ----------
    values
        Values of the short-term States, by path.
    attributes
        Plain attributes that are others than in the model.
    """

    values: dict[Path, Any]
    attributes: list[Assigned]


def initialised(
    model: brainstate.nn.Module, mapped: bool, size: Size, options: dict[str, Any]
) -> Fresh:
    """Return what ``init_state`` assigns, without changing the model.

    Parameters
    ----------
    model
        The model.
    mapped
        Whether it is a model for one sample, mapped over a batch axis of that size.
    size
        Argument of ``init_state``; for a mapped model, the size of the batch axis.
    options
        Further arguments of ``init_state``.
    """
    twin = copy_of(model)
    before = {path: dict(vars(node)) for path, node in twin.nodes().items()}
    arguments = {} if mapped or size is None else {"batch_size": size}
    brainstate.nn.init_all_states(twin, **arguments, **options)
    values = {
        tuple(path): strongly_typed(state.value)
        for path, state in twin.states(brainstate.ShortTermState).items()
    }
    if mapped:
        values = jax.tree.map(lambda leaf: _of_samples(leaf, size), values)
    return Fresh(values, list(_attributes_assigned(model, twin, before)))


def fresh_values(
    model: brainstate.nn.Module, mapped: bool, size: Size, options: dict[str, Any]
) -> dict[Path, Any]:
    """Return the initial values of all short-term States; see `initialised`."""
    return initialised(model, mapped, size, options).values


def _attributes_assigned(
    model: brainstate.nn.Module,
    twin: brainstate.nn.Module,
    before: Mapping[Path, Mapping[str, Any]],
) -> Iterator[Assigned]:
    """Yield the plain attributes that were assigned in a copy of a model since ``before``.

    Other objects than numbers may refer to the copy.
    """
    own = model.nodes()
    for path, node in twin.nodes().items():
        if path not in own or path not in before:
            continue
        now = vars(own[path])
        for name, value in vars(node).items():
            if before[path].get(name, before) is value or not _is_plain(value):
                continue
            if name not in now or part_of(now[name]) != part_of(value):
                yield path, name, value


_PLAIN = (*BY_VALUE, type(None), np.ndarray, jax.Array, saiunit.Quantity)


def _is_plain(value: Any) -> bool:
    """Test whether a value consists of numbers and strings."""
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    return isinstance(value, _PLAIN)


@contextlib.contextmanager
def assigned(model: brainstate.nn.Module, attributes: Iterable[Assigned]) -> Iterator[None]:
    """Assign plain attributes of a model; if the context fails, restore them."""
    nodes, before = model.nodes(), list[tuple[dict[str, Any], dict[str, Any]]]()
    try:
        for path, name, value in attributes:
            before.append((vars(nodes[path]), dict(vars(nodes[path]))))
            setattr(nodes[path], name, value)
        yield
    except BaseException:
        for now, then in reversed(before):
            now.clear()
            now.update(then)
        raise


def _of_samples(value: Any, size: Size) -> Any:
    """Return the values of all samples from the value of one; random keys are split."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        split = jax.vmap(lambda key: jax.random.split(key, size), out_axes=1)
        return split(value.ravel()).reshape(size, *value.shape)
    return jnp.broadcast_to(value, (size, *value.shape))


def copy_of(model: brainstate.nn.Module) -> brainstate.nn.Module:
    """Return a copy of a model; transformations observe the reads of its long-term States."""
    twin = brainstate.graph.clone(model)
    states = model.states()
    for path, state in twin.states().items():
        if not isinstance(state, brainstate.ShortTermState):
            state.value = states[path].value
    return twin


def shapes_of(values: Mapping[Path, Any]) -> Shapes:
    """Return the shapes of all values of States, in the order of their paths."""
    leaves = (leaf for path in sorted(values, key=str) for leaf in jax.tree.leaves(values[path]))
    return tuple(tuple(jnp.shape(leaf)) for leaf in leaves)


class InitialValues:
    """Initial values of the short-term States of a model, by cached functions."""

    def __init__(self) -> None:
        self._made: LRUCache[tuple[int, bool, Size], Initialiser] = LRUCache(MOST_KEPT)

    def __call__(
        self, model: brainstate.nn.Module, mapped: bool, size: Size, options: dict[str, Any]
    ) -> Fresh:
        """Return what ``init_state`` assigns; see `initialised`."""
        if options or is_watched():
            return initialised(model, mapped, size, options)
        return self._initialiser(model, mapped, size)()

    def of_shapes(
        self,
        model: brainstate.nn.Module,
        mapped: bool,
        samples: Size,
        shapes: Shapes,
        options: dict[str, Any],
    ) -> Fresh:
        """Return what ``init_state`` assigns, if the initial values have given shapes.

        Raises
        ------
        ShapeError
            If ``init_state`` returns other shapes, both for this number of samples and without a
            batch size.
        """
        for size in _sizes(samples, mapped):
            try:
                if options or is_watched():
                    fresh = initialised(model, mapped, size, options)
                else:
                    made = self._initialiser(model, mapped, size)
                    if made.shapes not in (None, shapes):
                        continue
                    fresh = made()
            except TypeError:  # `init_state` wants a batch size
                continue
            if shapes_of(fresh.values) == shapes:
                return fresh
        raise _other_shapes(model, shapes)

    def initialiser(
        self, model: brainstate.nn.Module, mapped: bool, samples: Size, shapes: Shapes
    ) -> "Initialiser":
        """Return the function of initial values with given shapes.

        Raises
        ------
        ShapeError
            See `of_shapes`.
        """
        for size in _sizes(samples, mapped):
            try:
                made = self._initialiser(model, mapped, size)
                if made.shapes_drawn() == shapes:
                    return made
            except TypeError:  # `init_state` wants a batch size
                continue
        raise _other_shapes(model, shapes)

    def _initialiser(self, model: brainstate.nn.Module, mapped: bool, size: Size) -> "Initialiser":
        key = (id(model), mapped, size)
        made: Initialiser | None = self._made.get(key)
        if made is None or not made.fits():
            times = 0 if made is None else made.times + 1
            made = self._made[key] = Initialiser(model, mapped, size, times)
        return made


def _other_shapes(model: brainstate.nn.Module, shapes: Shapes) -> ShapeError:
    return ShapeError(
        f"`{type(model).__name__}.init_state` does not create states of the current shapes, "
        f"{', '.join(map(str, shapes))}. Call `reset_state` with the batch size (and the options) "
        "of your initialisation, inside the same maps."
    )


def failed_init(model: brainstate.nn.Module, batch_size: Size, options: Mapping[str, Any]) -> str:
    """Return what failed, if ``init_state`` does."""
    given = named(["batch_size", *options], [batch_size, *options.values()])
    return f"`init_state` of `{type(model).__name__}` fails for {given}"


def _sizes(samples: Size, mapped: bool) -> list[Size]:
    """Return the possible batch sizes of ``init_state``: the number of samples, or none."""
    return [samples] if mapped else list(dict.fromkeys([samples, None]))


class Initialiser:
    """Initial values of one model for one batch size.

    Parameters
    ----------
    model, mapped, size
        See `initialised`.
    times
        Number of earlier compilations.

    Attributes
    ----------
    shapes
        Shapes of the values, if there is a compiled function.
    states
        States that the compiled function takes.
    read
        States that its values depend on.
    """

    def __init__(self, model: brainstate.nn.Module, mapped: bool, size: Size, times: int) -> None:
        self._fresh: Callable[[], Fresh] = lambda: initialised(model, mapped, size, {})
        self.times = times
        self.shapes: Shapes | None = None
        self.states: tuple[brainstate.State, ...] = ()
        self.read: tuple[brainstate.State, ...] = ()
        self._attributes: list[Assigned] = []
        found = self._traced() if times <= MOST_REMADE else None
        self._captured = None if found is None else CapturedEnvironment(model)
        if found is not None:
            values, _ = found.result_shapes
            self.states, self.read = found.states, _read_by(found)
            self._paths, self.shapes = list(values), shapes_of(values)
            self._run = jax.jit(lambda states: _as_list(found.call(states)))

    def fits(self) -> bool:
        """Test whether the function is still valid."""
        return self._captured is None or self._captured.are_unchanged()

    def __call__(self) -> Fresh:
        """Return what ``init_state`` assigns; random States advance."""
        if self._captured is None:
            return self._fresh()
        written, values = self.values([state.value for state in self.states])
        for state, value in zip(self.states, written, strict=True):
            if value is not None:
                state.value = value
        return Fresh(values, self._attributes)

    def shapes_drawn(self) -> Shapes:
        """Return the shapes of the values; random States do not advance."""
        if self.shapes is not None:
            return self.shapes
        before = peek(brainstate.random.DEFAULT)
        try:
            return shapes_of(self._fresh().values)
        finally:
            hold(brainstate.random.DEFAULT, before)

    def values(self, of_states: Sequence[Any]) -> tuple[Sequence[Any], dict[Path, Any]]:
        """Return new values of States, and the initial values; see `InitialFunction`."""
        if self._captured is None:
            return [], self._fresh().values
        written, values = self._run(of_states)
        return written, dict(zip(self._paths, values, strict=True))

    def _traced(self) -> StatefulTrace | None:
        """Return the function, or ``None`` if it depends on more than States."""
        brainstate.random.DEFAULT.value  # noqa: B018  created here, outside of the trace

        def values() -> dict[Path, Any]:
            fresh = self._fresh()
            self._attributes = fresh.attributes
            return fresh.values

        try:
            first, again = (trace_stateful(values) for _ in range(2))
        except Exception:  # a real error is raised again when the function runs untraced
            return None
        if any(holds_tracers(value) for *_, value in self._attributes):
            return None
        return first if fingerprint(first.jaxpr) == fingerprint(again.jaxpr) else None


def _read_by(traced: StatefulTrace) -> tuple[brainstate.State, ...]:
    """Return the States that a program uses, other than by copying (`copy_of` copies all)."""
    jaxpr, _ = open_jaxpr(traced.jaxpr)
    used = {id(v) for equation in jaxpr.eqns for v in equation.invars} | set(map(id, jaxpr.outvars))
    variables = iter(jaxpr.invars)
    read = []
    for state in traced.states:
        leaves = [next(variables) for _ in jax.tree.leaves(state.value)]
        if any(id(variable) in used for variable in leaves):
            read.append(state)
    return tuple(read)


def _as_list(result: tuple[Any, dict[Path, Any]]) -> tuple[Any, list[Any]]:
    """Return values in a list, since paths with both names and numbers cannot be sorted."""
    written, values = result
    return written, list(values.values())
