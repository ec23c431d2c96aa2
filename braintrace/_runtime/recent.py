"""A dict of bounded size."""

import collections
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(collections.OrderedDict[Key, Value]):
    """The entries that were used last, up to a number of them.

    Parameters
    ----------
    most
        How many there are at most.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __getitem__(self, key: Key) -> Value:
        self.move_to_end(key)
        return super().__getitem__(key)

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        if len(self) > self.most:
            del self[next(iter(self))]
