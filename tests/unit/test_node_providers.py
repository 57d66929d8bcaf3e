"""Who adds and drops spot nodes: over real sockets against servers that behave, and misbehave, as Kubernetes'
does; and the market of an emulated cluster.
"""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes_server import Kubernetes, meanwhile, says, serving_kubernetes, slow
from typer.testing import CliRunner

from spotlight.cli.main import app
from spotlight.cluster.nodes.listing import RayNode
from spotlight.config.load import build_config, load_config
from spotlight.registry import NODE_PROVIDERS
from spotlight.scheduler.types import NodeKind
from spotlight_fleet.providers import json_api
from spotlight_fleet.providers.command_provider import COMMANDS, CommandProvider, CommandSettings
from spotlight_fleet.providers.emulated_provider import SpotOffers
from spotlight_fleet.providers.kubernetes_provider import KUBERNETES, KubernetesProvider, KubernetesSettings
from spotlight_fleet.providers.node_notes import NodeNotes
from spotlight_fleet.providers.node_provider import ProviderError, ProviderSetting
from spotlight_rewards.base.errors import ConfigError


def node(name: str, address: str = "10.0.0.99") -> RayNode:
    return RayNode(f"ray-{name}", name, NodeKind.SPOT, 8, True, "H100", address, 1, "")


# -- Kubernetes --------------------------------------------------------------------------------------------


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("first-token\n")
    (tmp_path / "namespace").write_text("train")
    return tmp_path


@pytest.fixture
def kubernetes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Kubernetes, str]]:
    monkeypatch.setattr(json_api, "PAUSE_S", 0.01)
    state = Kubernetes()
    state.operate()
    with serving_kubernetes(state) as server:
        yield state, server


def provider(server: str, account: Path, **settings: object) -> KubernetesProvider:
    given = {"server": server, "account": account, "cluster": "qwen", "timeout_s": 60, **settings}
    return KubernetesProvider(KubernetesSettings.model_validate(given))


def nodes_of(state: Kubernetes) -> list[RayNode]:
    """The nodes of the pods that run."""
    return [node(name, address) for name, address in state.pods.items() if address is not None]


def test_more_and_fewer_nodes_and_only_those_that_are_empty_end(
    kubernetes: tuple[Kubernetes, str], account: Path
) -> None:
    state, server = kubernetes
    pods = provider(server, account)
    assert pods.asked([]) == 2
    assert pods.ask(4, nodes_of(state), []) == 4
    assert len(state.pods) == 4
    present = nodes_of(state)
    assert pods.ask(3, present, [present[1]]) == 3
    assert state.deleted == [present[1].name]
    # None of those that are left is empty: none is ended.
    assert pods.ask(1, nodes_of(state), []) == 3
    assert pods.ask(3, nodes_of(state), []) == 3
    assert state.deleted == [present[1].name]
    assert set(state.kinds) == {"application/json-patch+json"}
    pods.close()
    assert state.replicas == 0


def test_pods_that_wait_for_a_node_end_before_any_that_works(
    kubernetes: tuple[Kubernetes, str], account: Path
) -> None:
    state, server = kubernetes
    state.capacity = 3
    pods = provider(server, account)
    assert pods.ask(5, nodes_of(state), []) == 5
    working = nodes_of(state)
    assert len(working) == 3
    assert pods.ask(3, working, []) == 3
    assert {each.name for each in working} == set(state.pods)
    # Replicas whose pod is lost need no name: the number is lowered alone.
    state.lose(working[0].name)
    assert pods.ask(2, nodes_of(state), []) == 2
    assert {each.name for each in working[1:]} == set(state.pods)


def test_a_change_by_another_meanwhile_is_not_overwritten(
    kubernetes: tuple[Kubernetes, str], account: Path
) -> None:
    state, server = kubernetes
    state.faults = [meanwhile(lambda: None), meanwhile(state.operate)]
    assert provider(server, account).ask(4, nodes_of(state), []) == 4
    assert [method for method, _ in state.requests] == ["GET", "PATCH", "GET", "PATCH"]
    assert len(state.pods) == 4
    state.faults = [says(200, state.cluster()) if turn % 2 == 0 else says(409) for turn in range(20)]
    with pytest.raises(
        ProviderError, match=r"group 'spot' of RayCluster 'qwen': changed by others 5 times.*quiet"
    ):
        provider(server, account).ask(5, nodes_of(state), [])


def test_replicas_that_nobody_stated_are_those_that_the_operator_makes(
    kubernetes: tuple[Kubernetes, str], account: Path
) -> None:
    state, server = kubernetes
    silent = state.cluster()
    for key in ("replicas", "minReplicas", "maxReplicas", "scaleStrategy"):
        del silent["spec"]["workerGroupSpecs"][1][key]
    state.faults = [says(200, silent)]
    assert provider(server, account).asked([]) == 0
    state.faults = [says(200, silent)]
    assert provider(server, account).ask(1, [], []) == 1
    assert state.replicas == 1


def test_what_may_pass_is_tried_again_and_reported_when_it_does_not(
    kubernetes: tuple[Kubernetes, str], account: Path
) -> None:
    state, server = kubernetes
    state.faults = [says(500), says(429), slow(4.0)]
    assert provider(server, account, timeout_s=2.0).ask(3, nodes_of(state), []) == 3
    state.faults = [slow(1.0)] * 4
    with pytest.raises(ProviderError, match=r"was not done after 0.5 s, in the last of 4 attempts; expected"):
        provider(server, account, timeout_s=0.5).asked([])
    state.faults = [says(500)] * 4
    with pytest.raises(ProviderError, match=r"answered 500 \(.*out of order"):
        provider(server, account).asked([])
    with pytest.raises(ProviderError, match="in the last of 4 attempts"):
        provider("http://127.0.0.1:9", account).asked([])


def test_a_token_that_was_replaced_is_read_again_and_none_is_reported(
    kubernetes: tuple[Kubernetes, str], account: Path
) -> None:
    state, server = kubernetes

    def rotate() -> None:
        state.token = "second-token"
        (account / "token").write_text("second-token")

    pods = provider(server, account)
    state.faults = [meanwhile(rotate)]
    assert pods.asked([]) == 2
    assert len(state.requests) == 2, "refused once, then read again"
    state.token = "third-token"
    with pytest.raises(ProviderError, match=r"answered 401.*expected 200 OK. The service account") as caught:
        pods.asked([])
    assert "second-token" not in str(caught.value)
    assert len(state.requests) == 4
    for broken in ("", "half-a\ntoken", "a token"):
        (account / "token").write_text(broken)
        with pytest.raises(ProviderError, match="token: found no token, expected one line") as caught:
            pods.asked([])
        assert "half-a" not in str(caught.value)
    assert len(state.requests) == 4


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (says(403), "answered 403.*role of launch/kuberay-scaling.yaml"),
        (says(404), "answered 404.*kubectl get rayclusters"),
        (says(200, b"<html>proxy</html>"), "expected JSON. Is it the address"),
        (says(200, b"[" * 100_000), "expected JSON. Is it the address"),
        (says(200, {"spec": {}}), "no such group; expected one of none"),
        (
            says(200, {"metadata": {}, "spec": {"workerGroupSpecs": [{"groupName": "spot"}]}}),
            "cannot be read",
        ),
        (says(200, ["no cluster"]), "cannot be read"),
    ],
)
def test_what_will_not_pass_names_what_to_do(
    kubernetes: tuple[Kubernetes, str], account: Path, answer: object, message: str
) -> None:
    state, server = kubernetes
    state.faults = [answer]  # type: ignore[list-item]
    with pytest.raises(ProviderError, match=message):
        provider(server, account).asked([])


def test_bounds_of_the_group_and_missing_places_are_reported(
    kubernetes: tuple[Kubernetes, str], account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, server = kubernetes
    with pytest.raises(
        ProviderError, match="9 replicas are wanted, its minReplicas and maxReplicas are 0 and 8"
    ):
        provider(server, account).ask(9, [], [])
    state.hosts = 4
    with pytest.raises(ProviderError, match="numOfHosts is 4; expected 1"):
        provider(server, account).ask(3, [], [])
    state.hosts, state.autoscaler = 1, True
    with pytest.raises(ProviderError, match="enableInTreeAutoscaling is true; expected false"):
        provider(server, account).ask(3, [], [])
    state.autoscaler = False
    monkeypatch.delenv("RAY_CLUSTER_NAME", raising=False)
    with pytest.raises(ProviderError, match=r"RAY_CLUSTER_NAME is not set.*fleet.target.params.cluster"):
        provider(server, account, cluster=None).asked([])
    monkeypatch.setenv("RAY_CLUSTER_NAME", "qwen")
    assert provider(server, account, cluster=None).asked([]) == 2
    with pytest.raises(ProviderError, match=r"namespace cannot be read.*service account"):
        provider(server, account / "nowhere").asked([])
    assert not state.patches


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_the_server_must_show_a_certificate_of_the_service_accounts_authority(account: Path) -> None:
    key, certificate = account / "key.pem", account / "ca.crt"
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=kubernetes",
    ]
    made += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(made, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    state = Kubernetes()
    with serving_kubernetes(state, context) as server:
        assert server.startswith("https:")
        assert provider(server, account).asked([]) == 2
        certificate.write_text("")
        with pytest.raises(ProviderError, match="cannot be read as certificates"):
            provider(server, account).asked([])
        other = account / "other.pem"
        made[-1] = str(other)
        subprocess.run(made, check=True, capture_output=True)
        other.rename(certificate)
        with pytest.raises(ProviderError, match=r"failed .*certificate"):
            provider(server, account).asked([])


# -- the market of an emulated cluster ---------------------------------------------------------------------

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("offer"), st.integers(0, 9)),
        st.tuples(st.just("withdraw"), st.integers(0, 9)),
        st.tuples(st.just("want"), st.integers(0, 9)),
    ),
    max_size=40,
)


@given(steps=STEPS, leave=st.booleans())
def test_the_run_takes_what_it_wants_of_what_there_is(steps: list[tuple[str, int]], leave: bool) -> None:
    offers = SpotOffers(2)
    for what, number in steps:
        name = f"spot-{number}"
        if what == "offer":
            offers.offered[name] = 1
        elif what == "withdraw":
            offers.withdraw(name)
        else:
            busy = set(offers.taken)
            back = offers.want(number, busy, busy if leave else set())
            assert set(back) <= (busy if leave else set()), "none that works"
            if leave:
                assert len(offers.taken) <= max(number, 0)
        while offers.take():
            pass
        assert offers.taken <= offers.offered.keys()
        assert len(offers.taken) == min(len(offers.offered), offers.wanted)


# -- the configuration -------------------------------------------------------------------------------------

RAY = {"driver": "ray", "address": "auto", "price_usd_h": 1.0}


@pytest.mark.parametrize(
    ("fleet", "key", "message"),
    [
        ({"target": {"nodes_max": 4}}, "fleet.target", "a deadline_h or a budget_usd.*--deadline-h"),
        ({"target": {"deadline_h": 2}}, "fleet.target", "fleet.driver=inline"),
        (RAY | {"target": {"deadline_h": 2}}, "fleet.target.provider", "other than 'auto' or 'emulated'"),
        ({"driver": "ray", "target": {"deadline_h": 2, "provider": "kubernetes"}}, "fleet.target.provider",
         "'auto' or 'emulated' with a cluster on this machine"),
        (RAY | {"target": {"budget_usd": 9, "provider": "commands"}}, "fleet.target.params.start", "nothing"),
        (RAY | {"target": {"budget_usd": 9, "provider": "kubernetes", "params": {"grp": "x"}}},
         "fleet.target.params.grp", "group, cluster"),
        (RAY | {"target": {"budget_usd": 9, "provider": "kubernetes", "params": {"server": "http://10.0.0.1"}}},
         "fleet.target.params.server", "https://HOST"),
        ({"driver": "ray", "target": {"deadline_h": 2, "nodes_min": 3, "nodes_max": 2}},
         "fleet.target.nodes_min", "at most fleet.target.nodes_max"),
        ({"driver": "ray", "target": {"deadline_h": 2, "nodes_min": 0}}, "fleet.target.nodes_min",
         "a slot that rolls out.* Set at least 1"),
        ({"driver": "ray", "learner_placement": "spot", "learner_ranks": 2, "spot": {"nodes": 4},
          "target": {"deadline_h": 2}}, "fleet.target.nodes_min", "the learner and a slot.* Set at least 3"),
    ],
)  # fmt: skip
def test_goals_that_cannot_be_used_are_refused(fleet: dict[str, object], key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}: found.*{message}"):
        build_config({"fleet": fleet, "learner": {"mode": "lora"}}, "the test")


def test_every_provider_is_opened_from_its_settings(tmp_path: Path) -> None:
    setting = ProviderSetting(None, 2, NodeNotes(tmp_path / "nodes.json"), 60.0)
    assert isinstance(COMMANDS.open(CommandSettings(start="true", stop="true"), setting), CommandProvider)
    assert isinstance(KUBERNETES.open(KubernetesSettings(), setting), KubernetesProvider)
    for name in NODE_PROVIDERS:
        kind = NODE_PROVIDERS.load(name)
        assert all(field.description for field in kind.settings.model_fields.values())
    config = load_config(None, ["fleet.driver=ray", "fleet.target.deadline_h=2"])
    assert config.fleet.target.provider_name == "emulated"


def test_the_options_are_short_for_the_keys(tmp_path: Path) -> None:
    """Nothing starts: the plan says what would."""
    words = ["train", "--deadline-h", "6", "--budget-usd", "150", "--dry-run", f"runs_dir={tmp_path}"]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "6 h and $150.00" in " ".join(result.output.split())
    assert "held by 1 to 16 spot nodes" in " ".join(result.output.split())
    refused = CliRunner().invoke(app, ["train", "--deadline-h", "0", "--dry-run"])
    assert refused.exit_code != 0
    assert "fleet.target.deadline_h" in refused.output
