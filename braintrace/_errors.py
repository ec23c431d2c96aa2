"""The exceptions of the library.

One base class. Every subclass also inherits the built-in exception that fits, so that
``except ValueError`` keeps working for people who do not know this family.
"""


class BraintraceError(Exception):
    """Base class of every error that the library raises on purpose."""


class CompilationError(BraintraceError, ValueError):
    """A model cannot be compiled for online learning as it stands."""


class NotCompiledError(BraintraceError, RuntimeError):
    """An algorithm was used before ``compile_graph``, or its model was changed after it."""


class NotInitializedError(BraintraceError, AttributeError):
    """A module is used before its ``init_state`` has made its States."""


class ShapeError(BraintraceError, ValueError):
    """An array has another shape (time axis, batch axis, …) than the compiled model expects."""


class DtypeError(BraintraceError, TypeError):
    """A parameter, state or input has a dtype that cannot be used here."""


class UnitError(BraintraceError, ValueError):
    """Two quantities have units that do not fit together."""


class PrimitiveError(BraintraceError, ValueError):
    """An ETP primitive is registered or described wrongly."""


class LostTracesError(BraintraceError, RuntimeError):
    """The traces are lost in a failed computation, or belong to other hidden states."""


class OptionError(BraintraceError, ValueError):
    """An option has a value that is not one of those it accepts."""


class MissingPackageError(BraintraceError, ModuleNotFoundError):
    """A feature needs a package that is not installed; the message says how to install it."""


class NonFiniteError(BraintraceError, FloatingPointError):
    """A loss or a gradient of a stream is NaN or infinite, and ``nonfinite='raise'`` was given.

    Attributes
    ----------
    step
        The step, counted from the beginning of the call.
    loss
        Its loss.
    parameter
        Path of the first parameter whose gradient is not finite, as in ``"cell/w"``; ``None`` if
        all gradients are finite.
    steps
        How many steps have one gradient: the length of the block.
    """

    def __init__(
        self, step: int, loss: float, parameter: str | None, steps: int = 1, before: int = 0
    ) -> None:
        self.step, self.loss, self.parameter, self.steps = step, loss, parameter, steps
        where = f"step {step}" if steps == 1 else f"step {step}, or in its block of {steps} steps,"
        what = (
            "all gradients are finite"
            if parameter is None
            else f"the first parameter whose gradient is not finite is '{parameter}'"
        )
        left = f"is as {before} steps have left it" if before else "is as it was before the call"
        super().__init__(f"At {where} the loss is {loss}, and {what}. The learner {left}.")

    def counted_from(self, start: int) -> "NonFiniteError":
        """Return the same of a call that began so many steps before, and has kept those."""
        return NonFiniteError(start + self.step, self.loss, self.parameter, self.steps, start)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C has ended a call that was watched (``progress``, ``log_every``) between two steps.

    Attributes
    ----------
    step
        How many steps are done: the learner is where they have left it.
    results
        What the call returns of these steps; ``None`` if there are none.
    """

    def __init__(self, method: str, step: int, steps: int, results: object) -> None:
        self.step, self.results = step, results
        super().__init__(
            f"`{method}` was interrupted after {step} of {steps} steps. The learner is as these "
            f"have left it, and goes on with the rest of the sequences, `xs[{step}:]`."
        )


class CheckpointError(BraintraceError, ValueError):
    """What has been saved is damaged, of a later version, or that of another learner."""


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """Nothing has been saved in a folder to its end."""


class NotPicklableError(BraintraceError, TypeError):
    """An object holds compiled programs, which cannot be pickled."""


class RecompilationWarning(UserWarning):
    """Compiling takes more time than it should, because something changes from call to call."""
