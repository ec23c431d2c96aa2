"""Exceptions of the library.

All have one base class. Every subclass also inherits the fitting built-in exception, so ``except
ValueError`` also catches it.
"""

import importlib
import math
from types import ModuleType


class BraintraceError(Exception):
    """Base class of the library's errors."""


class CompilationError(BraintraceError, ValueError):
    """A model cannot be compiled for online learning."""


class NotCompiledError(BraintraceError, RuntimeError, AttributeError):
    """An algorithm was used before ``compile_graph``."""


class NotInitializedError(BraintraceError, AttributeError):
    """A module is used before its ``init_state`` has created its States."""


class ShapeError(BraintraceError, ValueError):
    """An array does not have the shape (time, batch, …) that the compiled model expects."""


class DtypeError(BraintraceError, TypeError):
    """A parameter, state or input has a dtype that cannot be used here."""


class UnitError(BraintraceError, ValueError):
    """The physical units of two quantities are incompatible."""


class PrimitiveError(BraintraceError, ValueError):
    """An ETP operation is registered or specified incorrectly, or not supported by a rule."""


class LostTracesError(BraintraceError, RuntimeError):
    """The traces are lost in a failed computation, or belong to other hidden states."""


class OptionError(BraintraceError, ValueError):
    """An option has a value that it does not accept."""


class MissingPackageError(BraintraceError, ModuleNotFoundError):
    """A feature needs a package that is not installed; the message says how to install it."""


class NonFiniteError(BraintraceError, FloatingPointError):
    """A loss or gradient is NaN or infinite, with ``nonfinite='raise'``.

    Attributes
    ----------
    step
        The step, counted from the start of the call.
    loss
        Loss of the step.
    steps
        Length of the block: the number of steps with one common gradient.
    """

    def __init__(self, step: int, loss: float, steps: int = 1, before: int = 0) -> None:
        self.step, self.loss, self.steps = step, loss, steps
        where = f"step {step}" if steps == 1 else f"step {step}, or in its block of {steps} steps,"
        what = "a gradient" if math.isfinite(loss) else "the loss"
        left = f"after {before} steps" if before else "from before the call"
        super().__init__(
            f"At {where} {what} is not finite; the loss is {loss}. The learner is in the state "
            f"{left}."
        )


class CheckpointError(BraintraceError, ValueError):
    """A checkpoint is damaged, has a later format, or belongs to a different learner."""


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """A folder contains no complete checkpoint."""


class NotPicklableError(BraintraceError, TypeError):
    """An object contains compiled programs, which cannot be pickled."""


class NonFiniteWarning(UserWarning):
    """Updates are skipped because a loss or gradient is NaN or infinite."""


def optional_import(name: str, extra: str) -> ModuleType:
    """Import a module of an optional package.

    Parameters
    ----------
    name
        Dotted name of the module, such as ``"matplotlib.figure"``.
    extra
        The extra of this distribution that installs the package.

    Raises
    ------
    MissingPackageError
        If the package is not installed. A broken installation raises its own error.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name != missing and not name.startswith(f"{missing}."):
            raise
        raise MissingPackageError(
            f"This needs `{missing}`, which is not installed. From the folder of the sources: "
            f'pip install -e ".[{extra}]"',
            name=missing,
        ) from error
