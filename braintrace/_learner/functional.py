"""The state of a learner as one pytree, and the learner as pure functions of it.

The functions run under JAX's transformations. Traces are packed only inside (see
`_core/traces.py`).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .. import _brainstate
from .._checks import differences, path_name, shown
from .._core.traces import pack, unpack
from .._errors import OptionError, ShapeError
from .._graph.method import Traces
from .._model import Values
from .._typing import Path, PyTree
from .arguments import Options, check_flags
from .base import BaseLearner
from .calls import find_call, find_program
from .carried import Form, Zero, is_settled, settled
from .program import Arguments, Program

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

    def __post_init__(self) -> None:
        vars(self).update({name: Values(getattr(self, name)) for name in BY_PATH})


jax.tree_util.register_dataclass(LearnerState, [*BY_PATH, "optimizer", "traces"], ["rule"])


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
        named = [
            *of_model.items(),
            (("brainstate", "random"), brainstate.random.DEFAULT),
            *learner.compiled.outside.items(),
            *(pair for name, holder in own.items() for pair in _states_in(name, holder)),
            (("braintrace", "skipped_updates"), optimizer.skipped),
        ]
        for path, state in named:
            place = _field(state, of_model.get(path) is state), path
            # A State that has several paths is at its first place.
            if self.states.setdefault(self.setdefault(id(state), place), state) is not state:
                raise OptionError(
                    f"'{path_name(path)}' is the name of another State: choose another name for "
                    f"`{path[0]}` in `learner.functional`."
                )
        if _brainstate.peek(optimizer.transformed) is not None:
            self[id(optimizer.transformed)] = place = ("optimizer", ())
            self.states[place] = optimizer.transformed

    def state(self, traces: Traces, rule: str) -> LearnerState:
        """Return the current values of the States, with given traces."""
        states = self.states.values()
        return self.replaced(
            LearnerState({}, {}, {}, {}, traces, rule), states, _brainstate.peek_all(states)
        )

    def value_in(self, state: LearnerState, of: brainstate.State) -> PyTree:
        """Return the value of a State in a learner state, with keys instead of their data."""
        if id(of) not in self:
            raise OptionError(
                f"`step_fn` or `update_fn` uses another State, {shown(of)} of {shown(of.value)}. "
                "Pass its holder under a name: `learner.functional(optimizer=optimizer)`."
            )
        field, path = self[id(of)]
        value = getattr(state, field)[path] if path else state.optimizer
        return None if value is None else jax.tree.map(_like, _brainstate.peek(of), value)

    def replaced(
        self, state: LearnerState, states: Iterable[brainstate.State], values: Iterable[PyTree]
    ) -> LearnerState:
        """Return a state with new values of some States; ``None``: they stay."""
        fields: dict[str, Any] = {field: dict(getattr(state, field)) for field in BY_PATH}
        for each, value in zip(states, values, strict=True):
            if value is not None:
                field, path = self[id(each)]
                arrays = jax.tree.map(_without_key, value)
                fields |= {field: {**fields[field], path: arrays} if path else arrays}
        return dataclasses.replace(state, **fields)

    def check(self, state: LearnerState, traces: Traces, rule: str) -> None:
        """Refuse a value that does not fit a learner as its state."""
        if state.rule != rule:
            raise OptionError(
                f"This state belongs to a learner with `{state.rule}`; this learner has `{rule}`. "
                "Compile with the same rule and options, or take only the parameters."
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
                "the same model and options; for another batch, call `reset_state` first."
            )


def _field(state: brainstate.State, is_of_model: bool) -> str:
    fields = {brainstate.random.RandomState: "random"}
    if is_of_model:
        fields |= {brainstate.ParamState: "parameters", brainstate.ShortTermState: "hidden"}
    return next((fields[kind] for kind in fields if isinstance(state, kind)), "others")


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


# --- functions of it

Outcome: TypeAlias = tuple[LearnerState, PyTree]
"""The new state, and the results."""


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
        self._learner, self._own = learner, own

    def state(self) -> LearnerState:
        """Return the current state of the learner.

        Its arrays are the learner's arrays. Copy them before you pass them to a compiled function
        that donates its arguments (``donate_argnums``), if you continue to use the learner.
        """
        learner = self._learner
        learner.carried.begin(learner.followed)
        return Places(learner, self._own).state(learner.traces.value, learner.rule)

    def restore(self, state: LearnerState) -> None:
        """Set the learner, the user's own States and ``brainstate.random`` to a state.

        If it has the state of an optimizer, call `Learner.init_optimizer` first.

        Raises
        ------
        ShapeError, OptionError
            If the state does not fit the learner, or belongs to another rule; then nothing changes.
        """
        learner = self._learner
        learner.carried.finish()
        places = self._checked(state)
        if state.optimizer is not None and learner.optimizer_state is None:
            raise OptionError(
                "`state` has the state of an optimizer: call `learner.init_optimizer` first."
            )
        states = places.states.values()
        values = [places.value_in(state, each) for each in states]
        values, traces = jax.tree.map(jnp.asarray, (values, self._arrays(state.traces)))

        def write() -> None:
            _brainstate.set_values(states, values)
            learner.carried.value = pack(traces, learner.carried.pairs())
            learner.place()
            learner.carried.left = _brainstate.peek_all(learner.followed.values())

        learner.carried.complete(write, not _brainstate.is_watched())

    def step(self, state: LearnerState, *arguments: PyTree) -> Outcome:
        """Run one step, and return the new state and the output of the model's ``update``.

        The derivative of a loss of this output with respect to ``state.parameters`` is the online
        gradient; see `Learner.update`. States before the step are constants: the traces
        contain how they depend on the parameters.
        """
        return self._advance(state, *find_call(self._learner, arguments))

    def grad(self, state: LearnerState, *sequences: PyTree, **options: Any) -> Outcome:
        """Return the new state and the gradient over a sequence; see `Learner.etrace_grad`.

        The new traces are deferred: they are computed where the next function, or `settle`, reads
        them, and otherwise never. In the body of a loop they are arrays. To continue a sequence,
        ``state = jax.jit(pure.settle)(state)`` between two compiled calls gives the second call an
        argument of the same structure as the first.
        """
        return self._run(state, "etrace_grad", sequences, options)

    def online(self, state: LearnerState, *sequences: PyTree, **options: Any) -> Outcome:
        """Learn at every step; return the new state and losses; see `Learner.etrace_online`."""
        return self._run(state, "etrace_online", sequences, options)

    def evolve(self, state: LearnerState, *sequences: PyTree, **options: Any) -> Outcome:
        """Advance states and traces; return the new state and outputs.

        See `Learner.etrace_evolve`.
        """
        return self._run(state, "etrace_evolve", sequences, options)

    def predict(self, state: LearnerState, *sequences: PyTree, **options: Any) -> Outcome:
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
        state, fresh = self._initial(state)
        if where is not None:
            flags = check_flags("where", where, learner.graph.batch)
            fresh = learner.reset_values(state.hidden, fresh, flags)
            traces: Form = learner.compiled.reset(self._arrays(state.traces), flags)
        else:
            traces = learner.traces_at_start(lambda: self._arrays(state.traces))
        state = dataclasses.replace(state, hidden=fresh)
        return self._with(state, traces, like is not None and is_settled(like.traces))

    def settle(self, state: LearnerState) -> LearnerState:
        """Return the state with arrays as traces; see `reset` and `grad`."""
        return self._with(state, state.traces, True)

    def _with(self, state: LearnerState, traces: Form, needs_arrays: bool = False) -> LearnerState:
        is_array = needs_arrays or is_settled(traces) or _brainstate.is_in_loop()
        return dataclasses.replace(state, traces=self._arrays(traces) if is_array else traces)

    def _arrays(self, traces: Form) -> Traces:
        return unpack(settled(traces, self._learner.zero_traces))

    def _run(
        self, state: LearnerState, method: str, sequences: tuple[PyTree, ...], given: dict[str, Any]
    ) -> Outcome:
        """Run a method of the learner."""
        learner = self._learner
        inspect.signature(getattr(learner, method)).bind(**given)  # raises Python's error
        options = Options(**given)
        if options.optimizer is not None:
            parameters = learner.parameters_for_optimizer
            learner.held_optimizer.begin(options.optimizer, parameters, creates=False)
        learner.follow_every_state(options.window, is_given=True)
        fresh = None
        if options.reset is not None:
            state, fresh = self._initial(state)
        call = learner, method, sequences, options, lambda: fresh
        program, arguments, _ = find_program(*call)
        after, results = self._advance(state, program, arguments)
        return after, program.named(results, options)

    def _advance(self, state: LearnerState, program: Program, arguments: Arguments) -> Outcome:
        """Run a program on a state."""
        places, done = self._checked(state), list[Any]()
        is_zero = program.reads == "zero" and isinstance(state.traces, Zero)
        has_none = is_zero or program.reads == "nothing"
        traces = (
            None if has_none else pack(self._arrays(state.traces), self._learner.carried.pairs())
        )
        values = [places.value_in(state, each) for each in program.states]
        program(values, traces, arguments, in_place=False, done=done)
        results, verdict = program.jitted.result(done)[0]
        if program.check is not None:
            program.check(verdict, 0)
        written, after = program.changes(done, traces)
        state = places.replaced(state, program.written, written)
        return state if after is None else self._with(state, after), results

    def _initial(self, state: LearnerState) -> tuple[LearnerState, Values]:
        """Return the initial values of the short-term States; random keys advance."""
        learner, places = self._learner, self._checked(state)
        made = learner.initialiser(learner.size_of_init())
        written, fresh = made.values([places.value_in(state, each) for each in made.states])
        fresh = Values({**fresh, **learner.compiled.filter_starts()})
        return places.replaced(state, made.states, written), fresh

    def _checked(self, state: LearnerState) -> Places:
        """Return the places of all values in a state, which is refused if it does not fit."""
        learner = self._learner
        learner.current_states()
        places = Places(learner, self._own)
        places.check(state, unpack(learner.starting_traces()), learner.rule)
        return places
