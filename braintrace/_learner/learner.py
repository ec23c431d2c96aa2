"""Learner: a model, its compiled graph, its traces, and methods for steps and sequences."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from .._brainstate import is_watched
from .._checks import in_words, path_name
from .._compiler import publish
from .._core.traces import size_in_bytes
from .._errors import NotPicklableError, ShapeError
from .._graph.graph import report_of
from .._graph.report import Diagnostic, Report
from .._jax import strongly_typed
from .._model import values_by_path, write_by_path
from .._rules.eligibility import eligibility_of
from .._tables import in_bytes
from .._typing import Path, PyTree
from . import calls
from .arguments import check_flags, first_step
from .base import BaseLearner
from .functional import FunctionalLearner
from .user_step import INTERCEPTORS

if TYPE_CHECKING:
    from ..streams import LiveStream


class Learner(BaseLearner):
    """Base class of the online learners: a model, its compiled graph, and its traces.

    Create a learner by `braintrace.compile`, or by a subclass such as `D_RTRL` and `compile_graph`.

    A call runs one step and advances states and traces. You can call a learner inside your own
    ``brainstate.transform.grad``, ``jit``, ``for_loop`` or ``scan``; one ``grad`` around several
    calls computes the sum of the gradients of the calls. The methods `etrace_grad`,
    `etrace_online`, `etrace_evolve` and `predict` run whole sequences, in which time is axis 0.

    A call that Ctrl-C ends has updated parameters, states and traces, or none of them. Use a
    learner in one thread. In other threads, and inside transformations of JAX, use the pure
    functions of `functional`.

    Parameters
    ----------
    model
        A brainstate module with initialised states. Its ``update`` is one time step.
    window
        Number of steps of a window. The gradient is backpropagation through time within each
        window, and the traces contain the time before it; see `etrace_grad`. A call of the learner
        in your own ``grad`` is a window of one step, or of all steps of a `MultiStepData`. Traces
        then follow every hidden state. ``None``: the rule itself.
    strict
        Raise a `CompilationError` if a part of the gradient is truncated, instead of warning.
    mark
        ``None``, ``'explicit'``, ``'auto'`` or a filter of parameters; see `compile_etrace_graph`.
    trace_dtype
        Floating-point dtype in which traces are stored between chunks or single steps;
        ``jnp.bfloat16`` halves their memory. ``None``: the model's dtype, which is also used to
        compute with them. In half precision, a step copies the traces of coupled states.

    Raises
    ------
    OptionError
        For an option value that is not accepted.

    Examples
    --------
    >>> import braintrace, jax.numpy as jnp
    >>> model, x = braintrace.nn.IndRNN(2, 3), jnp.ones((1, 2))
    >>> learner = braintrace.compile(model, "d_rtrl", x, batch_size=1)
    >>> learner(x).shape, learner.predict(jnp.ones((5, 1, 2))).shape
    ((1, 3), (5, 1, 3))
    """

    def __repr__(self) -> str:
        size = "not compiled"
        if self.steps.value:
            size = f"{size_in_bytes(self.compiled.trace_specs):,} bytes of traces"
        return f"{type(self).__name__}({type(self.module).__name__}, {size})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotPicklableError(
            "A learner has compiled programs: use `braintrace.save(folder, learner)`, and "
            "`braintrace.restore` into a learner that is built in the same way."
        )

    etrace_grad = calls.etrace_grad
    etrace_online = calls.etrace_online
    etrace_evolve = calls.etrace_evolve
    predict = calls.predict

    def compile_graph(self, *arguments: Any, batch_size: int | None = None) -> None:
        """Analyse the model and allocate zero traces.

        Values that ``update`` reads from anything but its arguments and States (attributes of a
        module, ``brainstate.environ``) are fixed now, as with ``jax.jit``.

        Parameters
        ----------
        *arguments
            Example arguments of ``update`` (also as `SingleStepData` or `MultiStepData`).
        batch_size
            For a model written for one sample: size of the batch axis over which the model is
            mapped. This axis is the first axis of the arguments and states.

        Raises
        ------
        CompilationError, DtypeError
            See `compile_etrace_graph`.
        PrimitiveError
            If the rule does not support one of the model's operations.
        """
        self.compile_first(first_step(arguments), batch_size)
        publish(learned_starts(self), self.compiler_options.strict)

    def update(self, *arguments: Any) -> Any:
        """Run one step (or the steps of a `MultiStepData`) and advance the traces.

        Returns
        -------
        pytree
            Output of the model's ``update``, stacked over time for `MultiStepData`.

        Raises
        ------
        NotCompiledError, ShapeError
            Before `compile_graph`, or for inputs or states of a different shape.
        """
        interceptor = INTERCEPTORS.get().get(id(self))
        if interceptor is not None:
            return interceptor(*arguments)
        return calls.advance(self, *calls.find_call(self, arguments))[0]

    def reset_state(self, batch_size: int | None = None, *, where: Any = None) -> None:
        """Start a new sequence: reset states to their initial values, and traces to zero.

        You can call it in your own loop (also inside ``brainstate.transform.jit``, ``for_loop`` and
        ``cond``), and between calls of a learner.

        Parameters
        ----------
        batch_size
            Argument of the model's ``init_state``; ``None``: the size that the learner has. A new
            size compiles the model again.
        where
            Booleans ``(batch,)``: the samples that are reset. Other samples continue. States
            without a batch axis continue unless all flags are set. ``None``: all samples.

        Raises
        ------
        ShapeError
            If ``batch_size`` is ``None`` and ``init_state`` returns other shapes than the model was
            compiled for, or if the shape of ``where`` does not fit them.
        OptionError
            If samples that share an input are reset separately (`ES_D_RTRL`).
        """
        carried, is_outside = self.carried, not is_watched()
        if is_outside:
            carried.finish()
        if where is not None or not is_outside:  # traces of other keys cannot be made inside
            self.current_states()
        if where is not None:
            return self._reset_some(where)
        if self.compiler_options.samples is not None and batch_size is not None:
            self.compiler_options = dataclasses.replace(self.compiler_options, samples=batch_size)
        with in_words(lambda: f"`reset_state` runs `init_state` of `{type(self.module).__name__}`"):
            values = self.initial(self.size_of_init() if batch_size is None else batch_size)
        step = self.step_at(values, batch_size)

        def write() -> None:
            if is_outside:
                for state in self.states_of_model.values():
                    state.stack_level = 0  # a transformation of the user may have created it
            write_by_path(self.states_of_model, values)
            self.use(step)
            self.begin_sequence()

        carried.complete(write, is_outside)
        self.place()

    def _reset_some(self, where: Any) -> None:
        states, carried, is_outside = self.short_term_states, self.carried, not is_watched()
        flags = check_flags("where", where, self.graph.batch)
        values = self.reset_values(values_by_path(states), self.initial_values(), flags)
        traces = carried.given("zero", is_outside)
        after = None if traces is None else self.compiled.reset(traces, flags)
        changes = [states[path] for path in values], values.values(), after, is_outside
        carried.complete(lambda: carried.advance(self.followed.values(), *changes), is_outside)
        self.place()

    def eligibility(self, path: str | Path) -> dict[str, PyTree]:
        """Return the trace of one weight, by the name of the hidden state.

        Entry ``[b, i, j]`` of the trace of a matrix is a derivative with respect to entry ``[i,
        j]`` of the matrix. It is the derivative of the current state in sample ``b``, at the
        element that this entry reaches, in the approximation of the rule. If several operations use
        the weight, it is their sum.

        Parameters
        ----------
        path
            Path of the parameter, as in ``model.states()``, or its name: ``("cell", "w")`` or
            ``"cell/w"``.

        Returns
        -------
        dict
            Arrays ``(batch, *weight shape)``, for the states with traces; ``weight shape`` without
            a batch. If the parameter's value is a dict (weight and bias of a layer), a dict of
            arrays. Several leading axes of an operation's input are one axis. A kernel of `conv`
            has a trace at every output position, ``(batch, *positions, groups, inputs of a group,
            features of a group)``. The factors of `lora_matmul` have the trace of their product. If
            one output of an operation reaches several elements of a state, these are the first
            axis. `RTRL` has ``(batch, *shape of the state's sample, *weight shape)``, for every
            weight. If the model computes an operand from the parameter (a mask, a transpose), the
            result is the trace of the operand. After a reset, all traces are zero.

        Raises
        ------
        OptionError
            If no such weight exists, or the rule has no array of that form for it.
        ShapeError
            If several operations use the weight, and their traces have different forms.

        Examples
        --------
        >>> import braintrace, jax.numpy as jnp
        >>> x = jnp.ones((5, 2))
        >>> model = braintrace.nn.IndRNN(2, 3)
        >>> learner = braintrace.compile(model, "d_rtrl", x, batch_size=5)
        >>> output = learner(x)
        >>> learner.eligibility("u")["h"].shape
        (5, 3)
        >>> {name: trace.shape for name, trace in learner.eligibility(("W", "weight"))["h"].items()}
        {'bias': (5, 3), 'weight': (5, 2, 3)}
        """
        compiled = self.compiled
        return eligibility_of(compiled.graph, compiled.trace_specs, self.traces.value, path)

    def functional(self, **own: PyTree) -> FunctionalLearner:
        """Return this learner as pure functions of its state.

        Parameters
        ----------
        **own
            Holders of your own States that ``step_fn`` and ``update_fn`` use, such as an optimizer:
            a State, a module, or a list or dict of them. The name is the prefix of their paths.
        """
        return FunctionalLearner(self, own)

    def live(
        self,
        step_fn: Callable[..., PyTree],
        optimizer: Any = None,
        *,
        pending: int = 1,
        **options: Any,
    ) -> LiveStream:
        """Return a live stream: forecasts of single samples now, their labels later or never.

        ``predict`` runs one step and returns the output; ``learn`` learns the label of a sample
        and returns its loss. A label that arrives before the next forecast has the update of
        `etrace_online`. The gradient of a later one is taken at the current parameters, with the
        states and traces that its sample had; labels may arrive in any order.

        This learner does not change: ``learner.functional().restore(stream.state)`` stores what the
        stream has learned, before `save` for example. Samples that wait are not a part of it.

        Parameters
        ----------
        step_fn, optimizer
            As for `etrace_online`. ``step_fn`` receives the inputs, then the label.
        pending
            Maximum number of samples that wait for a label; each keeps a copy of states and traces.
            A further forecast drops the oldest one. Use 1 if labels arrive before the next
            forecast, and ``d + 1`` if they arrive ``d`` samples late.
        **options
            ``update_fn``, ``nonfinite`` and ``has_aux``, as for `etrace_online`.

        Examples
        --------
        >>> import braintrace, jax.numpy as jnp, optax
        >>> model = braintrace.nn.IndRNN(2, 1)
        >>> learner = braintrace.compile(model, "d_rtrl", jnp.ones((1, 2)), batch_size=1)
        >>> stream = learner.live(
        ...     lambda x, y: ((learner(x) - y) ** 2).mean(), optax.sgd(0.1), pending=2
        ... )
        >>> outputs = [stream.predict(jnp.ones((1, 2)), id=name) for name in ("a", "b")]
        >>> loss = stream.learn(jnp.ones((1, 1)), id="b")
        >>> stream.waiting
        ('a',)
        """
        from ..streams import LiveStream  # imported at the first use

        if optimizer is not None:
            self.init_optimizer(optimizer)
        options["optimizer"] = optimizer
        return LiveStream(self.functional(), step_fn, pending, options)

    def report(self) -> Report:
        """Report how each parameter learns, and the memory; ``print`` shows a table.

        It also contains the chunks of all calls so far, and the bytes of their residuals.
        """
        report, placement = report_of(self.graph), self.compiled.placement
        return dataclasses.replace(
            report,
            mesh=None if placement is None else str(placement.data),
            carried_bytes=size_in_bytes(self.compiled.trace_specs) + report.filter_bytes,
            sequences=tuple(dict.fromkeys(calls.rows_of(self))),
            skipped_updates=self.skipped_updates,
        )

    def plot(self, ax: Any = None) -> Any:
        """Draw the compiled model with Matplotlib, and return the axes.

        Hidden states are drawn in the frames of their groups. A weight is an arrow from the values
        that it reads to the states that it drives, labelled with its name and the size of its
        traces. Red paths are truncated: thick with an `ApproximationWarning`, thin if the learning
        rule truncates them.

        Parameters
        ----------
        ax
            Axes to draw in; ``None``: new axes in a figure that fits the model.

        Raises
        ------
        MissingPackageError
            Without Matplotlib.

        Examples
        --------
        >>> import braintrace, jax.numpy as jnp, matplotlib
        >>> matplotlib.use("agg")
        >>> model = braintrace.nn.LSTMCell(2, 3)
        >>> learner = braintrace.compile(model, "d_rtrl", jnp.ones((1, 2)), batch_size=1)
        >>> learner.plot().get_title()
        'D_RTRL, 288 B of traces'
        """
        from .._picture import draw_model  # imported at the first use

        carried = in_bytes(size_in_bytes(self.compiled.trace_specs))
        return draw_model(self.graph, f"{type(self).__name__}, {carried} of traces", ax)

    @property
    def optimizer_state(self) -> PyTree:
        """The state of the ``optimizer`` of `etrace_online`; ``None`` before its first call.

        It is the state of an `optax.GradientTransformation`. Write ``None`` to reset it, possibly
        for another optimizer, or a pytree with the structure of the current state.
        """
        return self.held_optimizer.transformed.value

    @optimizer_state.setter
    def optimizer_state(self, value: PyTree) -> None:
        self.held_optimizer.transformed.value = strongly_typed(value)

    def init_optimizer(self, optimizer: Any) -> None:
        """Initialise an optimizer's state where `etrace_online` cannot do it.

        Call it before a transformation, or before you use functions of a `LearnerState`. An
        existing or restored state continues.

        Raises
        ------
        OptionError, ShapeError
            If it is not an optimizer, or the learner has the state of another optimizer.
        """
        self.held_optimizer.begin(optimizer, self.parameters_for_optimizer)
        self.place()

    @property
    def skipped_updates(self) -> int:
        """Number of updates that were skipped; see ``nonfinite`` of `etrace_online`."""
        self.held_optimizer.notice_all()
        return int(self.held_optimizer.skipped.value)


def learned_starts(learner: Learner) -> list[Diagnostic]:
    """Return a warning for each parameter that only ``init_state`` reads: it has no gradient."""
    used = {leaf.path for leaf in learner.graph.traced.parameters}
    unused = {path: state for path, state in learner.param_states.items() if path not in used}
    read: set[int] = set()
    if unused:
        with contextlib.suppress(ShapeError):  # `init_state` makes other shapes than States have
            read = set(map(id, learner.initialiser(learner.size_of_init()).read))
    message = (
        "Parameter '{0}' is read by `init_state` alone, and an online rule has no trace for "
        "initial values: its gradient is zero."
    )
    names = [path_name(path) for path, state in unused.items() if id(state) in read]
    return [Diagnostic("warning", "no-trace", message.format(n), (n,)) for n in names]


ETraceAlgorithm: TypeAlias = Learner
