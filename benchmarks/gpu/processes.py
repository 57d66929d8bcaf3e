"""Rows with more than one process: groups, kills, weights from a peer, two processes on one GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu import children
from benchmarks.gpu import lab as model
from benchmarks.gpu.children import DIGEST, Child
from benchmarks.gpu.correct import distance, learning
from benchmarks.gpu.lab import Lab
from benchmarks.gpu.suite import Outcome, Skip
from benchmarks.gpu.timing import interleaved, medians
from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.skeleton import filling, modules_of
from spotlight.rollout.sequence_parallel import rendezvous
from spotlight.training.device_memory import measure_peak
from spotlight.training.learner import Learner, TrainingSample
from spotlight.training.timesteps import Trial
from spotlight_kernels.measure.device_rates import wait
from spotlight_weights import peers
from spotlight_weights.peers import BUCKET_BYTES, FetchedWeights, fetch_from_peer
from spotlight_weights.weight_errors import PeerLostError

STEPS = 4
CYCLES = 20


# -- part A ------------------------------------------------------------------------------------------------


def sharded_gradients(lab: Lab) -> Outcome:
    """Gradients through FSDP2 on a mesh of one rank against those without."""
    lab.drop()
    with Child(children.gradients_on_a_mesh, lab) as child:
        value, is_sharded = child.receive()
    if not is_sharded:
        raise RuntimeError("the parameters are not DTensors: nothing was sharded")
    return Outcome(value)


def out_of_memory(lab: Lab) -> Outcome:
    """Gradients after a pass that ran out of memory against those of passes that were smaller at once."""
    layers = lab.scale.few_layers
    family, slots, shape = lab.family(layers), lab.slots(layers), lab.scale.train_small
    samples = lab.samples(family, slots, shape, STEPS)
    gradients: dict[str, Tensor] = {}
    peaks: dict[str, int] = {}

    def measure(name: str, times: object) -> tuple[Trial, ...]:
        auto = times == "auto"
        # Without recomputation, of which one timestep more hardly needs more memory.
        settings: dict[str, object] = {"recompute": "none", "timesteps_per_pass": times}
        if auto:
            settings["pass_memory_gib"] = 2.0**20  # more than there is: it begins with all timesteps
        with (
            learning(lab, family, slots, shape, **settings) as learner,
            _short_of_memory(lab, family, peaks if auto else None, shape),
        ):
            peaks[name] = _peak(lab, learner, samples)
            parameters = learner.slots.trainable_parameters().values()
            gradients[name] = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
            return learner.passes.memory.trials

    measure("one", 1)
    measure("all", STEPS)
    trials = measure("recovered", "auto")
    lost = [trial.rows for trial in trials if trial.bytes is None]
    kept = max((trial.rows for trial in trials if trial.bytes is not None), default=0) // shape.batch
    details = {
        "failed_rows": lost,
        "timesteps_a_pass": kept,
        "peaks_gb": {k: v / 1e9 for k, v in peaks.items()},
    }
    if not lost or not kept:
        raise RuntimeError(f"no pass ran out of memory, or none was left: {details}")
    measure("expected", kept)
    return Outcome(distance(gradients["recovered"], gradients["expected"]), details)


def _peak(lab: Lab, learner: Learner, samples: Sequence[TrainingSample]) -> int:
    """Bytes above those held, of gradients of all samples; 0 on a CPU."""
    if lab.device.type != "cuda":
        model.accumulate(learner, samples)
        return 0
    return measure_peak(lab.device, lambda: model.accumulate(learner, samples))[1]


def _short_of_memory(
    lab: Lab, family: QwenImage, peaks: dict[str, int] | None, shape: model.Shape
) -> ExitStack:
    """While open, a pass of all timesteps does not fit, one of a single timestep does.

    On a CPU the error is made up: nothing there limits one process's tensors.
    """
    stack = ExitStack()
    if peaks is None:
        return stack
    if lab.device.type == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info(lab.device)[1]
        allowed = peaks["one"] + 0.5 * (peaks["all"] - peaks["one"])
        share = (torch.cuda.memory_reserved(lab.device) + allowed) / total
        torch.cuda.set_per_process_memory_fraction(min(share, 1.0), lab.device)
        stack.callback(torch.cuda.set_per_process_memory_fraction, 1.0, lab.device)
        return stack

    def refuse(_: torch.nn.Module, args: object, kwargs: dict[str, Tensor]) -> None:
        if kwargs["hidden_states"].shape[0] > shape.batch:
            raise torch.OutOfMemoryError("made up: a CPU has no limit for one process's tensors")

    handle = family.transformer.register_forward_pre_hook(refuse, with_kwargs=True)
    stack.callback(handle.remove)
    return stack


def open_and_close(lab: Lab) -> Outcome:
    """Memory lost by opening and closing a group twenty times."""
    with Child(children.open_and_close, lab, CYCLES, 20.0) as child:
        seconds, lost = child.receive()
    return Outcome(
        lost / 2**20, {"first_s": seconds[0], "others_s": sorted(seconds[1:]), "cycles": len(seconds)}
    )


def missing_peer(lab: Lab) -> Outcome:
    """Seconds until a rank without its peer gives up, in units of the limit it was given."""
    limit_s, (store, address) = 5.0, rendezvous.serve()
    with Child(children.open_group, lab, address, 0, limit_s) as child:
        child.receive()
        try:
            name, message, seconds = child.receive(4 * limit_s)
        except TimeoutError:
            return Outcome(4.0, {"hangs": "killed after four times the limit"})
    del store
    if name == "opened":
        raise RuntimeError("a group of two opened with one rank")
    return Outcome(seconds / limit_s, {"error": name, "message": message})


def killed_and_resumed(lab: Lab) -> Outcome:
    """SIGKILL in mid-rollout: values of the rollouts resumed by another process that differ."""
    for path in lab.home.glob("commit*"):
        raise RuntimeError(f"{path} is left of an earlier row")
    lab.pipeline(lab.scale.few_layers)
    with Child(children.roll_out_and_commit, lab) as child:
        while (step := child.receive()) < children.STEPS // 2:
            pass
        time.sleep(0.02)  # into the next step
        child.kill()
    with Child(children.resume_and_compare, lab) as child:
        different, began = child.receive()
    if max(began) >= children.STEPS:
        raise RuntimeError("the rollouts were done before the process was killed")
    return Outcome(different, {"killed_after_step": step, "resumed_at": began})


# -- part C ------------------------------------------------------------------------------------------------


def copied_model(lab: Lab) -> Outcome:
    """GB/s of half of the model's blocks from another process, checksums included.

    Half, since both processes hold them: all of Qwen-Image's, twice, are more than 80 GB.
    """
    layers = lab.scale.layers // 2
    lab.drop()
    family = lab.empty(layers)
    with Child(children.serve_weights, lab, layers, BUCKET_BYTES) as server:
        size = server.receive()
        seconds = []
        for _ in range(2):  # the first time buckets are allocated and handles opened
            began = time.perf_counter()
            _fetch(lab, family, stall_s=30.0)
            wait(lab.device)
            seconds.append(time.perf_counter() - began)
    return Outcome(size / 1e9 / min(seconds), {"gb": size / 1e9, "seconds": seconds, "layers": layers})


def _fetch(lab: Lab, family: QwenImage, stall_s: float) -> FetchedWeights:
    with filling(family.transformer) as targets:
        return fetch_from_peer(
            lab.home / "peers" / "w0.sock", DIGEST, targets, modules_of(targets), stall_s=stall_s
        )


def killed_source(lab: Lab) -> Outcome:
    """Seconds until a copy ends whose source was killed; then the device still works, and another source."""
    layers, stall_s, bucket = lab.scale.few_layers, 5.0, 2**20 if lab.tiny else BUCKET_BYTES // 4
    lab.drop()
    family = lab.empty(layers)
    take, taken, killed = peers._Transfer.take, [0], [0.0]
    with Child(children.serve_weights, lab, layers, bucket) as server:
        server.receive()

        def take_and_kill(self: peers._Transfer, rows: object, memory: Tensor) -> None:
            take(self, rows, memory)  # type: ignore[arg-type]
            taken[0] += 1
            if taken[0] == 2:
                server.kill()
                killed[0] = time.monotonic()

        with mock.patch.object(peers._Transfer, "take", take_and_kill):
            try:
                _fetch(lab, family, stall_s)
            except PeerLostError as error:
                seconds, message = time.monotonic() - killed[0], str(error)
            else:
                raise RuntimeError(f"the copy ended as if nothing had happened, after {taken[0]} buckets")
    wait(lab.device)
    with Child(children.serve_weights, lab, layers, bucket) as server:
        server.receive()
        _fetch(lab, family, stall_s)
        lab.velocity(family, family.transformer, lab.scale.exact)
    return Outcome(seconds, {"message": message[:300], "buckets_before": taken[0]})


def two_on_one(lab: Lab) -> Outcome:
    """Speed of a learner and a worker together on one device, as shares of each alone, added."""
    layers = lab.scale.layers
    family, slots, shape = lab.family(layers), lab.slots(layers), lab.scale.train_small
    samples = lab.samples(family, slots, shape, STEPS)
    seconds = 1.0 if lab.tiny else min(10.0, lab.budget_s / 6)
    with (
        Child(children.roll_out_forever, lab, layers) as worker,
        learning(lab, family, slots, shape) as learner,
    ):
        worker.receive()

        def updates(over: Callable[[], bool]) -> float:
            done, began = 0, time.monotonic()
            while done == 0 or not over():
                model.train(learner, samples)
                wait(lab.device)
                done += 1
            return done / (time.monotonic() - began)

        updates(lambda: True)
        ends = time.monotonic() + seconds
        train_alone = updates(lambda: time.monotonic() > ends)
        worker.pipe.send(seconds)
        roll_alone = worker.receive()
        worker.pipe.send(seconds)
        train_both = updates(worker.pipe.poll)
        roll_both = worker.receive()
    shares = {"training": train_both / train_alone, "rollout": roll_both / roll_alone}
    return Outcome(
        sum(shares.values()),
        {**shares, "updates_a_s_alone": train_alone, "steps_a_s_alone": roll_alone, "layers": layers},
    )


def loading(lab: Lab) -> Outcome:
    """GB/s of reading a pipeline from disk onto the device, its files in the page cache."""
    layers = lab.scale.few_layers
    lab.drop()
    directory = lab.pipeline(layers)
    lab.fresh(layers).transformer.save_pretrained(directory / "transformer")  # type: ignore[operator]
    size = sum(path.stat().st_size for path in (directory / "transformer").glob("*.safetensors"))

    def load() -> QwenImage:
        return QwenImage.load(
            directory,
            device=lab.device,
            dtype=torch.bfloat16,
            embeddings_cache=lab.home / "embeddings",
        )

    try:
        seconds = interleaved(lab, {"load": load})
    finally:
        for path in (directory / "transformer").glob("*.safetensors*"):
            path.unlink()
    return Outcome(size / 1e9 / medians(seconds)["load"], {"gb": size / 1e9, "seconds": seconds["load"]})


def two_ranks_on_one(lab: Lab) -> Outcome:
    """Two NCCL ranks on one GPU: seconds until both are refused, in units of the limit."""
    if lab.device.type != "cuda":
        raise Skip("only NCCL refuses two ranks on one device")
    limit_s, (store, address) = 10.0, rendezvous.serve()
    with ExitStack() as stack:
        ranks = [stack.enter_context(Child(children.open_group, lab, address, i, limit_s)) for i in range(2)]
        for rank in ranks:
            rank.receive()
        try:
            answers = [rank.receive(4 * limit_s) for rank in ranks]
        except TimeoutError:
            return Outcome(4.0, {"hangs": "killed after four times the limit"})
    del store
    if any(name == "opened" for name, _, _ in answers):
        raise RuntimeError(f"two ranks share one GPU: {answers}")
    return Outcome(
        max(seconds for _, _, seconds in answers) / limit_s, {"errors": [row[:2] for row in answers]}
    )
