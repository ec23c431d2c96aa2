"""A mesh gives what one device gives, whatever kind its axes are, and with few messages."""

import os
import re
import subprocess
import sys

import places

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
        "XLA_FLAGS": " ".join(
            [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=4", *flags]
        ),
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
