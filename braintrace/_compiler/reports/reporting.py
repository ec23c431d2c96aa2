"""Reporting: select the diagnostics that concern a rule, and warn or raise."""

import warnings
from collections.abc import Iterable, Mapping
from typing import get_args

from ..._errors import CompilationError
from ..._graph import FOLLOWS_ALL, ApproximationWarning, Diagnostic, DiagnosticKind, Jacobian

_EVERY: frozenset[Jacobian] = frozenset(get_args(Jacobian))
_PAST = _EVERY - {"none"}
_MARKED_ONLY = _PAST - FOLLOWS_ALL

REPORTED: Mapping[DiagnosticKind, frozenset[Jacobian]] = {
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
"""The Jacobians (see `TraceMethod`) for which a kind of diagnostic is reported.

A full-Jacobian rule follows every parameter, marked or not, also through coupling, so diagnostics
about marks or coupling do not apply to it. For a sparse rule, the bytes in the report show how many
entries it keeps. A rule without traces (``'none'``) leaves out every path from earlier steps."""


def reported(findings: Iterable[Diagnostic], jacobian: Jacobian) -> tuple[Diagnostic, ...]:
    """Return the diagnostics that concern a rule, each once (loop steps repeat them)."""
    return tuple(dict.fromkeys(f for f in findings if jacobian in REPORTED[f.kind]))


def publish(diagnostics: Iterable[Diagnostic], strict: bool) -> None:
    """Warn of diagnostics that cost accuracy, or raise an error if ``strict``."""
    costly = [diagnostic for diagnostic in diagnostics if diagnostic.level == "warning"]
    if strict and costly:
        listed = "".join(f"\n- {diagnostic}" for diagnostic in costly)
        raise CompilationError(f"Traces cannot carry parts of the gradient:{listed}")
    for diagnostic in costly:
        warnings.warn(str(diagnostic), ApproximationWarning, stacklevel=3)
