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
    """A marker primitive is registered or described wrongly."""


class LostTracesError(BraintraceError, RuntimeError):
    """The traces went into a computation that has failed."""


class OptionError(BraintraceError, ValueError):
    """An option has a value that is not one of those it accepts."""


class MissingPackageError(BraintraceError, ModuleNotFoundError):
    """A feature needs a package that is not installed; the message says how to install it."""


class RecompilationWarning(UserWarning):
    """Compiling takes more time than it should, because something changes from call to call."""
