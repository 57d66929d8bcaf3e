"""The pool's side of one reward process: start, request with a deadline, kill, restart.

One thread at a time sends requests; only :meth:`RewardProcess.interrupt` may come from another. Every process
leads its own session, so killing it also kills its children, and Ctrl-C reaches the pool only. Every started
process is waited for: no zombies.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol

from spotlight_rewards.base.files import open_to_append
from spotlight_rewards.frames import FrameRule
from spotlight_rewards.pool import channel
from spotlight_rewards.pool.channel import Done, Failed, Load, Reply, Request, Values
from spotlight_rewards.reward import RewardContext, RewardSetupError, RewardTraits, same_scorer
from spotlight_rewards.reward_config import RewardConfig

_GRACE_S = 1.0
"""On top of the deadline: time to send the images, and for the process to report where it hangs."""

_LAST_WORDS_MAX_BYTES = 4096
_SCRATCH_MAX_BYTES = 1 << 20

# Pass sys.path on: the process imports what this one can, and (-P) nothing from the current directory.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from spotlight_rewards.pool.reward_worker import main; main(int(sys.argv[2]))"
)


class PoolClosedError(RuntimeError):
    """The reward pool was closed; unfinished work has no result."""


class ProcessLost(Exception):  # noqa: N818  (an event the scoring handles, not an error of its caller)
    """A reward process ended, or was killed, before it replied.

    Attributes:
        timed_out: it exceeded its deadline.
        preempted: its machine went with it, so the reward and its samples are not to blame.
    """

    def __init__(self, message: str, *, timed_out: bool, preempted: bool = False) -> None:
        super().__init__(message)
        self.timed_out, self.preempted = timed_out, preempted


class Scorer(Protocol):
    """A process of one reward, here or on another machine; see :class:`RewardProcess`."""

    scored_by: str | None
    traits: RewardTraits

    @property
    def pid(self) -> int | None:
        """Process id on this machine, or None."""

    @property
    def cores(self) -> int:
        """Cores that the reward's processes share where they run."""

    def log_to(self, path: Path) -> None:
        """Append its output to ``path``."""

    def start(self) -> None:
        """Start the process and load the reward, unless it runs."""

    def ask(self, request: Request, samples: Sequence[bytes] = ()) -> Done | Values | Failed:
        """Send a request and wait for its reply."""

    def interrupt(self) -> None:
        """Kill the process for good, from any thread."""

    def close(self) -> None:
        """Kill the process and wait for it."""


def setup_error(what: str, lost: ProcessLost) -> RewardSetupError:
    """The error of a start or check whose process was lost; names the remedy if it took too long."""
    remedy = (
        "\nRaise reward_policy.start_deadline_s; fetch models from the hub beforehand with `hf download`."
        if lost.timed_out
        else ""
    )
    return RewardSetupError(f"{what}: {lost}{remedy}")


class RewardProcess:
    """One process of one reward.

    Args:
        start_deadline_s: limit for starting it and loading the reward.
        replica, replicas: which of the reward's processes it is.
        environment: variables that differ from this process's, such as the GPUs it may see.
        run_directory: of the run that it is for; empty: of none.
    """

    def __init__(
        self,
        reward: RewardConfig,
        start_deadline_s: float,
        replica: int = 0,
        replicas: int = 1,
        environment: Mapping[str, str] | None = None,
        run_directory: str = "",
    ) -> None:
        self._reward, self._run_directory = reward, run_directory
        self._replica, self._replicas = replica, replicas
        self._environment = environment or {}
        self._start_deadline_s = start_deadline_s
        # Receives all output; quoted in error messages and copied to the path given to log_to().
        self._log: IO[bytes] = tempfile.TemporaryFile("a+b")  # noqa: SIM115
        self._kept: Path | None = None
        self._kept_bytes = 0
        flags = fcntl.fcntl(self._log, fcntl.F_GETFL)
        fcntl.fcntl(self._log, fcntl.F_SETFL, flags | os.O_APPEND)  # truncated while in use
        self._log_lock = threading.RLock()  # log_to() may be called during a request
        self._lock = threading.Lock()  # guards _process and _closed
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._closed = False
        self.scored_by: str | None = None
        """What the reward's function of that name returned; None before the first start."""
        self.traits = RewardTraits()
        """What the reward declares of itself; meaningless before the first start."""

    @property
    def pid(self) -> int | None:
        """Process id, or None while there is no process."""
        process = self._process
        return None if process is None else process.pid

    @property
    def cores(self) -> int:
        """This machine's, divided among the ranks of torchrun."""
        return (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def log_to(self, path: Path) -> None:
        """Append its output, past and future, to ``path``: after each request and on close."""
        self._kept = path
        self._keep_log()

    def take_output(self, max_bytes: int) -> bytes:
        """Instead of :meth:`log_to`: what it has printed since the last call."""
        with self._log_lock:
            printed = os.pread(self._log.fileno(), max_bytes, self._kept_bytes)
            self._kept_bytes += len(printed)
        return printed

    def start(self) -> None:
        """Start the process and load the reward; does nothing if it is running.

        Raises:
            RewardSetupError: the reward cannot be loaded, or something else than before would score.
            ProcessLost: it ended before it had loaded, though it did load before.
            PoolClosedError: :meth:`interrupt` was called.
        """
        if self._runs():
            return
        self._end()
        self._spawn()
        reward = self._reward
        frames = FrameRule(reward.frames, reward.combine_frames)
        load = Load(
            reward.name,
            dict(reward.params),
            frames,
            self._start_deadline_s,
            RewardContext(reward.deadline_s, self._run_directory),
            self._replica,
            self._replicas,
        )
        try:
            reply = self._exchange(load)
        except ProcessLost as lost:
            if self.scored_by is not None and not lost.timed_out:
                raise  # it has loaded before: whatever killed it may not do so again
            raise setup_error(f"reward {self._reward.curve!r} did not start", lost) from None
        if isinstance(reply, Failed):
            self._end()
            raise RewardSetupError(reply.message)
        assert isinstance(reply, Done), reply
        if self.scored_by is not None and not same_scorer(self.scored_by, reply.scored_by):
            self._end()
            raise RewardSetupError(
                f"reward {self._reward.curve!r} was scored by {self.scored_by!r}, and after a restart would "
                f"be by {reply.scored_by!r}; expected the same. Put back the weights that the run began with."
            )
        self.scored_by, self.traits = reply.scored_by, reply.traits

    def ask(self, request: Request, samples: Sequence[bytes] = ()) -> Done | Values | Failed:
        """Send a request and wait for its reply, starting the process first if necessary.

        Args:
            samples: the encoded samples of a ``Score``.

        Raises:
            ProcessLost: it ended, or exceeded ``request.deadline_s``.
            RewardSetupError, PoolClosedError: as :meth:`start`.
            ValueError: the request cannot be pickled.
        """
        self.start()
        return self._exchange(request, samples)

    def interrupt(self) -> None:
        """Kill the process for good, from any thread; a pending request raises PoolClosedError."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                _kill_session(self._process)

    def close(self) -> None:
        """Kill the process and wait for it. No request may be pending. Idempotent."""
        self.interrupt()
        self._end()
        if not self._log.closed:
            self._keep_log()
            self._log.close()

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        paths = json.dumps([str(path) for path in sys.path])
        command = [sys.executable, "-P", "-u", "-c", _BOOT, paths, str(theirs.fileno())]
        with theirs, self._lock:
            if self._closed:
                ours.close()
                raise PoolClosedError("the reward pool is closed")
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **self._environment},
                start_new_session=True,
            )
            self._channel = ours

    def _runs(self) -> bool:
        process = self._process
        if process is None:
            return False
        # WNOWAIT: do not reap. Until wait() the pid cannot be reused, so _end() kills the right session.
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def _exchange(self, request: Request, samples: Sequence[bytes] = ()) -> Reply:
        assert self._channel is not None
        messages = [channel.encode(request), *samples]
        log_start = self._mark_log()
        started_s = time.monotonic()
        limit_s = request.deadline_s + _GRACE_S
        try:
            for message in messages:
                channel.send(self._channel, message, limit_s)
            left_s = started_s + limit_s - time.monotonic()
            reply = channel.receive(self._channel, max(left_s, 0))
        except (TimeoutError, EOFError, OSError):
            timed_out = time.monotonic() - started_s >= request.deadline_s
            exit_code = self._end()
            if self._closed:
                raise PoolClosedError("the reward pool was closed before this was scored") from None
            raise self._lost(timed_out, exit_code, request, log_start) from None
        finally:
            self._keep_log()
        assert isinstance(reply, Done | Values | Failed), reply
        return reply

    def _mark_log(self) -> int:
        size = os.fstat(self._log.fileno()).st_size
        if size > _SCRATCH_MAX_BYTES:
            with self._log_lock:
                self._keep_log()
                os.ftruncate(self._log.fileno(), 0)
                self._kept_bytes = 0
            return 0
        return size

    def _keep_log(self) -> None:
        with self._log_lock:
            size = os.fstat(self._log.fileno()).st_size
            if self._kept is None or size <= self._kept_bytes:
                return
            # A full disk must not stop the run here.
            with suppress(OSError), open_to_append(self._kept) as kept:
                kept.write(os.pread(self._log.fileno(), size - self._kept_bytes, self._kept_bytes))
            self._kept_bytes = size

    def _lost(self, timed_out: bool, exit_code: int | None, request: Request, log_start: int) -> ProcessLost:
        text = self._log_since(log_start)
        if timed_out:
            # faulthandler lists the main thread, where the reward runs, last.
            where = text.rpartition("\nThread ")[2] if "Timeout (" in text else text
            said = f"; it was at:\n{where}" if where else ""
            return ProcessLost(f"no answer within {request.deadline_s:g} s{said}", timed_out=True)
        said = f"; its last words:\n{text}" if text else "; it printed nothing"
        return ProcessLost(f"its process {_ending(exit_code)}{said}", timed_out=False)

    def _log_since(self, start: int) -> str:
        descriptor = self._log.fileno()
        end = os.fstat(descriptor).st_size
        start = max(start, end - _LAST_WORDS_MAX_BYTES)
        return os.pread(descriptor, max(end - start, 0), start).decode(errors="replace").strip()

    def _end(self) -> int | None:
        """Kill and reap. Returns the exit code (negative: the signal), None if there was no process."""
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                # If it exited by itself, wait() still returns its own exit code.
                _kill_session(process)
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        return None if process is None else process.wait()


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _ending(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = " (the system does this when memory runs out)" if -exit_code == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"
