"""Schema checks for plain data read from a file."""

from typing import Any


def check(data: Any, schema: Any, name: str) -> Any:
    """Return plain data if they match a schema.

    Parameters
    ----------
    data
        The data, as read from JSON.
    schema
        A type (``object`` for anything), a set of allowed values, a list with the schema of its
        items, or a dict: ``{str: schema}`` for a mapping, otherwise the schema of each key. A key
        that ends in ``?`` is optional; additional keys are ignored.
    name
        Name of the data in the error.

    Raises
    ------
    ValueError
        If the data do not match.
    """
    if isinstance(schema, list) and type(data) is list:
        for index, item in enumerate(data):
            check(item, schema[0], f"{name}/{index}")
    elif isinstance(schema, dict) and type(data) is dict and str in schema:
        for key, item in data.items():
            check(item, schema[str], f"{name}/{key}")
    elif isinstance(schema, dict) and type(data) is dict:
        for key, of_key in schema.items():
            word = key.removesuffix("?")
            if word == key or word in data:
                if word not in data:
                    raise ValueError(f"`{name}` has no '{word}'")
                check(data[word], of_key, f"{name}/{word}")
    elif isinstance(schema, frozenset):
        if type(data) is not str or data not in schema:
            raise ValueError(f"`{name}` is not one of {', '.join(sorted(schema))}")
    elif schema is not object and type(data) is not schema:
        expected = schema.__name__ if isinstance(schema, type) else type(schema).__name__
        raise ValueError(f"`{name}` is a {type(data).__name__}; expected a {expected}")
    return data
