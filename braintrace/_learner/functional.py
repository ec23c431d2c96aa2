"""Functional learner: a learner as pure functions of its state.

They run the same programs as the methods of the learner, under JAX's transformations: for example
over a stack of states, or over devices. Traces are packed only inside (see `_core/traces.py`).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._brainstate import is_in_loop, peek_all, set_values
from .._core.traces import outliving, pack, unpack
from .._errors import OptionError
from .._graph import Traces
from .._typing import PyTree
from . import sequences as methods
from .arguments import Options
from .base import BaseLearner
from .body import Arguments, Initial
from .resets import check_flags, reset_values
from .shell import Program, find_call, find_program, shown
from .state import LearnerState, Places, states_in
from .traces import Form, Zero, is_settled, settled


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
        self._learner, self._own = learner, own

    def state(self) -> LearnerState:
        """Return the current state of the learner.

        Its arrays are the learner's arrays. Copy them before you pass them to a compiled function
        that donates its arguments (``donate_argnums``), if you continue to use the learner.
        """
        learner, carried = self._learner, self._learner.carried
        carried.finish()
        carried.check(learner.followed, learner.compiled.followed)
        return Places(learner, self._own).state(learner.traces.value, learner.rule)

    def restore(self, state: LearnerState) -> None:
        """Set the learner, the user's own States and ``brainstate.random`` to a state.

        If it has the state of an optimizer, call `Learner.init_optimizer` first.

        Raises
        ------
        ShapeError, OptionError
            If the state does not fit the learner, or belongs to another rule; then nothing changes.
        """
        learner, optimizer = self._learner, self._learner.held_optimizer
        learner.carried.finish()
        places = self._checked(state)
        has_optimizer = bool(state.optimizer)
        if has_optimizer and not optimizer.states:
            raise OptionError(
                "`state` has the state of an optimizer, and this learner has no optimizer: call "
                "`learner.init_optimizer(optimizer)` first."
            )
        kept = [p.state for p in places.values() if p.field != "optimizer" or has_optimizer]
        values = [places.value_in(state, each) for each in kept]
        values, traces = jax.tree.map(jnp.asarray, (values, self._arrays(state)))
        if not has_optimizer:
            optimizer.write(None)
        set_values(kept, values)
        learner.traces.value = traces
        learner.place()
        learner.carried.left = peek_all(learner.followed)

    def step(self, state: LearnerState, *arguments: PyTree) -> tuple[LearnerState, PyTree]:
        """Run one step, and return the new state and the output of the model's ``update``.

        The derivative of a loss of this output with respect to ``state.parameters`` is the online
        gradient; see `Learner.update`. States before the step are constants: the traces
        contain how they depend on the parameters.
        """
        learner = self._learner
        program, data = find_call(learner, learner.current_states(), arguments)
        return self._advance(state, program, data)

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
        learner.current_states()
        state, fresh = self._initial(state)
        has_arrays = is_in_loop() or (like is not None and is_settled(like.traces))
        traces: Form
        if where is not None:
            now = {path: state.hidden[path] for path in fresh}
            flags = check_flags("where", where, learner.graph, learner.states_of_model)
            fresh = reset_values(learner.graph.batch, now, fresh, flags)
            traces = learner.compiled.reset(self._arrays(state), flags)
        elif outliving(learner.compiled.trace_specs):
            traces = learner.traces_after_reset(self._arrays(state))
        else:
            traces = learner.zero_traces() if has_arrays else Zero()
        return dataclasses.replace(state, hidden=fresh, traces=traces)

    def settle(self, state: LearnerState) -> LearnerState:
        """Return the state with arrays as traces; see `reset` and `grad`."""
        return dataclasses.replace(state, traces=self._arrays(state))

    def _arrays(self, state: LearnerState) -> Traces:
        return unpack(settled(state.traces, self._learner.zero_traces))

    def _run(
        self, state: LearnerState, method: str, sequences: tuple[PyTree, ...], given: dict[str, Any]
    ) -> tuple[LearnerState, PyTree]:
        """Run a method of the learner."""
        learner = self._learner
        inspect.signature(getattr(methods, method)).bind(None, **given)  # raises Python's error
        options = Options(**given)
        if options.optimizer is not None:
            parameters = learner.parameters_for_optimizer
            learner.held_optimizer.begin(options.optimizer, parameters, creates=False)
        learner.follow_every_state(options.window, is_given=True)
        states = learner.current_states()
        if options.reset is None:
            initial: Initial = []
        else:
            state, fresh = self._initial(state)
            initial = list(fresh.values())
        call = learner, method, sequences, options, states, lambda: initial
        program, arguments, steps = find_program(*call)
        after, results = self._advance(state, program, arguments, steps)
        return after, shown(learner, program.body, results, options)

    def _advance(
        self, state: LearnerState, program: Program, arguments: Arguments, steps: int = 1
    ) -> tuple[LearnerState, PyTree]:
        """Run a program on a state."""
        places, body, done = self._checked(state), program.body, list[Any]()
        is_zero = isinstance(state.traces, Zero) and body.reads == "zero"
        has_none = is_zero or body.reads == "nothing"
        traces = None if has_none else pack(self._arrays(state), self._learner.carried.pairs)
        values = [places.value_in(state, each) for each in body.states]
        defers = not is_in_loop()
        program(values, traces, arguments, steps, is_owned=False, defers=defers, done=done)
        (results, verdict), written, after = program.changes(done[0], traces)
        if body.check is not None:
            body.check(verdict)
        state = places.replaced(state, program.written, written)
        if after is not None:
            after = unpack(after) if is_settled(after) else after
            state = dataclasses.replace(state, traces=after)
        return state, results

    def _initial(self, state: LearnerState) -> tuple[LearnerState, dict[Any, PyTree]]:
        """Return the initial values of the short-term States by path; random keys advance."""
        places = self._checked(state)
        states, function = self._learner.initial_function()
        written, fresh = function([places.value_in(state, each) for each in states])
        state = places.replaced(state, states, written)
        return state, {path: fresh[path] for path in self._learner.short_term_states}

    def _checked(self, state: LearnerState) -> Places:
        """Return the places of all values in a state, which is refused if it does not fit."""
        learner = self._learner
        places = Places(learner, self._own)
        places.check(state, unpack(learner.starting_traces()), learner.rule)
        return places
