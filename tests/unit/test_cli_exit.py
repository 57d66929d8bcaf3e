"""How the process of a command ends: as Python ends it, but for freeing what the kernel frees anyway."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer import Exit

from spotlight_rewards.commands.exit_codes import errors_without_traceback, is_explained

PROGRAM = """
import atexit, sys, tempfile, threading
from spotlight.cli.__main__ import main
from spotlight.cli.main import app

class Freed:
    def __del__(self):
        print("freed")

@app.command()
def end(how: str):
    sys.freed, sys.folder = Freed(), tempfile.TemporaryDirectory()
    atexit.register(print, "exit handler")
    threading.Thread(target=lambda: (threading.main_thread().join(), print("thread"))).start()
    print(sys.folder.name)
    if how == "raise":
        raise RuntimeError("wrong")
    raise SystemExit("said" if how == "say" else int(how))

main()
"""


INTERRUPTED = """
class Finder:
    def find_spec(name, *_):
        if name == "spotlight.cli.main":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Finder)
"""


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [("0", 0, ""), ("3", 3, ""), ("say", 1, "said\n"), ("raise", 1, "RuntimeError: wrong\n")],
)
def test_threads_and_exit_handlers_end_and_everything_is_said(how: str, status: int, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, "end", how], capture_output=True, text=True)
    folder, *lines = done.stdout.splitlines()
    assert lines == ["thread", "exit handler"]  # nothing is freed
    assert not Path(folder).exists()
    assert done.returncode == status
    assert done.stderr.endswith(said)


def test_a_lack_of_memory_is_told_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    for said in ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"):
        assert is_explained(RuntimeError(said))
    with pytest.raises(Exit), errors_without_traceback():
        raise MemoryError
    assert capsys.readouterr().err == "Error: out of memory\n"
    assert not is_explained(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_ctrl_c_while_the_program_is_imported_is_as_quiet_as_later() -> None:
    program = PROGRAM.replace("from spotlight.cli.main import app", INTERRUPTED).replace("@app.command()", "")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_output_that_cannot_be_written_is_an_error() -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, "end", "0"], stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode != 0
    assert b"No space left on device" in done.stderr
