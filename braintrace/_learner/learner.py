"""The learner: one step, what it holds, and the methods that run whole sequences."""

import dataclasses
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import brainstate
from jax.typing import ArrayLike

from .._algorithms import ETraceAlgorithm
from .._arguments import check_option
from .._brainstate import ConstructorSignature
from .._errors import NotPicklableError
from .._executor import size_in_bytes
from .._graph import ETraceGraph, Report, report_of
from .._runtime import on_automatic_axes, one_thread_at_a_time
from .._sharding import Division
from .._typing import Path, PyTree
from . import ahead_of_time, export, sequences
from .arguments import ALGORITHM
from .compilations import Compilations
from .functional import FunctionalLearner
from .interceptor import interceptor_of
from .optimizer import HeldOptimizer
from .parts import LearnerParts


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
        self.held_optimizer = HeldOptimizer()
        self._drivers: Compilations[Any] = Compilations(self)

    def __copy__(self) -> "Learner":
        twin: Learner = object.__new__(type(self))
        twin.__dict__.update(vars(self))
        return twin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotPicklableError(
            "A learner holds compiled programs and cannot be pickled: use `braintrace.save(folder, "
            "learner)`, and `braintrace.restore` into a learner that is built in the same way."
        )

    etrace_grad = sequences.etrace_grad
    etrace_online = sequences.etrace_online
    etrace_evolve = sequences.etrace_evolve
    predict = sequences.predict
    lower = ahead_of_time.lower
    export_step = export.export_step

    @one_thread_at_a_time
    def update(self, *arguments: PyTree) -> PyTree:
        """Run one step; see `ETraceAlgorithm.update`."""
        interceptor = interceptor_of(self.algorithm)
        return (interceptor or self.algorithm)(*arguments)

    @one_thread_at_a_time
    def reset_state(
        self, batch_size: int | None = None, *, where: ArrayLike | None = None, **kwargs: PyTree
    ) -> None:
        """Start a new sequence, for all samples or for some of them.

        Also in the ``update_fn`` of `etrace_online`, and there too inside ``cond``. See
        `ETraceAlgorithm.reset_state`.
        """
        self.algorithm.reset_state(batch_size, where=where, **kwargs)

    @one_thread_at_a_time
    def eligibility(self, path: str | Path) -> dict[str, PyTree]:
        """Return the trace of one weight, by the name of the hidden state that it is for.

        Entry ``[b, i, j]`` of the trace of a matrix is the derivative of what the state holds now,
        in sample ``b`` and at the position that entry ``[i, j]`` of the matrix reaches, with
        respect to that entry: what D_RTRL takes it for. If several operations use the weight, it
        is the sum over them.

        Parameters
        ----------
        path
            Path of the parameter, as in ``model.states()``, or its name: ``("cell", "w")`` or
            ``"cell/w"``.

        Returns
        -------
        dict
            Arrays ``(batch, *weight shape)``, for the states whose traces are carried; without a
            batch ``weight shape``. For a parameter whose value is a dict (weight and bias of a
            layer), a dict of them. Several leading axes of an operation's input count as one. A
            kernel of `conv` has a trace at every output position, ``(batch, *positions, groups,
            inputs of a group, features of a group)``; the factors of `lora_matmul` have that of
            their product. If one output of an operation reaches several positions of a state,
            these are an axis in front. `RTRL` has ``(batch, *shape of the state's sample, *weight
            shape)``, for every weight. If the model computes an operand from the parameter (a
            mask, a transpose), it is the trace of the operand. After a reset, all is zero.

        Raises
        ------
        OptionError
            If there is no such weight, or the rule has no array of that form for it.
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
        return self.algorithm.eligibility(path)

    def functional(self, **own: PyTree) -> FunctionalLearner:
        """Return this learner as pure functions of its state.

        Parameters
        ----------
        **own
            What holds States of your own that ``step_fn`` and ``update_fn`` use, an optimizer for
            example: a State, a module, or a list or dict of them. The name begins their paths.
        """
        return FunctionalLearner(self.parts, own)

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
        sequences = tuple(dict.fromkeys(self.parts.drivers.sequences(self.graph)))
        report = report_of(self.graph)
        carried = size_in_bytes(self.algorithm.compiled.trace_specs) + report.filter_bytes
        placement = self.algorithm.placement
        return dataclasses.replace(
            report,
            mesh=None if placement is None else str(placement.division),
            whole=() if placement is None else placement.layout.whole,
            carried_bytes=carried,
            sequences=sequences,
            skipped_updates=self.skipped_updates,
        )

    def plot(self, ax: Any = None) -> Any:
        """Draw the compiled model by Matplotlib, and return the axes.

        Hidden states stand in the frames of their groups. A weight is an arrow from what it reads
        to what it drives, with its name and the size of its traces on the way. Red is what no trace
        follows: thick with an `ApproximationWarning`, thin where the learning rule leaves it out.

        Parameters
        ----------
        ax
            Axes to draw in; ``None``: those of a new figure, which is as large as the model.

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
        'D_RTRL, 216 B of traces'
        """
        from .._pictures import draw_model  # when it is asked for

        return draw_model(self.algorithm, ax)

    @property
    def optimizer_state(self) -> PyTree:
        """The state of the ``optimizer`` of `etrace_online`; ``None`` before it has begun.

        What the functions of an `optax.GradientTransformation` hand on; of an optimizer with States
        of its own, their values by path. Write ``None`` to begin anew, perhaps with another
        optimizer, or a pytree like the one that is there.
        """
        return self.held_optimizer.value

    @optimizer_state.setter
    def optimizer_state(self, value: PyTree) -> None:
        self.held_optimizer.write(value)

    @one_thread_at_a_time
    @on_automatic_axes
    def init_optimizer(self, optimizer: Any) -> None:
        """Let an optimizer have its state, where `etrace_online` cannot make it by itself.

        That is inside a transformation, or a function of a `LearnerState`. A state that is there,
        or has been restored, goes on.

        Raises
        ------
        OptionError, ShapeError
            If it is no optimizer, or the learner holds the state of another one.
        """
        self.parts.init_optimizer(optimizer)

    @property
    def skipped_updates(self) -> int:
        """How many updates ``nonfinite='skip'`` has left out."""
        return int(self.held_optimizer.skipped.value)

    @one_thread_at_a_time
    def divide(self, division: Division) -> None:
        """Divide what the learner holds over the devices of a mesh; see `braintrace.shard`."""
        self.algorithm.divide(division)
        self.parts.place()

    @property
    def parts(self) -> LearnerParts:
        """The parts that the methods work on; a clone compiles its own programs."""
        if not self._drivers.is_of(self):
            self._drivers = Compilations(self)
        return LearnerParts(self.algorithm, self.held_optimizer, self._drivers)

    @property
    def lock(self) -> AbstractContextManager[bool]:
        """What a thread holds while it runs or traces the model."""
        lock: AbstractContextManager[bool] = self.algorithm.lock
        return lock
