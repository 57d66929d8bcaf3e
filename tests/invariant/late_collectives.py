"""NCCL's code over gloo, made to behave as NCCL does when a peer is lost.

Collectives return at once. That a peer is gone shows where a value is read, which waits until the
communicator is aborted, and then finds whatever is in the memory. The timer that aborts it expires as soon as
a peer is lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, Work
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spotlight.rollout.sequence_parallel import communicators

READS = {"__int__", "__bool__", "__float__", "item", "tolist", "cpu", "numpy"}


class Stream:
    """The collectives of this process, in order.

    Attributes:
        kinds: of those issued, as ``allreduc``.
        fail_at: the collective that this process fails in by itself, which is lost to the others.
        left: what an aborted collective leaves in the memory.
        stuck: a peer is lost, and nothing issued since is done.
    """

    def __init__(self) -> None:
        self.reset(None, 0)

    def reset(self, fail_at: int | None, left: int) -> None:
        self.kinds: list[str] = []
        self.fail_at, self.left, self.stuck = fail_at, left, threading.Event()

    def wait(self) -> None:
        while self.stuck.is_set() and dist.is_initialized():
            time.sleep(0.001)

    def issue(self, name: str, tensors: Sequence[Tensor], run: Callable[[], None]) -> None:
        """Run a collective to its end; it hangs if a peer is lost."""
        if self.fail_at == len(self.kinds):
            raise ArithmeticError("this rank's own failure")
        self.kinds.append(name.partition("::")[2].replace("_", "")[:8])
        if not self.stuck.is_set():
            try:
                run()
            except RuntimeError:
                self.stuck.set()
        if self.stuck.is_set():
            for tensor in tensors:
                tensor.fill_(self.left % 256 if tensor.dtype == torch.uint8 else self.left)


class Issue(TorchDispatchMode):
    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, aborted = func.name(), not dist.is_initialized()
        if name == "_c10d_functional::all_to_all_single" and not aborted:
            got = torch.empty_like(args[0])
            wait = torch.ops._c10d_functional.wait_tensor
            self._stream.issue(name, [got], lambda: got.copy_(wait(func(*args))))  # type: ignore[arg-type]
            return got
        if name == "_c10d_functional::wait_tensor":
            return args[0]  # nothing is read yet
        if not name.startswith("c10d::") or aborted:
            return func(*args, **(kwargs or {}))
        written = tree_leaves(args[0])

        def run() -> None:
            *_, work = found if isinstance(found := func(*args, **(kwargs or {})), tuple) else (found,)
            Work.unbox(work).wait()

        self._stream.issue(name, written, run)
        work = Work.boxed(FakeWork())
        return work if len(func._schema.returns) == 1 else (args[0], work)


class Read(TorchFunctionMode):
    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in READS:
            self._stream.wait()
        return func(*args, **(kwargs or {}))


class LateNccl(communicators.Nccl):
    """See the module. It changes its process for good: only one, and never closed."""

    def __init__(self, collective_s: float) -> None:
        super().__init__(torch.device("cuda:0"), collective_s)
        self.device = torch.device("cpu")
        self.stream, self.opening = stream, opening = Stream(), Stream()
        opened, use = communicators._opened, communicators._use

        def use_in_this_thread(group: dist.ProcessGroup, device: torch.device) -> None:
            with Issue(opening):
                use(group, device)

        class ExpiresWhenLost(threading.Timer):
            def run(self) -> None:
                while not self.finished.wait(0.001):
                    if stream.stuck.is_set() and self.function.__name__ == "expire":
                        self.function()
                        break

        threading.Timer = ExpiresWhenLost  # type: ignore[misc]
        communicators._opened = lambda backend, *arguments: opened("gloo", *arguments[:4])
        communicators._use = use_in_this_thread
        torch.cuda.set_device = lambda device: None
        torch.cuda.synchronize = lambda device=None: stream.wait()  # type: ignore[misc]
        Issue(stream).__enter__()
        Read(stream).__enter__()

    def life(self, fail_at: int | None, left: int) -> tuple[list[str], list[str]]:
        """Begin to count collectives. Returns those since the last call, and those of opening groups."""
        kinds = self.stream.kinds, self.opening.kinds
        self.stream.reset(fail_at, left)
        self.opening.reset(None, 0)
        return kinds
