"""Traces of a few steps by torch's profiler, for ``chrome://tracing`` or Perfetto."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile, record_function


def trace_file(folder: Path, kind: str) -> Path:
    return folder / f"{kind}.json.gz"


class StepProfiler:
    """Writes one trace of each kind of step into ``folder``, as ``KIND.json.gz``.

    The first step of a kind, in which kernels are compiled, is left out. A trace ends after ``steps``
    steps, or when one of another kind begins.

    Args:
        folder: None: a temporary one, which is there for ``taken`` alone.
        kinds: that are traced.
        note: is given a line about each trace.
        taken: is given the file of each trace.
    """

    def __init__(
        self,
        folder: Path | None,
        kinds: Collection[str],
        steps: int,
        note: Callable[[str], None],
        taken: Callable[[Path], None] = lambda path: None,
    ) -> None:
        self._folder, self._kinds, self._steps, self._note, self._taken = folder, kinds, steps, note, taken
        self._seen: dict[str, int] = {}
        self._active: tuple[str, profile] | None = None

    @contextmanager
    def step(self, kind: str) -> Iterator[None]:
        """One step of this kind, on the thread that makes them all."""
        if self._active is not None and self._active[0] != kind:
            self.close()
        before = self._seen.get(kind, 0)
        self._seen[kind] = before + 1
        if before == 1 and kind in self._kinds:
            self._start(kind)
        with record_function(f"{kind} step"):
            yield
        if before >= self._steps:  # later than at once where the last step failed
            self.close()

    def close(self) -> None:
        """End and write the trace that is being taken, if any."""
        if self._active is None:
            return
        (kind, taken), self._active = self._active, None
        with ExitStack() as stack:
            try:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                taken.stop()
                folder = self._folder or Path(
                    stack.enter_context(TemporaryDirectory(prefix="spotlight-trace-"))
                )
                folder.mkdir(parents=True, exist_ok=True)
                path = trace_file(folder, kind)
                taken.export_chrome_trace(str(path))
            except (OSError, RuntimeError) as error:
                self._note(f"the trace of {kind} steps cannot be written: {error}")
                return
            self._note(f"trace of {self._seen[kind] - 1} {kind} steps: {path}")
            self._taken(path)

    def _start(self, kind: str) -> None:
        kinds = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(ProfilerActivity.CUDA)
        taken = profile(activities=kinds)
        taken.start()
        self._active = kind, taken
