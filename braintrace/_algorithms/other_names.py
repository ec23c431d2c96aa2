"""Methods under the names of another package, for programs that were written for it."""

from typing import Any

import brainstate

from .._errors import OptionError
from .._typing import Path, path_name


def init_etrace_state(self: Any) -> None:
    """Do nothing: `compile_graph` has allocated the traces.

    Raises
    ------
    NotCompiledError
        Before `compile_graph`.
    """
    self.compiled_model  # noqa: B018 - raises


def get_etrace_of(self: Any, weight: brainstate.State | str | Path) -> dict[str, Any]:
    """Return the trace of one weight by hidden state; see `Learner.eligibility`.

    Parameters
    ----------
    weight
        The parameter, its path or its name.

    Raises
    ------
    OptionError, ShapeError
        If a State is not a parameter of the model, and as in `Learner.eligibility`.
    """
    if isinstance(weight, brainstate.State):
        weight = _path_of(self.param_states, weight)
    found: dict[str, Any] = self.eligibility(weight)
    return found


def _path_of(parameters: dict[Path, brainstate.State], weight: brainstate.State) -> Path:
    for path, state in parameters.items():
        if state is weight:
            return path
    known = ", ".join(f"'{path_name(path)}'" for path in parameters)
    raise OptionError(
        f"`weight` is a {type(weight).__name__} that is not a parameter of the model. Its "
        f"parameters are {known}."
    )
