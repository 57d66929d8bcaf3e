"""A real ext4 on a loop device that turns read-only, or loses its power, at a chosen moment.

An error makes ext4 read-only under a process that has files open, which no remount does; a shutdown without
flushing leaves what a power cut does.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SHUTDOWN, _WITHOUT_FLUSHING = 0x8004587D, 2  # EXT4_IOC_SHUTDOWN
_SIZE_BYTES = 64 << 20


class FragileDisk:
    """Mounted at ``path``."""

    def __init__(self, path: Path) -> None:
        self.path, self._image = path, path.with_suffix(".ext4")
        path.mkdir()
        self._image.touch()
        os.truncate(self._image, _SIZE_BYTES)
        _run("mkfs.ext4", "-q", self._image)
        self.loop = _run("losetup", "--find", "--show", self._image)

    def mount(self) -> bool:
        """Whether that is permitted."""
        command = ["mount", "-o", "errors=remount-ro", self.loop, self.path]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

    def repair(self) -> None:
        """As after a restart of the machine."""
        _run("umount", self.path)
        subprocess.run(["fsck.ext4", "-p", self.loop], check=False, capture_output=True)
        assert self.mount()

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", self.path], check=False, capture_output=True)
        subprocess.run(["losetup", "--detach", self.loop], check=False)


@contextmanager
def fragile_disk(path: Path) -> Iterator[FragileDisk | None]:
    """None where this user may not have one."""
    tools = ("mkfs.ext4", "fsck.ext4", "losetup", "mount")
    if os.geteuid() != 0 or not all(map(shutil.which, tools)):
        yield None
        return
    try:
        disk = FragileDisk(path)
    except subprocess.CalledProcessError:
        yield None
        return
    try:
        mounted = disk if disk.mount() else None
        yield mounted
    finally:
        disk.close()


def turn_read_only(path: Path) -> None:
    """Let the file system of ``path`` meet an error."""
    number = path.stat().st_dev
    loop = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve().name
    Path(f"/sys/fs/ext4/{loop}/trigger_fs_error").write_text("1", encoding="utf-8")


def cut_power(path: Path) -> None:
    """What is not on the disk of ``path`` yet is lost, and nothing more gets there."""
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _WITHOUT_FLUSHING))
    os.close(descriptor)


def _run(*command: object) -> str:
    return subprocess.run(
        list(map(str, command)), check=True, capture_output=True, encoding="utf-8"
    ).stdout.strip()
