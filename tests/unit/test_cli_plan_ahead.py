"""``spotlight prices`` and ``spotlight traces``, as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from price_server import serving
from typer.testing import CliRunner, Result

from spotlight.cli.main import app

CATALOGUE = (
    "InstanceType,AcceleratorName,AcceleratorCount,Region,AvailabilityZone,Price,SpotPrice\n"
    "p5.48xlarge,H100,8,us-east-1,use1-az1,55.04,14.24\n"
    "p5.48xlarge,H100,8,us-east-1,use1-az2,55.04,11.00\n"
    "g6.xlarge,L4,1,us-west-2,usw2-az1,0.8,0.3\n"
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")
    return tmp_path


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def refused(*arguments: str) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Error: ")
    return " ".join(result.stderr.split())


def test_prices_show_source_age_and_saving(here: Path) -> None:
    result = invoke("prices")
    assert result.exit_code == 0
    (line,) = (line for line in result.output.splitlines() if "p5.48xlarge" in line)
    assert line.split()[:7] == ["H100", "8", "aws", "-", "p5.48xlarge", "6.88", "1.78"]
    assert "74%" in line
    assert " d " in line  # the built-in table is days old at least
    assert "arXiv 2606.19004" in result.output
    assert "prices are older than 90 days: try --source skypilot" in result.output


def test_prices_of_a_server_its_cheapest_zone_and_its_failure(here: Path) -> None:
    state = {"status": 200}
    with serving(lambda request: request.say(CATALOGUE, status=state["status"])) as (url, _):
        asked = ["prices", "--source", f"aws={url}/vms.csv", "--gpu", "H100"]
        (one,) = json.loads(invoke(*asked, "--json").output)
        assert (one["zone"], one["spot_usd_gpu_h"], one["caveat"]) == ("use1-az2", 1.375, "")
        assert len(json.loads(invoke(*asked, "--json", "--zones").output)) == 2
        state["status"] = 500
        stale = invoke(*asked, "--max-age-h", "0")
        assert stale.exit_code == 0
        assert "stale: no newer answer to be had" in stale.output
        assert "answered 500" in refused("prices", "--source", f"gcp={url}/vms.csv")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu", "H10O"], "Did you mean 'H100'?"),
        (["--gpu", "L4"], "No price of L4 in this source; it has aws A100, aws A100-80GB, aws H100"),
        (["--source", "nosuch"], "expected builtin, skypilot, aws, azure"),
        (["--source", "aws=absent.csv"], "absent.csv: No such file"),
        (["--source", "aws=bad.csv"], "bad.csv:2: Price is '-1'; expected a number of $/h above 0"),
    ],
)
def test_prices_that_cannot_be_had(here: Path, arguments: list[str], said: str) -> None:
    (here / "bad.csv").write_text(CATALOGUE.replace("55.04", "-1"))
    assert said in refused("prices", *arguments)


def test_traces_are_counted_written_and_drawn(here: Path) -> None:
    (here / "a.csv").write_text("0,add,x\n0,add,y\n1800000,remove,x\n3600000,add,x\n")
    result = invoke("traces", "a.csv", "--notice-lead-s", "30", "--out", "out.jsonl", "--html", "out.html")
    assert result.exit_code == 0, result.output
    assert "mean 1.5" in result.output
    assert "1 of 1 preemptions, mean 30 s" in result.output
    (numbers,) = json.loads(invoke("traces", "out.jsonl", "--json").output)
    assert (numbers["nodes_mean"], numbers["noticed"], numbers["price_mean_usd_h"]) == (1.5, 1, None)
    assert "Plotly.newPlot" in (here / "out.html").read_text()


def test_traces_can_be_limited_and_lengthened(here: Path) -> None:
    (here / "a.csv").write_text("0,add,x\n0,add,y\n1800000,remove,x\n3600000,add,x\n")
    (numbers,) = json.loads(invoke("traces", "a.csv", "--nodes", "1", "--horizon-h", "3", "--json").output)
    assert (numbers["nodes_max"], numbers["horizon_s"]) == (1, 3 * 3600)


def test_a_trace_is_generated_the_same_twice(here: Path) -> None:
    asked = ["traces", "--generate", "--seed", "7", "--nodes", "4", "--horizon-h", "6", "--bursts-per-h", "1"]
    for name in ("one.csv", "two.csv"):
        assert invoke(*asked, "--notice-lead-s", "30", "--out", name).exit_code == 0
    assert (here / "one.csv").read_text() == (here / "two.csv").read_text()
    (numbers,) = json.loads(invoke("traces", "one.csv", "--json").output)
    assert numbers["noticed"] == numbers["preemptions"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected FILE..., or --generate"),
        (["a.csv", "--generate"], "--generate reads no files"),
        (["a.csv", "--seed", "1"], "seed given without --generate"),
        (["a.csv", "a.csv", "--out", "b.csv"], "--out writes one trace"),
        (["absent.csv"], "absent.csv: No such file"),
        (["bad.csv"], "bad.csv:2: unsorted"),
        (["empty.csv"], "empty.csv is empty"),
        (["a.csv", "--horizon-h", "-1"], "expected more than 0"),
        (["a.csv", "--notice-lead-s", "-1"], "the notice lead is -1.0 s"),
        (["a.csv", "--out", "b.txt"], "expected .csv or .jsonl"),
        (["--generate", "--horizon-h", "0"], "horizon_s is 0.0; expected more than 0"),
        (["--generate", "--burst-fraction", "2"], "burst_fraction is 2.0"),
    ],
)
def test_traces_that_cannot_be_had(here: Path, arguments: list[str], said: str) -> None:
    (here / "a.csv").write_text("0,add,x\n1000,remove,x\n")
    (here / "bad.csv").write_text("10,add,x\n5,add,y\n")
    (here / "empty.csv").write_text("\n")
    assert said in refused("traces", *arguments)
