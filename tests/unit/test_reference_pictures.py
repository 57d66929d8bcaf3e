"""Pictures that prompts are about, in files and data sets of others: found, kept by digest, or refused."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zipfile import ZIP_BZIP2, ZIP_LZMA, ZipFile

import pytest
from PIL import ExifTags, Image, ImageOps
from test_hostile_files import png, soon
from typer.testing import CliRunner

from spotlight.api.arguments import prompt_files
from spotlight.cli.main import app
from spotlight.config.load import load_config
from spotlight.data.datasets import Prompts, load_prompts
from spotlight_rewards.base.errors import ConfigError
from spotlight_rewards.base.kept_pictures import PICTURE_BYTES_MAX, keep, kept_path, paths_of, with_kept
from spotlight_rewards.base.prompt_datasets import Columns, dataset_objects
from spotlight_rewards.base.prompt_files import PromptFileError

MEDIA = {"modality": "image", "role": "condition", "uri": "cat.png"}


def picture(color: str = "red") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), color).save(buffer, "PNG")
    return buffer.getvalue()


def read(
    path: Path, cache: Path, column: str | None, test: object = "testbed", keys: Sequence[str] = ()
) -> Prompts:
    keys = [f"data.train={path}", f"data.test={test}", f"cache_dir={cache}", *keys]
    keys += [] if column is None else [f"data.reference_column={column}"]
    return load_prompts(load_config(Path(os.devnull), keys))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("column", "value", "folder"),
    [
        ("image", "cat.png", "."),
        ("image", "cat.png", "images"),  # where Flow-Factory has them
        ("images", ["cat.png"], "."),
        ("media", [MEDIA], "."),
        ("references", ["cat.png"], "."),
    ],
)
def test_columns_of_other_trainers_are_references(
    tmp_path: Path, column: str, value: object, folder: str
) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "cat.png").write_bytes(picture())
    rows = [{"prompt": "make it blue", column: value, "tag": "colour"}]
    (prompt,) = read(write(tmp_path / "train.jsonl", rows), tmp_path / "cache", column).train
    assert prompt.references == (str(tmp_path / folder / "cat.png"),)
    assert prompt.metadata.keys() == {"references", "tag"}
    assert not (tmp_path / "cache").exists()


def test_a_table_of_paths_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(picture())
    table = tmp_path / "train.csv"
    table.write_text('prompt,image\na,cat.png\nb,"[""cat.png"", ""cat.png""]"\n')
    found = read(table, tmp_path, "image").train
    assert [len(each.references) for each in found] == [1, 2]


@pytest.mark.parametrize("column", ["image", "images", "media"])
def test_without_the_key_the_error_names_it(tmp_path: Path, column: str) -> None:
    train = write(tmp_path / "train.jsonl", [{"prompt": "a", column: "cat.png"}])
    with pytest.raises(ConfigError, match=f"set data.reference_column={column} if it holds pictures"):
        read(train, tmp_path, None)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, "'image' is missing, which data.reference_column names"),
        ({"image": "a.png", "references": ["b.png"]}, "both 'image' and 'references'"),
        ({"image": 3}, "'image' holds int; expected a path"),
        ({"image": []}, "'image' is '[]'; expected a path"),
        ({"image": [""]}, "expected a path of a picture"),
        ({"image": "https://example.org/a.png"}, "expected a file: download it"),
        ({"image": [MEDIA | {"role": "target"}]}, "modality and role ('image', 'target')"),
        ({"image": [MEDIA | {"modality": "video"}]}, "('video', 'condition')"),
        ({"image": [MEDIA]}, "no file"),
        ({"image": "sha256:" + "0" * 64}, "; give it again, or set cache_dir to where it is"),
        ({"image": "sha256:../../../etc/passwd"}, "no file"),
    ],
)
def test_what_is_no_picture_is_named(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    train = write(tmp_path / "train.jsonl", [{"prompt": "a", **row}])
    with pytest.raises(PromptFileError) as error:
        read(train, tmp_path, "image")
    assert said in str(error.value)


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as files

    files.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


CELLS: dict[str, Callable[[bytes], object]] = {
    "as the hub's files have them": lambda content: {"bytes": content, "path": "../../evil.png"},
    "bytes": lambda content: content,
    "several": lambda content: [{"bytes": content, "path": None}],
}


@pytest.mark.parametrize("cell", CELLS)
def test_pictures_in_a_data_set_are_kept_once_by_their_digest(tmp_path: Path, cell: str) -> None:
    content, cache = picture(), tmp_path / "cache"
    rows = [{"prompt": text, "image": CELLS[cell](content)} for text in ("a", "b")]
    train = parquet(tmp_path / "train.parquet", rows)
    found = read(train, cache, "image").train
    (kept,) = (cache / "pictures").iterdir()
    assert kept.name == hashlib.sha256(content).hexdigest()
    assert kept.read_bytes() == content
    assert [each.references for each in found] == [(str(kept),)] * 2
    again = read(train, tmp_path / "elsewhere", "image").train
    assert [each.id for each in again] == [each.id for each in found]  # wherever the cache lies
    other = parquet(tmp_path / "other.parquet", [{"prompt": "a", "image": CELLS[cell](picture("blue"))}])
    assert read(other, cache, "image").train[0].id != found[0].id
    kept.write_bytes(b"damaged")
    read(train, cache, "image")
    assert kept.read_bytes() == content


def test_a_picture_may_be_a_file_of_the_data_set_and_no_other(tmp_path: Path) -> None:
    own = tmp_path / "data"
    own.mkdir()
    (own / "cat.png").write_bytes(picture())
    (tmp_path / "private.png").write_bytes(picture("blue"))
    (own / "link.png").symlink_to(tmp_path / "private.png")
    rows = [{"prompt": "a", "image": {"bytes": None, "path": "cat.png"}}]
    (prompt,) = read(parquet(own / "train.parquet", rows), tmp_path / "cache", "image").train
    assert Path(prompt.references[0]).read_bytes() == picture()
    for path in ("../private.png", str(tmp_path / "private.png"), "link.png"):
        rows = [{"prompt": "a", "image": {"bytes": None, "path": path}}]
        with pytest.raises(ConfigError, match="outside the data set"):
            read(parquet(own / "train.parquet", rows), tmp_path / "cache", "image")


@pytest.mark.parametrize(
    "cell",
    [
        {"bytes": 10**13, "path": None},  # bytes() would make so many zeros
        {"bytes": "no bytes", "path": "cat.png"},
        {"bytes": None, "path": None},
    ],
)
def test_a_cell_that_only_looks_like_a_picture_is_refused(tmp_path: Path, cell: dict[str, object]) -> None:
    with soon(), pytest.raises(ValueError, match="expected a picture's file as bytes, or its path as a text"):
        with_kept(cell, tmp_path, [tmp_path])


@pytest.mark.slow
def test_a_data_set_of_hugging_face_holds_its_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    rows = {"prompt": ["a", "b"], "image": [Image.new("RGB", (8, 8), each) for each in ("red", "blue")]}
    both = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    both.save_to_disk(tmp_path / "saved")
    found = read(tmp_path / "saved", tmp_path / "cache", "image").train
    assert [Image.open(each.references[0]).getpixel((0, 0)) for each in found] == [(255, 0, 0), (0, 0, 255)]
    given = prompt_files(both, ["x"], tmp_path / "cache")
    again = read(Path(given["data.train"]), tmp_path / "cache", "image").train
    assert [each.references for each in again] == [each.references for each in found]


def test_a_data_set_of_the_hub_names_no_file_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spotlight_rewards.base import prompt_datasets

    private = tmp_path / "private.png"
    private.write_bytes(picture())
    media = MEDIA | {"uri": str(private)}
    for column, value in [
        ("references", [str(private)]),
        ("pictures", [str(private)]),
        ("image", [str(private)]),
        ("image", str(private)),
        ("image", media),
        ("image", [media]),
        ("jpg_0", str(private)),  # of Pick-a-Pic, which become ``pictures``
        ("reference", str(private)),  # which rewards read
        ("source", str(private)),
    ]:
        monkeypatch.setattr(
            prompt_datasets, "_rows", lambda *_, name=column, found=value: [{"prompt": "a", name: found}]
        )
        rewards = (
            "rewards=[{name: edit-score, params: {reference: source}}, "
            "{name: first-frame, params: {reference: null}}]"
        )
        with pytest.raises(ConfigError, match=f"its column '{column}' names the file"):
            read(
                Path("hf:someone/prompts"), tmp_path, "image" if column == "image" else None, keys=(rewards,)
            )
    rows = [{"prompt": "a", "reference": "as in a text book"}]
    monkeypatch.setattr(prompt_datasets, "_rows", lambda *_: rows)
    assert read(Path("hf:someone/prompts"), tmp_path, None).train[0].metadata == {
        "reference": rows[0]["reference"]
    }
    score = ["score", "edit-score", str(private), "--prompts", "hf:someone/prompts"]
    refused = CliRunner().invoke(app, score)
    assert "its column 'reference' names the file 'as in a text book'" in " ".join(refused.output.split())


def test_a_data_set_of_the_hub_has_pictures_of_its_own_snapshot_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    from spotlight_rewards.base import prompt_datasets

    hub = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))

    def cached(repository: str, name: str, content: bytes) -> Path:
        """As the hub's client keeps a file: a link to a blob."""
        blob = hub / repository / "blobs" / hashlib.sha256(content).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link = hub / repository / "snapshots" / "c0" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
        return link

    def first(path: Path) -> Prompts:
        rows = [{"prompt": "a", "image": {"bytes": None, "path": str(path)}}]
        monkeypatch.setattr(prompt_datasets, "_rows", lambda *_: rows)
        return read(Path("hf:someone/prompts:train"), tmp_path / "cache", "image")

    own, other = "datasets--someone--prompts", "datasets--me--private"
    (prompt,) = first(cached(own, "cat.png", picture())).train
    assert Path(prompt.references[0]).read_bytes() == picture()
    private = hub / "private.png"
    private.write_bytes(picture())
    link = cached(own, "evil.png", b"")
    link.unlink()
    link.symlink_to(private)
    for path in (
        cached(other, "cat.png", picture()),
        cached("models--me--private", "cat.png", picture()),
        private,
        link,
    ):
        with pytest.raises(ConfigError, match="outside the data set"):
            first(path)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (png(30_000, 30_000), "expected at most|decompression bomb"),
        (png(4_000, 4_000, 100), "10[01] frame"),
        (b"no picture", "10 bytes of no known format"),
        (b"", "0 bytes of no known format"),
        (bytes(PICTURE_BYTES_MAX + 1), "expected at most 67,108,864"),
    ],
)
def test_hostile_pictures_are_refused_before_they_are_decoded(
    tmp_path: Path, content: bytes, said: str
) -> None:
    with soon(), pytest.raises(ValueError, match=said):
        keep(content, tmp_path)
    assert not list(tmp_path.iterdir())


def test_pictures_of_a_program_are_kept_as_files(tmp_path: Path) -> None:
    rows = [{"prompt": text, "references": [Image.new("RGB", (8, 8), "red")]} for text in ("a", "b")]
    given = prompt_files(rows, rows[:1], tmp_path)
    found = read(Path(given["data.train"]), tmp_path, None, given["data.test"])
    (kept,) = (tmp_path / "pictures").iterdir()
    assert {each.references for each in (*found.train, *found.test)} == {(str(kept),)}
    assert with_kept({"a": 1}, tmp_path) == {"a": 1}
    assert kept_path("sha256:" + "A" * 64, tmp_path) is None
    assert paths_of([MEDIA, "b.png"]) == ["cat.png", "b.png"]


@pytest.mark.parametrize("mode", ["RGB", "CMYK"])
def test_a_picture_of_a_program_is_kept_as_its_file_is_read(tmp_path: Path, mode: str) -> None:
    original = Image.new("RGB", (16, 8), "red")
    original.paste("blue", (8, 0, 16, 8))
    turned = original.getexif()
    turned[ExifTags.Base.Orientation] = 6
    original.convert(mode).save(tmp_path / "a.jpg", exif=turned, quality=100)
    name = with_kept(Image.open(tmp_path / "a.jpg"), tmp_path)
    kept = Image.open(kept_path(name, tmp_path) or "")
    with Image.open(tmp_path / "a.jpg") as file:
        wanted = ImageOps.exif_transpose(file).convert("RGB")
    assert kept.size == wanted.size == (8, 16)
    assert kept.convert("RGB").tobytes() == wanted.tobytes()


def test_a_programs_prompts_are_the_same_wherever_the_cache_lies(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "references": [Image.new("RGB", (8, 8), "red")]}]
    ids, texts = set(), set()
    for cache in (tmp_path / "here", tmp_path / "there"):
        file = Path(prompt_files(rows, rows, cache)["data.train"])
        (prompt,) = read(file, cache, None, file).train
        assert Path(prompt.references[0]).parent == cache / "pictures"
        ids.add(prompt.id)
        texts.add(file.read_text(encoding="utf-8"))
    assert len(ids) == len(texts) == 1


@pytest.mark.slow
def test_a_data_set_of_zipped_pictures_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (place := tmp_path / "set").mkdir()
    with ZipFile(place / "train.zip", "w") as archive:
        archive.writestr("a.png", picture())
        archive.writestr("metadata.jsonl", '{"file_name": "a.png", "prompt": "a cat"}\n')
    columns = Columns(references="image", kept=tmp_path / "kept")
    (row,) = map(json.loads, dataset_objects(place, "train", columns))
    kept = kept_path(row["image"], tmp_path / "kept")
    assert kept is not None
    assert kept.read_bytes() == picture()


def test_a_picture_in_an_archive_is_one_of_the_data_sets_own(tmp_path: Path) -> None:
    (inside := tmp_path / "set").mkdir()
    for folder in (tmp_path, inside):
        with ZipFile(folder / "a.zip", "w") as archive:
            archive.writestr("a.png", picture())
            archive.writestr("a.txt", "no picture")
    (inside / "b.zip").write_bytes(b"PK\x03\x04 and no more")
    for name, kind in (("c.zip", ZIP_BZIP2), ("d.zip", ZIP_LZMA)):
        with ZipFile(inside / name, "w", kind) as archive:
            archive.writestr("a.png", bytes(2**16))
    named = with_kept({"bytes": None, "path": f"zip://a.png::{inside}/a.zip"}, tmp_path / "kept", [inside])
    assert named == keep(picture(), tmp_path / "kept")
    for path, said in (
        (f"zip://a.png::{tmp_path}/a.zip", "outside the data set"),
        (f"zip://b.png::{inside}/a.zip", "cannot be read"),
        (f"zip://a.txt::{inside}/a.zip", "of no known format"),
        (f"zip://a.png::{inside}/b.zip", "cannot be read"),
        (f"zip://a.png::{inside}/c.zip", "compression 12"),
        (f"zip://a.png::{inside}/d.zip", "compression 14"),
    ):
        with pytest.raises(ValueError, match=said):
            with_kept({"bytes": None, "path": path}, tmp_path / "kept", [inside])


def test_a_new_archive_in_the_place_of_an_old_one_is_read(tmp_path: Path) -> None:
    named = {"bytes": None, "path": f"zip://a.png::{tmp_path}/a.zip"}
    for content in (picture(), picture("blue")):
        with ZipFile(tmp_path / "new", "w") as archive:
            archive.writestr("a.png", content)
        (tmp_path / "new").replace(tmp_path / "a.zip")
        assert with_kept(named, tmp_path / "kept", [tmp_path]) == keep(content, tmp_path / "kept")
