"""SkyPilot's catalogues, in the shapes that its clouds have, from a server on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from price_server import Handler, serving
from typer.testing import CliRunner

from spotlight.cli.main import app
from spotlight_plan.prices import skypilot_prices
from spotlight_plan.prices.cache import PriceCache
from spotlight_plan.prices.fetch import FetchLimits
from spotlight_plan.prices.quotes import OLD, PriceError
from spotlight_plan.prices.sources import PriceQuery, load_prices

NOW = datetime.now(UTC).replace(microsecond=0)
FILES = {
    # Zones, and a price in one direction only.
    "aws": "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,"
    "AvailabilityZone\np5.48xlarge,H100,8.0,192,2048,,55.04,14.24,us-east-1,use1-az1\n"
    "p5.4xlarge,H100,1.0,16,256,,6.88,,us-east-1,use1-az1\n",
    # No zones, and no machine is spot.
    "lambda": "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice\n"
    "cpu_4x_general,,,4.0,16.0,0.2,us-east-1,,\ngpu_8x_h100_sxm5,H100,8.0,208,1800,23.92,us-east-1,,\n",
    # The other order, and no column of spot prices.
    "cudo": "Region,InstanceType,Price,AcceleratorName,AcceleratorCount\nno-luster-1,h100_8x,19.9,H100,8\n",
    # Neither region nor zone.
    "mithril": "InstanceType,AcceleratorName,AcceleratorCount,Price,SpotPrice\n"
    "h100-80gb.sxm.8x,H100,8,8.0,8.0\n",
    # Places with commas, a GPU that is not known, and a price of nothing.
    "vast": "InstanceType,AcceleratorName,AcceleratorCount,Price,SpotPrice,Region\n"
    '8x-H100,H100,8,16.5,9.2,"Quebec, CA"\n'
    '1x-GX9,GX9,1,0.2,0.1,"Quebec, CA"\n1x-H100,H100,1,0,0.9,"Ohio, US"\n',
}
DATES = {"lambda": NOW - OLD - timedelta(days=1)}


def answer(request: Handler) -> None:
    path, _, query = request.path.partition("?")
    if path == "/commits":
        cloud = next((name for name in FILES if f"%2F{name}%2F" in query or f"/{name}/" in query), "")
        date = DATES.get(cloud, NOW - timedelta(days=2))
        request.say(json.dumps([{"commit": {"committer": {"date": date.isoformat()}}}]))
        return
    cloud = path.split("/")[-2]
    if cloud in FILES:
        request.say(FILES[cloud])
    else:
        request.say("404: Not Found", status=404)


@pytest.fixture
def catalogues(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    with serving(answer) as (url, paths):
        monkeypatch.setattr(skypilot_prices, "FILES_URL", url)
        monkeypatch.setattr(skypilot_prices, "COMMITS_URL", f"{url}/commits")
        yield paths


def question(tmp_path: Path, *clouds: str, gpus: tuple[str, ...] = ()) -> PriceQuery:
    limits = FetchLimits(idle_s=5, total_s=5)
    return PriceQuery(gpus=gpus, clouds=clouds, now=NOW, cache=PriceCache(tmp_path), limits=limits)


def test_every_shape_of_catalogue_is_read(catalogues: list[str], tmp_path: Path) -> None:
    asked = question(tmp_path)
    found = {(quote.cloud, quote.instance_type): quote for quote in load_prices("skypilot", asked)}
    assert {cloud for cloud, _ in found} == set(FILES)
    assert found["aws", "p5.48xlarge"].zone == "use1-az1"
    assert found["aws", "p5.4xlarge"].spot_usd_h is None
    assert (found["lambda", "gpu_8x_h100_sxm5"].gpus, found["lambda", "gpu_8x_h100_sxm5"].zone) == (8, "")
    assert found["cudo", "h100_8x"].on_demand_usd_gpu_h == pytest.approx(19.9 / 8)
    assert found["mithril", "h100-80gb.sxm.8x"].region == ""
    assert found["vast", "8x-H100"].region == "Quebec, CA"
    assert "2 rows of this file were skipped" in found["vast", "8x-H100"].caveat
    assert found["lambda", "gpu_8x_h100_sxm5"].age(NOW) == timedelta(days=91)
    assert "ibm" in asked.unread
    assert "404" in asked.unread["ibm"]
    assert len(asked.unread) == len(skypilot_prices.CLOUDS) - len(FILES)
    # Fresh answers are not asked for again.
    before = len(catalogues)
    load_prices("skypilot", question(tmp_path, "aws", "vast"))
    assert len(catalogues) == before


def test_a_cloud_asked_for_by_name_must_be_there(catalogues: list[str], tmp_path: Path) -> None:
    with pytest.raises(PriceError, match="404"):
        load_prices("skypilot", question(tmp_path, "ibm", "aws"))


def test_prices_of_unknown_age_say_so(
    catalogues: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skypilot_prices, "COMMITS_URL", f"{skypilot_prices.FILES_URL}/rate-limited")
    (quote,) = load_prices("skypilot", question(tmp_path, "cudo"))
    assert "of unknown age" in quote.caveat
    assert quote.as_of == NOW


def test_the_command_warns_of_old_prices_and_names_what_it_could_not_read(
    catalogues: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["prices", "--source", "skypilot", "--gpu", "H100"])
    assert result.exit_code == 0, result.output
    assert "1 of 6 prices are older than 90 days" in result.output
    assert "Not read: ibm" in result.output
