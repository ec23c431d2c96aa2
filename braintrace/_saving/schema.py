"""Check plain data from a file against a description of what they may be."""

from typing import Any


def check(data: Any, schema: Any, name: str) -> Any:
    """Return plain data if they are as a schema describes them.

    Parameters
    ----------
    data
        What JSON returned.
    schema
        A type (``object`` for anything), a set of allowed values, a list of the schema of its
        items, or a dict: of ``{str: schema}`` for a mapping, otherwise of the schema of each key.
        A key that ends in ``?`` may be absent; other keys are ignored.
    name
        Of the data, for the error.

    Raises
    ------
    ValueError
        If they are anything else.
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
