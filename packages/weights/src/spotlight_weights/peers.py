"""Full weights from a worker on the same node: every worker runs a server, a new worker fetches from it.

They connect over a Unix socket in a directory private to this user. Bytes pass through two buckets of shared
memory (host, or the server's GPU); messages are JSON::

    new worker                                  server
      wanted digest, GPUs it can read──────────►
                                     ◄──────────  names, types, shapes, modules, buckets; or a refusal
      go                             ──────────►
                                     ◄──────────  bucket 0: pieces and their checksums
                                     ◄──────────  bucket 1 (filled while 0 is emptied)
      done 0                         ──────────►  ...
                                     ◄──────────  end

Invariants:
- Nothing is written before names, types, shapes and the number of modules match.
- Checksums of the source before the copy and of the target after it cover everything in between.
  :func:`fetch_from_peer` returns only if every byte was checked.
- Every socket operation has a deadline, so neither side waits for a dead or hung peer.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from spotlight_weights import cuda_ipc
from spotlight_weights.buckets import COUNT, host_buckets, side_stream, take_cuda, take_host
from spotlight_weights.bundle import check_same
from spotlight_weights.flat import Piece, as_bytes, checksum, cut
from spotlight_weights.locks import private_directory
from spotlight_weights.served_weights import ServedWeights
from spotlight_weights.weight_errors import PeerLostError, WeightsError
from spotlight_weights.wire import Channel, Message, check_address

PROTOCOL = 2
BUCKET_BYTES = 64 * 2**20
_SAME_PACKAGE = "run the same version of the package in all processes of a node"
_log = logging.getLogger(__name__)


class WeightServer:
    """Serves a worker's weights to new workers, one at a time, from its own thread.

    Args:
        directory: for the socket; private to this user, created if its parent exists.
        name: of this worker; the socket is ``directory / (name + ".sock")``.
        bucket_bytes: per bucket, a multiple of 16.
        stall_s: an idle client is dropped after this.

    Raises:
        WeightsError: the directory belongs to another user, or the socket's path is too long.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        served: ServedWeights,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        stall_s: float = 30.0,
    ) -> None:
        self.path = private_directory(directory) / f"{name}.sock"
        check_address(str(self.path))
        self.path.unlink(missing_ok=True)  # left by a dead worker of that name
        self._served, self._bucket_bytes, self._stall_s = served, bucket_bytes, stall_s
        self._gpu_buckets: list[Tensor] = []
        self._client: socket.socket | None = None
        self._closing = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen(16)
        self._thread = threading.Thread(target=self._run, name=f"weight server {name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; a transfer in progress is aborted."""
        self._closing = True
        self.path.unlink(missing_ok=True)
        for end in (self._listener, self._client):
            if end is not None:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        with torch.no_grad(), side_stream(self._served.device):
            while not self._closing:
                try:
                    client, _ = self._listener.accept()
                except OSError:
                    return
                with client:
                    self._client = client
                    self._handle(Channel(client, "a new worker", self._stall_s, float("inf")))
                    self._client = None

    def _handle(self, channel: Channel) -> None:
        try:
            self._serve(channel)
        except (WeightsError, RuntimeError, OSError, ValueError, KeyError, TypeError) as error:
            _log.info("a transfer of weights ended early: %s", error)
            with suppress(WeightsError):
                channel.send({"refused": str(error)})

    def _serve(self, channel: Channel) -> None:
        asked = channel.receive()
        if asked.get("protocol") != PROTOCOL:
            raise WeightsError(f"protocol {asked.get('protocol')}, expected {PROTOCOL}: {_SAME_PACKAGE}")
        self._served.check(str(asked["digest"]))
        if handles := self._handles(_list(asked["gpus"])):
            buckets = self._gpu_buckets
            self._offer(channel, handles)
        else:
            with host_buckets(self._bucket_bytes) as (buckets, descriptors):
                self._offer(channel, [])
                channel.send_files(descriptors)
        self._stream(channel, buckets)

    def _offer(self, channel: Channel, handles: Sequence[Mapping[str, object]]) -> None:
        tensors = self._served.tensors
        channel.send(
            {
                "contents": [[name, _name(t.dtype), list(t.shape)] for name, t in tensors.items()],
                "modules": self._served.modules,
                "bucket_bytes": self._bucket_bytes,
                "handles": handles,
            }
        )

    def _stream(self, channel: Channel, buckets: Sequence[Tensor]) -> None:
        channel.receive()  # the client compared the metadata and says go
        served, size, count = self._served, self._bucket_bytes, 0
        for count, pieces in enumerate(cut([m.numel() for m in served.memory], size), start=1):
            if count > COUNT:
                channel.receive()  # acknowledgement: that bucket is free again
            sums = _put(pieces, served.memory, buckets[(count - 1) % COUNT])
            channel.send({"pieces": _rows(pieces, sums)})
        for _ in range(min(count, COUNT)):
            channel.receive()
        channel.send({"end": count})

    def _handles(self, readable: Sequence[str]) -> list[dict[str, object]]:
        """Of the GPU buckets, for a process that reads these GPUs; none: the host's memory must do."""
        device = self._served.device
        if device.type != "cuda" or not readable:
            return []
        if (own := cuda_ipc.gpu_id(device)) not in readable:
            _log.warning("weights go through the host's memory: GPU %s cannot read GPU %s", readable[0], own)
            return []
        try:
            return [cuda_ipc.share(bucket) for bucket in self._own_gpu_buckets()]
        except RuntimeError as error:
            _log.warning("weights go through the host's memory: %s", error)
            return []

    def _own_gpu_buckets(self) -> list[Tensor]:
        """GPU buckets, reused for every client: CUDA IPC memory cannot be freed at will."""
        if not self._gpu_buckets:
            device = self._served.device
            self._gpu_buckets = [
                torch.empty(self._bucket_bytes, dtype=torch.uint8, device=device) for _ in range(COUNT)
            ]
        return self._gpu_buckets


@dataclass(frozen=True, slots=True)
class FetchedWeights:
    """Numbers of tensors (all filled and checked), modules and bytes transferred."""

    tensors: int
    modules: int
    bytes: int


@torch.no_grad()
def fetch_from_peer(
    path: Path,
    digest: str,
    targets: Mapping[str, Tensor],
    modules: int,
    *,
    deadline_s: float = 300.0,
    stall_s: float = 30.0,
) -> FetchedWeights:
    """Fill ``targets`` with the weights of a peer on this node.

    Args:
        path: the peer's socket (:attr:`WeightServer.path`).
        targets: name -> tensor to fill, contiguous, all on one device.
        modules: number of modules they belong to; must match the peer's.
        deadline_s: in total, including the wait for other clients.
        stall_s: per operation of the peer.

    Raises:
        PeerLostError: the peer is dead, hangs, or has other weights. The targets may hold a mixture.
        WeightsError: names, shapes, types or modules differ (nothing was written), or a checksum does.
    """
    (device,) = {tensor.device for tensor in targets.values()}
    with _connected(path, stall_s, time.monotonic() + deadline_s) as channel:
        channel.send({"protocol": PROTOCOL, "digest": digest, "gpus": cuda_ipc.readable(device)})
        offer = _receive(channel, patient=True)
        with _as_agreed(channel):
            size, handles = int(str(offer["bucket_bytes"])), _list(offer["handles"])
            buckets = [] if handles else take_host(channel, size)
            _compare(channel, offer, targets, modules)
            if handles:
                buckets = take_cuda(channel, handles, size, device)
            _send(channel, {"go": True})
            transfer = _Transfer(channel.peer, tuple(targets), tuple(as_bytes(t) for t in targets.values()))
            count = 0
            while "end" not in (message := _receive(channel)):
                transfer.take(_list(message["pieces"]), buckets[count % COUNT])
                _send(channel, {"done": count})
                count += 1
    transfer.check_whole()
    return FetchedWeights(len(targets), modules, sum(transfer.filled))


class _Transfer:
    def __init__(self, peer: str, names: Sequence[str], memory: Sequence[Tensor]) -> None:
        self._peer, self._names, self._memory = peer, names, memory
        self.filled = [0] * len(names)

    def take(self, rows: Sequence[Sequence[int]], bucket: Tensor) -> None:
        """Copy a bucket's pieces into their targets and check what arrived."""
        sums, expected, whose = [], [], []
        for index, start, stop, at, *of_peer in rows:
            target = self._memory[index][start:stop]
            inside = 0 <= at <= at + stop - start <= bucket.numel()
            if start != self.filled[index] or target.numel() != stop - start or not inside:
                raise WeightsError(
                    f"{self._peer} sent bytes {start} to {stop} of {self._names[index]!r}, expected those "
                    f"from {self.filled[index]} of {self._memory[index].numel()}; {_SAME_PACKAGE}"
                )
            target.copy_(bucket[at : at + stop - start])
            sums.append(checksum(target))
            expected.append(of_peer)
            whose.append(self._names[index])
            self.filled[index] = stop
        for name, found, wanted in zip(whose, torch.stack(sums).tolist(), expected, strict=True):
            if found != wanted:
                raise WeightsError(
                    f"{name!r} from {self._peer}: found checksum {found}, expected {wanted}: it was damaged "
                    "on the way; take the weights from the store, and look at the memory of this node"
                )

    def check_whole(self) -> None:
        """Raise :class:`WeightsError` unless every byte arrived."""
        wholes = [tensor.numel() for tensor in self._memory]
        lacking = [n for n, got, whole in zip(self._names, self.filled, wholes, strict=True) if got != whole]
        if lacking:
            raise WeightsError(
                f"{self._peer} sent {len(wholes) - len(lacking)} of {len(wholes)} tensors, first missing "
                f"{lacking[0]!r}; {_SAME_PACKAGE}"
            )


def _compare(channel: Channel, offer: Message, targets: Mapping[str, Tensor], modules: int) -> None:
    theirs = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name, dtype, shape in _list(offer["contents"])
    }
    check_same(channel.peer, theirs, targets)
    if not 0 < modules == offer["modules"]:
        raise WeightsError(
            f"{channel.peer}: its weights belong to {offer['modules']} modules, those here to {modules}; "
            "expected the same number, at least 1: give both processes the same model"
        )


def _put(pieces: Sequence[Piece], memory: Sequence[Tensor], bucket: Tensor) -> list[list[int]]:
    """Returns the sources' checksums; reading them to the host also waits for the copies."""
    sums = []
    for piece in pieces:
        source = memory[piece.index][piece.start : piece.stop]
        sums.append(checksum(source))
        bucket[piece.at : piece.at + source.numel()].copy_(source)
    found: list[list[int]] = torch.stack(sums).tolist()
    return found


def _rows(pieces: Sequence[Piece], sums: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[p.index, p.start, p.stop, p.at, *found] for p, found in zip(pieces, sums, strict=True)]


def _send(channel: Channel, message: Mapping[str, object]) -> None:
    try:
        channel.send(message)
    except PeerLostError:
        while True:  # the peer may have sent a reason before it hung up
            _receive(channel)


def _receive(channel: Channel, *, patient: bool = False) -> Message:
    message = channel.receive(patient=patient)
    if "refused" in message:
        raise PeerLostError(f"{channel.peer} refuses: {message['refused']}")
    return message


@contextmanager
def _connected(path: Path, stall_s: float, end_s: float) -> Iterator[Channel]:
    check_address(str(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        channel = Channel(end, f"peer {path}", stall_s, end_s)
        channel.connect(str(path))
        yield channel


@contextmanager
def _as_agreed(channel: Channel) -> Iterator[None]:
    """Report malformed messages as WeightsError, and failed copies as PeerLostError."""
    try:
        yield
    except WeightsError:
        raise
    except RuntimeError as error:  # from torch: a dead server's GPU memory may be gone
        raise PeerLostError(
            f"cannot copy from {channel.peer}: {error}; take the weights from another peer or from the store"
        ) from error
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise WeightsError(
            f"{channel.peer} sent a message that is not understood ({error!r}); {_SAME_PACKAGE}"
        ) from error


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
