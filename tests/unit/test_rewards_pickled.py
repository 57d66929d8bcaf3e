"""Reward servers that speak pickle: plain answers are scores, everything else an error, and no code runs."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from spotlight_rewards.pickled import pickle_server as module
from spotlight_rewards.pickled.pickle_server import pickle_server
from spotlight_rewards.pickled.plain_pickle import UnsafePickleError, load_plain
from spotlight_rewards.reward import RewardSetupError, SampleError

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


class Touches:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


@contextmanager
def pickling(answer: Callable[[dict[str, Any]], object]) -> Iterator[str]:
    """A server that unpickles and pickles, as those of flow_grpo and verl-omni do."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            made = answer(pickle.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            body = made if isinstance(made, bytes) else pickle.dumps(made)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def grays(*levels: int) -> list[np.ndarray]:
    return [np.full((8, 12, 3), level, np.uint8) for level in levels]


def params(url: str, protocol: str = "verl-omni", **more: Any) -> dict[str, Any]:
    quick = {"base_url": url, "timeout_s": 5, "batch_timeout_s": 10, "retries": 0}
    return {"server": quick, "protocol": protocol, "allow_pickle": True, **more}


def level_of(jpeg: bytes) -> int:
    return int(np.asarray(Image.open(io.BytesIO(jpeg)))[0, 0, 0])


@settings(max_examples=50)
@given(PLAIN, st.integers(3, pickle.HIGHEST_PROTOCOL))
def test_plain_values_are_read_as_they_are(value: object, protocol: int) -> None:
    assert load_plain(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
def test_arrays_and_their_scalars_are_lists_and_numbers(protocol: int) -> None:
    a = np.arange(6.0).reshape(2, 3)
    value = {
        "a": a,
        "b": [np.float32(0.5), np.bool_(True)],
        "c": np.array([], np.int8),
        "d": a.astype(">i2").T,
    }
    found = load_plain(pickle.dumps(value, protocol))
    assert found == {"a": a.tolist(), "b": [0.5, True], "c": [], "d": a.T.tolist()}


@pytest.mark.parametrize(
    "inside", [lambda bad: bad, lambda bad: {"scores": [bad]}, lambda bad: np.array([bad])]
)
def test_what_could_run_is_not_read(inside: Callable[[object], object], tmp_path: Path) -> None:
    for bad in (Touches(tmp_path / "ran"), OrderedDict(a=1), print):
        with pytest.raises(UnsafePickleError):
            load_plain(pickle.dumps(inside(bad)))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x05", b"no pickle", pickle.dumps([1])[:-1], b"\x80\x04c."])
def test_what_is_no_pickle_is_an_error(content: bytes) -> None:
    with pytest.raises(ValueError, match="no readable pickle"):
        load_plain(content)


HOSTILE = """
import pickle, struct, sys, time
import numpy as np
from spotlight_rewards.pickled.plain_pickle import load_plain

class Reduce:
    def __init__(self, *made):
        self.made = made

    def __reduce__(self):
        return self.made

def nested(depth, make):
    value = make(0, 0)
    for _ in range(depth):
        value = make(value, value)
    return value

rebuild = np.array([0]).__reduce__()[0]
scalar = np.float64(0).__reduce__()[0]
objects = np.dtype("O")
shape = Reduce(rebuild, (np.ndarray, (0,), b"b"), (1, (77, 77, 77), np.dtype("f8"), False, b""))
huge = b"\\x8b" + struct.pack("<i", 10**5) + b"\\x7f" * 10**5 + b"q\\xff" + b"h\\xff" * 9999
cases = {
    "pointer": [Reduce(np.ndarray, ((1,), objects, b"A" * 8))],
    "pointer of a scalar": Reduce(scalar, (objects, b"A" * 8)),
    "pointer by state": Reduce(rebuild, (np.ndarray, (0,), b"b"), (1, (1,), objects, False, b"A" * 8)),
    "short": Reduce(rebuild, (np.ndarray, (0,), b"b"), (1, (9,), np.dtype("f8"), False, b"A" * 8)),
    "negative": Reduce(rebuild, (np.ndarray, (0,), b"b"), (1, (-1,), np.dtype("f8"), False, b"")),
    "long and empty": Reduce(rebuild, (np.ndarray, (0,), b"b"), (1, (10**12, 0), np.dtype("f8"), False, b"")),
    "huge lengths, shared": pickle.dumps(shape, 3).replace(b"KMKMKM\\x87", b"(" + huge + b"t"),
    "strides of 0": Reduce(np.ndarray, ((10**8,), np.dtype("i1"), b"a", 0, (0,))),
    "other class": Reduce(rebuild, (np.dtype, (0,), b"b")),
    "shared lists": nested(40, lambda *two: list(two)),
    "shared tuples as a key": b"\\x80\\x03}K\\x00K\\x00\\x86" + b"q\\x00h\\x00\\x86" * 60 + b"K\\x01s.",
    "long text, shared": ["a" * 10**6] * 10**4,
    "huge integer": 1 << 10**6,
    "keys of one hash": {key * (2**61 - 1): 0 for key in range(1, 10_000)},
    "itself": (lambda a: a.append(a) or a)([]),
    "memo": b"\\x80\\x03Nr\\xff\\xff\\xff\\xff0.",
    "many": b"\\x80\\x03" + b"](" * 10**6 + b".",
    "no stack": b"\\x80\\x03\\x87.",
    "no mark": b"\\x80\\x03]e.",
}
begun_s = time.process_time()
for name, value in cases.items():
    content = value if isinstance(value, bytes) else pickle.dumps(value)
    try:
        load_plain(content)
    except ValueError:
        continue
    sys.exit(f"{name} was read")
print(time.process_time() - begun_s)
"""


def test_hostile_pickles_are_refused_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", HOSTILE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 10


def test_each_protocol_is_spoken() -> None:
    seen: list[dict[str, Any]] = []

    def answer(asked: dict[str, Any]) -> object:
        seen.append(asked)
        level = level_of(asked["images"][0]) / 10
        if "meta_datas" in asked:
            strict = float(asked["meta_datas"][0]["tag"] == "counting")
            return {"scores": [level], "rewards": [level / 2], "strict_rewards": [strict],
                    "group_rewards": {"counting": [level]}, "group_strict_rewards": {}}  # fmt: skip
        return {"scores" if "metadata" in asked else "outputs": np.array([level], np.float32)}

    with pickling(answer) as url:
        for protocol in ("verl-omni", "flow-grpo"):
            found = pickle_server(grays(10, 20), ["a", "b"], [{}] * 2, **params(url, protocol))
            assert found == {"score": [1.0, 2.0]}
            module.check([], [], **params(url, protocol))
        tagged = [{"tag": "counting"}, {"tag": "colors"}]
        found = pickle_server(grays(10, 20), ["a", "b"], tagged, **params(url, "flow-grpo-geneval"))
        module.check(["a"], tagged, **params(url, "flow-grpo-geneval", only_strict=False))
    assert found == {"score": [1.0, 2.0], "rewards": [0.5, 1.0], "strict_rewards": [1.0, 0.0]}
    assert [each["only_strict"] for each in seen if "meta_datas" in each] == [True, True, False]
    assert sorted(each["prompts"][0] for each in seen[:2]) == ["a", "b"]


def test_an_answer_that_is_no_score_fails_its_sample_alone(tmp_path: Path) -> None:
    bad: dict[int, object] = {
        10: {"error": "out of memory"}, 20: {"scores": [float("nan")]}, 30: {"scores": [1, 2]}, 40: [1.0],
        50: {"scores": ["1"]}, 60: Touches(tmp_path / "ran"), 70: b"no pickle", 80: {"outputs": [1.0]},
    }  # fmt: skip
    with pickling(lambda asked: bad.get(level_of(asked["images"][0]), {"scores": [5]})) as url:
        found = pickle_server(grays(*bad, 100), ["a"] * 9, [{}] * 9, **params(url))["score"]
    assert found[-1] == 5.0
    assert all(isinstance(each, SampleError) for each in found[:-1])
    assert "out of memory" in str(found[0])
    assert "Is params.protocol the server's?" in str(found[7])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [({"allow_pickle": False}, "allow_pickle is False; expected true, because its protocol is pickle"),
     ({"server": {"base_url": "http://10.0.0.1:18085"}}, "expected an address of this machine"),
     ({"server": {"base_url": "http://127.0.0.1.evil.org"}}, "expected an address of this machine"),
     ({"only_strict": False}, "only_strict is False with the protocol verl-omni; expected true or false"),
     ({"protocol": "other"}, "expected one of verl-omni, flow-grpo, flow-grpo-geneval")],
)  # fmt: skip
def test_it_is_refused_unless_asked_for_and_on_this_machine(change: dict[str, Any], words: str) -> None:
    with pytest.raises(RewardSetupError) as caught:
        module.scored_by(**(params("http://127.0.0.1:18085") | change))
    assert words in str(caught.value)


def test_it_warns_that_code_can_run(caplog: pytest.LogCaptureFixture) -> None:
    assert module.scored_by(**params("http://127.0.0.1:18085")) == "http://127.0.0.1:18085 (verl-omni)"
    assert "unpickling runs whatever code the other side wrote" in caplog.text
