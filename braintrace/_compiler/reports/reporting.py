"""Which findings concern a rule, and how a user learns of them."""

import warnings
from collections.abc import Iterable, Mapping
from typing import get_args

from ..._errors import CompilationError
from ..._graph import FOLLOWS_ALL, ApproximationWarning, Boundary, Diagnostic, DiagnosticKind

_EVERY: frozenset[Boundary] = frozenset(get_args(Boundary))
_PAST = _EVERY - {"closed"}
_MARKED_ONLY = _PAST - FOLLOWS_ALL

REPORTED: Mapping[DiagnosticKind, frozenset[Boundary]] = {
    "plain-mixing": _MARKED_ONLY,
    "mixed-positions": _MARKED_ONLY,
    "recurrent-mixing": _MARKED_ONLY,
    "layer-to-layer": _MARKED_ONLY,
    "between-layers": frozenset({"layered"}),
    "not-a-linear-readout": _MARKED_ONLY,
    "plain-in-readout": _MARKED_ONLY,
    "nested-weights": _MARKED_ONLY,
    "also-untagged": _MARKED_ONLY,
    "partly-coupled": _MARKED_ONLY,
    "operand-not-parameters": _MARKED_ONLY,
    "inside-custom-rule": _MARKED_ONLY,
    "not-marked": _MARKED_ONLY,
    "no-hidden-state": _EVERY - FOLLOWS_ALL,
    "backward-not-linear": _PAST,
    "untraced-state": _PAST,
    "no-trace": _EVERY - FOLLOWS_ALL,
    "unused-parameter": _EVERY,
}
"""The boundaries (see `TraceMethod`) under which a finding is one.

A rule of the whole state goes through weights and mixing, and follows every parameter, marked
or not: nothing that is about either of these is left out of its gradient; of one that keeps
neighbours alone, the bytes of a report tell how many these are. One that is closed to the past
leaves all of it out, wherever it comes from.
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
