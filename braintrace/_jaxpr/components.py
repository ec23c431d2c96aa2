"""Graph searches: reachable nodes, and strongly connected components."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)


def reached(starts: Iterable[Node], successors: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Return the nodes reachable from some start nodes, these included.

    Examples
    --------
    >>> from braintrace._jaxpr import reached
    >>> sorted(reached([3], lambda node: [node // 2]))
    [0, 1, 3]
    """
    nodes: set[Node] = set()
    pending = [*starts]
    while pending:
        node = pending.pop()
        if node not in nodes:
            nodes.add(node)
            pending.extend(successors(node))
    return nodes


def components(successors: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the strongly connected components, each after all reachable from it.

    This is Tarjan's algorithm, in time linear in the number of edges.

    Parameters
    ----------
    successors
        For each node, the ends of its outgoing edges.

    Examples
    --------
    >>> from braintrace._jaxpr import components
    >>> components([[1], [2], [1], [0, 3]])
    [[1, 2], [0], [3]]
    """
    result: list[list[int]] = []
    order: dict[int, int] = {}
    lowest: dict[int, int] = {}
    path: list[int] = []
    on_path: set[int] = set()
    pending: list[tuple[int, Iterator[int]]] = []

    def enter(node: int) -> None:
        order[node] = lowest[node] = len(order)
        path.append(node)
        on_path.add(node)
        pending.append((node, iter(successors[node])))

    for root in range(len(successors)):
        if root not in order:
            enter(root)
        while pending:
            node, rest = pending[-1]
            following = next(rest, None)
            if following is None:
                pending.pop()
                if pending:
                    before = pending[-1][0]
                    lowest[before] = min(lowest[before], lowest[node])
                if lowest[node] == order[node]:
                    component = [path.pop()]
                    while component[-1] != node:
                        component.append(path.pop())
                    on_path.difference_update(component)
                    result.append(sorted(component))
            elif following not in order:
                enter(following)
            elif following in on_path:
                lowest[node] = min(lowest[node], order[following])
    return result
