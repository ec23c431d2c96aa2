"""The learner: one step, and whole sequences."""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Literal, Unpack, overload

import brainstate
import jax
from jax.typing import ArrayLike

from .._algorithms import ETraceAlgorithm
from .._arguments import check_option
from .._brainstate import ConstructorSignature
from .._executor import size_in_bytes
from .._graph import ETraceGraph, Report, report_of
from .._runtime import on_automatic_axes, one_thread_at_a_time
from .._typing import Path, PyTree
from .arguments import (
    ALGORITHM,
    GradientOptions,
    Gradients,
    Options,
    SequenceOptions,
    StreamOptions,
    chosen_among,
)
from .body import Request
from .compilations import Compilations
from .driver import prepared
from .evolve import evolving, predicting
from .functional import FunctionalLearner
from .gradient import differentiating
from .online import learning_online
from .restart import initial_values


class Learner(brainstate.nn.Module):
    """A model with its algorithm, made by `braintrace.compile`.

    ``Learner(algorithm)`` is that of an algorithm which you have made and compiled yourself. The
    drivers (`etrace_grad`, `etrace_online`, `etrace_evolve`, `predict`) are methods of it.

    Calling it runs one step and advances states and traces, like the algorithm itself. The
    methods run whole sequences, in which time is axis 0.

    A call moves parameters, states and traces on as a whole or not at all. A signal (Ctrl-C, an
    alarm) that arrives while they are written waits for that. What calls Python while it runs
    (``jax.pure_callback``, ``jax.debug.print``, checks) is waited for, and leaves the values from
    before if it fails. Threads take turns; others may read the States meanwhile.

    Parameters
    ----------
    algorithm
        A compiled algorithm.
    """

    __signature__ = ConstructorSignature()

    def __init__(self, algorithm: ETraceAlgorithm) -> None:
        super().__init__()
        check_option("algorithm", algorithm, ALGORITHM)
        self.algorithm = algorithm
        self._recorder: Callable[..., PyTree] | None = None
        self._drivers = Compilations(self)

    @property
    def drivers(self) -> Compilations:
        """What this learner has compiled; a clone compiles for itself."""
        if not self._drivers.is_of(self):
            self._drivers = Compilations(self)
        return self._drivers

    @property
    def lock(self) -> AbstractContextManager[bool]:
        """What a thread holds while it runs or traces the model."""
        lock: AbstractContextManager[bool] = self.algorithm.lock
        return lock

    @property
    def graph(self) -> ETraceGraph:
        """The compiled model; ``print`` it for a table."""
        return self.algorithm.graph

    @property
    def is_compiled(self) -> bool:
        """Whether the model has been compiled."""
        return self.algorithm.is_compiled

    def report(self) -> Report:
        """Return what learns online, how, and at what memory; ``print`` it for a table.

        It also has how calls so far have cut sequences into chunks, and what these record.
        """
        sequences = tuple(dict.fromkeys(self.drivers.sequences(self.graph)))
        report = report_of(self.graph)
        carried = size_in_bytes(self.algorithm.compiled.trace_specs) + report.filter_bytes
        return dataclasses.replace(report, carried_bytes=carried, sequences=sequences)

    @one_thread_at_a_time
    def eligibility(self, path: str | Path) -> dict[str, PyTree]:
        """Return the trace of one weight by hidden state; see `ETraceAlgorithm.eligibility`."""
        return self.algorithm.eligibility(path)

    @one_thread_at_a_time
    def update(self, *arguments: PyTree) -> PyTree:
        """Run one step; see `ETraceAlgorithm.update`."""
        if self._recorder is not None:
            return self._recorder(*arguments)
        return self.algorithm(*arguments)

    def record_with(self, recorder: Callable[..., PyTree] | None) -> None:
        """Let a recorder, or what refuses steps, stand in for the algorithm; None ends that."""
        self._recorder = recorder

    @one_thread_at_a_time
    def reset_state(
        self, batch_size: int | None = None, *, where: ArrayLike | None = None, **kwargs: PyTree
    ) -> None:
        """Start a new sequence, for all samples or for some of them.

        Also in the ``update_fn`` of `etrace_online`, and there too inside ``cond``. See
        `ETraceAlgorithm.reset_state`.
        """
        self.algorithm.reset_state(batch_size, where=where, **kwargs)

    @overload
    def etrace_grad(
        self,
        *sequences: PyTree,
        has_aux: Literal[False] = False,
        return_value: Literal[False] = False,
        **options: Unpack[GradientOptions],
    ) -> Gradients: ...
    @overload
    def etrace_grad(
        self,
        *sequences: PyTree,
        has_aux: Literal[False] = False,
        return_value: Literal[True],
        **options: Unpack[GradientOptions],
    ) -> tuple[Gradients, jax.Array]: ...
    @overload
    def etrace_grad(
        self,
        *sequences: PyTree,
        has_aux: Literal[True],
        return_value: Literal[False] = False,
        **options: Unpack[GradientOptions],
    ) -> tuple[Gradients, PyTree]: ...
    @overload
    def etrace_grad(
        self,
        *sequences: PyTree,
        has_aux: Literal[True],
        return_value: Literal[True],
        **options: Unpack[GradientOptions],
    ) -> tuple[Gradients, jax.Array, PyTree]: ...
    @overload
    def etrace_grad(
        self,
        *sequences: PyTree,
        has_aux: bool = ...,
        return_value: bool = ...,
        **options: Unpack[GradientOptions],
    ) -> PyTree: ...

    @one_thread_at_a_time
    @on_automatic_axes
    def etrace_grad(
        self,
        *sequences: PyTree,
        step_fn: Callable[..., PyTree],
        mask: ArrayLike | None = None,
        reduction: str = "mean",
        chunk_size: int | str = "auto",
        memory_budget: int | None = None,
        has_aux: bool = False,
        return_value: bool = False,
        unit_aware: bool = False,
        reset: ArrayLike | None = None,
        weights: Mapping[PyTree, brainstate.State] | None = None,
    ) -> PyTree:
        """Return the gradient of a loss over a sequence; states and traces move on.

        Parameters
        ----------
        *sequences
            Pytrees of arrays ``(T, …)``; ``step_fn`` gets the slices of one step.
        step_fn
            Calls this learner once and returns the scalar loss of the step (with ``has_aux``:
            a pair of it and a pytree). It is traced once for what it is: its code, the objects
            that this reads, and the numbers among them. What changes inside those objects (an
            entry of a list, an attribute that only their own methods read) is not seen: keep it
            in a State. States that it reads before the call, and States of its own, carry no
            gradient from one step to the next (nor, with ``vjp_method='multi-step'``, to the next
            window).
        mask
            Weights ``(T,)`` of the steps' losses; ``None``: all are 1. Where all are 0, the
            gradient is 0. A step of weight 0 leaves the gradient alone, whatever its inputs are:
            padding may be NaN, and so may the states and traces that it leaves behind.
        reduction
            ``'mean'``: the weighted mean over the steps. ``'sum'``: the weighted sum.
        chunk_size
            Number of steps that are run between two updates of the traces. It changes speed and
            memory, not the gradient (with ``vjp_method='multi-step'`` it is the length of the
            window that is differentiated). ``'auto'``: the shortest chunk that is expected to
            be among the fastest within ``memory_budget``; `report` says which. From zero traces a
            sequence is best run as one chunk, which needs no trace. (For a window: as many steps
            as record less than the traces, or the gradient, take, and from 64 to 128.)
        memory_budget
            For ``chunk_size='auto'``: how many bytes the steps of a chunk may record, at least one
            step and as many as the traces take. Beyond it memory does not grow with the
            sequence. ``None``: a tenth of the device's memory, and at most 1 GiB.
        has_aux
            Whether ``step_fn`` returns auxiliary results as well; they are stacked over time.
        return_value
            Return the losses of the steps as well, ``(T,)``: 0 where the mask is 0, and otherwise
            as ``step_fn`` returns them.
        unit_aware
            Give gradients the unit of the loss over that of the parameter, as
            ``brainstate.transform.grad`` does with this option; without it they are in the
            parameter's own container, and the loss must have no unit.
        reset
            Booleans ``(T,)``, or ``(T, batch)`` where the states' first axis is the batch:
            states and traces start anew before the steps where it is true, as for a sequence of
            its own. States get the values of ``init_state``; nothing that was NaN before is
            seen after it.
        weights
            Parameters whose gradients are wanted, some of ``model.states(brainstate.ParamState)``
            as a dict; ``None``: all. The traces of all move on.

        Returns
        -------
        gradients, or ``(gradients, losses)``, ``(gradients, aux)``, ``(gradients, losses, aux)``
            Gradients are a dict keyed like ``model.states(brainstate.ParamState)``, or like
            ``weights``. Those of a `from_function` model are a pytree like its ``params``.

        Raises
        ------
        ShapeError
            For sequences that are empty, differ in length or do not fit the states.
        DtypeError
            For sequences, a mask or flags that are nothing that JAX computes with.
        OptionError
            For an option value that is not accepted, or a ``step_fn`` that does not call the
            learner exactly once, writes a parameter or a hidden state, or returns no scalar.
        """
        options = Options(
            reduction=reduction,
            chunk_size=chunk_size,
            memory_budget=memory_budget,
            has_aux=has_aux,
            unit_aware=unit_aware,
            weights=chosen_among(self.algorithm.param_states, weights),
            return_value=return_value,
        )
        functions = {"step_fn": step_fn}
        return self._run(
            Request("etrace_grad", differentiating, sequences, options, functions, mask, reset)
        )

    @overload
    def etrace_online(
        self,
        *sequences: PyTree,
        has_aux: Literal[False] = False,
        **options: Unpack[StreamOptions],
    ) -> jax.Array: ...
    @overload
    def etrace_online(
        self, *sequences: PyTree, has_aux: Literal[True], **options: Unpack[StreamOptions]
    ) -> tuple[jax.Array, PyTree]: ...
    @overload
    def etrace_online(
        self, *sequences: PyTree, has_aux: bool = ..., **options: Unpack[StreamOptions]
    ) -> PyTree: ...

    @one_thread_at_a_time
    @on_automatic_axes
    def etrace_online(
        self,
        *sequences: PyTree,
        step_fn: Callable[..., PyTree],
        update_fn: Callable[..., PyTree],
        has_aux: bool = False,
        unit_aware: bool = False,
        reset: ArrayLike | None = None,
    ) -> PyTree:
        """Learn at every step of a stream: its gradient, an update, then the next step.

        A stream that arrives step by step is given step by step, as sequences of length 1. The
        traces are then updated in place, which a loop of your own around the learner cannot do.

        Parameters
        ----------
        *sequences
            Pytrees of arrays ``(T, …)``; ``step_fn`` gets the slices of one step.
        step_fn
            As for `etrace_grad`. It does not write parameters.
        update_fn
            Called after every step with the gradient of its loss, keyed like
            ``model.states(brainstate.ParamState)``, and with ``has_aux`` with the auxiliary
            results as well. It writes the parameters, and whatever States it keeps for that (an
            optimizer's ``update``); its result is not used. It is traced once, like ``step_fn``.
            Create the States that they use before the first call.
            `reset_state` in it, of all samples or with ``where`` of some, starts a new sequence
            with the next step, as ``reset`` does; it does not write hidden states or traces itself.
        has_aux
            Whether ``step_fn`` returns auxiliary results as well; they are stacked over time.
        unit_aware
            See `etrace_grad`.
        reset
            See `etrace_grad`.

        Returns
        -------
        losses, or ``(losses, aux)``
            The loss of every step, ``(T,)``, each before its update.

        Raises
        ------
        ShapeError
            For sequences that are empty, differ in length or do not fit the states.
        OptionError
            For a ``step_fn`` that does not call the learner exactly once, writes a parameter or a
            hidden state, or returns no scalar, for an ``update_fn`` that calls the learner or
            writes hidden states or traces, and with ``vjp_method='multi-step'``.

        Notes
        -----
        The traces hold what older parameters have done, as in every online learner that has a
        memory. What lies between a parameter and its trace (the function of `element_wise`, the
        factors of `lora_matmul`, a mask) is differentiated at the parameters of the step.

        Examples
        --------
        >>> import brainstate, braintrace, jax, jax.numpy as jnp
        >>> brainstate.random.seed(1)
        >>> model = braintrace.nn.LSTMCell(2, 1)
        >>> learner = braintrace.compile(model, "d_rtrl", jnp.ones((1, 2)), batch_size=1)
        >>> weights = model.states(brainstate.ParamState)
        >>> def descend(gradients):
        ...     for path, weight in weights.items():
        ...         step = jax.tree.map(lambda w, g: w - 0.1 * g, weight.value, gradients[path])
        ...         weight.value = step
        >>> xs, targets = jnp.ones((100, 1, 2)), 0.5 * jnp.ones((100, 1, 1))
        >>> losses = learner.etrace_online(
        ...     xs, targets, step_fn=lambda x, y: ((learner(x) - y) ** 2).mean(), update_fn=descend
        ... )
        >>> bool(losses[-1] < 0.1 * losses[0])
        True
        """
        options = Options(has_aux=has_aux, unit_aware=unit_aware)
        functions = {"step_fn": step_fn, "update_fn": update_fn}
        return self._run(
            Request("etrace_online", learning_online, sequences, options, functions, reset=reset)
        )

    @overload
    def etrace_evolve(
        self, *sequences: PyTree, return_outputs: Literal[False], **options: Unpack[SequenceOptions]
    ) -> None: ...
    @overload
    def etrace_evolve(
        self, *sequences: PyTree, return_outputs: bool = ..., **options: Unpack[SequenceOptions]
    ) -> PyTree: ...

    @one_thread_at_a_time
    @on_automatic_axes
    def etrace_evolve(
        self,
        *sequences: PyTree,
        chunk_size: int | str = "auto",
        memory_budget: int | None = None,
        reset: ArrayLike | None = None,
        return_outputs: bool = True,
    ) -> PyTree:
        """Advance states and traces over a sequence without a loss.

        Parameters
        ----------
        *sequences
            One sequence ``(T, …)`` per argument of ``update``.
        chunk_size, memory_budget, reset
            See `etrace_grad`.
        return_outputs
            Whether the outputs are returned; without, they are not kept.

        Returns
        -------
        pytree or None
            The outputs of the steps, stacked over time.

        Raises
        ------
        ShapeError
            For sequences that are empty, differ in length or do not fit the states.
        """
        options = Options(
            chunk_size=chunk_size, memory_budget=memory_budget, return_outputs=return_outputs
        )
        return self._run(Request("etrace_evolve", evolving, sequences, options, reset=reset))

    @one_thread_at_a_time
    @on_automatic_axes
    def predict(self, *sequences: PyTree, reset: ArrayLike | None = None) -> PyTree:
        """Run the model alone over a sequence: states move on, traces do not.

        Parameters
        ----------
        *sequences
            One sequence ``(T, …)`` per argument of ``update``.
        reset
            See `etrace_grad`.

        Returns
        -------
        pytree
            The outputs of the steps, stacked over time.

        Raises
        ------
        ShapeError
            For sequences that are empty, differ in length or do not fit the states.
        """
        return self._run(Request("predict", predicting, sequences, reset=reset))

    def functional(self, **own: PyTree) -> FunctionalLearner:
        """Return this learner as pure functions of its state.

        Parameters
        ----------
        **own
            What holds States of your own that ``step_fn`` and ``update_fn`` use, an optimizer for
            example: a State, a module, or a list or dict of them. The name begins their paths.
        """
        return FunctionalLearner(self, own)

    def _run(self, request: Request) -> PyTree:
        states = self.algorithm.states_of_model
        driver, arguments = prepared(
            self, request, states, lambda: initial_values(self.algorithm, states)
        )
        return driver(states, arguments, request.options)
