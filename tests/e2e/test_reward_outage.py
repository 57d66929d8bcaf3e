"""A reward's server is killed: a run outlasts it, or stops with what is trained, and goes on later."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest
from main_job import NFT, Job, RecordedRun, clean_audit, free_port, newest_checkpoint, outcome

from spotlight.cli.runs.train import driver_of
from spotlight_rewards.pool import outages

pytestmark = [pytest.mark.slow]
SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Scores(BaseHTTPRequestHandler):
    def do_POST(self):
        sent = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"rewards": [%d]}' % (sum(sent) % 97))
    def log_message(self, *_):
        pass
server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Scores)
print("listens", flush=True)
server.serve_forever()
"""


class Server:
    """One that can be killed and started again."""

    def __init__(self) -> None:
        self.port = free_port()
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-c", SERVER, str(self.port)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"listens\n"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def reward(self, outage_s: float) -> str:
        server = f"{{base_url: 'http://127.0.0.1:{self.port}', retries: 0}}"
        return f"rewards=[{{name: flow-factory, outage_s: {outage_s}, params: {{server: {server}}}}}]"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(outages, "PAUSE_S", 0.05)
    server = Server()
    yield server
    server.kill()


class Killing(RecordedRun):
    """The server dies after iteration 1; it may start again when the run says that it does not answer."""

    def __init__(self, server: Server, comes_back: bool) -> None:
        super().__init__()
        self._server, self._comes_back = server, comes_back

    def iterated(self, iteration: int, row: Mapping[str, float]) -> None:
        super().iterated(iteration, row)
        if iteration == 1:
            self._server.kill()

    def note(self, text: str) -> None:
        super().note(text)
        if "no scores at the moment" in text and self._comes_back:
            self._server.start()


def train(job: Job, observer: RecordedRun, name: str, *overrides: str) -> RecordedRun:
    config = job.config(name, *NFT, "checkpoint.every=9", "evaluation.every=0", *overrides)
    observer.result = driver_of(config)(config, observer)
    return observer


def test_a_run_outlasts_a_server_that_is_killed_and_comes_back(job: Job, server: Server) -> None:
    straight = train(job, RecordedRun(), "served", server.reward(600))
    killed = train(job, Killing(server, comes_back=True), "outlasted", server.reward(600))
    assert straight.iterations == killed.iterations == [0, 1, 2, 3]
    (away,) = (note for note in killed.notes if "no scores at the moment" in note)
    assert f"POST http://127.0.0.1:{server.port}/compute failed" in away
    assert sum("scores again, after" in note for note in killed.notes) == 1
    assert not any("not scored" in note for note in killed.notes)
    assert outcome(job.root / "outlasted").learner == outcome(job.root / "served").learner
    clean_audit(job.root / "outlasted")


def test_a_run_whose_patience_ends_keeps_what_is_trained(job: Job, server: Server) -> None:
    name = "impatient"
    stopped = train(job, Killing(server, comes_back=False), name, server.reward(0.2))
    assert stopped.iterations == [0, 1]
    assert "It did not answer for rewards[].outage_s=0.2." in stopped.error
    assert "reward_policy.on_failure=drop" in stopped.error
    (said,) = (note for note in stopped.notes if "not scored" in note)
    assert "more are not scored" in said
    assert newest_checkpoint(job.root / name).name.endswith("iteration-000002"), "without checkpoint.every"
    server.start()
    resumed = train(job, RecordedRun(), name, server.reward(600))
    assert resumed.iterations == [2, 3]
    straight = train(job, RecordedRun(), "patient", server.reward(600))
    assert straight.iterations == [0, 1, 2, 3]
    assert outcome(job.root / name).learner == outcome(job.root / "patient").learner
    clean_audit(job.root / name)
