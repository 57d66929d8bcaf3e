"""Trace files of every form are read exactly, or the bad line is named by its number."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight_fleet.traces.trace import PricePoint, Trace, TraceError, TraceEvent, TraceEventKind
from spotlight_fleet.traces.trace_files import parse_trace, read_trace, to_csv, to_jsonl, write_trace
from spotlight_fleet.traces.transforms import with_notices
from spotlight_plan.traces.generator import TraceSpec, generate
from spotlight_plan.traces.trace_statistics import statistics

ADD, NOTICE, REMOVE = TraceEventKind.ADD, TraceEventKind.NOTICE, TraceEventKind.REMOVE
REAL = Path(os.environ.get("SPOTLIGHT_TRACES", Path(__file__).parents[3] / "shared" / "traces"))


def refusal(text: str) -> str:
    with pytest.raises(TraceError) as raised:
        parse_trace(text, "trace")
    return str(raised.value)


def test_bamboo() -> None:
    trace = parse_trace("0,add,a\n500,add,b\n\n1500,remove,a\n2000,add,a\n", "trace", gpus_per_node=4)
    assert trace.events[2] == TraceEvent(1.5, REMOVE, "a", 4)
    assert (len(trace.events), trace.horizon_s, trace.prices) == (4, 2.0, ())


def test_skypilot_has_the_fewest_changes_that_explain_the_counts() -> None:
    text = json.dumps({"metadata": {"gap_seconds": 60}, "data": [2, 2, 0, 1], "prices": [3, 3, 2.5, 2.5]})
    trace = parse_trace(text, "trace")
    assert [(event.time_s, event.kind, event.node) for event in trace.events] == [
        (0, ADD, "spot-0"),
        (0, ADD, "spot-1"),
        (120, REMOVE, "spot-1"),
        (120, REMOVE, "spot-0"),
        (180, ADD, "spot-0"),
    ]
    assert trace.horizon_s == 240
    assert trace.prices == (PricePoint(0, 3), PricePoint(120, 2.5))
    assert statistics(trace).price_mean_usd_h == pytest.approx(2.75)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30))
def test_skypilots_counts_come_back(counts: list[int]) -> None:
    if not any(counts):
        return
    trace = parse_trace(json.dumps({"metadata": {"gap_seconds": 10}, "data": counts}), "trace")
    assert statistics(trace).nodes_mean == pytest.approx(sum(counts) / len(counts))
    assert statistics(trace).nodes_max == max(counts)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        (" \n\n", "is empty"),
        ("0,add,a\nx,add,b\n", "trace:2: the time is 'x'"),
        ("0,add,a\n-5,add,b\n", "trace:2: the time is '-5'"),
        ("0,add\n", "trace:1: '0,add' has 2 fields"),
        (f"{'9' * 400},add,a\n", "expected whole milliseconds"),
        (f"{'9' * 5000},add,a\n", "expected whole milliseconds"),
        ("0,add,a\n\n1,move,a\n", "trace:3: the event is 'move'; expected add or remove"),
        ("10,add,a\n5,add,b\n", "trace:2: unsorted: the time falls from 0.01 s to 0.005 s"),
        ("0,add,a\n5,add,a\n", "trace:2: node a is added twice"),
        ("0,add,a\n5,remove,b\n", "trace:2: remove of node b, which is not there"),
        ("0,add,\n5,add,b\n", "trace:1: the node has no name"),
        ("0,add,a\n0,add,b\n", "all events are at 0 s"),
        ("time,event,node\n0,add,a\n", "trace:1: the time is 'time'"),
    ],
)
def test_bad_bamboo_lines(text: str, said: str) -> None:
    assert said in refusal(text)


def test_every_bad_line_is_reported_up_to_ten() -> None:
    message = refusal("x,add,a\n" * 12)
    assert "trace:10" in message
    assert "... and 2 more" in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "trace:1: no JSON"),
        ('{\n"metadata": oops}', "trace:2: no JSON"),
        ("[1, 2]", "gap_seconds is None"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "gap_seconds is 0"),
        ('{"metadata": {"gap_seconds": 60}}', "data is None"),
        ('{"metadata": {"gap_seconds": 60}, "data": []}', "data is []"),
        ('{"metadata": {"gap_seconds": 60}, "data": [1, -2]}', "trace:data[1]: -2"),
        ('{"metadata": {"gap_seconds": 60}, "data": [1, 2.5]}', "trace:data[1]: 2.5"),
        ('{"metadata": {"gap_seconds": 60}, "data": [1000000000]}', "from 0 to 100000"),
        ('{"metadata": {"gap_seconds": 1e999}, "data": [1]}', "gap_seconds is inf"),
        ('{"metadata": {"gap_seconds": 60}, "data": [1, 1], "prices": [1]}', "expected 2, as many as data"),
        ('{"metadata": {"gap_seconds": 60}, "data": [1], "prices": [-1]}', "prices[0] is -1"),
    ],
)
def test_bad_skypilot_files(text: str, said: str) -> None:
    assert said in refusal(text)


HEAD = '{"format": "spotlight-trace", "version": 1, "horizon_s": 10}\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("time_s,event,node,gpus\n", "there is no event"),
        ("time_s,event,node,gpus\n0,add,a\n", "trace:2: '0,add,a' has 3 fields"),
        ("time_s,event,node,gpus\nnan,add,a,1\n", "trace:2: time_s is nan"),
        ("time_s,event,node,gpus\n0,add,a,0\n", "trace:2: gpus is 0"),
        ("time_s,event,node,gpus\n0,add,a,two\n", "trace:2: gpus is 'two'"),
        (f"time_s,event,node,gpus\n0,add,a,{'9' * 5000}\n", "trace:2: gpus is '999"),
        (f"time_s,event,node,gpus\n{'9' * 400},add,a,1\n", "trace:2: time_s is"),
        (HEAD + '{"time_s": 0, "event": ["add"], "node": "a", "gpus": 1}\n', "trace:2: event is ['add']"),
        (HEAD + '{"time_s": 0, "event": {}, "node": "a", "gpus": 1}\n', "trace:2: event is {}"),
        (HEAD + f'{{"time_s": {"9" * 400}, "event": "add", "node": "a", "gpus": 1}}\n', "trace:2: time_s is"),
        ("# spotlight trace horizon_s=soon\ntime_s,event,node,gpus\n0,add,a,1\n", "trace:1:"),
        ("# spotlight trace horizon_s=5\n0,add,a,1\n", "trace:2: '0,add,a,1'; expected the header"),
        ("# spotlight trace horizon_s=5\ntime_s,event,node,gpus\n9,add,a,1\n", "at most the horizon, 5 s"),
        ("time_s,event,node,gpus\n0,add,a,1\n1,notice,a,1\n2,notice,a,1\n", "trace:4: a second notice"),
        ("time_s,event,node,gpus\n0,add,a,1\n1,remove,a,2\n", "trace:3: node a has 2 GPUs"),
        (HEAD + "nonsense\n", "trace:2: 'nonsense' is no JSON"),
        (HEAD + '{"time_s": 0, "event": "add", "node": 7, "gpus": 1}\n', "trace:2: node is 7"),
        (HEAD + '{"time_s": 0, "event": "add", "node": "a", "gpus": true}\n', "trace:2: gpus is True"),
        (HEAD + '{"time_s": 0, "spot_usd_h": -1}\n', "trace:2:"),
        (HEAD.replace("1,", "2,"), '"version": 1'),
        (HEAD, "there is no event"),
    ],
)
def test_bad_canonical_files(text: str, said: str) -> None:
    assert said in refusal(text)


def test_an_impossible_trace_cannot_be_made() -> None:
    add = TraceEvent(1.0, ADD, "a", 1)
    with pytest.raises(TraceError, match="horizon"):
        Trace((add,), 0.0, "made")
    with pytest.raises(TraceError, match="event 1: node a is added twice"):
        Trace((add, add), 10.0, "made")
    with pytest.raises(TraceError, match="price"):
        Trace((add,), 10.0, "made", (PricePoint(0.0, -1.0),))


def test_what_is_written_reads_back_equal(tmp_path: Path) -> None:
    trace = with_notices(generate(TraceSpec(seed=3, horizon_s=9 * 3600, nodes=5, bursts_per_h=1)), 30)
    for ending in (".csv", ".jsonl"):
        path = tmp_path / "deep" / f"trace{ending}"
        write_trace(trace, path)
        again = read_trace(path)
        assert (again.events, again.horizon_s) == (trace.events, trace.horizon_s)


def test_only_json_lines_hold_prices() -> None:
    trace = Trace((TraceEvent(0.0, ADD, "a,b", 1),), 10.0, "made", (PricePoint(0.0, 2.5),))
    assert parse_trace(to_jsonl(trace), "made") == trace
    with pytest.raises(TraceError, match=r"write \.jsonl"):
        to_csv(trace)
    bare = Trace(trace.events, 10.0, "made")
    assert parse_trace(to_csv(bare), "made") == bare  # a comma in a name survives


@pytest.mark.parametrize("name", ["a\nb", "a\rb", "a\ud800"])
def test_a_name_that_csv_cannot_give_back_is_refused_by_it_alone(tmp_path: Path, name: str) -> None:
    trace = Trace((TraceEvent(0.0, TraceEventKind.ADD, name, 1),), 10.0, "made")
    with pytest.raises(TraceError, match=r"made has a node .*; expected a name on one line; write \.jsonl"):
        write_trace(trace, tmp_path / "trace.csv")
    write_trace(trace, tmp_path / "trace.jsonl")
    assert read_trace(tmp_path / "trace.jsonl").events == trace.events


@pytest.mark.parametrize("name", ["a\tb", "a\u00a0b", "a\u2028b", " a ", '"a', "#"])
def test_other_names_survive_csv(name: str) -> None:
    trace = Trace((TraceEvent(0.0, TraceEventKind.ADD, name, 1),), 10.0, "made")
    assert parse_trace(to_csv(trace), "made") == trace


def test_places_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="no text"):
        read_trace(tmp_path / "bytes.csv")
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "absent.csv")
    trace = generate(TraceSpec(seed=0, horizon_s=3600, nodes=1))
    with pytest.raises(TraceError, match=r"expected \.csv or \.jsonl"):
        write_trace(trace, tmp_path / "trace.txt")
    with pytest.raises(TraceError, match="expected a place"):
        write_trace(trace, tmp_path / "bytes.csv" / "trace.csv")


def test_a_trace_replaces_another_whole_or_not_at_all(tmp_path: Path) -> None:
    path, link = tmp_path / "trace.csv", tmp_path / "link.csv"
    link.symlink_to(path)
    write_trace(generate(TraceSpec(seed=0, horizon_s=3600, nodes=1)), link)
    before = path.stat().st_ino
    trace = generate(TraceSpec(seed=1, horizon_s=3600, nodes=2))
    write_trace(trace, link)
    assert read_trace(path).events == trace.events
    assert path.stat().st_ino != before  # what reads the old one goes on reading it
    assert link.is_symlink()
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(TraceError, match="Is a directory"):
        write_trace(trace, tmp_path / "folder.csv")
    assert {one.name for one in tmp_path.iterdir()} == {"trace.csv", "link.csv", "folder.csv"}


@pytest.mark.parametrize(
    ("name", "added", "removed", "most"),
    [("bamboo-p3-trace.csv", 177, 167, 32), ("bamboo-g4dn-trace.csv", 79, 74, 24)],
)
def test_real_traces(name: str, added: int, removed: int, most: int) -> None:
    path = REAL / name
    if not path.exists():
        pytest.skip(f"{path} is not here; SPOTLIGHT_TRACES names the folder of the real traces")
    numbers = statistics(read_trace(path))
    assert (numbers.machines, numbers.preemptions, numbers.nodes_max) == (added, removed, most)
    assert 0 < numbers.preemptions_per_node_h < 1
