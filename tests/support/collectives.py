"""Messages between devices, read from programs that XLA has compiled."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

KINDS = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
MESSAGE = re.compile(rf" = (.*?) ({'|'.join(KINDS)})(?:-start)?\((.*)")
HEAD = re.compile(r"(?:ENTRY )?%?([\w.\-]+) .*\{$")
CALLED = re.compile(
    r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)"
)
BRANCHES = re.compile(r"branch_computations=\{(.*?)\}")
ARRAY = re.compile(r"(pred|[a-z]+(\d+))\[([\d,]*)\]")
GROUPS = re.compile(r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]*)\})")


@dataclasses.dataclass(frozen=True)
class Message:
    """A message that devices send one another.

    Attributes
    ----------
    kind
        One of `KINDS`.
    size
        Bytes of what each device has afterwards.
    devices
        How many take part; 0 where the program does not say.
    is_by_step
        Whether it is in a loop.
    """

    kind: str
    size: int
    devices: int
    is_by_step: bool


def messages(compiled: Any) -> dict[str, dict[str, int]]:
    """Return how many messages of each kind a program has: outside of loops, and within."""
    found: dict[str, dict[str, int]] = {}
    for when, is_by_step in (("once", False), ("by step", True)):
        kinds = (message.kind for message in sent(compiled) if message.is_by_step is is_by_step)
        found[when] = dict(collections.Counter(kinds))
    return found


def sent(compiled: Any) -> list[Message]:
    """Return the messages of a program, those in a loop once."""
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
    return [
        Message(match[2], _size(match[1]), _devices(match[3]), name in inside)
        for name, own in lines.items()
        for line in own
        if (match := MESSAGE.search(line))
    ]


def _size(shapes: str) -> int:
    """Return the bytes of an array, or of a tuple of them."""
    return sum(
        math.prod(map(int, filter(None, axes.split(",")))) * (int(bits) // 8 if bits else 1)
        for _, bits, axes in ARRAY.findall(shapes)
    )


def _devices(attributes: str) -> int:
    found = GROUPS.search(attributes)
    if found is None:
        return 0
    return int(found[1]) if found[1] else len(found[2].split(","))


def _computations(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        head = HEAD.match(line)
        if head:
            current = found[head[1]] = []
        current.append(line)
    return found


def _called(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield from CALLED.findall(line)
        for group in BRANCHES.findall(line):
            yield from (name.strip().lstrip("%") for name in group.split(","))


def _reached(names: Iterable[str], called: Mapping[str, Iterable[str]]) -> set[str]:
    found: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += called.get(name, ())
    return found
