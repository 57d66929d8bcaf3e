"""Training and opening runs from Python."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from main_job import TINY, Job
from PIL import Image as PILImage

import spotlight
from spotlight.api.arguments import overrides_of, prompt_files, reward_of
from spotlight.cli.runs.notebook_progress import NotebookProgress
from spotlight.cli.runs.progress import Facts
from spotlight.config.load import dump_config, load_config
from spotlight.data.datasets import load_prompts, read_prompts
from spotlight.scheduler.types import Phase
from spotlight_files.model_errors import ModelError
from spotlight_rewards.base.errors import ConfigError
from spotlight_rewards.base.file_errors import StoreError
from spotlight_rewards.pool import channel
from spotlight_rewards.pool.reward_process import RewardProcess
from spotlight_rewards.reward import Image, RewardSetupError
from spotlight_rewards.reward_config import RewardConfig

PROMPTS = [f"{number} red circles" for number in range(20)]
HERE = Path(__file__).parent


def redness(
    images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> list[float]:
    return [float(np.mean(image[..., 0])) / 255 for image in images]


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, spotlight; spotlight.train, spotlight.open; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        spotlight.trian  # noqa: B018


def test_a_run_from_python_is_that_of_the_command(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(HERE)
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")  # which has no plus-minus sign
    monkeypatch.setattr(sys, "stdout", terminal)
    tiny = dict(each.split("=", 1) for each in TINY if not each.startswith(("data.", "rewards")))
    keys = {key: load_value(text) for key, text in tiny.items()} | {"evaluation.prompts": None}
    run = spotlight.train(
        name="python", runs_dir=tmp_path, cache_dir=job.root / "cache", model=str(job.pipeline),
        prompts=PROMPTS, rewards=[redness, {"name": "jpeg_size", "weight": 0.1}], algorithm="diffusion-nft",
        **(keys | {"iterations": 2, "learner": {"lora": {"rank": 2}}}),
    )  # fmt: skip
    terminal.flush()
    assert b" ? " in terminal.buffer.getvalue()  # type: ignore[attr-defined]
    assert run.finished
    assert list(run.metrics["iteration"]) == [0, 1]
    assert list(run.evaluations["iteration"]) == [0, 2]
    assert {"graded", "graded_stderr", "redness"} <= set(run.evaluations)
    samples = run.samples
    assert sum(samples["purpose"] == "train") == 12
    assert all(samples["prompt"].isin(PROMPTS))
    assert all(samples["reward"].notna())
    assert run.pictures(2).is_file()
    best, worst = (row for _, row in run.training_pictures(1).head(2).iterrows())
    assert (best["place"], worst["place"]) == ("best", "worst")
    assert best["prompt"] == worst["prompt"]
    assert best["reward"] == pytest.approx(best["redness"] + 0.1 * best["jpeg_size"])
    assert best["reward"] >= worst["reward"]
    with pytest.raises(StoreError, match="expected one of 0, 1"):
        run.training_pictures(5)
    assert run.lora == tmp_path / "python" / "lora"
    assert run.audit().ok
    assert (
        run.export(tmp_path / "one", iteration=1, device="cpu") / "pytorch_lora_weights.safetensors"
    ).is_file()
    assert "python: 2 iterations, finished" in run._repr_html_()
    again = spotlight.open(run.directory)
    assert again == run
    config = again.record.config
    assert (config.learner.lora.rank, config.learner.lora.alpha) == (2, 8.0)
    assert config.rewards[0].name == f"{__name__}:redness"
    held_out = [prompt.text for prompt in load_prompts(config).test]
    assert held_out == PROMPTS[::10]
    with pytest.raises(StoreError, match="iteration-000002"):
        run.pictures(1)
    with pytest.raises(StoreError, match="not a run directory"):
        spotlight.open(tmp_path)


def load_value(text: str) -> object:
    import yaml

    return yaml.safe_load(text)


def test_arguments_are_those_of_a_file(tmp_path: Path) -> None:
    given = {"rollout": {"steps": 8, "sde_window": {"size": 1}}, "name": "x", "runs_dir": tmp_path}
    overrides = list(overrides_of(given))
    assert overrides == ["rollout.steps=8", "rollout.sde_window.size=1", 'name="x"', f'runs_dir="{tmp_path}"']
    loaded = load_config(Path(os.devnull), overrides[:1])
    assert dump_config(loaded) == dump_config(load_config(Path(os.devnull), ["rollout={steps: 8}"]))
    with pytest.raises(ConfigError, match=r"rollout.stepps.*Did you mean 'steps'"):
        spotlight.train(rollout={"stepps": 3})
    numbers = {"iterations": np.int64(3), "learner": {"betas": np.array([0.5, 0.25])}}
    assert list(overrides_of(numbers)) == ["iterations=3", "learner.betas=[0.5, 0.25]"]
    with pytest.raises(ModelError, match=r"none does not exist"):
        spotlight.train(
            model=tmp_path / "none",
            prompts=PROMPTS,
            rewards=["jpeg_size"],
            cache_dir=tmp_path,
            runs_dir=tmp_path,
        )


def test_a_checkpoint_asked_for_both_ways_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(load_config(Path(os.devnull))), encoding="utf-8")
    with pytest.raises(StoreError, match="iteration 1 and the best; expected one of the two"):
        spotlight.open(tmp_path).export(tmp_path / "lora", iteration=1, best=True, device="cpu")


def scored(section: dict[str, Any]) -> list[float]:
    """By the reward's own process."""
    image = np.full((4, 4, 3), 51, np.uint8)
    with closing(RewardProcess(RewardConfig(**section), start_deadline_s=600)) as process:
        process.start()
        sample = channel.encode(channel.Sample(image, "a cat", {}))
        found = process.ask(channel.Score(samples=1, deadline_s=600), [sample])
    assert isinstance(found, channel.Values), found
    return found.curves["score"]


class Bright:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def score(self, images: Sequence[Image], prompts: Sequence[str], metadata: object) -> list[float]:
        return [self.factor * float(image.mean()) / 255 for image in images]


def test_functions_of_modules_are_named_and_others_copied(tmp_path: Path) -> None:
    assert reward_of("ocr", tmp_path, tmp_path) == {"name": "ocr"}
    own = reward_of({"name": redness, "weight": 2}, tmp_path, tmp_path)
    assert own == {"name": f"{__name__}:redness", "weight": 2}
    factor = 3

    def bright(images: Sequence[Image], prompts: Sequence[str], metadata: object) -> list[float]:
        return [factor * float(image.mean()) / 255 for image in images]

    section = reward_of({"name": bright, "weight": 2}, tmp_path / "run", tmp_path)
    assert (section["label"], section["weight"]) == ("bright", 2)
    assert scored(section) == pytest.approx([0.6])
    assert (
        reward_of(bright, tmp_path / "run", tmp_path)["params"] == section["params"]
    )  # the same call goes on
    assert reward_of(bright, tmp_path / "other", tmp_path)["params"] != section["params"]
    assert reward_of(lambda *_: [0.0], tmp_path, tmp_path)["label"] == "lambda"
    bound = reward_of(Bright(factor).score, tmp_path / "run", tmp_path)  # not Bright.score of another process
    assert (bound["label"], scored(bound)) == ("score", [pytest.approx(0.6)])
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"the function lambda, which cannot be copied .*cannot pickle"):
        reward_of(lambda *_: [lock], tmp_path, tmp_path)
    Path(section["params"]["path"]).unlink()
    with pytest.raises(RewardSetupError, match=r"cannot be read here.*a function of a module"):
        scored(section)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"rewards": "pickscore"}, "rewards: found 'pickscore'; expected a list"),
        ({"rewards": 3}, "rewards: found 3; expected a list"),
        ({"rewards": [None]}, "rewards: found None; expected a name, a function or a section"),
        ({"prompts": [1, 2]}, "prompts: found 1; expected texts, or rows whose column 'prompt' is one"),
        ({"prompts": ["a cat", None]}, "prompts: found None; expected texts"),
        (
            {"prompts": {"prompt": ["a cat"], "tag": ["b"]}},
            "prompts: found {'prompt': ['a cat'], 'tag': ['b']}",
        ),
        (
            {"prompts": ["a cat", "a dog", "a cat"]},
            "prompts[2]: found 'a cat'; expected each prompt once; it is prompts[0] too",
        ),
        ({"test_prompts": ["a cat", " "]}, "test_prompts[1]: found ' '"),
        ({"prompts": [{"prompt": "a cat", "at": object}]}, "prompts[0]: found {'prompt': 'a cat', 'at'"),
        ({"rollout": {"steps": object}}, "rollout.steps: found <class 'object'>; expected a number, a text"),
        ({"rollout": {"stepps": 3}}, "Cannot use the arguments of train:"),
        ({"prompts": 3}, "prompts: found 3; expected a file, texts"),
        ({"test_prompts": [None]}, "test_prompts: found None; expected texts"),
        ({"test_prompts": []}, "test_prompts: found []; expected at least one of texts"),
        ({"prompts": b"a cat"}, "prompts: found b'a cat'; expected a file, texts"),
        ({"rewards": [{"weight": 2.0}]}, "rewards.0.name: found nothing"),
        *(
            ({"algorithm": wrong}, f"algorithm: found {wrong!r}; expected a name, or a dictionary of keys")
            for wrong in (5, False, [], ["awm"], object)
        ),
        *(
            ({"model": wrong}, f"model: found {wrong!r}; expected a path, a hub")
            for wrong in (5, False, [], object)
        ),
        *(
            ({"config": wrong}, f"config: found {wrong!r}; expected a configuration")
            for wrong in (5, {}, True, b"a")
        ),
        *(
            ({"plain": wrong}, f"plain: found {wrong!r}; expected True or False")
            for wrong in (1, None, "yes")
        ),
        ({"stage": "rl"}, "stage: found 'rl'; expected none, since no stages are configured. Leave it out."),
    ],
)
def test_arguments_of_a_wrong_kind_are_named(given: dict[str, Any], found: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(found)):
        spotlight.train(cache_dir=tmp_path, runs_dir=tmp_path, **given)


def test_prompts_are_texts_rows_or_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    class Table:
        columns = ("prompt", "tag")

        def to_dict(self, kind: str) -> list[dict[str, str]]:
            assert kind == "records"
            return [{"prompt": text, "tag": "a"} for text in PROMPTS]

    files = prompt_files(Table(), ["a cat", {"prompt": "a dog", "tag": "b"}], tmp_path)
    config = load_config(Path(os.devnull), [f"{key}={path}" for key, path in files.items()])
    prompts = load_prompts(config)
    assert [prompt.text for prompt in prompts.train] == PROMPTS
    assert [dict(prompt.metadata) for prompt in prompts.test] == [{}, {"tag": "b"}]
    assert prompt_files(Table(), ["a cat", {"prompt": "a dog", "tag": "b"}], tmp_path) == files
    assert prompt_files("train.txt", "test.txt", tmp_path) == {
        "data.train": "train.txt",
        "data.test": "test.txt",
    }
    PILImage.new("RGB", (4, 4)).save("its.png")  # beside the caller, not beside the cached file
    files = prompt_files(["a cat", {"prompt": "a dog", "references": ["its.png"]}], "test.txt", tmp_path)
    _, dog = read_prompts("data.train", Path(files["data.train"]))
    assert dog.metadata["references"] == [str(tmp_path / "its.png")]
    with pytest.raises(ConfigError, match="column 'prompt'"):
        prompt_files([{"text": "a cat"}, {"text": "a dog"}], None, tmp_path)


def test_empty_cells_of_tables_are_left_out_as_of_files(tmp_path: Path) -> None:
    import pandas

    columns = {
        "prompt": PROMPTS[:3],
        "tag": ["counting", None, "colors"],
        "classes": [["cat"], None, ["dog"]],
    }
    frame = pandas.DataFrame(columns)
    frame.to_parquet(tmp_path / "file.parquet")
    expected = read_prompts("data.test", tmp_path / "file.parquet")
    assert [dict(prompt.metadata) for prompt in expected][1] == {}
    datasets = pytest.importorskip("datasets")
    again = pandas.read_parquet(tmp_path / "file.parquet")  # its lists are arrays
    for table in (frame, frame.convert_dtypes(), again, datasets.Dataset.from_dict(columns)):
        files = prompt_files("train.txt", table, tmp_path)
        assert read_prompts("data.test", Path(files["data.test"])) == expected
    files = prompt_files("train.txt", frame["prompt"], tmp_path)
    assert [each.text for each in read_prompts("data.test", Path(files["data.test"]))] == PROMPTS[:3]
    with pytest.raises(ConfigError, match="column 'prompt'"):
        prompt_files("train.txt", pandas.DataFrame({"prompt": ["a cat", None]}), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_goes_from_an_installation_to_a_lora(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(HERE.parents[1] / "examples" / "notebook.ipynb", as_version=4)
    assert len(notebook.cells) <= 12
    assert "pip install" in notebook.cells[0].source
    for cell in notebook.cells:  # what is installed here stays
        cell.source = re.sub(r"(?m)^%pip install .*$", "", cell.source)
    NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert (tmp_path / "lora-of-the-best" / "pytorch_lora_weights.safetensors").is_file()
    (training,) = (cell for cell in notebook.cells if "spotlight.train(" in cell.source)
    shown = [each.data.get("text/html", "") for each in training.outputs if "data" in each]
    assert "4/4" in shown[0]  # the bar, drawn in place
    assert "validation at iteration 4" in shown[0]
    assert "notebook: 4 iterations, finished" in shown[1]
    assert "stdout" not in {each.get("name") for each in training.outputs}


def test_a_notebooks_bar_says_what_a_terminals_does() -> None:
    progress = NotebookProgress(Facts(total=4, price_usd_h=0.0))
    progress.work(Phase.ROLLOUT, 3, 6)
    progress.note("a <note>")
    progress.iterated(0, {"rollout/reward": 0.5})
    progress.iterated(1, {"rollout/reward": 0.25})
    shown = re.sub(r"<[^>]*>", "", progress.html())
    assert "a &lt;note&gt;" in shown
    assert "2/4" in shown
    assert shown.count("reward 0.25") == 1
    assert "reward 0.5" not in shown
