"""Which findings concern a rule, and how a user learns of them."""

import warnings
from collections.abc import Iterable, Mapping
from typing import get_args

from .._errors import CompilationError
from .._graph import ApproximationWarning, Boundary, Diagnostic, DiagnosticKind

_EVERY: frozenset[Boundary] = frozenset(get_args(Boundary))
_PAST = _EVERY - {"closed"}
_MARKED_ONLY = _PAST - {"layered", "passed"}
_POSITIONS = _MARKED_ONLY - {"neighbours"}

REPORTED: Mapping[DiagnosticKind, frozenset[Boundary]] = {
    "plain-mixing": _POSITIONS,
    "mixed-positions": _MARKED_ONLY,
    "recurrent-mixing": _POSITIONS,
    "layer-to-layer": _MARKED_ONLY,
    "between-layers": frozenset({"layered"}),
    "not-a-linear-readout": _MARKED_ONLY,
    "weight-behind-weight": _MARKED_ONLY,
    "also-plain": _MARKED_ONLY,
    "partly-mixed": _MARKED_ONLY,
    "operand-not-parameters": _MARKED_ONLY,
    "inside-custom-rule": _MARKED_ONLY,
    "not-marked": _MARKED_ONLY,
    "no-hidden-state": _EVERY - {"layered", "passed"},
    "backward-not-linear": _PAST,
    "untraced-state": _PAST,
    "not-carried": _EVERY - {"layered", "passed"},
    "unused-parameter": _EVERY,
}
"""The boundaries (see `TraceMethod`) under which a finding is one.

A rule that passes weights on the way back passes mixing, too, and follows every parameter, marked
or not: nothing that is about either of these is left out of its gradient. One that keeps neighbours
follows mixing from state to state, as far as it keeps them: the bytes of a report tell how many
these are. One that is closed to the past leaves all of it out, wherever it comes from.
"""


def reported(findings: Iterable[Diagnostic], boundary: Boundary) -> tuple[Diagnostic, ...]:
    """Return the findings that concern a rule, each once: steps of a loop say the same."""
    return tuple(dict.fromkeys(f for f in findings if boundary in REPORTED[f.kind]))


def publish(diagnostics: Iterable[Diagnostic], strict: bool) -> None:
    """Warn of what costs accuracy, or refuse it."""
    costly = [diagnostic for diagnostic in diagnostics if diagnostic.level == "warning"]
    if strict and costly:
        listed = "".join(f"\n- {diagnostic}" for diagnostic in costly)
        raise CompilationError(f"Parts of the gradient cannot be carried by traces:{listed}")
    for diagnostic in costly:
        warnings.warn(str(diagnostic), ApproximationWarning, stacklevel=3)
