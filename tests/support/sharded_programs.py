"""Run test programs with eight simulated devices, each in a separate process."""

import json
import os
import subprocess
import sys

import places


def run(program, *arguments, flags=()):
    """Return the numbers by case that a program with eight devices prints."""
    environment = {
        **os.environ,
        "XLA_FLAGS": " ".join(
            [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8", *flags]
        ),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": places.SEARCHED,
    }
    command = [sys.executable, str(places.SUPPORT / program), *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    lines = run.stdout.splitlines()
    counts = [json.loads(line) for line in lines if line.startswith("{")]
    return dict(line.split() for line in lines if not line.startswith("{")), counts
