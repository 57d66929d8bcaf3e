"""People as a reward: ballots, the reward ``vote``, and the dashboard's only way to write."""

from __future__ import annotations

import io
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image as PILImage
from tests.unit.dashboard_run import BEARER, TOKEN, client_of

from spotlight.store.images import Tile, write_grid
from spotlight.store.run_directory import RunPaths
from spotlight_dashboard.dashboard_app import dashboard_app
from spotlight_dashboard.dashboard_keys import DashboardKeys
from spotlight_dashboard.report_pictures import PictureBudget
from spotlight_dashboard.run_folders import RunFolder
from spotlight_dashboard.views.gallery import pictures as pictures_of
from spotlight_rewards import ballots as ballots_module
from spotlight_rewards.ballots import (
    AWAITED_FOR_S,
    Ballot,
    BallotBox,
    DamagedVoteError,
    NoSuchBallotError,
    picture_name,
)
from spotlight_rewards.pool.reward_pool import RewardPool
from spotlight_rewards.pool.reward_process import RewardProcess
from spotlight_rewards.results import FailureKind, RewardFailure, SampleResult
from spotlight_rewards.reward import Image, RewardContext, RewardSetupError
from spotlight_rewards.reward_config import RewardConfig
from spotlight_rewards.reward_registry import compares_groups, load, tiny_params
from spotlight_rewards.vote import shares_beaten

HOSTILE = "<script>window.hacked = 1</script>\u202e"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("rewards: [{name: vote}]\n")
    return tmp_path / "run"


@pytest.fixture
def client(run: Path) -> TestClient:
    return client_of(run)


def grays(*levels: int) -> list[Image]:
    return [np.full((16, 16, 3), level, np.uint8) for level in levels]


def asked(run: Path, *, prompt: str = HOSTILE, asks_name: bool = False) -> Ballot:
    files = {picture_name(content): content for content in (b"a", b"b", b"c")}
    ballot = Ballot(prompt, tuple(sorted(files)), asks_name)
    BallotBox(run / "votes").open(ballot, files, 60.0)
    return ballot


def cast(client: TestClient, ballot: Ballot | str, vote: object = None, **headers: str) -> tuple[int, str]:
    name = ballot if isinstance(ballot, str) else ballot.id
    sent = {"Content-Type": "application/json", **headers}
    content = json.dumps({"ranking": []} if vote is None else vote)
    answer = client.post(f"/api/runs/run/ballots/{name}", content=content, headers=sent)
    return answer.status_code, answer.text


def test_a_score_is_the_share_of_the_others_that_come_after() -> None:
    names = ["a", "b", "c", "b"]  # two alike
    assert shares_beaten(names, ["c", "b", "a"]) == pytest.approx([0, 0.5, 1, 0.5])
    assert shares_beaten(names, ["b"]) == pytest.approx([1 / 6, 5 / 6, 1 / 6, 5 / 6])
    assert shares_beaten(names, []) == [0.5] * 4
    assert sum(shares_beaten(names, ["a"])) == pytest.approx(2)  # of any vote: half of each pair
    assert shares_beaten(["a"], []) == [0.5]


def test_a_ballot_shows_what_its_prompt_is_about(run: Path, client: TestClient, tmp_path: Path) -> None:
    files = {picture_name(content): content for content in (b"a", b"b", b"about")}
    pictures = tuple(sorted(picture_name(content) for content in (b"a", b"b")))
    ballot = Ballot("a", pictures, references=(picture_name(b"about"),))
    assert ballot.id == Ballot("a", pictures).id  # votes of before count
    box = BallotBox(run / "votes")
    box.open(ballot, files, 60.0)
    (found,) = client.get("/api/runs/run/votes").json()["ballots"]
    assert found["references"] == [picture_name(b"about")]
    assert client.get(f"/api/runs/run/ballots/{ballot.id}/{found['references'][0]}").content == b"about"
    with pytest.raises(ValueError, match="different pictures of this ballot"):
        box.vote(ballot.id, found["references"])
    path = run / "votes" / "open" / ballot.id / "ballot.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "references"}))
    assert box.awaited()[0].references == ()  # one of before


def test_galleries_show_what_a_prompt_is_about(run: Path, client: TestClient, tmp_path: Path) -> None:
    about, other = grays(10, 20)
    tiles = [Tile(picture, "a", 0.5, references=(about,)) for picture in grays(30, 40)]
    (run / "images" / "tiles").mkdir(parents=True)
    write_grid(RunPaths(run), 0, [*tiles, Tile(other, "b", 0.5)], columns=2, title="t")
    found = client.get("/api/runs/run/evaluation?iteration=0").json()["pictures"]
    ((name,), same, none) = (each["references"] for each in found)
    assert (same, none) == ([name], [])
    answer = client.get(f"/api/runs/run/reference/{name}")
    assert PILImage.open(io.BytesIO(answer.content)).getpixel((0, 0)) == (10, 10, 10)
    (tmp_path / "private.png").write_bytes(answer.content)
    (run / "images" / "references" / "link.png").symlink_to(tmp_path / "private.png")
    for wrong in ("no.png", "link.png", "..%2f..%2fconfig.yaml", "..%2f..%2f..%2fprivate.png"):
        assert client.get(f"/api/runs/run/reference/{wrong}").status_code == 404
    folder, budget = RunFolder("run", run.resolve()), PictureBudget()
    budget.take(folder, pictures_of(folder, 0), share=1.0, whole=True)
    assert sorted(budget.taken) == ["picture/0/0", "picture/0/1", "picture/0/2", f"reference/{name}"]


def test_a_ballot_is_voted_on_once_and_its_vote_is_found_again(run: Path, client: TestClient) -> None:
    ballot = asked(run)
    (found,) = client.get("/api/runs/run/votes").json()["ballots"]
    assert (found["id"], found["prompt"]) == (ballot.id, HOSTILE)
    for name in found["pictures"]:
        assert client.get(f"/api/runs/run/ballots/{ballot.id}/{name}").status_code == 200
    best = ballot.pictures[1]
    assert cast(client, ballot, {"ranking": [best], "voter": "Ada"})[0] == 200
    assert cast(client, ballot)[0] == 409
    assert client.get("/api/runs/run/votes").json()["ballots"] == []
    vote = BallotBox(run / "votes").vote_on(ballot.id)
    assert vote is not None
    assert (vote.ranking, vote.voter) == ((best,), "")  # nobody asked who
    assert "Ada" not in (run / "votes" / f"{ballot.id}.json").read_text()


def test_who_voted_is_kept_where_the_run_asks(run: Path, client: TestClient) -> None:
    ballot = asked(run, asks_name=True)
    assert cast(client, ballot) == (
        400,
        "voter is missing; this run asks who votes (params.ask_name of its reward).",
    )
    assert cast(client, ballot, {"ranking": [], "voter": " Ada "})[0] == 200
    vote = BallotBox(run / "votes").vote_on(ballot.id)
    assert vote is not None
    assert vote.voter == "Ada"


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://localhost:8080"},
        {"Origin": "null"},
        {"Origin": "http://[x"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_other_sites_do_not_vote(run: Path, client: TestClient, headers: dict[str, str]) -> None:
    ballot = asked(run)
    assert cast(client, ballot, **headers)[0] == 403
    assert BallotBox(run / "votes").vote_on(ballot.id) is None
    assert cast(client, ballot, Origin="http://localhost:8170")[0] == 200


def test_a_vote_needs_the_token(run: Path) -> None:
    ballot, guarded = asked(run), dashboard_app([run], DashboardKeys(TOKEN))
    assert cast(TestClient(guarded), ballot)[0] == 401
    assert cast(TestClient(guarded), ballot, Authorization="Bearer wrong")[0] == 401
    assert cast(TestClient(guarded), ballot, **BEARER)[0] == 200


@pytest.mark.parametrize(
    ("vote", "status"),
    [
        ([], 400),
        ({"ranking": "a"}, 400),
        ({"ranking": [1]}, 400),
        ({"ranking": ["../../../etc/passwd"]}, 400),
        ({"ranking": ["FIRST", "FIRST"]}, 400),
        ({"ranking": [], "voter": 5}, 400),
        ({"ranking": ["x" * (1 << 16)]}, 413),
    ],
)
def test_what_is_no_vote_is_refused(run: Path, client: TestClient, vote: Any, status: int) -> None:
    ballot = asked(run)
    text = json.dumps(vote).replace("FIRST", ballot.pictures[0])
    assert cast(client, ballot, json.loads(text))[0] == status
    assert BallotBox(run / "votes").vote_on(ballot.id) is None


def test_only_ballots_of_the_run_are_read_and_voted_on(run: Path, client: TestClient) -> None:
    outside = run.parent / "outside"
    ballot = asked(outside)
    (run / "votes").symlink_to(outside / "votes")
    assert client.get("/api/runs/run/votes").json()["ballots"] == []
    assert cast(client, ballot)[0] == 404
    (run / "votes").unlink()
    (run / "votes" / "open").mkdir(parents=True)
    (run / "votes" / "open" / ballot.id).symlink_to(outside / "votes" / "open" / ballot.id)
    assert cast(client, ballot)[0] == 409
    assert client.get(f"/api/runs/run/ballots/{ballot.id}/{ballot.pictures[0]}").status_code == 404
    for name in ("..%2f..%2fconfig", "....", "a" * 32):
        assert cast(client, name)[0] in (404, 409)
        assert client.get(f"/api/runs/run/ballots/{name}/{name}").status_code == 404
    assert {path.name for path in (run / "votes").iterdir()} == {"clock", "open"}


def test_a_ballot_that_nobody_waits_for_is_not_shown_and_is_cleared(run: Path, client: TestClient) -> None:
    ballot = asked(run)
    old = time.time() - AWAITED_FOR_S - 60
    os.utime(run / "votes" / "open" / ballot.id / "ballot.json", (old, old))
    assert client.get("/api/runs/run/votes").json()["ballots"] == []
    assert cast(client, ballot)[0] == 409
    (run / "votes" / "open" / ballot.id / "ballot.json").unlink()  # a removal that was interrupted
    assert asked(run).id == ballot.id
    assert BallotBox(run / "votes").awaited()[0].id == ballot.id
    os.utime(run / "votes" / "open" / ballot.id / "ballot.json", (old, old))
    other = asked(run, prompt="another")
    assert [path.name for path in (run / "votes" / "open").iterdir()] == [other.id]


@pytest.mark.parametrize("time", ["1" + 400 * "0", "1e400", "NaN", "-Infinity"])
def test_a_ballot_and_a_vote_of_times_beyond_all_numbers_are_none(run: Path, time: str) -> None:
    ballot, box = asked(run), BallotBox(run / "votes")
    path = run / "votes" / "open" / ballot.id / "ballot.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "ends_at": "TIME"}).replace('"TIME"', time))
    assert box.awaited() == []
    (run / "votes" / f"{ballot.id}.json").write_text(f'{{"ranking": [], "took_s": {time}, "voter": ""}}')
    with pytest.raises(DamagedVoteError, match="Delete it to be asked again"):
        box.vote_on(ballot.id)


def test_a_vote_that_comes_too_late_is_refused_until_it_is_asked_again(run: Path, client: TestClient) -> None:
    ballot, path = asked(run), run / "votes" / "open"
    (found,) = client.get("/api/runs/run/votes").json()["ballots"]
    assert 0 < found["left_s"] <= 60
    over_s = BallotBox(run / "votes").now_s()
    path = path / ballot.id / "ballot.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "ends_at": over_s}))
    assert BallotBox(run / "votes").awaited() == []
    assert cast(client, ballot)[0] == 409
    assert asked(run) == ballot  # a retry
    assert cast(client, ballot)[0] == 200


def test_looking_at_an_open_ballot_is_no_change_of_the_run(
    run: Path, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As NFS has it, where a file cannot be without a name.
    monkeypatch.setattr(ballots_module, "TemporaryFile", NamedTemporaryFile)
    asked(run)
    for path in (run, *run.rglob("*")):
        os.utime(path, (time.time() - 5,) * 2)  # whatever is changed now has another time
    signature = RunFolder("run", run).signature()
    assert len(client.get("/api/runs/run/votes").json()["ballots"]) == 1
    assert RunFolder("run", run).signature() == signature


def test_what_a_vote_took_leaves_out_the_time_in_which_nobody_asked(run: Path) -> None:
    ballot, box = asked(run), BallotBox(run / "votes")
    path = run / "votes" / "open" / ballot.id / "ballot.json"
    (first,) = box.awaited()
    asked(run)  # another attempt, at once
    assert box.awaited()[0].asked_at == first.asked_at
    path.write_text(json.dumps({**json.loads(path.read_text()), "asked_at": first.asked_at - 3600}))
    os.utime(path, (first.asked_at - 1800,) * 2)
    asked(run)  # a run that is resumed after half an hour
    box.vote(ballot.id, ())
    vote = box.vote_on(ballot.id)
    assert vote is not None
    assert vote.took_s < 60


def test_of_votes_at_the_same_time_the_first_counts(run: Path) -> None:
    ballot, taken, refused = asked(run), list[str](), list[str]()
    start = threading.Barrier(8)

    def cast_one(choice: str) -> None:
        box = BallotBox(run / "votes")  # of a server of its own
        start.wait()
        try:
            box.vote(ballot.id, [choice])
            taken.append(choice)
        except NoSuchBallotError:
            refused.append(choice)

    threads = [threading.Thread(target=cast_one, args=(ballot.pictures[at % 3],)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(taken), len(refused)) == (1, 7)
    vote = BallotBox(run / "votes").vote_on(ballot.id)
    assert vote is not None
    assert list(vote.ranking) == taken
    assert {path.name for path in (run / "votes").iterdir()} == {f"{ballot.id}.json", "clock", "open"}


def test_the_clock_of_this_machine_does_not_count(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ballot, hour_ahead = asked(run), time.time() + 3600
    monkeypatch.setattr("spotlight_rewards.ballots.time.time", lambda: hour_ahead)
    assert [each.id for each in BallotBox(run / "votes").awaited()] == [ballot.id]


# -- the reward --


def test_in_a_smoke_run_the_brighter_picture_wins(run: Path) -> None:
    assert compares_groups("vote")
    params = tiny_params("vote", run, {})
    assert params is not None
    scored = load("vote", params, context=RewardContext(run_directory=str(run))).function(
        grays(9, 7, 8), ["a"] * 3, [{}] * 3
    )
    assert scored["score"] == [1, 0, 0.5]  # type: ignore[call-overload]
    with pool_of(run, params=params) as pool:
        assert pool.scored_by == {"vote": "brightness, in place of people"}


def test_outside_of_a_run_it_says_so() -> None:
    with pytest.raises(RewardSetupError, match="spotlight train"), RewardPool([RewardConfig(name="vote")]):
        pass


@pytest.fixture
def brightest_wins(run: Path) -> Iterator[list[str]]:
    """Votes for the brightest of each ballot; the ballots voted on."""
    box, voted, ends = BallotBox(run / "votes"), list[str](), threading.Event()

    def look() -> None:
        from PIL import Image as PILImage

        while not ends.wait(0.05):
            for ballot in box.awaited():
                levels = {
                    name: np.asarray(PILImage.open(path)).mean()
                    for name in ballot.pictures
                    if (path := box.picture(ballot.id, name)) is not None
                }
                box.vote(ballot.id, sorted(levels, key=lambda name: -levels[name]))
                voted.append(ballot.id)

    thread = threading.Thread(target=look)
    thread.start()
    yield voted
    ends.set()
    thread.join()


def pool_of(run: Path, **settings: Any) -> RewardPool:
    def start(reward: RewardConfig, deadline_s: float, replica: int, replicas: int) -> RewardProcess:
        return RewardProcess(reward, deadline_s, replica, replicas, run_directory=str(run))

    return RewardPool([RewardConfig(name="vote", **settings)], starter=start)


def values(samples: Sequence[SampleResult]) -> list[float]:
    assert not any(isinstance(each, RewardFailure) for each in samples), samples
    return [each.scores["vote"].value for each in samples if not isinstance(each, RewardFailure)]


def test_votes_become_scores_whatever_is_killed(run: Path, brightest_wins: list[str]) -> None:
    images, videos = grays(10, 200, 90, 90), [np.stack([image] * 2) for image in grays(50, 7)]
    for attempt in range(2):  # the second is a run that is resumed
        with pool_of(run) as pool:
            scored = pool.score(images, ["a"] * 4, [{}] * 4).samples
            played = pool.score(videos, ["b"] * 2, [{}] * 2).samples
            same = pool.score(grays(5, 5), ["c"] * 2, [{}] * 2).samples
        assert values(scored) == pytest.approx([0, 1, 0.5, 0.5])
        assert values(played) == [1, 0]
        assert values(same) == [0.5, 0.5]
        assert len(brightest_wins) == 2, attempt
    assert list((run / "votes" / "open").iterdir()) == []
    (run / "votes" / f"{brightest_wins[0]}.json").write_text("{}")
    with pool_of(run, retries=0) as pool:
        (damaged, *_) = pool.score(images, ["a"] * 4, [{}] * 4).samples
    assert isinstance(damaged, RewardFailure)
    assert "Delete it to be asked again" in damaged.message


def test_without_a_vote_the_deadline_ends_it_and_a_later_vote_counts(run: Path) -> None:
    box = BallotBox(run / "votes")
    with pool_of(run, deadline_s=3.0, retries=1) as pool:
        pids = pool.pids
        pending = pool.submit(grays(1, 2), ["a"] * 2, [{}] * 2)
        while not (ballots := box.awaited()):
            assert not pending.done(), "no ballot was opened before the deadline"
            time.sleep(0.02)
        late = pending.result().samples
        assert pool.pids != pids  # killed at its deadline, and again
        assert all(isinstance(each, RewardFailure) for each in late)
        assert {each.kind for each in late if isinstance(each, RewardFailure)} == {FailureKind.TIMEOUT}
        with pytest.raises(NoSuchBallotError):  # nobody would see it
            box.vote(ballots[0].id, ballots[0].pictures[:1])
    with pool_of(run) as pool:
        again = pool.submit(grays(1, 2), ["a"] * 2, [{}] * 2)
        while not box.awaited():
            time.sleep(0.02)
        box.vote(ballots[0].id, ballots[0].pictures[:1])
        assert sorted(values(again.result().samples)) == [0, 1]
