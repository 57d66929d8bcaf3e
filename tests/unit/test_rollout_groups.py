"""Shares of tokens, orders on the wire, groups and where they meet: what needs no second process."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from spotlight.rollout.sequence_parallel import communicators, rendezvous
from spotlight.rollout.sequence_parallel.communicators import (
    CommunicatorStuckError,
    Gloo,
    Nccl,
    SpPeerLostError,
)
from spotlight.rollout.sequence_parallel.lockstep import Claim, Given, LockstepOrder
from spotlight.rollout.sequence_parallel.membership import (
    FormationError,
    SpGroup,
    SpMembership,
    StaleEpochError,
    StepLimit,
)
from spotlight.rollout.sequence_parallel.ulysses import SequenceParallel, SequenceParallelError, share_out
from spotlight.scheduler.types import LeaseId, RolloutId, WorkerId


@given(st.integers(1, 8), st.integers(0, 5000), st.integers(1, 600))
def test_shares_level_the_ranks_with_little_padding(degree: int, more: int, text: int) -> None:
    image = degree + more
    shares = share_out(degree, image, text)
    assert sum(shares.image) == image
    assert max(shares.image) - min(shares.image) <= 1
    assert len({a + b for a, b in zip(shares.image, shares.text, strict=True)}) == 1
    assert min(shares.text) >= 1
    assert text <= sum(shares.text) < text + 2 * degree
    for of in (shares.image, shares.text):  # a length tells whose it is, or it does not matter
        assert shares.of_length(sum(of)) == of


def test_even_lengths_need_no_padding() -> None:
    assert share_out(4, 4096, 512).text == (128,) * 4
    assert share_out(2, 8, 8).text == (4, 4)


def test_lengths_that_cannot_be_are_refused() -> None:
    with pytest.raises(SequenceParallelError, match="an image of 3 tokens at sequence-parallel degree 4"):
        share_out(4, 3, 10)
    with pytest.raises(
        SequenceParallelError, match="has 5 tokens; expected the image's 8 or the padded text's 4"
    ):
        share_out(2, 8, 4).of_length(5)


@settings(max_examples=20)
@given(
    st.sampled_from(["", "policy", "old"]),
    st.lists(st.text(max_size=5), max_size=4, unique=True),
    st.integers(0, 3),
)
def test_orders_survive_the_wire(slot: str, ids: list[str], given: int) -> None:
    states = tuple(
        Given(
            {"step": i, "nested": {"a.b": [1, 2.5, None]}},
            {"latents": torch.randn(2, 3), "no.kept": torch.empty(0, 4)},
            Claim(LeaseId(7 + i), i),
        )
        for i in range(given)
    )
    names = tuple(RolloutId(name) for name in ids)
    order = LockstepOrder(slot, "digest", names[1:], names[:1], states, LeaseId(given))
    read = LockstepOrder.from_bytes(order.to_bytes())
    assert dataclasses.replace(read, given=()) == dataclasses.replace(order, given=())
    for ours, theirs in zip(states, read.given, strict=True):
        assert (theirs.header, theirs.claim) == (ours.header, ours.claim)
        assert theirs.tensors.keys() == ours.tensors.keys()
        assert all(torch.equal(theirs.tensors[name], ours.tensors[name]) for name in ours.tensors)


class Heads(nn.Module):
    """Stands for an attention module, by what is asked of one."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.processor = type("Processor", (), {"_parallel_config": None})()


class Transformer(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self._cp_plan: dict[str, dict[str, object]] = {"attention": {}}
        self.attention = Heads(heads)


def test_a_worker_by_itself_changes_epochs_without_a_network() -> None:
    store, _ = rendezvous.serve()
    parallel = SequenceParallel([Transformer(24)])
    membership = SpMembership(WorkerId("w"), store, Gloo(1.0), parallel, form_s=0.1)
    assert membership.leads
    assert membership.broadcast(b"order") == b"order"
    membership.form(SpGroup(3, (WorkerId("w"),)))
    assert membership.group == SpGroup(3, (WorkerId("w"),))
    with pytest.raises(StaleEpochError, match="epoch 2, but has seen 3"):
        membership.form(SpGroup(2, (WorkerId("w"), WorkerId("v"))))
    with pytest.raises(
        SequenceParallelError, match=r"degree 5 does not divide .* 24 .*; use one of 1, 2, 3, 4, 6"
    ):
        membership.form(SpGroup(4, tuple(WorkerId(name) for name in "wabcd")))
    with pytest.raises(FormationError, match=r": v did not come within 0.1 s"):
        membership.form(SpGroup(4, (WorkerId("w"), WorkerId("v"))))
    assert membership.group == SpGroup(4, (WorkerId("w"),))
    assert not parallel.active
    with membership.exchange():  # alone nothing is translated, and nobody lost
        pass
    with pytest.raises(ZeroDivisionError), membership.exchange():
        raise ZeroDivisionError


def test_a_store_that_is_gone_is_named() -> None:
    store, address = rendezvous.serve()
    client = rendezvous.connect(address)
    membership = SpMembership(
        WorkerId("w"), client, Gloo(1.0), SequenceParallel([Transformer(4)]), form_s=0.1
    )
    del store
    with pytest.raises(FormationError, match="the group store does not answer"):
        membership.form(SpGroup(1, (WorkerId("w"), WorkerId("v"))))
    with pytest.raises(
        ConnectionError, match=f"no group store answers at 127.0.0.1:{address.port} within 0.2 s"
    ):
        rendezvous.connect(address, timeout_s=0.2)


def test_the_store_listens_on_the_loopback_only() -> None:
    store, address = rendezvous.serve()
    assert address.host == "127.0.0.1"
    others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for host in others - {"127.0.0.1"}:
        with socket.socket() as probe:
            assert probe.connect_ex((host, address.port)) != 0
    del store


def test_gloo_tells_a_lost_peer_from_other_failures() -> None:
    gloo = Gloo(1.0)
    with pytest.raises(SpPeerLostError, match="Connection closed by peer"), gloo.bounded():
        raise RuntimeError("[/pytorch/third_party/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:9")
    with pytest.raises(RuntimeError, match=r"^out of memory$"), gloo.bounded():
        raise RuntimeError("out of memory")


def test_a_group_of_gpus_whose_peer_is_missing_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits for it without end, and there is nothing yet to abort."""
    released = threading.Event()
    found: list[object] = []

    def opened(*arguments: object) -> object:
        if not found:
            released.wait()
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    monkeypatch.setattr(communicators, "_opened", opened)
    monkeypatch.setattr(communicators, "_use", lambda group, device: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    store = dist.HashStore()
    nccl = Nccl(torch.device("cuda:0"), 0.2)
    with pytest.raises(CommunicatorStuckError, match=r"not returned after 0\.2 s.*raise fleet\.collective_s"):
        nccl.open(store, 0, 2)
    assert not issubclass(CommunicatorStuckError, SpPeerLostError), (
        "the process ends; it forms no other group"
    )
    found.append(dist.DistBackendError("NCCL error: remote process exited"))
    released.set()
    with pytest.raises(SpPeerLostError, match="remote process exited"):
        nccl.open(store, 0, 2)
    found[0] = "a group"
    assert nccl.open(store, 0, 2) == "a group"


@pytest.mark.parametrize("before", [None, "3"])
def test_a_worker_that_becomes_a_learner_handles_failed_collectives_as_one(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(key, raising=False)
    if before is not None:
        monkeypatch.setenv(key, before)
    seen: list[str | None] = []
    monkeypatch.setattr(communicators, "_opened", lambda *_: seen.append(os.environ.get(key)))
    monkeypatch.setattr(communicators, "_use", lambda group, device: None)
    monkeypatch.setattr(communicators, "_in_time", lambda connect, limit_s: connect())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    nccl = Nccl(torch.device("cuda:0"), 0.2)
    for _ in range(2):
        nccl.open(dist.HashStore(), 0, 2)
        nccl.close()
        assert os.environ.get(key) == before
    assert seen == ["0", "0"], "a group is to outlive its members"


sizes = st.floats(1.0, 1e6)
times = st.floats(1e-3, 1e3)


@given(st.lists(st.tuples(sizes, times), min_size=1, max_size=40), st.floats(0.1, 60.0))
def test_a_step_like_those_before_is_within_its_limit(
    steps: list[tuple[float, float]], least_s: float
) -> None:
    limit = StepLimit()
    assert limit.limit_s(1.0, least_s) == least_s, "as configured until a step is measured"
    for work, seconds in steps:
        limit.took(work, seconds)
    for work, seconds in steps[-32:]:
        assert limit.limit_s(work, least_s) >= max(least_s, 4 * seconds * (1 - 1e-9))
        assert limit.limit_s(2 * work, least_s) >= max(least_s, 8 * seconds * (1 - 1e-9))
        assert limit.limit_s(0, least_s) >= max(least_s, 4 * seconds)
    for _ in range(32):
        limit.took(1.0, 1e-9)
    assert limit.limit_s(1.0, least_s) == least_s, "slow steps of long ago do not count"


@given(st.floats(0.1, 60.0), st.floats(1.0, 15.0))
def test_a_limit_below_every_step_grows_until_one_is_done(least_s: float, slower: float) -> None:
    """Otherwise a group with a short configured limit would break at each first step."""
    limit, step_s = StepLimit(), slower * least_s
    for _ in range(5):
        if (allowed_s := limit.limit_s(1.0, least_s)) >= step_s:
            break
        limit.lost(allowed_s, least_s)
    assert limit.limit_s(1.0, least_s) >= step_s
    limit.took(1.0, step_s)
    assert limit.limit_s(1.0, least_s) == pytest.approx(max(least_s, 4 * step_s))
    limit.lost(least_s / 2, least_s)  # a closed socket, at once: no limit ran out
    assert limit.limit_s(1.0, least_s) == pytest.approx(max(least_s, 4 * step_s))


def test_interfaces_are_those_of_the_host_only_while_the_group_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    with rendezvous.listening_only_on("127.0.0.1"):
        assert os.environ["GLOO_SOCKET_IFNAME"].startswith("lo")
        assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7", "the user's"
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth8")
    with rendezvous.listening_only_on("127.0.0.1"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth8"


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="collective_s is 0; expected seconds above 0"):
        communicators.communicator(torch.device("cpu"), 0)
    with pytest.raises(ValueError, match="NCCL's device is cuda; expected a GPU with its index"):
        communicators.communicator(torch.device("cuda"), 1.0)
    assert isinstance(communicators.communicator(torch.device("cuda:0"), 1.0), Nccl)
    assert isinstance(communicators.communicator(torch.device("cpu"), 1.0), Gloo)
    with pytest.raises(ValueError, match="expected at least one, and each once"):
        SpGroup(1, ())
