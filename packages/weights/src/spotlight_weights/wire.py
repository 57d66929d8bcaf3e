"""JSON messages between processes of one node over a Unix socket, with deadlines.

A message is its length (4 bytes, little-endian) and a JSON object; nothing is pickled. File descriptors
travel with one byte.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass

from spotlight_weights.weight_errors import PeerLostError, WeightsError

Message = dict[str, object]

_LENGTH = struct.Struct("<I")
_MESSAGE_BYTES_MAX = 64 * 2**20
_PATH_BYTES_MAX = 107
"""Linux's limit for a Unix socket address."""


def check_address(path: str) -> None:
    """Raise :class:`WeightsError` if a socket's path is too long."""
    if len(path.encode()) > _PATH_BYTES_MAX:
        raise WeightsError(
            f"path of a socket has {len(path.encode())} bytes, expected at most {_PATH_BYTES_MAX}: {path}; "
            "name a directory with a shorter path, such as one below /tmp"
        )


@dataclass(slots=True)
class Channel:
    """One end of a connection.

    Attributes:
        stall_s: limit of one operation.
        end_s: ``time.monotonic()`` by which everything must be done.
    """

    socket: socket.socket
    peer: str
    stall_s: float
    end_s: float

    def connect(self, address: str) -> None:
        """Connect to a Unix socket. Raises PeerLostError."""
        try:
            self._allow()
            self.socket.connect(address)
        except OSError as error:
            raise self._lost(error) from error

    def send(self, message: Mapping[str, object]) -> None:
        """Send a message. Raises PeerLostError."""
        data = json.dumps(message).encode()
        try:
            self._allow()
            self.socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise self._lost(error) from error

    def receive(self, *, patient: bool = False) -> Message:
        """Wait for a message.

        Args:
            patient: wait until ``end_s``, not ``stall_s``: the peer may be serving another client.

        Raises:
            PeerLostError: timeout, or the peer is gone.
            WeightsError: not a message of this protocol.
        """
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, patient))
        if length > _MESSAGE_BYTES_MAX:
            raise self._foreign(f"a message of {length} bytes")
        data = self._exactly(length, patient=False)
        try:
            message = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self._foreign(repr(bytes(data[:80]))) from error
        if not isinstance(message, dict):
            raise self._foreign(repr(message)[:80])
        return message

    def send_files(self, descriptors: list[int]) -> None:
        """Send open file descriptors. Raises PeerLostError."""
        try:
            self._allow()
            socket.send_fds(self.socket, [b"F"], descriptors)
        except OSError as error:
            raise self._lost(error) from error

    def receive_files(self, count: int) -> list[int]:
        """Wait for file descriptors, which the caller must close. Raises PeerLostError."""
        try:
            self._allow()
            data, descriptors, _, _ = socket.recv_fds(self.socket, 1, count)
        except OSError as error:
            raise self._lost(error) from error
        if len(data) != 1 or len(descriptors) != count:
            for descriptor in descriptors:
                os.close(descriptor)
            raise self._lost(EOFError())
        return descriptors

    def _exactly(self, size: int, patient: bool) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                self._allow(patient)
                count = self.socket.recv_into(view)
            except OSError as error:
                raise self._lost(error) from error
            if count == 0:
                raise self._lost(EOFError())
            view = view[count:]
        return data

    def _allow(self, patient: bool = False) -> None:
        left_s = self.end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self.socket.settimeout(left_s if patient else min(left_s, self.stall_s))

    def _lost(self, error: Exception) -> PeerLostError:
        if isinstance(error, TimeoutError):
            over = time.monotonic() >= self.end_s
            why = "was not done before the deadline" if over else f"did not answer for {self.stall_s:g} s"
        else:
            why = f"is gone ({error or type(error).__name__})"
        return PeerLostError(f"{self.peer} {why}; take the weights from another peer or from the store")

    def _foreign(self, found: str) -> WeightsError:
        return WeightsError(
            f"{self.peer} sent {found}; expected a JSON object: run the same version of the package in all "
            "processes of a node"
        )
