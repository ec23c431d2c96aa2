"""Messages between devices, counted in programs that XLA has compiled."""

import collections
import re

KINDS = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
MESSAGE = re.compile(rf" ({'|'.join(KINDS)})(?:-start)?\(")
HEAD = re.compile(r"(?:ENTRY )?%?([\w.\-]+) .*\{$")
CALLED = re.compile(
    r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)"
)
BRANCHES = re.compile(r"branch_computations=\{(.*?)\}")


def messages(compiled):
    """Return how many messages of each kind a program has: outside of loops, and within."""
    lines = _computations(compiled.as_text())
    called = {name: set(_called(own)) for name, own in lines.items()}
    loops = {
        name
        for own in lines.values()
        for line in own
        if " while(" in line
        for name in CALLED.findall(line)
    }
    inside = _reached(loops, called)
    found = {"once": collections.Counter(), "by step": collections.Counter()}
    for name, own in lines.items():
        kinds = [match[1] for line in own if (match := MESSAGE.search(line))]
        found["by step" if name in inside else "once"].update(kinds)
    return {when: dict(counts) for when, counts in found.items()}


def _computations(text):
    found, current = {}, []
    for line in text.splitlines():
        head = HEAD.match(line)
        if head:
            current = found[head[1]] = []
        current.append(line)
    return found


def _called(lines):
    for line in lines:
        yield from CALLED.findall(line)
        for group in BRANCHES.findall(line):
            yield from (name.strip().lstrip("%") for name in group.split(","))


def _reached(names, called):
    found, pending = set(), list(names)
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += called.get(name, ())
    return found
