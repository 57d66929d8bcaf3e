"""The process of a command: ``spotlight``, or for torchrun, which starts modules, ``-m spotlight.cli``."""

from __future__ import annotations

import atexit
import os
import sys


def main() -> None:
    """Run the command, and end the process once its exit handlers have run."""
    status = 1  # of an exception that nobody catches

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()  # an error is left to Python, which says it and ends with status 120
        # Python would now free every object of every package, one by one: a quarter of a short run's time.
        os._exit(status)

    atexit.register(leave)  # first, so that it is the last to run
    try:
        from spotlight.cli.main import app
    except KeyboardInterrupt:
        status = 130  # as later, when the command catches it
        raise SystemExit(status) from None
    try:
        app(prog_name="spotlight")
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    except KeyboardInterrupt:
        atexit.unregister(leave)  # Python ends by the signal, which shells look for
        raise


if __name__ == "__main__":
    main()
