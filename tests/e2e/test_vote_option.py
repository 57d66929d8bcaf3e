"""``spotlight train --vote``: whatever the rewards are, people judge; a program votes as the page does."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx2
import pytest
from main_job import Job, clean_audit
from voted_run import voted_run

from spotlight.cli.runs import dashboard_beside, vote_option
from spotlight.cli.runs.vote_option import VoteError, vote_overrides
from spotlight.config.load import load_config
from spotlight.data.datasets import load_prompts

RECIPE = Path(__file__).parents[2] / "examples/24gb-z-image-turbo.yaml"


def test_a_recipes_rewards_become_curves_and_its_groups_can_be_seen_at_a_glance() -> None:
    before = load_config(RECIPE, [])
    voted = load_config(RECIPE, vote_overrides(before, []))
    assert [(reward.name, reward.weight) for reward in voted.rewards] == [("vote", 1.0), ("pickscore", 0.0)]
    assert voted.rewards[1].device == "cpu"
    assert voted.rewards[0].replicas == voted.rollout.prompts_per_iteration
    assert (voted.reward_policy.on_failure, voted.rollout.group_size) == ("drop", 4)
    evaluation = voted.evaluation  # after every round, of which nobody is asked
    assert (evaluation.every, evaluation.prompts, evaluation.images_per_prompt) == (1, 3, 1)
    assert list(voted.every_problem()) == []
    again = load_config(RECIPE, vote_overrides(voted, []))
    assert again.rewards == voted.rewards


def test_what_the_command_sets_holds() -> None:
    given = ["rollout.group_size=8"]
    overrides = vote_overrides(load_config(RECIPE, given), given)
    assert not [each for each in overrides if each.startswith("rollout.group_size")]


def test_a_section_that_the_command_sets_holds_too() -> None:
    given = [str(RECIPE), "evaluation={every: 5, prompts: 2}", "rollout={group_size: 8}"]
    overrides = vote_overrides(load_config(RECIPE, given[1:]), given)
    keys = {each.partition("=")[0] for each in overrides}
    assert not keys & {"evaluation.every", "evaluation.prompts", "rollout.group_size"}


def test_no_more_prompts_are_evaluated_than_there_are(tmp_path: Path) -> None:
    (tmp_path / "two.txt").write_text("a cat\na dog\n")
    given = [f"data.{key}={tmp_path / 'two.txt'}" for key in ("train", "test")]
    overrides = vote_overrides(load_config(None, given), given)
    assert len(load_prompts(load_config(None, [*given, *overrides])).test) == 2


def test_without_a_dashboard_nobody_could_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_beside, "_NEEDS", ("json", "no_such_package"))
    with pytest.raises(VoteError, match=r"--vote needs the package 'no_such_package'.*\[dashboard\]"):
        vote_option.vote_overrides(load_config(RECIPE, []), [])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_is_trained_by_the_votes_on_the_dashboard_beside_it(job: Job) -> None:
    votes = 0
    with (
        voted_run(job, "judged", "iterations=1") as (run, page),
        httpx2.Client(base_url=f"{page['address']}/api/runs/judged", timeout=60) as client,
    ):
        assert client.post(f"{page['address']}/api/session", json={"token": page["token"]}).status_code == 200
        while run.poll() is None:
            votes += vote_once(client)
            time.sleep(0.05)  # between two looks
    assert run.returncode == 0
    kept = [json.loads(path.read_text()) for path in (job.root / "judged" / "votes").glob("*.json")]
    assert votes == len(kept) == 2  # of the iteration's groups; nobody is asked about evaluations
    assert clean_audit(job.root / "judged").counts.trained == 2 * 3


def vote_once(client: httpx2.Client) -> int:
    """The first picture of whatever is asked; 0 if nothing is, or the run is over."""
    try:
        found = client.get("/votes")
        ballots = found.json()["ballots"] if found.status_code == 200 else []
        if not ballots:
            return 0
        ranking = {"ranking": [ballots[0]["pictures"][0]]}
        return int(client.post(f"/ballots/{ballots[0]['id']}", json=ranking).status_code == 200)
    except httpx2.TransportError:  # the dashboard ends with the run
        return 0
