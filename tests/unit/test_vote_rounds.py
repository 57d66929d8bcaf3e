"""What a round of votes came to, from the ledger's scores."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.dashboard_run import ITERATIONS, client_of, make_run

from spotlight_dashboard.views.vote_rounds import summary


def test_pairs_are_those_that_people_ordered_and_other_rewards_agree_with_a_share_of_them() -> None:
    first = [{"vote": 1.0, "vote/vote_s": 4.0, "pick": 0.9, "reward": 1.0},
             {"vote": 0.25, "vote/vote_s": 4.0, "pick": 0.1, "reward": 0.25},
             {"vote": 0.25, "vote/vote_s": 4.0, "pick": 0.9, "reward": 0.25}]  # fmt: skip
    alike = [{"vote": 0.5, "vote/vote_s": 8.0, "pick": 0.3}, {"vote": 0.5, "vote/vote_s": 8.0, "pick": 0.2}]
    found = summary("vote", [first, alike, [{}, {}]])
    assert found == {
        "groups": 3, "voted": 2, "undecided": 1, "vote_s": 6.0, "pairs": 2,
        "agree": {"pick": pytest.approx(0.75)},
    }  # fmt: skip
    nobody = summary("vote", [[{}, {}]])
    assert (nobody["voted"], nobody["pairs"], nobody["agree"], nobody["vote_s"]) == (0, 0, {}, None)


def test_rounds_are_the_newest_iterations_with_votes_by_whatever_label(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run")
    assert client_of(paths.path).get("/api/runs/run/votes").json()["rounds"] == []  # nobody is asked
    with paths.config.open("a") as config:
        config.write("rewards: [{name: shapes}, {name: vote, label: reward}]\n")
    answer = client_of(paths.path).get("/api/runs/run/votes").json()
    assert answer["curve"] == "reward"
    assert [each["iteration"] for each in answer["rounds"]] == [*reversed(range(ITERATIONS))][:10]
    assert all(each["trained"] and each["voted"] <= each["groups"] for each in answer["rounds"])
