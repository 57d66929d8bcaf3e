"""Catalogues say what machines with GPUs cost, or which line is wrong."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from spotlight_fleet.gpus import INSTANCE_TYPES, UnknownGpuError, gpu_type
from spotlight_plan.prices.catalogue import built_in, parse_built_in, parse_catalogue
from spotlight_plan.prices.quotes import PriceError, Quote, cheapest, select

NOW = datetime(2026, 6, 2, tzinfo=UTC)
HEADER = (
    "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,"
    "AvailabilityZone\n"
)
AWS = HEADER + (
    "m5.large,,,2,8,,0.096,0.03,us-east-1,use1-az1\n"
    "p5.48xlarge,H100,8.0,192,2048,\"{'Gpus': [1, 2]}\",55.04,14.24,us-east-1,use1-az1\n"
    "p5.48xlarge,H100,8.0,192,2048,,55.04,13.0,us-east-1,use1-az2\n"
    "trn1.2xlarge,Trainium,1,8,32,,1.34,0.4,us-east-1,use1-az1\n"
    "g6f.large,L4,0.125,2,8,,0.2,0.1,us-east-1,use1-az1\n"
    "p4d.24xlarge,A100,8,96,1152,,21.96,,us-west-2,us-west-2\n"
)
GCP = (
    "InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,Region,AvailabilityZone,Price,"
    "SpotPrice\n"
    "a3-highgpu-8g,208,1872,,,,us-central1,us-central1-a,9.46,2.9\n"
    "a3-highgpu-8g,208,1872,,,,us-east4,us-east4-a,9.5,2.0\n"
    "n1-standard-8,8,30,,,,us-central1,us-central1-a,0.38,0.08\n"
    ",,,H100,8,,us-central1,us-central1-a,79.03,36.91\n"
    ",,,H100,8,,us-east4,us-east4-a,79.0,\n"
    ",,,T4,1,,us-central1,us-central1-a,0.35,0.11\n"
    "TPU-VM,,,tpu-v4-8,1,,us-central1,us-central1-a,12.9,6.1\n"
)


def parse(text: str, cloud: str = "aws", gpus: tuple[str, ...] = ()) -> tuple[Quote, ...]:
    return parse_catalogue(text, cloud=cloud, source="vms.csv", as_of=NOW, gpus=gpus)


def test_machines_with_gpus_are_read_and_nothing_else() -> None:
    quotes = parse(AWS)
    assert [quote.instance_type for quote in quotes] == ["p5.48xlarge", "p5.48xlarge", "p4d.24xlarge"]
    first, _, last = quotes
    assert (first.gpus, first.on_demand_usd_gpu_h, first.spot_usd_gpu_h) == (8, 6.88, 1.78)
    assert first.saving == pytest.approx(1 - 14.24 / 55.04)
    assert (last.spot_usd_h, last.saving, last.zone, last.region) == (None, None, "", "us-west-2")
    assert first.age(NOW + timedelta(days=3)) == timedelta(days=3)


def test_gcp_adds_machine_and_gpus_up() -> None:
    central, east = parse(GCP, "gcp")
    assert (central.instance_type, central.region) == ("a3-highgpu-8g", "us-central1")
    assert central.on_demand_usd_h == pytest.approx(9.46 + 79.03)
    assert central.spot_usd_h == pytest.approx(2.9 + 36.91)
    # Without the GPUs' spot price there is none for the whole.
    assert (east.on_demand_usd_h, east.spot_usd_h) == (pytest.approx(88.5), None)


def test_the_same_rows_of_another_cloud_are_not_added_up() -> None:
    with pytest.raises(PriceError, match="no row has the price of a machine with GPUs"):
        parse(GCP.replace("TPU-VM", "x"), "aws")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("p5,H100,8,1,1,,-3,1,r,z", ["vms.csv:2", "Price is '-3'", "above 0"]),
        ("p5,H100,8,1,1,,3,0,r,z", ["vms.csv:2", "SpotPrice is '0'", "above 0"]),
        ("p5,H100,8,1,1,,nan,1,r,z", ["Price is 'nan'"]),
        ("p5,H100,8,1,1,,three,1,r,z", ["Price is 'three'", "a number"]),
        ("p5,H100,8,1,1,,,,r,z", ["vms.csv:2", "both empty"]),
        ("p5,H101,8,1,1,,3,1,r,z", ["vms.csv:2", "'H101'", "Did you mean 'H100'?"]),
        ("p5,H100,2.5,1,1,,3,1,r,z", ["AcceleratorCount is '2.5'", "whole number"]),
        ("p5,H100,,1,1,,3,1,r,z", ["AcceleratorCount is ''"]),
        ("p5,H100,8,1", ["vms.csv:2", "4 values; expected 10"]),
        ("p5,H100,8,1,1,,3,1,r,z,extra", ["more values; expected 10"]),
    ],
)
def test_a_bad_line_is_reported_with_number_value_and_expectation(line: str, said: list[str]) -> None:
    with pytest.raises(PriceError) as raised:
        parse(HEADER + line + "\n")
    assert all(words in str(raised.value) for words in said), raised.value


@pytest.mark.parametrize(
    "place", ["p5,H100,8,1,1,,3,1,{},z", "{},H100,8,1,1,,3,1,r,z", "p5,H100,8,1,1,,3,1,r,{}"]
)
@pytest.mark.parametrize("name", ['"p5\ntouch here"', "\x1b[2Jp5", "\u202ep5"])
def test_a_name_is_one_line_that_can_be_printed(place: str, name: str) -> None:
    # It is in the comments of start.sh, in which another line would be a command.
    with pytest.raises(PriceError, match=r"vms\.csv: '.*p5.*'; expected a name on one line"):
        parse(HEADER + place.format(name) + "\n")


def test_all_bad_lines_are_reported_at_once_up_to_ten() -> None:
    with pytest.raises(PriceError) as raised:
        parse(HEADER + "p5,H100,8,1,1,,-3,1,r,z\n" * 12)
    assert "vms.csv:11" in str(raised.value)
    assert "... and 2 more" in str(raised.value)


def test_rows_of_types_nobody_asked_for_are_not_judged() -> None:
    text = AWS + "new.48xlarge,Z900,8,1,1,,9,3,us-east-1,z\n"
    assert len(parse(text, gpus=("H100",))) == 2
    with pytest.raises(PriceError, match="Z900"):
        parse(text)
    with pytest.raises(UnknownGpuError, match="Z900"):
        parse(text, gpus=("Z900",))


@pytest.mark.parametrize(("text", "said"), [("", "an empty file"), ("a,b\n1,2\n", "no column InstanceType")])
def test_a_file_that_is_no_catalogue_says_what_is_missing(text: str, said: str) -> None:
    with pytest.raises(PriceError, match=said):
        parse(text)


def test_the_built_in_table_has_the_papers_rows_each_with_date_and_source() -> None:
    rows = {quote.instance_type: quote for quote in built_in()}
    published = {
        "p5.48xlarge": ("aws", 55.04, 14.24),
        "p5.4xlarge": ("aws", None, 2.47),
        "a3-highgpu-8g": ("gcp", 88.49, 39.81),
        "Standard_ND96isr_H100_v5": ("azure", 98.32, 18.17),
    }
    for name, (cloud, on_demand, spot) in published.items():
        quote = rows[name]
        assert (quote.cloud, quote.on_demand_usd_h, quote.spot_usd_h) == (cloud, on_demand, spot)
        assert "arXiv" in quote.source
    assert all(quote.as_of.year == 2026 for quote in rows.values())
    assert {"H100", "H200", "B200", "A100", "A100-80GB", "L40S"} == {quote.gpu for quote in rows.values()}
    for quote in rows.values():  # a machine that others know too has as many GPUs here
        known = [one for one in INSTANCE_TYPES if (one.cloud, one.name) == (quote.cloud, quote.instance_type)]
        assert all((one.gpu, one.gpus) == (quote.gpu, quote.gpus) for one in known)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("aws,p5,H100,8,,5,1,June,paper", "AsOf is 'June'"),
        ("aws,p5,H100,8,,5,1,2026-06-01,", "expected both"),
        ("aws,p5,,,,5,1,2026-06-01,paper", "no GPU"),
    ],
)
def test_a_built_in_row_without_date_source_or_gpu_is_refused(row: str, said: str) -> None:
    header = "Cloud,InstanceType,AcceleratorName,AcceleratorCount,Region,Price,SpotPrice,AsOf,Source\n"
    with pytest.raises(PriceError, match=said):
        parse_built_in(header + row + "\n", "builtin")


def test_prices_are_chosen_and_sorted_by_what_a_spot_gpu_costs() -> None:
    quotes = parse(AWS)
    assert [quote.zone for quote in select(quotes, gpus=["H100"])] == ["use1-az2", "use1-az1"]
    assert [quote.zone for quote in cheapest(quotes) if quote.gpu == "H100"] == ["use1-az2"]
    assert select(quotes, clouds=["gcp"]) == ()
    assert {quote.region for quote in select(quotes, regions=["us-west-2"])} == {"us-west-2"}
    anywhere = [quote for quote in built_in() if not quote.region]
    assert len(anywhere) == len(select(built_in(), regions=["us-west-2"])) == 6
    assert select(quotes, gpus=["h100"]) == select(quotes, gpus=["H100"])
    with pytest.raises(UnknownGpuError, match="Did you mean 'H100'"):
        select(quotes, gpus=["h10"])


@pytest.mark.parametrize("price", [0.0, -1.0, float("nan"), float("inf")])
def test_no_quote_has_a_price_that_is_none(price: float) -> None:
    with pytest.raises(PriceError):
        Quote("aws", "", "", "p5", "H100", 8, price, None, NOW, "test")


def test_a_quote_needs_a_price_a_time_zone_and_gpus() -> None:
    with pytest.raises(PriceError, match="no price at all"):
        Quote("aws", "", "", "p5", "H100", 8, None, None, NOW, "test")
    with pytest.raises(PriceError, match="time zone"):
        Quote("aws", "", "", "p5", "H100", 8, 1.0, None, NOW.replace(tzinfo=None), "test")
    with pytest.raises(PriceError, match="0 GPUs"):
        Quote("aws", "", "", "p5", "H100", 0, 1.0, None, NOW, "test")


def test_every_machine_that_is_asked_for_has_a_known_gpu() -> None:
    assert all(gpu_type(machine.gpu).vram_bytes > 0 and machine.gpus > 0 for machine in INSTANCE_TYPES)
