"""Prices over HTTP: what servers send is read, checked, kept, and never older than it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from price_server import Handler, serving

from spotlight_plan.prices import azure_prices as azure
from spotlight_plan.prices.cache import PriceCache
from spotlight_plan.prices.fetch import FetchLimits, get_text
from spotlight_plan.prices.quotes import PriceError
from spotlight_plan.prices.sources import PriceQuery, load_prices

NOW = datetime(2026, 6, 2, tzinfo=UTC)
PATIENT = FetchLimits(bytes_max=10_000)
QUICK = FetchLimits(idle_s=0.2, total_s=0.5)
"""For servers that never end."""
CATALOGUE = (
    "InstanceType,AcceleratorName,AcceleratorCount,Region,AvailabilityZone,Price,SpotPrice\n"
    "p5.48xlarge,H100,8,us-east-1,use1-az1,55.04,14.24\n"
)


def item(sku: str = "Standard_ND96isr_H100_v5", **changes: object) -> dict[str, object]:
    record: dict[str, object] = {
        "currencyCode": "USD",
        "retailPrice": 98.32,
        "unitPrice": 98.32,
        "armRegionName": "eastus",
        "effectiveStartDate": "2026-01-01T00:00:00Z",
        "productName": "Virtual Machines NDsr H100 v5 Series",
        "skuName": "ND96isr H100 v5",
        "serviceName": "Virtual Machines",
        "unitOfMeasure": "1 Hour",
        "type": "Consumption",
        "isPrimaryMeterRegion": True,
        "armSkuName": sku,
    }
    return record | changes


def page(items: list[object], link: str | None = None, **changes: object) -> str:
    return json.dumps({"Items": items, "NextPageLink": link, "Count": len(items)} | changes)


SPOT = item(skuName="ND96isr H100 v5 Spot", retailPrice=18.17)


def test_azures_pages_are_followed_and_both_prices_joined() -> None:
    def answer(request: Handler) -> None:
        query = parse_qs(urlsplit(request.path).query)
        if "$skip" in query:
            request.say(page([SPOT, item(skuName="ND96isr H100 v5 Low Priority", retailPrice=1)]))
            return
        assert "armSkuName eq 'Standard_ND96isr_H100_v5'" in query["$filter"][0]
        assert "(armRegionName eq 'eastus')" in query["$filter"][0]
        link = f"http://{request.headers['Host']}/prices?$filter=x&$skip=100"
        windows = item(productName="Virtual Machines NDsr Series Windows", retailPrice=200)
        request.say(page([item(), windows], link))

    with serving(answer) as (url, paths):
        pages = azure.fetch_pages(["eastus"], PATIENT, f"{url}/prices")
    (quote,) = azure.parse_pages(pages, NOW)
    assert len(paths) == 2
    assert (quote.on_demand_usd_h, quote.spot_usd_h) == (98.32, 18.17)
    assert (quote.gpu, quote.gpus, quote.region) == ("H100", 8, "eastus")


def test_of_two_meters_of_one_machine_the_newest_counts() -> None:
    old = item(retailPrice=120.0, effectiveStartDate="2024-01-01T00:00:00Z")
    for items in ([old, item()], [item(), old]):
        (quote,) = azure.parse_pages([page(list(items))], NOW)
        assert quote.on_demand_usd_h == 98.32


def test_what_no_terminal_shows_is_no_region() -> None:
    with pytest.raises(PriceError, match=r"'\\ud800'; expected a name on one line"):
        azure.parse_pages([page([item(armRegionName="\ud800")])], NOW)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<html>", "no JSON"),
        ("[]", "expected an object with a list of Items"),
        ('{"Items": {}}', "list of Items"),
        (page([item()], Count=3), "1 Items; expected its Count, 3"),
        (page([7]), "Items[0]: 7; expected an object"),
        (page([item(retailPrice=-1)]), "Items[0]: retailPrice of Standard_ND96isr_H100_v5 is -1"),
        (page([item(retailPrice="12")]), "is '12'; expected a number"),
        (page([item(retailPrice=0)]), "above 0"),
        (page([item(retailPrice=True)]), "is True"),
        (page([item(retailPrice=10**400)]), "a number of $/h above 0"),
        (page([item("Standard_D2")]), "armSkuName is 'Standard_D2'; expected one of the machines asked for"),
        (page([item(currencyCode="EUR")]), "'EUR'; expected 'USD'"),
        (page([item(unitOfMeasure="1 Month")]), "'1 Month'; expected '1 Hour'"),
        (page([item(effectiveStartDate="soon")]), "effectiveStartDate"),
        (page([item(armRegionName=None)]), "armRegionName is None"),
    ],
)
def test_what_azure_should_not_send_is_named(text: str, said: str) -> None:
    with pytest.raises(PriceError) as raised:
        azure.parse_pages([text], NOW)
    assert said in str(raised.value)
    assert "page 1" in str(raised.value)


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ("http://elsewhere.example/prices", "expected a page of the same server"),
        ("file:///etc/passwd", "expected a page of the same server"),
        ("SELF", "linked twice"),
    ],
)
def test_page_links_that_lead_astray_are_refused(link: str, said: str) -> None:
    def answer(request: Handler) -> None:
        here = f"http://{request.headers['Host']}/prices"
        request.say(page([item()], here if link == "SELF" else link))

    with serving(answer) as (url, _), pytest.raises(PriceError, match=said):
        azure.fetch_pages([], PATIENT, f"{url}/prices")


def test_a_region_cannot_smuggle_a_filter_in() -> None:
    with pytest.raises(PriceError, match="letters and digits"):
        azure.fetch_pages(["x' or 1 eq 1 or 'y"], PATIENT, "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda request: request.say("x" * 20_000), "sent more; expected at most 10000 bytes"),
        (lambda request: request.say("no", status=503), "answered 503"),
        (lambda request: request.say("", status=302, Location="http://elsewhere.example"), "answered 302"),
        (lambda request: request.say(b"\xff\xfe"), "sent no text"),
        (lambda request: request.say("half", Content_Length="900"), "could not be read"),
        (lambda request: request.wfile.write(b"SMTP ready\r\n\r\n"), "could not be read"),
    ],
    ids=["too large", "503", "redirects", "binary", "cut off", "no HTTP"],
)
def test_what_a_bad_server_does_is_reported(answer: Callable[[Handler], None], said: str) -> None:
    with serving(answer) as (url, _), pytest.raises(PriceError) as raised:
        get_text(f"{url}/vms.csv", PATIENT)
    assert said in str(raised.value)
    assert url in str(raised.value)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda request: request.trickle(2.0), "was not done after 0.5 s"),
        (lambda request: request.rfile.read(1), "said nothing for 0.2 s"),
    ],
    ids=["trickles", "silent"],
)
def test_a_server_that_never_ends_is_left_in_time(answer: Callable[[Handler], None], said: str) -> None:
    with serving(answer) as (url, _), pytest.raises(PriceError, match=said):
        get_text(f"{url}/vms.csv", QUICK)


def test_no_server_at_all() -> None:
    with pytest.raises(PriceError, match="could not be read"):
        get_text("http://127.0.0.1:9/vms.csv", PATIENT)


def question(directory: Path, now: datetime = NOW) -> PriceQuery:
    return PriceQuery(now=now, cache=PriceCache(directory, timedelta(hours=6)), limits=PATIENT)


def test_answers_are_kept_aged_and_used_when_the_server_fails_saying_so(tmp_path: Path) -> None:
    state = {"answer": CATALOGUE, "status": 200}

    def answer(request: Handler) -> None:
        request.say(str(state["answer"]), status=int(state["status"]))

    with serving(answer) as (url, paths):
        source = f"aws={url}/vms.csv"
        (fresh,) = load_prices(source, question(tmp_path))
        assert (fresh.as_of, fresh.caveat, fresh.source) == (NOW, "", f"{url}/vms.csv")

        soon = NOW + timedelta(hours=5)
        (kept,) = load_prices(source, question(tmp_path, soon))
        assert (kept.as_of, kept.caveat, len(paths)) == (NOW, "", 1)
        assert kept.age(soon) == timedelta(hours=5)

        later = NOW + timedelta(hours=7)
        for broken in ({"status": 500}, {"status": 200, "answer": "<html>"}):
            state.update(broken)
            (stale,) = load_prices(source, question(tmp_path, later))
            assert stale.as_of == NOW
            assert stale.caveat.startswith("stale: no newer answer to be had: ")
        assert len(paths) == 3

        state.update(answer=CATALOGUE.replace("14.24", "15.00"))
        (renewed,) = load_prices(source, question(tmp_path, later))
        assert (renewed.spot_usd_h, renewed.as_of, renewed.caveat) == (15.0, later, "")


def test_without_an_older_answer_the_failure_is_the_answer(tmp_path: Path) -> None:
    with serving(lambda request: request.say("<html>")) as (url, _):
        with pytest.raises(PriceError, match="no column"):
            load_prices(f"aws={url}/vms.csv", question(tmp_path))
        assert list(tmp_path.iterdir()) == []  # what could not be read is not kept


def test_a_damaged_cache_is_as_good_as_none(tmp_path: Path) -> None:
    with serving(lambda request: request.say(CATALOGUE)) as (url, paths):
        load_prices(f"aws={url}/vms.csv", question(tmp_path))
        (file,) = tmp_path.iterdir()
        for damage in (
            "",
            "[]",
            "[" * 100_000,
            file.read_text()[:-20],
            file.read_text().replace("55.04", "-1"),
        ):
            file.write_text(damage)
            (quote,) = load_prices(f"aws={url}/vms.csv", question(tmp_path))
            assert quote.on_demand_usd_h == 55.04
        assert len(paths) == 6


def test_an_answer_from_the_future_is_not_fresh(tmp_path: Path) -> None:
    with serving(lambda request: request.say(CATALOGUE)) as (url, paths):
        load_prices(f"aws={url}/vms.csv", question(tmp_path, NOW + timedelta(days=400)))
        load_prices(f"aws={url}/vms.csv", question(tmp_path, NOW))
        assert len(paths) == 2


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with serving(lambda request: request.say(CATALOGUE)) as (url, _):
        (quote,) = load_prices(f"aws={url}/vms.csv", question(tmp_path / "file" / "deeper"))
    assert quote.caveat.startswith("not cached: ")


def test_a_file_is_as_old_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "vms.csv"
    path.write_text(CATALOGUE)
    (quote,) = load_prices(f"aws={path}", question(tmp_path))
    assert quote.as_of == datetime.fromtimestamp(path.stat().st_mtime, UTC)
    with pytest.raises(PriceError, match="No such file"):
        load_prices(f"aws={tmp_path}/absent.csv", question(tmp_path))


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:9", "what://x"])
def test_a_proxy_that_cannot_be_used_is_reported(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        for each in (name, name.lower()):
            monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(PriceError, match=r"http://example\.invalid.*unset ALL_PROXY"):
        get_text("http://example.invalid/prices", QUICK)


@pytest.mark.parametrize("source", ["nosuch", "=vms.csv", "aws=", "a b=vms.csv"])
def test_an_unknown_source_names_those_there_are(source: str, tmp_path: Path) -> None:
    with pytest.raises(PriceError, match="expected builtin, skypilot, aws, azure"):
        load_prices(source, question(tmp_path))
