"""All cases."""

from .case import Case
from .questions import saving, sequence, sparse_nets, stacks, streaming, training_loop, windows

MODULES = (sequence, stacks, windows, sparse_nets, streaming, training_loop, saving)
QUESTIONS = {module.__name__.rpartition(".")[-1]: module for module in MODULES}


def all_cases(platform: str) -> list[Case]:
    """Return the cases for a platform (cpu, gpu or tpu), question by question."""
    return [case for module in MODULES for case in module.cases(platform)]


def heading(question: str) -> tuple[str, str]:
    """Return the first line of a file's docstring, and the rest, which explains the method."""
    first, _, rest = (QUESTIONS[question].__doc__ or question).partition("\n")
    return first.removesuffix("."), rest.strip()
