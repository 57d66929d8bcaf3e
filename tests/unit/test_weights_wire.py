"""Messages between processes of a node."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from spotlight_weights.weight_errors import PeerLostError
from spotlight_weights.wire import Channel


def test_files_of_a_peer_that_sends_too_few_are_closed() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, Path(os.devnull).open("rb") as file:
        socket.send_fds(theirs, [b"F"], [file.fileno()])
        before = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(PeerLostError):
            Channel(ours, "a peer", 5.0, time.monotonic() + 5).receive_files(2)
        assert len(list(Path("/proc/self/fd").iterdir())) == before
