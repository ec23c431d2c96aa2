"""Functional learner: a learner as pure functions of its state.

They run the same programs as the methods of the learner, under JAX's transformations: for example
over a stack of states, or over devices. Traces are packed only inside (see `_core/traces.py`).
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Mapping
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._brainstate import is_in_loop, values_of
from .._core.traces import Pairs, outliving, unpack
from .._errors import OptionError
from .._graph import Traces
from .._jax import struct_of
from .._runtime.carried_traces import Form, Zero, is_settled, settled
from .._runtime.compiled_model import current_step, follow_every_state, up_to_date
from .._runtime.program import write_values
from .._runtime.resets import check_where, reset_values
from .._runtime.stepping import run_call
from .._typing import Path, PyTree
from .base import BaseLearner
from .driver import prepared
from .learner_state import BY_PATH, LearnerState, Places, check_like, places_of, states_in
from .options import Options, request_of
from .sequences import etrace_evolve, etrace_grad, etrace_online, predict
from .state_store import StateStore


class FunctionalLearner:
    """A learner as pure functions of a `LearnerState`; created by `Learner.functional`.

    Each function takes a state, returns a new one, and does not change the learner. ``jax.jit``,
    ``vmap`` (over a stack of states), ``lax.scan`` and, with ``check_vma=False``, ``shard_map``
    work on them. ``step_fn`` and ``update_fn`` are the same as for the learner's methods: they call
    the learner.

    ``jax.grad`` works on `step`, with the online gradient, and on `predict`, with the gradient of
    backpropagation through time. Do not differentiate the other functions: they compute their
    results from traces and residuals that are constants for JAX.

    Parameters
    ----------
    learner
        The parts of the learner.
    own
        Holders of the user's own States (an optimizer), by name.

    Raises
    ------
    OptionError
        If a holder contains no State.

    Examples
    --------
    Train four learners at once, each with its own weights:

    >>> import brainstate, braintrace, dataclasses, jax, jax.numpy as jnp
    >>> model = braintrace.nn.LRUCell(2, 1, 1)
    >>> learner = braintrace.compile(model, "d_rtrl", jnp.ones((1, 2)), batch_size=1)
    >>> pure = learner.functional()
    >>> weights = model.states(brainstate.ParamState)
    >>> def descend(gradients):
    ...     for path, weight in weights.items():
    ...         step = jax.tree.map(lambda w, g: w - 0.01 * g, weight.value, gradients[path])
    ...         weight.value = step
    >>> def train(state, xs, ys):
    ...     return pure.online(
    ...         state,
    ...         xs,
    ...         ys,
    ...         step_fn=lambda x, y: ((learner(x) - y) ** 2).mean(),
    ...         update_fn=descend,
    ...     )
    >>> states = []
    >>> for seed in range(4):
    ...     brainstate.random.seed(seed)
    ...     scaled = jax.tree.map(lambda w: (1 + 0.1 * seed) * w, pure.state().parameters)
    ...     states.append(dataclasses.replace(pure.state(), parameters=scaled))
    >>> stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    >>> xs, ys = jnp.ones((50, 1, 2)), 0.5 * jnp.ones((50, 1, 1))
    >>> stack, losses = jax.jit(jax.vmap(train, in_axes=(0, None, None)))(stack, xs, ys)
    >>> losses.shape, bool((losses[:, -1] < losses[:, 0]).all())
    ((4, 50), True)
    """

    def __init__(self, learner: BaseLearner, own: Mapping[str, PyTree]) -> None:
        for name, holder in own.items():
            states_in(name, holder)
        self._learner = learner
        self._own = own
        self._known: tuple[tuple[object, ...], Places, Any] = (None,), {}, None

    def state(self) -> LearnerState:
        """Return the current state of the learner.

        Its arrays are the learner's arrays. Copy them before you pass them to a compiled function
        that donates its arguments (``donate_argnums``), if you continue to use the learner.
        """
        learner = self._learner
        learner.store(learner.states_of_model)  # refuses States that other code has written
        return self._now(self._places(), learner.traces.value)

    def restore(self, state: LearnerState) -> None:
        """Set the learner, the user's own States and ``brainstate.random`` to a state.

        If it has the state of an optimizer, call `Learner.init_optimizer` first.

        Raises
        ------
        ShapeError, OptionError
            If the state does not fit the learner, or belongs to another rule; then nothing changes.
        """
        self._learner.traces.carried.finish()
        store, optimizer = self._store(state), self._learner.held_optimizer
        has_optimizer = bool(state.optimizer)
        if has_optimizer and not optimizer.states:
            raise OptionError(
                "`state` has the state of an optimizer, and this learner has no optimizer: call "
                "`learner.init_optimizer(optimizer)` first."
            )
        places = store.places.values()
        result = [p.state for p in places if p.field != "optimizer" or has_optimizer]
        values = store.values(result)
        values, traces = jax.tree.map(jnp.asarray, (values, self._arrays(state)))
        if not has_optimizer:
            optimizer.forget()
        write_values(result, values)
        self._learner.traces.value = traces
        self._learner.place()
        self._learner.store(self._learner.states_of_model).remember()

    def step(self, state: LearnerState, *arguments: PyTree) -> tuple[LearnerState, PyTree]:
        """Run one step, and return the new state and the output of the model's ``update``.

        The derivative of a loss of this output with respect to ``state.parameters`` is the online
        gradient; see `Learner.update`. States before the step are constants: the traces
        contain how they depend on the parameters.
        """
        learner = self._learner
        step, states = current_step(learner)
        store = self._store(state, learner.traces.pairs)
        output = run_call(step, states, store, arguments, learner.window is not None)
        return store.state, output

    def grad(
        self, state: LearnerState, *sequences: PyTree, **options: Any
    ) -> tuple[LearnerState, PyTree]:
        """Return the new state and the gradient over a sequence; see `Learner.etrace_grad`.

        The new traces are deferred: they are computed where the next function, or `settle`, reads
        them, and otherwise never. In the body of a loop they are arrays. To continue a sequence,
        ``state = jax.jit(pure.settle)(state)`` between two compiled calls gives the second call an
        argument of the same structure as the first.
        """
        return self._run(state, "etrace_grad", sequences, options)

    def online(
        self, state: LearnerState, *sequences: PyTree, **options: Any
    ) -> tuple[LearnerState, PyTree]:
        """Learn at every step; return the new state and losses; see `Learner.etrace_online`."""
        return self._run(state, "etrace_online", sequences, options)

    def evolve(
        self, state: LearnerState, *sequences: PyTree, **options: Any
    ) -> tuple[LearnerState, PyTree]:
        """Advance states and traces; return the new state and outputs.

        See `Learner.etrace_evolve`.
        """
        return self._run(state, "etrace_evolve", sequences, options)

    def predict(
        self, state: LearnerState, *sequences: PyTree, **options: Any
    ) -> tuple[LearnerState, PyTree]:
        """Run the model alone; return the new state and outputs; see `Learner.predict`."""
        return self._run(state, "predict", sequences, options)

    def reset(
        self,
        state: LearnerState,
        *,
        where: ArrayLike | None = None,
        like: LearnerState | None = None,
    ) -> LearnerState:
        """Start a new sequence, for all samples or for some; see `Learner.reset_state`.

        After a reset of all samples, the traces have no arrays, so that the next gradient runs the
        shorter program. In the body of a loop they have, since its carry keeps its structure; a
        carry that starts with a reset needs them, too: give ``like=state``, or call `settle`.

        Parameters
        ----------
        state
            The state.
        where
            The samples that are reset, ``(batch,)``; ``None``: all.
        like
            A state with the structure that the result has.
        """
        learner = self._learner
        up_to_date(learner)
        store = self._store(state)
        paths = list(learner.short_term_states)
        fresh = dict(zip(paths, store.initial(), strict=True))
        has_arrays = is_in_loop() or (like is not None and is_settled(like.traces))
        traces: Form
        if where is not None:
            now = {path: state.hidden[path] for path in paths}
            flags = check_where(where, learner.graph, now)
            fresh = reset_values(learner.graph.batch, now, fresh, flags)
            traces = learner.compiled.reset(self._arrays(state), flags)
        elif outliving(learner.compiled.trace_specs):
            traces = learner.traces_after_reset(self._arrays(state))
        else:
            traces = learner.zero_traces() if has_arrays else Zero()
        placement = learner.placement
        if placement is not None:
            fresh = {path: placement.value(path, value) for path, value in fresh.items()}
            traces = placement.traces(traces) if is_settled(traces) else traces
        return dataclasses.replace(store.state, hidden=fresh, traces=traces)

    def settle(self, state: LearnerState) -> LearnerState:
        """Return the state with arrays as traces; see `reset` and `grad`."""
        return dataclasses.replace(state, traces=self._arrays(state))

    def _arrays(self, state: LearnerState) -> Traces:
        return unpack(settled(state.traces, self._learner.zero_traces))

    def _run(
        self,
        state: LearnerState,
        method: str,
        sequences: tuple[PyTree, ...],
        given: Mapping[str, Any],
    ) -> tuple[LearnerState, PyTree]:
        """Run a method of the learner."""
        learner, options = self._learner, _options_of(method, given)
        request = request_of(learner.param_states, method, sequences, options)
        if options.optimizer is not None:
            optimizer, parameters = options.optimizer, learner.parameters_for_optimizer
            learner.held_optimizer.check_begun(optimizer, parameters)
        follow_every_state(self._learner, options.window, is_given=True)
        of_model, store = up_to_date(self._learner), self._store(state)
        driver, arguments = prepared(learner, request, of_model, store.initial)
        results = driver(store, of_model, arguments, options)
        return store.state, results

    def _places(self) -> Places:
        learner = self._learner
        return places_of(self._learner, self._own, learner.held_optimizer)

    def _now(self, places: Places, traces: Traces) -> LearnerState:
        fields: dict[str, dict[Path, PyTree]] = {field: {} for field in BY_PATH}
        values = values_of(place.state for place in places.values())
        for place, value in zip(places.values(), values, strict=True):
            fields[place.field].update(place.entries(value))
        return LearnerState(**fields, traces=traces, rule=self._learner.rule)

    def _store(self, state: LearnerState, pairs: Pairs = ()) -> StateStore:
        """Return the store of a state, which is refused if it does not fit the learner."""
        learner, optimizer = self._learner, self._learner.held_optimizer
        own = object() if self._own else None  # their States are not observed
        drawn = brainstate.random.DEFAULT
        version = learner.states_of_model, learner.compiled, optimizer.version, drawn, own
        if not all(map(operator.is_, self._known[0], version)) or optimizer.own is not None:
            places = self._places()
            now = self._now(places, unpack(learner.starting_traces()))
            self._known = version, places, jax.tree.map(struct_of, now)
        _, places, like = self._known
        check_like(state, like)
        return StateStore(learner, places, state, pairs)


_SIGNATURES = {
    method.__name__: inspect.signature(method)
    for method in (etrace_grad, etrace_online, etrace_evolve, predict)
}


def _options_of(method: str, given: Mapping[str, Any]) -> Options:
    """Return the options of a method; Python's error for other names than those of the learner."""
    _SIGNATURES[method].bind(None, **given)
    options = Options(**given)
    if options.is_logged:
        raise OptionError("`progress` and `log_every` are options of the methods of a learner.")
    return options
