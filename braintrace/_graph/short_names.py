"""Short forms of names for the columns of a table.

Some packages put all constructor arguments of a module into a State's path, which fills pages.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

LONGEST = 40
"""Longest name that a table shows in full."""
_WORTH = 8
"""Longest text in brackets that is kept."""

_BETWEEN_PARTS = re.compile(r"(?<![ /])/(?![ /])")


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return short forms of the names that are too long, all different.

    A form has the first part of the name, and as many of its last parts as make it unique.

    Examples
    --------
    >>> names = [f"net/layers/{i}/a_module_with_a_long_name/cell(dt=0.1, tau=10)/V" for i in (0, 1)]
    >>> sorted(short_names(["h", *names]).values())
    ['net/…/0/a_module_with_a_long_name/cell(…)/V', 'net/…/1/a_module_with_a_long_name/cell(…)/V']
    """
    every = list(dict.fromkeys(names))
    forms = {name: list(_forms(name)) for name in every if _is_long(name)}
    taken = set(every) - forms.keys()
    short: dict[str, str] = {}
    for name, name_forms in forms.items():
        foreign = {form for other in forms if other != name for form in forms[other]}
        numbered = (f"{name_forms[-1]} [{n}]" for n in range(1, len(every) + 2))
        free = (form for form in name_forms if form not in foreign | taken)
        short[name] = next(free, None) or next(f for f in numbered if f not in foreign | taken)
        taken.add(short[name])
    return short


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Return forms of long names without constructor arguments, for a sentence.

    Examples
    --------
    >>> list(plain_names(["h", "net/a_synapse(tau=Constant(value=8.0), size=4)/g"]).values())
    ['net/a_synapse(…)/g']
    """
    return {name: _without_brackets(name) for name in names if _is_long(name)}


def shortened(text: str, short: Mapping[str, str]) -> str:
    """Return a text with the short forms of names in it."""
    for name in sorted(short, key=len, reverse=True):
        text = text.replace(name, short[name])
    return text


def _is_long(name: str) -> bool:
    return len(name) > LONGEST or "\n" in name


def _forms(name: str) -> Iterator[str]:
    """Yield forms of a name, shortest first, with at least two of its last parts."""
    parts = _BETWEEN_PARTS.split(_without_brackets(name))
    for first in range(len(parts) - 2, 1, -1):
        yield "/".join([parts[0], "…", *parts[first:]])
    yield "/".join(parts)


def _without_brackets(name: str) -> str:
    """Leave out the text in brackets, unless it is short."""
    outside, inside, depth = "", "", 0
    for character in name:
        depth -= character in ")]}" and depth > 0
        if depth:
            inside += character
        else:
            outside += ("…" if len(inside) > _WORTH else inside) + character
            inside = ""
        depth += character in "([{"
    return " ".join((outside + inside).split())
