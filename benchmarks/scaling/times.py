"""The arithmetic: what a step takes a device, term by term. The package says what the terms are."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

ACTIVITY = 4
"""Bytes of what one unit tells the others of one sample."""

PARTS = ("activity", "parameters", "readout")
"""What is sent: activity, (gradients of) parameters with traces, and of those without."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a vendor publishes of a device and its links.

    Attributes
    ----------
    name
        Of the device.
    operations, memory, capacity
        Operations and bytes per second, and bytes of its memory.
    of_a_host
        Devices of a host.
    within, between
        Bytes per second that a device sends within a host, and to another one.
    latency_within, latency_between
        Seconds of a round of messages: assumed, and not published.
    sources
        Where the rates are from.
    """

    name: str
    operations: float
    memory: float
    capacity: float
    of_a_host: int
    within: float
    between: float
    latency_within: float
    latency_between: float
    sources: tuple[str, ...]


H100 = Rates(
    name="NVIDIA H100 SXM, eight in a host",
    operations=67e12,
    memory=3.35e12,
    capacity=80e9,
    of_a_host=8,
    within=450e9,
    between=50e9,
    latency_within=3e-6,
    latency_between=6e-6,
    sources=(
        "NVIDIA H100 Tensor Core GPU datasheet (H100 SXM): FP32 67 teraFLOPS; GPU memory 80 GB, "
        "3.35 TB/s; NVLink 900 GB/s, which is 450 GB/s in each direction",
        "NVIDIA DGX H100 datasheet: eight GPUs; eight single-port ConnectX-7 of 400 Gb/s, which "
        "is 50 GB/s for each GPU",
    ),
)


@dataclasses.dataclass(frozen=True)
class Terms:
    """Seconds of a step, and whether a device has the memory."""

    compute: float
    memory: float
    data: float
    model: float
    fits: bool

    @property
    def total(self) -> float:
        """All of a step."""
        return max(self.compute, self.memory) + self.data + self.model

    @property
    def binds(self) -> str:
        """Name of the largest term."""
        terms = {"compute": self.compute, "memory": self.memory}
        terms |= {"all-reduce over data": self.data, "gather over model": self.model}
        return max(terms, key=lambda name: terms[name])


def terms_of(
    plan: Mapping[str, Any], messages: Mapping[str, Any], whole: Mapping[str, Any], rates: Rates
) -> Terms:
    """Return what a step takes a device of a mesh.

    Parameters
    ----------
    plan
        What the device does: one of the plans that are stored.
    messages
        What is counted of messages, of such a network and rule.
    whole
        ``units`` of the network, and bytes of its ``parameters``, those of the ``readout`` among
        them, which have no traces.
    rates
        Of the device.
    """
    model, every = plan["model"], plan["every"]
    activity = ACTIVITY * whole["units"] * plan["samples"] * every
    near = max(1, rates.of_a_host // model)
    over_data = _sent(messages["data"], activity, plan["parameters"], whole["readout"], every)
    over_model = _sent(messages["model"], activity, whole["parameters"], whole["readout"], every)
    return Terms(
        compute=plan["flops"] / rates.operations,
        memory=bytes_moved(plan) / rates.memory,
        data=all_reduce(*over_data, plan["data"], near, rates) / every,
        model=all_gather(*over_model, model, rates.of_a_host, rates) / every,
        fits=plan["total"] <= rates.capacity,
    )


def _sent(
    messages: Mapping[str, Any], activity: float, parameters: float, readout: float, every: int
) -> tuple[float, float]:
    """Return the bytes and the number of the messages of an update."""
    parts = activity, parameters - readout, readout
    size = sum(messages[f"of {name}"] * part for name, part in zip(PARTS, parts, strict=True))
    return size, messages["by step"] * every + messages["by update"]


def bytes_moved(plan: Mapping[str, Any]) -> float:
    """Return the bytes that a device reads and writes in a step, at least."""
    every = plan["every"]
    once = (plan["arguments"] + plan["results"]) / every
    if every == 1:
        return once
    return once + 2 * plan["parameters"] + 2 * plan["records"] / every


def all_reduce(size: float, messages: float, devices: int, near: int, rates: Rates) -> float:
    """Return the seconds in which bytes are added up over devices, of which some share a host."""
    return 2 * all_gather(size, messages, devices, near, rates)


def all_gather(size: float, messages: float, devices: int, near: int, rates: Rates) -> float:
    """Return the seconds after which every device has so many bytes, a part from each."""
    local = min(devices, near)
    hosts = devices // local
    seconds = 0.0
    for count, bytes_, rate, latency in (
        (local, size, rates.within, rates.latency_within),
        (hosts, size / local, rates.between, rates.latency_between),
    ):
        rounds = math.ceil(math.log2(count))
        seconds += (count - 1) / count * bytes_ / rate + rounds * messages * latency
    return seconds
