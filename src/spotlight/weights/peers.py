"""Full weights from a worker of the same node: a lender in every worker, and the newcomer that borrows.

The two meet at a Unix socket in a directory that only this user can enter. Bytes go through two buckets of
shared memory (of the host, or of the lender's GPU), tensors cut to fit; messages are JSON::

    newcomer                                    lender
      which weights, on what device  ──────────►
                                     ◄──────────  names, types, shapes, modules; the buckets; or a refusal
      go                             ──────────►
                                     ◄──────────  bucket 0: pieces and their checksums
                                     ◄──────────  bucket 1 (filled while 0 is emptied)
      done 0                         ──────────►  ...
                                     ◄──────────  end

Invariants:
- Nothing is written before names, types, shapes and the number of modules were compared.
- A checksum is taken of the lender's tensor before it is copied, and of the newcomer's tensor after: it
  covers everything in between. :func:`borrow` returns only if every byte of every tensor was checked.
- All of a loan is of one version (see :class:`spotlight.weights.shelf.Shelf`).
- Every operation on a socket has a deadline, on both sides; so neither waits for a peer that is dead or hangs.
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
from typing import Self

import torch
from torch import Tensor

from spotlight.weights import cuda_ipc
from spotlight.weights.buckets import COUNT, offer_host, side_stream, take_cuda, take_host
from spotlight.weights.bundle import check_same
from spotlight.weights.errors import PeerLostError, WeightsError
from spotlight.weights.flat import Piece, as_bytes, checksum, cut
from spotlight.weights.locks import private_directory
from spotlight.weights.shelf import Shelf
from spotlight.weights.wire import Channel, Message, check_address

PROTOCOL = 1
BUCKET_BYTES = 64 * 2**20
_SAME_PACKAGE = "run the same version of the package in all processes of a node"
_log = logging.getLogger(__name__)


class Lender:
    """Lends a shelf to newcomers, one after the other, from a thread of its own.

    Args:
        directory: where the socket is made; private to this user, and made if its parent is there.
        name: of this worker; ``directory / (name + ".sock")`` is what newcomers are told.
        bucket_bytes: of each of the two buckets, a multiple of 16.
        stall_s: a newcomer that does nothing for so long is given up.

    Raises:
        WeightsError: the directory belongs to somebody else, or the socket's path is too long.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        shelf: Shelf,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        stall_s: float = 30.0,
    ) -> None:
        self.path = private_directory(directory) / f"{name}.sock"
        check_address(str(self.path))
        self.path.unlink(missing_ok=True)  # of a dead worker of that name
        self._shelf, self._bucket_bytes, self._stall_s = shelf, bucket_bytes, stall_s
        self._gpu_buckets: list[Tensor] = []
        self._guest: socket.socket | None = None
        self._closing = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen(16)
        self._thread = threading.Thread(target=self._run, name=f"lender {name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Lend no more; a loan under way is broken off."""
        self._closing = True
        self.path.unlink(missing_ok=True)
        for end in (self._listener, self._guest):
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
        with torch.no_grad(), side_stream(self._shelf.device):
            while not self._closing:
                try:
                    guest, _ = self._listener.accept()
                except OSError:
                    return
                with guest:
                    self._guest = guest
                    self._serve(Channel(guest, "a newcomer", self._stall_s, float("inf")))
                    self._guest = None

    def _serve(self, channel: Channel) -> None:
        try:
            self._lend(channel)
        except (WeightsError, RuntimeError, OSError, ValueError, KeyError, TypeError) as error:
            _log.info("a loan of weights ended early: %s", error)
            with suppress(WeightsError):
                channel.send({"refused": str(error)})

    def _lend(self, channel: Channel) -> None:
        asked = channel.receive()
        if asked.get("protocol") != PROTOCOL:
            raise WeightsError(f"protocol {asked.get('protocol')}, expected {PROTOCOL}: {_SAME_PACKAGE}")
        digest, shelf, size = str(asked["digest"]), self._shelf, self._bucket_bytes
        with shelf.reading(digest):
            on_gpu = shelf.device.type == "cuda" and asked["device"] == "cuda"
        buckets = self._own_gpu_buckets() if on_gpu else []
        channel.send(
            {
                "contents": [[n, _name(t.dtype), list(t.shape)] for n, t in shelf.tensors.items()],
                "modules": shelf.modules,
                "bucket_bytes": size,
                "handles": [cuda_ipc.share(bucket) for bucket in buckets],
            }
        )
        if not on_gpu:
            buckets = offer_host(channel, size)
        channel.receive(patient=True)  # the newcomer has compared
        count = 0
        for count, pieces in enumerate(cut([m.numel() for m in shelf.memory], size), start=1):
            if count > COUNT:
                channel.receive()  # that bucket is empty again
            with shelf.reading(digest):
                sums = _put(pieces, shelf.memory, buckets[(count - 1) % COUNT])
            channel.send({"pieces": _rows(pieces, sums)})
        for _ in range(min(count, COUNT)):
            channel.receive()
        channel.send({"end": count})

    def _own_gpu_buckets(self) -> list[Tensor]:
        """Buckets on the GPU, kept for the next newcomer: shared memory cannot be given back at will."""
        if not self._gpu_buckets:
            device = self._shelf.device
            self._gpu_buckets = [
                torch.empty(self._bucket_bytes, dtype=torch.uint8, device=device) for _ in range(COUNT)
            ]
        return self._gpu_buckets


@dataclass(frozen=True, slots=True)
class Borrowed:
    """What came from a peer.

    Attributes:
        tensors: how many were filled and checked: all.
        modules: that they belong to.
        bytes: of all of them.
    """

    tensors: int
    modules: int
    bytes: int


@torch.no_grad()
def borrow(
    path: Path,
    digest: str,
    targets: Mapping[str, Tensor],
    modules: int,
    *,
    deadline_s: float = 300.0,
    stall_s: float = 30.0,
) -> Borrowed:
    """Fill ``targets`` with the weights of a peer on this node.

    Args:
        path: the peer's socket (:attr:`Lender.path`).
        digest: the mark of the weights wanted.
        targets: name -> tensor to be filled, contiguous, all on one device.
        modules: that they belong to; the peer must say the same number.
        deadline_s: for all of it, waiting for other newcomers included.
        stall_s: for any one step of the peer.

    Raises:
        PeerLostError: the peer is dead, hangs, or has other weights: the targets may hold a mixture; fill
            them from elsewhere.
        WeightsError: names, shapes, types or modules differ (nothing was written), or a checksum does.
    """
    names = list(targets)
    (device,) = {tensor.device for tensor in targets.values()}
    memory = [as_bytes(tensor) for tensor in targets.values()]
    with _connected(path, stall_s, time.monotonic() + deadline_s) as channel:
        channel.send({"protocol": PROTOCOL, "digest": digest, "device": device.type})
        offer = _heard(channel, patient=True)
        with _as_agreed(channel):
            size = int(str(offer["bucket_bytes"]))
            handles = offer["handles"]
            assert isinstance(handles, list)
            if not handles:
                buckets = take_host(channel, size)
            _compare(channel, offer, targets, modules)
            if handles:
                buckets = take_cuda(channel, handles, size, device)
            channel.send({"go": True})
            filled = [0] * len(names)
            count = 0
            while "end" not in (message := _heard(channel)):
                _take(channel, message["pieces"], buckets[count % COUNT], memory, filled, names)
                channel.send({"done": count})
                count += 1
    lacking = [name for name, got, whole in zip(names, filled, memory, strict=True) if got != whole.numel()]
    if lacking:
        raise WeightsError(
            f"{channel.peer} sent {len(names) - len(lacking)} of {len(names)} tensors, first missing "
            f"{lacking[0]!r}; {_SAME_PACKAGE}"
        )
    return Borrowed(len(names), modules, sum(filled))


def _compare(channel: Channel, offer: Message, targets: Mapping[str, Tensor], modules: int) -> None:
    contents = offer["contents"]
    assert isinstance(contents, list)
    theirs = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name, dtype, shape in contents
    }
    check_same(channel.peer, theirs, targets)
    if not 0 < modules == offer["modules"]:
        raise WeightsError(
            f"{channel.peer}: its weights belong to {offer['modules']} modules, those here to {modules}; "
            "expected the same number, at least 1: give both processes the same model"
        )


def _put(pieces: Sequence[Piece], memory: Sequence[Tensor], bucket: Tensor) -> list[list[int]]:
    """Copy pieces into a bucket; their checksums, of the tensors themselves. Done when it returns."""
    sums = []
    for piece in pieces:
        source = memory[piece.index][piece.start : piece.stop]
        sums.append(checksum(source))
        bucket[piece.at : piece.at + source.numel()].copy_(source)
    found: list[list[int]] = torch.stack(sums).tolist()
    return found


def _take(
    channel: Channel,
    rows: object,
    bucket: Tensor,
    memory: Sequence[Tensor],
    filled: list[int],
    names: Sequence[str],
) -> None:
    """Copy a bucket's pieces to where they belong, and check what arrived there."""
    assert isinstance(rows, list)
    sums, expected, whose = [], [], []
    for index, start, stop, at, *of_peer in rows:
        target = memory[index][start:stop]
        if start != filled[index] or target.numel() != stop - start or at + stop - start > bucket.numel():
            raise WeightsError(
                f"{channel.peer} sent bytes {start} to {stop} of {names[index]!r}, expected those from "
                f"{filled[index]} of {memory[index].numel()}; {_SAME_PACKAGE}"
            )
        target.copy_(bucket[at : at + stop - start])
        sums.append(checksum(target))
        expected.append(of_peer)
        whose.append(names[index])
        filled[index] = stop
    for name, found, wanted in zip(whose, torch.stack(sums).tolist(), expected, strict=True):
        if found != wanted:
            raise WeightsError(
                f"{name!r} from {channel.peer}: found checksum {found}, expected {wanted}: it was damaged on "
                "the way; take the weights from the store, and look at the memory of this node"
            )


def _rows(pieces: Sequence[Piece], sums: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[p.index, p.start, p.stop, p.at, *found] for p, found in zip(pieces, sums, strict=True)]


def _heard(channel: Channel, *, patient: bool = False) -> Message:
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
    """Tell a message that lacks something as what it is."""
    try:
        yield
    except (KeyError, IndexError, AssertionError, TypeError, ValueError, AttributeError) as error:
        raise WeightsError(
            f"{channel.peer} sent a message that is not understood ({error!r}); {_SAME_PACKAGE}"
        ) from error


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
