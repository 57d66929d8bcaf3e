"""Commits: each latent goes to the store once, and what is restored is what was committed, or refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from test_serialization import SIZE, bits, forged

from spotlight.cluster.blobs.blob_store import StoredBlob
from spotlight.diffusion.samplers import FlowSDE
from spotlight.diffusion.schedule import RandomWindow
from spotlight.models.condition import FIRST_FRAME, GRIDS, REFERENCES, Condition
from spotlight.rollout.commits import Committer, Packed, latents_of, restore
from spotlight.rollout.serialization import (
    SerializationError,
    checksum_of,
    pack_condition,
    unpack_condition,
    unpack_tensors,
)
from spotlight.rollout.state import Recipe, RolloutState
from spotlight.scheduler.types import PolicyVersion, Purpose, Rollout, RolloutId
from spotlight.worker import stored_rollouts
from spotlight.worker.stored_rollouts import RolloutStarter
from spotlight_rewards.base.prompts import PromptId

STEPS, WINDOW = 6, range(1, 4)
RECIPE = Recipe(SIZE, FlowSDE(0.7), RandomWindow(3, high=STEPS), 1.0, "trajectory")
EMBEDDINGS = unpack_condition(pack_condition(Condition({"embeds": torch.randn(50, 64)})))


def rollout_of(name: str, prompt: str) -> Rollout:
    return Rollout(RolloutId(name), Purpose.TRAIN, 0, PromptId(prompt), 0, 0, STEPS, PolicyVersion(0))


def states(name: str, condition: Condition = EMBEDDINGS) -> list[RolloutState]:
    """Before every step and at the end, as the engine makes one from another."""
    state = RolloutState(
        rollout_of(name, "p"),
        RECIPE,
        condition,
        0,
        torch.randn(8, 4),
        torch.linspace(1, 0, STEPS + 1),
        WINDOW,
    )
    made = [state]
    for step in range(STEPS):
        latents, kept, log_probs = torch.randn(8, 4), state.kept, state.log_probs
        if state.stochastic:
            kept, log_probs = (*(kept or (state.latents,)), latents), (*log_probs, torch.randn(()))
        state = dataclasses.replace(state, step=step + 1, latents=latents, kept=kept, log_probs=log_probs)
        made.append(state)
    return made


def found(values: dict[tuple[str, str], Packed], name: str, recipe: Recipe = RECIPE) -> RolloutState:
    data = values[name, ""].data
    return restore(data, [values[name, one].data for one in latents_of(data)], EMBEDDINGS, recipe)


@pytest.mark.parametrize("every", [1, 2, 4])
def test_what_was_committed_is_restored_bit_by_bit_and_each_latent_was_written_once(every: int) -> None:
    committer, values = Committer(), dict[tuple[str, str], Packed]()
    both = list(zip(states("a"), states("b"), strict=True))
    for pair in both[::every]:
        for value in committer.begin(pair):
            assert (value.rollout, value.latent) not in values or not value.latent
            values[value.rollout, value.latent] = value
        for state in pair:
            back = found(values, state.rollout.id)
            assert (back.rollout, back.step, back.window) == (state.rollout, state.step, state.window)
            for ours, theirs in (
                ([state.latents, state.sigmas], [back.latents, back.sigmas]),
                (state.kept, back.kept),
                (state.log_probs, back.log_probs),
                ([state.condition["embeds"]], [back.condition["embeds"]]),
            ):
                assert [bits(one) for one in ours] == [bits(one) for one in theirs]
            assert back.condition.checksum == EMBEDDINGS.checksum
    assert sum(bool(latent) for _, latent in values) == 2 * (len(WINDOW) + 1)


class Far(torch.Tensor):
    """A tensor of the fourth GPU, as far as commits look."""

    device = torch.device("cuda", 3)


def test_who_packs_waits_for_the_gpu_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's current GPU is the first one: to wait from there would take half a gigabyte of it."""
    current, empty, waits = [0], torch.empty, list[int]()

    @contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        before, current[0] = current[0], wanted.index
        yield
        current[0] = before

    def stream(of: torch.device) -> SimpleNamespace:
        event = SimpleNamespace(synchronize=lambda: waits.append(current[0]))
        return SimpleNamespace(record_event=lambda: event)

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **kind: empty(*shape, **kind))
    whole = states("a")[-1]
    there = dataclasses.replace(
        whole,
        latents=(kept := [each.as_subclass(Far) for each in whole.kept])[-1],
        kept=tuple(kept),
        log_probs=tuple(each.double().as_subclass(Far) for each in whole.log_probs),
    )
    packed = Committer().begin([there])
    assert not waits, "who denoises waits for nothing"
    back = found({(one.rollout, one.latent): one for one in packed}, "a")
    assert waits == [3]
    assert [bits(one) for one in back.kept] == [bits(one) for one in whole.kept]
    assert [float(one) for one in back.log_probs] == [float(one) for one in whole.log_probs]


def test_what_is_done_but_not_decoded_is_restored_with_its_last_step() -> None:
    recipe = dataclasses.replace(RECIPE, keeps="query")
    before, after = torch.randn(8, 4), torch.randn(8, 4)
    (begun, *_), values = states("a"), dict[tuple[str, str], Packed]()
    done = dataclasses.replace(begun, recipe=recipe, step=STEPS, latents=after, kept=(before, after))
    for value in Committer().begin([done]):
        values[value.rollout, value.latent] = value
    back = found(values, "a", recipe)
    assert back.done
    assert [bits(one) for one in back.kept] == [bits(before), bits(after)]


def test_a_worker_that_resumes_writes_the_latents_under_the_same_names() -> None:
    """The store then has them already."""
    values = {value.latent: value for value in Committer().begin([states("a")[-1]])}
    back = found({("a", name): value for name, value in values.items()}, "a")
    assert {value.latent: value for value in Committer().begin([back])}.keys() == values.keys()


def test_a_state_comes_after_its_latents_and_holds_neither_them_nor_embeddings() -> None:
    *latents, state = Committer().begin([states("a")[WINDOW.stop]])
    assert [value.latent.partition(".")[0] for value in latents] == ["0", "1", "2", "3"]
    assert not state.latent
    assert len(state.data) < 2000 < EMBEDDINGS["embeds"].nbytes
    *_, whole = Committer().begin([states("a", Condition(EMBEDDINGS.tensors))[0]])
    assert bits(restore(whole.data, [], None, RECIPE).condition["embeds"]) == bits(EMBEDDINGS["embeds"])


def test_pictures_go_to_a_worker_once_and_with_no_commit() -> None:
    """Latents of a reference at 1024 x 1024 pixels, and of a first frame of 81 frames at 480p."""
    text = EMBEDDINGS.tensors
    pictures = {
        "text": text,
        "edit": {**text, REFERENCES: torch.randn(4096, 64), GRIDS: torch.tensor([[64, 64]])},
        "video": {**text, FIRST_FRAME: torch.randn(21, 60, 104, 16, dtype=torch.bfloat16)},
    }
    head = Head({name: pack_condition(Condition(tensors)) for name, tensors in pictures.items()})
    starter = RolloutStarter(head, Begins(), {Purpose.TRAIN: RECIPE})  # type: ignore[arg-type]
    sent = {}
    for name in pictures:
        for lease in range(3):
            (first,), failed = starter.start([rollout_of(f"{name}{lease}", name)], (), "")
            assert not failed
        sent[name] = [
            len(each.data) for state in states("a", first.condition) for each in Committer().begin([state])
        ]
    assert head.fetched == [("condition", name) for name in pictures]
    assert sent["text"] == sent["edit"] == sent["video"]
    assert sum(sent["edit"]) < 20_000 < 1 << 20 < len(head.kept["edit"])


class Head:
    """What a worker asks for, from memory."""

    def __init__(self, kept: dict[str, bytes]) -> None:
        self.kept, self.fetched = kept, list[tuple[str, str]]()

    def fetch(self, kind: str, names: list[str], weights_digest: str = "") -> list[StoredBlob]:
        self.fetched += [(kind, name) for name in names]
        return [StoredBlob(0, self.kept[name]) for name in names]


class Begins:
    """An engine whose rollouts stand at their beginning."""

    def start(
        self, rollouts: list[Rollout], conditions: list[Condition], recipe: Recipe
    ) -> list[RolloutState]:
        sigmas = torch.linspace(1, 0, STEPS + 1)
        pairs = zip(rollouts, conditions, strict=True)
        return [
            RolloutState(one, recipe, about, 0, torch.zeros(8, 4), sigmas, WINDOW) for one, about in pairs
        ]


def test_a_worker_keeps_conditions_up_to_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_rollouts, "_KEPT_BYTES", 2 * EMBEDDINGS.nbytes)
    head = Head({name: pack_condition(EMBEDDINGS) for name in "abc"})
    starter = RolloutStarter(head, Begins(), {Purpose.TRAIN: RECIPE})  # type: ignore[arg-type]
    for name in "abacab":
        starter.start([rollout_of("r", name)], (), "")
    assert [name for _, name in head.fetched] == [*"abc", "b"]


def test_what_is_absent_altered_or_of_another_state_is_refused() -> None:
    *latents, state = [value.data for value in Committer().begin([states("a")[-1]])]
    altered = bytearray(latents[1])
    altered[-1] ^= 1
    other = unpack_condition(pack_condition(Condition({"embeds": torch.randn(50, 64)})))
    for wrong, says in (
        (latents[1:], "found latents"),
        ([latents[1], latents[0], *latents[2:]], "found latents"),
        ([latents[0], bytes(altered), *latents[2:]], "its checksum is"),
        ([b"", *latents[1:]], "cannot be read"),
        ([state, *latents[1:]], "found latents"),
    ):
        with pytest.raises(SerializationError, match=says):
            restore(state, wrong, EMBEDDINGS, RECIPE)
    for condition in (None, other, Condition(EMBEDDINGS.tensors)):
        with pytest.raises(SerializationError, match="found embeddings"):
            restore(state, latents, condition, RECIPE)
    with pytest.raises(SerializationError, match="it is a 'latent'"):
        latents_of(latents[0])


def test_a_sound_checksum_does_not_make_up_for_missing_parts() -> None:
    *latents, state = [value.data for value in Committer().begin([states("a")[WINDOW.stop]])]
    header, tensors = unpack_tensors("commit", state)
    for lacking in header:
        cut = {key: value for key, value in header.items() if key != lacking}
        with pytest.raises(ValueError, match=r"lacks a part|expected"):
            restore(forged("commit", tensors, content=cut), latents, EMBEDDINGS, RECIPE)
    for lacking in tensors:
        cut = {name: tensor for name, tensor in tensors.items() if name != lacking}
        with pytest.raises(SerializationError, match="lacks a part"):
            restore(forged("commit", cut, content=header), latents, EMBEDDINGS, RECIPE)
    latents[-1] = forged("latent", {"latents": torch.zeros(3)}, content={})
    names = [f"{index}.{checksum_of(latent)}" for index, latent in enumerate(latents)]
    with pytest.raises(SerializationError, match="expected one shape"):
        restore(forged("commit", tensors, content={**header, "kept": names}), latents, EMBEDDINGS, RECIPE)
