"""States that a learner carries from call to call: traces, and the optimizer's state.

Traces between two programs are arrays, known zeros, or deferred. Each form is a pytree, so JAX
compiles a program for each, also inside a user's ``jit``: one that starts from zeros has no product
with old traces, and one that ends with deferred traces does not compute them. Loops need a constant
structure. In the body of a ``scan``, ``while_loop`` or ``cond``, all results are therefore arrays.
"""

import dataclasses
import operator
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeAlias, TypeGuard

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .. import _brainstate
from .._checks import differences, in_words, path_name
from .._core.traces import Pairs, examples, unpack
from .._errors import LostTracesError, NonFiniteWarning, OptionError
from .._graph.method import Traces
from .._jax import on_host, strongly_typed
from .._typing import Path, PyTree
from .arguments import key_of


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Zero:
    """Traces that are zero: a pytree without leaves."""


ZERO = Zero()


class Jitted:
    """A compiled function that may donate the buffers of its second argument.

    Functions with the same key are equal. In the transformations of brainstate, the function of
    deferred traces is part of the type of a State, and a change of it means a new compilation.
    """

    def __init__(self, function: Callable[..., Any], key: Hashable | None = None) -> None:
        self._key = id(self) if key is None else key
        self._hash = hash(self._key)
        self._trees: list[Any] = []

        def run(*arguments: Any) -> dict[int, list[Any]]:
            leaves, tree = jax.tree.flatten(function(*arguments))
            self._trees.append(tree)
            return {len(self._trees) - 1: leaves}

        run.__name__ = getattr(function, "__name__", "run")  # as profilers and dumps show it
        self._run = jax.jit(run)
        self._run_in_place = jax.jit(run, donate_argnums=1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Jitted) and other._key == self._key

    def __hash__(self) -> int:
        return self._hash

    def __call__(self, *arguments: Any, in_place: bool, done: list[Any]) -> None:
        """Run the function and append its results; ``in_place`` donates the buffers.

        `map`, `extend` and JAX's dicts of lists are C code: no signal handler runs between the
        function and its results. Named tuples and other nodes are made of them by `result`.
        """
        run = self._run_in_place if in_place else self._run
        done.extend(map(run, *zip(arguments)))

    def result(self, done: list[Any]) -> Any:
        """Return the results of a call."""
        if len(done) == 1:
            ((index, leaves),) = done[0].items()
            done.append(self._trees[index].unflatten(leaves))
        return done[1]


@dataclasses.dataclass(frozen=True)
class Deferred:
    """Traces after a sequence, which a program of its own computes when they are read.

    Attributes
    ----------
    sources
        What this program reads: the operands, and the recorded values of the steps.
    before
        The traces before these steps; ``None`` inside a program: those before the sequence.
    finish
        The program: ``(sources, before) -> traces``; ``None`` inside a program.
    done
        Its results outside of transformations, if an interrupt came before they were stored.
    """

    sources: Any
    before: "Traces | Zero | None"
    finish: Any = None
    done: list[Any] = dataclasses.field(default_factory=list, init=False, compare=False)

    def compute(self, done: list[Any], in_place: bool = False) -> Traces:
        """Return the traces; an interrupted computation continues with the same list."""
        if not done:
            self.finish(self.sources, self.before, in_place=in_place, done=done)
        return self.finish.result(done)


jax.tree_util.register_dataclass(Deferred, ["sources", "before"], ["finish"])

Form: TypeAlias = Traces | Zero | Deferred


def is_settled(form: Form) -> TypeGuard[Traces]:
    """Test whether traces are arrays."""
    return not isinstance(form, Zero | Deferred)


def settled(form: Form, zeros: Callable[[], Traces]) -> Traces:
    """Return traces as arrays; ``zeros`` returns zero traces."""
    if isinstance(form, Zero):
        return zeros()
    return form.compute([]) if isinstance(form, Deferred) else form


_VALUE: Any = brainstate.ShortTermState.value


def present(traces: "CarriedTraces") -> Any:
    """Return the form of traces that a transformation of brainstate passes to its program.

    ``jit`` passes the form that the traces have, and compiles for each. Other transformations pass
    arrays. Between calls, the form is the one that the last trace has asked for.
    """
    form: Form = _brainstate.held(traces)
    if not _brainstate.is_watched():
        traces.is_owned = False
        return traces.given(is_outside=True) if traces.needs_arrays else form
    if is_settled(form):
        return form
    if not _brainstate.is_in_loop():
        if traces.placeholder is not None:  # a loop has been traced with it and now starts
            traces.placeholder = None
            _brainstate.hold(traces, settled(form, traces.zeros))
        elif not traces.is_inside:
            traces.needs_arrays = False
        return _brainstate.held(traces)
    if not traces.is_inside:
        traces.needs_arrays = True
        # In a transformation, it would otherwise be lowered for one device; see `_jax`.
        with jax.ensure_compile_time_eval():
            return traces.given(is_outside=True)
    # The traces belong to an outer `jit`: they become arrays there, after this trace.
    if traces.placeholder is None:
        traces.placeholder = form, examples(jax.eval_shape(lambda: settled(form, traces.zeros)))
    return traces.placeholder[1]


def store_external(traces: "CarriedTraces", form: Form) -> None:
    """Store traces that are reset or restored, or that other code writes with hidden states."""
    traces.left, traces.is_owned = None, False
    traces.is_inside = _brainstate.is_recorded()
    if traces.placeholder is not None and form is traces.placeholder[1]:
        form = traces.placeholder[0]
    _brainstate.hold(traces, form)


@_brainstate.seen_through(present, store_external)
class CarriedTraces(brainstate.ShortTermState):
    """The State of the traces, in one of their forms, and packed (see `_core/traces.py`).

    Traces are large, and are often discarded: by a reset, or at the end of the program. A sequence
    therefore leaves deferred traces, which the next reader computes.

    Attributes
    ----------
    zeros, pairs
        Return zero traces as arrays, and the traces that share an array.
    left
        Values of the hidden States after the last call, to which the traces belong.
    unfinished
        Writes the results of a program that has run; an interrupt may end a call before.
    is_owned
        Whether there is no other reference to the arrays, so their buffers can be donated.
    needs_arrays
        Whether the last trace that read them needed arrays.
    is_inside
        Whether the value belongs to a trace of brainstate.
    placeholder
        The form of an outer ``jit``, and the example that inner loops are traced with.
    """

    left: tuple[Any, ...] | None = None
    unfinished: Callable[[], None] | None = None
    is_owned = needs_arrays = is_inside = False
    placeholder: tuple[Form, Traces] | None = None

    def __init__(self, zeros: Callable[[], Traces], pairs: Callable[[], Pairs]) -> None:
        super().__init__(Zero())
        # If this State is created inside a map, the map adds an axis to every trace afterwards.
        self.needs_arrays = _brainstate.is_watched()
        self.zeros = zeros
        self.pairs: Callable[[], Pairs] = tuple if _brainstate.is_watched() else pairs

    def _check_value_tree(self, v: Any) -> None:
        """Accept every form, though brainstate compares structures."""

    def finish(self) -> None:
        """Write the results of a call; an interrupt leaves them to the next call."""
        if self.unfinished is not None:
            self.unfinished()
            self.__dict__["unfinished"] = None

    def complete(self, write: Callable[[], None], is_outside: bool) -> None:
        """Write the results of a call, outside of transformations as a whole or not at all."""
        if not is_outside:
            return write()
        self.__dict__["unfinished"] = write
        write()
        self.__dict__["unfinished"] = None

    def begin(self, followed: Mapping[Path, brainstate.State]) -> None:
        """Finish an interrupted call, and refuse hidden States that other code has written since.

        Raises
        ------
        LostTracesError
            If there is one.
        """
        if self.unfinished is not None:
            self.finish()
        now = _brainstate.peek_all(followed.values())
        if self.left is not None and not all(map(operator.is_, now, self.left)):
            pairs = zip(followed, now, self.left, strict=True)
            path = next(path for path, one, own in pairs if one is not own)
            raise LostTracesError(
                f"State '{path_name(path)}' was written since the learner's last call, and the "
                "traces belong to its previous value. Call `learner.reset_state()`, and write "
                "initial values after it; within a sequence, write States in `update`."
            )

    def advance(
        self,
        followed: Iterable[brainstate.State],
        states: Iterable[brainstate.State],
        values: Iterable[Any],
        after: Form | None,
        is_outside: bool,
    ) -> None:
        """Write values of States, and traces; ``None``: they stay.

        Raises
        ------
        OptionError
            Inside a transformation of JAX (not of brainstate).
        """
        try:
            _brainstate.set_values(states, values, is_outside)
        except brainstate.TraceContextError as error:
            raise OptionError(RAW) from error
        if after is not None:
            self.store(after, is_outside)
        if is_outside:
            self.__dict__["left"] = _brainstate.peek_all(followed)

    def store(self, form: Form, is_outside: bool) -> None:
        """Store the traces after a call, or after a reset."""
        if is_outside:
            # Traces before a sequence that others hold too are not donated to compute those after.
            is_shared = isinstance(form, Deferred) and form.before is _brainstate.held(self)
            is_owned = self.is_owned or not is_shared
            _brainstate.hold(self, form)
            self.__dict__.update(left=None, is_owned=is_owned, is_inside=False)
        else:
            _VALUE.fset(self, settled(form, self.zeros) if _brainstate.is_in_loop() else form)

    def given(self, reads: str = "arrays", is_outside: bool | None = None) -> Any:
        """Return the traces that a program reads; see the attribute of `Program`.

        Outside of transformations, deferred traces are kept when they are computed.
        """
        if reads == "nothing":
            return None
        if is_outside is None:
            is_outside = not _brainstate.is_watched()
        form: Form = _brainstate.held(self) if is_outside else _VALUE.fget(self)
        if is_outside and isinstance(form, Deferred):
            form = form.compute(form.done, self.is_owned)
            _brainstate.hold(self, form)
        is_none = reads == "zero" and isinstance(form, Zero)
        return None if is_none else settled(form, self.zeros)


class EligibilityTraces:
    """The traces of a learner, ``learner.traces``: ``value`` is a dict with stable string keys.

    The traces of D_RTRL for one state have a key such as ``"cell/w@mm0>cell/V"``: the parameter,
    the operation, the state. `Learner.eligibility` returns the traces of one parameter. Keys and
    arrays are the same on every backend, and do not depend on the packed form in which programs
    update traces in place.

    To restore saved traces, pass a state that has them to `FunctionalLearner.restore`.
    """

    def __init__(self, carried: CarriedTraces) -> None:
        self._carried = carried

    @property
    def value(self) -> Traces:
        """The traces, by key."""
        traces = self._carried.given()
        self._carried.is_owned = self._carried.is_owned and _brainstate.is_watched()
        return unpack(traces)


RAW = (
    "A learner is called inside a transformation of JAX, which does not carry States. Use one of "
    "`brainstate.transform`, or its pure functions:\n"
    "    pure = learner.functional()  # outside; start with state = pure.state()\n"
    "    state, output = pure.step(state, x)  # inside"
)

# --- the optimizer


MOST_RUNNING = 8
"""Maximum number of calls of one step whose results are not read yet."""


class LearnerOptimizer(brainstate.graph.Node):
    """State of the optimizer of a learner, and the number of updates that were skipped.

    Attributes
    ----------
    transformed
        State of a gradient transformation; ``None`` if there is none.
    begun
        The transformation that it belongs to, and its cache key.
    skipped
        Number of updates that were omitted because of non-finite numbers.
    calls
        Calls that may still run: skipped updates by step, their number so far, and the index of
        the first step.
    """

    def __init__(self) -> None:
        self.transformed = brainstate.LongTermState(None)
        self.begun: _brainstate.Hidden[tuple[Any, Any]] = _brainstate.Hidden((None, None))
        # From NumPy: `jnp.zeros` compiles a program.
        self.skipped = brainstate.LongTermState(jnp.asarray(np.zeros((), np.int32)))
        self.calls: _brainstate.Hidden[list[tuple[jax.Array, jax.Array, int]]]
        self.calls = _brainstate.Hidden([])

    def begin(self, optimizer: Any, parameters: Callable[[], PyTree], creates: bool = True) -> None:
        """Initialise an optimizer, with its current state or a new one.

        Parameters
        ----------
        optimizer, parameters
            The optimizer, and a function that returns the parameters, in the structure of their
            gradients.
        creates
            Whether its state may be created here, and not only be continued.

        Raises
        ------
        OptionError
            If there is another one, or if its state would be created inside a transformation.
        """
        held, (begun, _) = _brainstate.peek(self.transformed), self.begun.value
        if begun is optimizer and held is not None:
            return
        if held is None and (_brainstate.is_watched() or not creates):
            raise OptionError(
                "A transformation or a pure function cannot store the state of `optimizer`: call "
                "`learner.init_optimizer(optimizer)` before."
            )
        advice = "an optimizer that keeps its own States is passed as `update_fn=optimizer.update`"
        with in_words(lambda: f"`optimizer.init` was called for the parameters; {advice}"):
            start = optimizer.init(parameters())
        if held is None:
            self.transformed.value = strongly_typed(start)
        elif differences(held, start):
            raise OptionError(
                f"The learner holds the state of another optimizer ({type(begun).__name__}). To "
                "use this one, write `learner.optimizer_state = None` first."
            )
        self.begun = _brainstate.Hidden((optimizer, key_of(optimizer.update)))

    def notice(self, skips: jax.Array, start: int) -> None:
        """Warn of updates that a call has skipped; after single steps, at the latest the eighth."""
        if not _brainstate.is_watched():
            calls = self.calls.value
            calls.append((skips, _brainstate.peek(self.skipped), start))
            if len(skips) > 1 or len(calls) > MOST_RUNNING:
                self.notice_all()

    def notice_all(self) -> None:
        """Wait for all calls, and warn at the first skipped update, and then at powers of ten."""
        calls, self.calls.value = self.calls.value, []
        for found, total, start in calls:
            skips = on_host(found)
            count = int(on_host(total)) if skips.any() else 0
            if len(str(count)) > len(str(count - int(np.sum(skips)) or "")) and count:
                step = start + int(np.argmax(skips))
                warnings.warn(
                    f"A loss or gradient is NaN or infinite, first at step {step} of "
                    f"{'this' if len(skips) > 1 else 'a'} call. Updates skipped: {count}; the next "
                    "warning follows at the next power of ten. Samples with non-finite states or "
                    "traces were reset. If an input has gaps that are NaN, fill them "
                    "(`jnp.nan_to_num`). See `nonfinite` of `etrace_online`.",
                    NonFiniteWarning,
                    stacklevel=5,  # the line that calls `etrace_online`
                )
