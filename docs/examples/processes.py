"""Run a program in several processes of this machine, like a scheduler on many.

Each process gets the options ``--coordinator ADDRESS --processes N --process I`` after its
arguments, for ``jax.distributed.initialize``. If a process fails, the others are ended, because
they would wait forever.

    python docs/examples/processes.py 2 docs/examples/multi_host.py stream --devices 2
"""

import ctypes
import signal
import socket
import subprocess
import sys
import time

USAGE = "usage: processes.py NUMBER PROGRAM [OPTION ...]\nNUMBER is how many processes, from 1"


def free_port():
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def end_with_parent():
    """End a new process together with this one (Linux only)."""
    end_with_parent = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(end_with_parent, signal.SIGKILL)


def start(count, program):
    """Return the running processes of a program."""
    address = f"127.0.0.1:{free_port()}"
    together = ["--coordinator", address, "--processes", str(count)]
    before = end_with_parent if sys.platform == "linux" else None
    return [
        subprocess.Popen(
            [sys.executable, *program, *together, "--process", str(number)], preexec_fn=before
        )
        for number in range(count)
    ]


def wait(processes):
    """Wait until all have ended; return the error of the first that failed."""
    while any(process.poll() is None for process in processes):
        time.sleep(0.05)
        for number, process in enumerate(processes):
            if process.poll():
                return (
                    f"process {number} of {len(processes)} has ended with status "
                    f"{process.returncode}, and the others were ended. Its own messages are above. "
                    "Start the same command again, with any number of processes: a program that "
                    "saves goes on from there."
                )
    return None


def main(arguments):
    if len(arguments) < 2 or not arguments[0].isdecimal() or int(arguments[0]) < 1:
        return USAGE
    processes = start(int(arguments[0]), arguments[1:])
    try:
        return wait(processes)
    except KeyboardInterrupt:
        return "stopped"
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
