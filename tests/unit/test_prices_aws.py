"""AWS's spot prices, from recorded answers of botocore's own stub."""

from __future__ import annotations

import builtins
from datetime import UTC, datetime
from typing import Any

import boto3
import pytest
from botocore.stub import ANY, Stubber

from spotlight_plan.prices import aws_prices as aws
from spotlight_plan.prices.fetch import FetchLimits
from spotlight_plan.prices.quotes import PriceError

NOW = datetime(2026, 6, 2, tzinfo=UTC)


def record(**changes: object) -> dict[str, object]:
    return {
        "AvailabilityZone": "us-east-1a",
        "InstanceType": "p5.48xlarge",
        "ProductDescription": "Linux/UNIX",
        "SpotPrice": "14.240000",
        "Timestamp": datetime(2026, 6, 1, tzinfo=UTC),
        **changes,
    }


def stubbed(*pages: dict[str, Any]) -> aws.Connect:
    client = boto3.client("ec2", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
    stub = Stubber(client)
    asked = {"InstanceTypes": ANY, "ProductDescriptions": ["Linux/UNIX"], "StartTime": NOW}
    token: dict[str, str] = {}
    for page in pages:
        stub.add_response("describe_spot_price_history", page, asked | token)
        token = {"NextToken": page["NextToken"]} if page.get("NextToken") else {}
    stub.activate()
    return lambda region, limits: client


def test_pages_are_followed_and_the_newest_price_of_a_zone_counts() -> None:
    older = record(SpotPrice="20.0", Timestamp=datetime(2026, 5, 1, tzinfo=UTC))
    first = {"SpotPriceHistory": [older, record()], "NextToken": "more"}
    second = {"SpotPriceHistory": [record(AvailabilityZone="us-east-1b", SpotPrice="13.0")]}
    texts = aws.fetch_records(["us-east-1"], FetchLimits(), NOW, stubbed(first, second))
    a, b = aws.parse_records(texts, NOW)
    assert (a.zone, a.spot_usd_h, a.on_demand_usd_h, a.saving) == ("us-east-1a", 14.24, None, None)
    assert (b.zone, b.spot_usd_gpu_h, b.region, b.as_of) == ("us-east-1b", 13 / 8, "us-east-1", NOW)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"SpotPrice": "-1"}, "SpotPrice is '-1'"),
        ({"SpotPrice": "much"}, "SpotPrice is 'much'"),
        ({"InstanceType": "m5.large"}, "InstanceType is 'm5.large'"),
        ({"AvailabilityZone": ""}, "AvailabilityZone"),
    ],
)
def test_a_bad_record_is_named_by_region_and_index(changes: dict[str, object], said: str) -> None:
    page = {"SpotPriceHistory": [record(), record(**changes)]}
    texts = aws.fetch_records(["us-east-1"], FetchLimits(), NOW, stubbed(page))
    with pytest.raises(PriceError) as raised:
        aws.parse_records(texts, NOW)
    assert said in str(raised.value)
    assert r"us-east-1, SpotPriceHistory[1]" in str(raised.value)


def test_a_refusal_by_aws_says_what_to_check() -> None:
    client = boto3.client("ec2", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
    with Stubber(client) as stub:
        stub.add_client_error("describe_spot_price_history", "UnauthorizedOperation", "You are not allowed")
        with pytest.raises(PriceError, match="ec2:DescribeSpotPriceHistory") as raised:
            aws.fetch_records(["us-east-1"], FetchLimits(), NOW, lambda region, limits: client)
    assert "UnauthorizedOperation" in str(raised.value)


@pytest.mark.parametrize(("region", "said"), [("us-east-1", "credentials"), ("no region", "no region")])
def test_a_client_that_cannot_ask(region: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nowhere")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(PriceError, match=f"aws, {region}.*{said}.*Check credentials"):
        aws.fetch_records([region], FetchLimits(), NOW)


def test_without_boto3_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name.partition(".")[0] == "boto3":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(PriceError, match=r"pip install 'spotlight-rl\[aws\]'"):
        aws.fetch_records(["us-east-1"], FetchLimits(), NOW)
