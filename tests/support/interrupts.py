"""Signals that arrive at a chosen line of the library."""

import pathlib
import signal
import sys

import braintrace

LIBRARY = str(pathlib.Path(braintrace.__file__).parent)


class Interrupts:
    """Calls a function and raises a signal before the line of the library that has a number."""

    def __init__(self, number):
        self.number, self.lines = number, 0

    def __call__(self, function):
        sys.settrace(self._trace)
        try:
            function()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    def _trace(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.number:
                signal.raise_signal(signal.SIGINT)
        return self._trace
