"""Serialisation of physical units as plain data."""

from typing import Any

import saiunit

_BASES = ("length", "mass", "time", "current", "temperature", "substance", "luminosity")


def unit_as_data(unit: saiunit.Unit) -> dict[str, Any]:
    """Return a unit as plain data: exponents of the base units, its scale and factor, its name."""
    return {
        "dimensions": [float(unit.dim.get_dimension(base)) for base in _BASES],
        "scale": float(unit.scale),
        "factor": float(unit.factor),
        "name": str(unit),
    }


def unit_of_data(data: dict[str, Any]) -> saiunit.Unit:
    """Return the unit described by data; units are equal if all but their names agree."""
    dimension, name = saiunit.get_or_create_dimension(data["dimensions"]), data["name"]
    unit = saiunit.Unit(dim=dimension, scale=data["scale"], factor=data["factor"])
    if str(unit) == name:
        return unit
    return saiunit.Unit(
        dim=dimension, scale=data["scale"], factor=data["factor"], name=name, dispname=name
    )
