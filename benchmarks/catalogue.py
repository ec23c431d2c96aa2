"""All cases."""

from .case import Case
from .questions import (
    memory,
    saving,
    sequence,
    sparse_nets,
    stacks,
    streaming,
    training_loop,
    whole_state,
    windows,
)

QUESTIONS = {
    module.__name__.rpartition(".")[-1]: module
    for module in (
        sequence,
        stacks,
        windows,
        whole_state,
        sparse_nets,
        streaming,
        training_loop,
        saving,
        memory,
    )
}


def all_cases(platform: str) -> list[Case]:
    """Return the cases for a platform (cpu, gpu or tpu), question by question."""
    return [case for module in QUESTIONS.values() for case in module.cases(platform)]


def find(name: str, platform: str) -> Case:
    """Return a case by name."""
    return {case.name: case for case in all_cases(platform)}[name]


def heading(question: str) -> str:
    """Return the heading of a file: the first line of its docstring."""
    return (QUESTIONS[question].__doc__ or question).splitlines()[0].removesuffix(".")


def explanation(question: str) -> str:
    """Return the method of a file: the rest of its docstring."""
    return "\n".join((QUESTIONS[question].__doc__ or "").strip().splitlines()[2:])
