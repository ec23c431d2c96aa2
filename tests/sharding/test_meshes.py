"""A mesh gives what one device gives, whatever kind its axes are, and with few messages."""

import os
import re
import subprocess
import sys

import compilation
import places
import pytest
from rules import RULES

KINDS = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
COLLECTIVE = re.compile(rf" ({KINDS})\(")
FLAGS = re.compile(rf"= \((pred\[\],? ?)+\) ({KINDS})\(")
"""The check for non-finite values: one flag for each array that it looks at."""


ELSEWHERE = ("d_rtrl", "es_d_rtrl", "rflo", "ostl_feedforward")
"""Rules that the day meets, and those that refuse a recurrent network without feedback."""


def deviations_of(*flags, arguments=()):
    """{case: how far a mesh of four devices is from one device}."""
    path = places.SEARCHED
    environment = {
        **os.environ,
        "XLA_FLAGS": compilation.with_flags("--xla_force_host_platform_device_count=4", *flags),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": path,
    }
    program = [sys.executable, str(places.SUPPORT / "mesh_program.py"), *arguments]
    run = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return {case: float(value) for case, value in map(str.split, run.stdout.splitlines())}


def messages_of(folder, arguments=()):
    """How far a mesh is from one device, and the messages of each sequence, in order."""
    flags = [
        f"--xla_dump_to={folder}",
        "--xla_dump_hlo_as_text",
        "--xla_dump_hlo_module_re=jit__sequence",
    ]
    deviations = deviations_of(*flags, arguments=arguments)
    assert all(value < 1e-6 for value in deviations.values()), deviations
    programs = [file.read_text() for file in sorted(folder.glob("*after_optimizations.txt"))]
    found = [(len(COLLECTIVE.findall(text)), len(FLAGS.findall(text))) for text in programs]
    return deviations, [count - flags for count, flags in found], [flags for _, flags in found]


@pytest.mark.nightly
@pytest.mark.core
def test_a_mesh_gives_what_one_device_gives(tmp_path):
    """Also: a gradient of a divided batch is one message per chunk or step, not one per sample.

    A stream also tells all devices which samples are not finite.
    """
    deviations, counts, flags = messages_of(tmp_path)
    assert len(deviations) == 8
    assert len(counts) == 10
    # In the order of the cases, each after one device: chunks (those of the loop, and the last),
    # a stream, and chunks of a convolution.
    assert [counts[i] for i in (1, 4, 6)] == [2, 1, 2], counts
    assert [flags[i] for i in (1, 4, 6)] == [0, 1, 0], flags


@pytest.mark.nightly
def test_other_drivers_and_axes_give_what_one_device_gives(tmp_path):
    deviations, counts, _ = messages_of(tmp_path, ["night"])
    assert len(deviations) == 5
    assert len(counts) == 4
    assert counts[1] == 2, counts


@pytest.mark.nightly
@pytest.mark.parametrize("rule", [name for name in RULES if name not in ELSEWHERE])
def test_a_mesh_under_every_rule(rule):
    """Sequences, streams and steps of one's own, by both kinds of meshes."""
    deviations = deviations_of(arguments=[rule])
    assert len(deviations) == 12
    assert all(value < 1e-5 for value in deviations.values()), deviations
