"""Which collectives a process hands to its group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    """Counts them; ``torch.profiler`` would record every operator, and take longer than the work itself.

    Attributes:
        seen: collectives so far, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.seen[func.name().partition("::")[2]] += 1
            self.check(func.name(), (args, kwargs))
        return func(*args, **(kwargs or {}))

    def check(self, name: str, arguments: object) -> None:
        """Fail where a collective must not be given these."""
