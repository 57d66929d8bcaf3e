"""The OCR reward: its formula on text, its reading of rendered text, and what it says when it cannot work."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as PILImage
from PIL import ImageDraw, ImageFont

from spotlight_rewards import ocr as ocr_module
from spotlight_rewards.ocr import check, ocr, readings
from spotlight_rewards.reading.legibility import (
    KnownCharacters,
    legibility,
    levenshtein,
    missing_scripts,
    normalized,
    target_of,
)
from spotlight_rewards.reading.tesseract_data import readable_characters
from spotlight_rewards.reward import Image, RewardInputError, RewardSetupError


def _unavailable() -> str | None:
    try:
        check([], [])
    except RewardSetupError as error:
        return str(error)
    return None


UNAVAILABLE = _unavailable()
needs_tesseract = pytest.mark.skipif(UNAVAILABLE is not None, reason=UNAVAILABLE or "")
words = st.text("abc", max_size=7)


def render(
    text: str, width: int, height: int, font_px: int, ink: str = "black", ground: str = "white"
) -> Image:
    picture = PILImage.new("RGB", (width, height), ground)
    font = ImageFont.load_default(size=font_px)
    ImageDraw.Draw(picture).text((width / 2, height / 2), text, fill=ink, font=font, anchor="mm")
    return np.asarray(picture)


class TestFormula:
    @pytest.mark.parametrize(
        ("prompt", "target"),
        [
            ('a sign "OPEN"', "open"),
            ('"Grand  Opening" over a "door"', "grandopening"),
            ('a sign "OPEN" and a stray "', "open"),
            ('"a\nb" below', "ab"),
        ],
    )
    def test_the_target_is_the_first_quoted_text(self, prompt: str, target: str) -> None:
        assert target_of(prompt) == target

    @pytest.mark.parametrize(
        "prompt", ["a cat", 'half "open', 'nothing ""', 'white "  " space', "“curly” quotes"]
    )
    def test_a_prompt_without_a_target_is_an_input_error(self, prompt: str) -> None:
        with pytest.raises(RewardInputError, match="double quotes") as error:
            target_of(prompt)
        assert repr(prompt) in str(error.value)

    @pytest.mark.parametrize(
        ("target", "reading", "reward"),
        [
            ("open", "open", 1.0),
            ("open", "weareopentoday", 1.0),
            ("open", "", 0.0),
            ("open", "opan", 0.75),
            ("open", "ope", 0.75),
            ("open", "completelyotherwords", 0.0),  # capped: never below zero
        ],
    )
    def test_reward_is_one_minus_the_capped_distance(self, target: str, reading: str, reward: float) -> None:
        assert legibility(target, reading) == reward

    @pytest.mark.parametrize(
        ("target", "reading", "reward"),
        [
            ("a", "xqabz", 0.0),
            ("a", "say A.", 1.0),
            ("ok", "o k!", 1.0),
            ("ok", "books", 0.0),
            ("lo", "lon", 0.5),
            ("24", "1924", 0.0),
            ("!", "stop!", 1.0),
            ("中文", "欢迎中文学习", 1.0),
        ],
    )
    def test_a_short_target_must_stand_alone(self, target: str, reading: str, reward: float) -> None:
        assert legibility(target, reading) == reward

    @pytest.mark.parametrize(
        ("drawn", "read"),
        [
            ("\uff2f\uff30\uff25\uff2e", "OPEN"),
            ("\ufb01ne \ufb02ag", "FINE FLAG"),
            ("it\u2019s", "IT'S"),
            ("Hawai\u02bbi", "HAWAI'I"),
            ("9\u20135", "9-5"),
            ("Caf\u00e9", "CAFE\u0301"),
            ("Stra\u00dfe", "STRASSE"),
            ("wait\u2026", "wait..."),
            ("9\ufe585", "9-5"),
            ("op\u200ben", "open"),
            ("\u0130stanbul", "i\u0307stanbul"),
            ("\uff21", "A"),  # short: it must stand alone
            ("\u2019s", "'s"),
        ],
    )
    def test_a_text_is_the_same_however_it_is_encoded(self, drawn: str, read: str) -> None:
        for target, reading in ((drawn, read), (read, drawn), (drawn, drawn)):
            assert legibility(target_of(f'a sign "{target}"'), f" {reading} ") == 1.0
        known = KnownCharacters.of(read.upper())
        assert missing_scripts(target_of(f'"{drawn}"'), known) == []

    @given(st.text(max_size=8))
    def test_normalizing_again_changes_nothing(self, text: str) -> None:
        assert normalized(normalized(text)) == normalized(text)

    @pytest.mark.parametrize(
        ("target", "scripts"),
        [
            ("open", []),
            ("café", []),
            ("24", []),
            ("привет", ["Cyrillic"]),
            ("open 中文", ["Cjk"]),
            ("☃", ["Symbol"]),
            ("ﾃｽﾄ", ["Katakana"]),
            ("OPEN\u02c8", []),  # a stress mark: a letter that only modifies
            ("人々", ["Cjk"]),
            ("D\u02bfNA", []),
        ],
    )
    def test_scripts_that_a_reader_lacks_are_named(self, target: str, scripts: list[str]) -> None:
        assert missing_scripts(target, KnownCharacters.of("ABCDEFNOP012345")) == scripts

    @given(words, words, words)
    def test_levenshtein_is_a_metric(self, a: str, b: str, c: str) -> None:
        assert (levenshtein(a, b) == 0) == (a == b)
        assert levenshtein(a, b) == levenshtein(b, a)
        assert levenshtein(a, c) <= levenshtein(a, b) + levenshtein(b, c)
        assert abs(len(a) - len(b)) <= levenshtein(a, b) <= max(len(a), len(b))

    @given(words, words, st.integers(0, 7))
    def test_levenshtein_counts_single_edits(self, a: str, b: str, at: int) -> None:
        assert levenshtein(a, a[:at] + "x" + a[at:]) == 1
        assert levenshtein(a + "x" + b, a + "y" + b) == 1

    def test_levenshtein_of_the_textbook(self) -> None:
        assert levenshtein("kitten", "sitting") == 3


@needs_tesseract
class TestReading:
    @pytest.mark.parametrize("text", ["HELLO", "Grand Opening", "Coffee 24"])
    @pytest.mark.parametrize(("ink", "ground"), [("black", "white"), ("white", "navy"), ("darkred", "beige")])
    def test_large_text_is_read(self, text: str, ink: str, ground: str) -> None:
        scores = ocr([render(text, 256, 128, 30, ink, ground)], [f'a sign "{text}"'], [{}])
        assert scores == {"score": [1.0], "exact": [1.0]}

    def test_text_in_a_colourful_scene_is_read(self) -> None:
        noise = np.random.default_rng(3).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        ground = PILImage.fromarray(noise).resize((512, 512), PILImage.Resampling.BICUBIC)
        images = []
        for ink, plate in (("black", "beige"), ("beige", "black")):
            sign = PILImage.fromarray(render("Spotlight", 320, 90, 50, ink, plate))
            scene = ground.copy()
            scene.paste(sign, (100, 220))
            images.append(np.asarray(scene))
        assert ocr(images, ['"Spotlight"'] * 2, [{}] * 2)["exact"] == [1.0, 1.0]

    def test_capitals_on_tiny_pictures_are_read(self) -> None:
        letters = np.random.default_rng(0).choice(list("ABCDEFGHKLMNPRSTUVWXYZ"), (40, 2))
        texts = ["".join(pair) for pair in letters]
        images = [render(text, 32, 32, 14) for text in texts]
        scores = ocr(images, [f'"{text}"' for text in texts], [{}] * 40)
        assert np.mean(scores["exact"]) >= 0.9

    def test_an_empty_picture_scores_zero_and_another_word_little(self) -> None:
        images = [render("", 256, 128, 30), render("MILK", 256, 128, 30), render("OPEM", 256, 128, 30)]
        found = ocr(images, ['"OPEN"'] * 3, [{}] * 3)
        assert found["score"][0] == 0.0
        assert found["score"][1] <= 0.25
        assert found["score"][2] == 0.75
        assert found["exact"] == [0.0, 0.0, 0.0]

    def test_scores_do_not_depend_on_the_batch(self) -> None:
        texts = ["OPEN", "milk", "Tea 4 two"]
        images = [render(text, 200, 80, 24) for text in texts]
        prompts = [f'"{text}"' for text in texts]
        together = ocr(images, prompts, [{}] * 3)["score"]
        alone = [
            ocr([image], [prompt], [{}])["score"][0] for image, prompt in zip(images, prompts, strict=True)
        ]
        assert together == alone

    def test_short_targets_are_not_read_in_white_noise(self) -> None:
        rng = np.random.default_rng(4)
        letters = list("abcdefghijklmnopqrstuvwxyz")
        images = [rng.integers(0, 256, (128, 128, 3), dtype=np.uint8) for _ in range(3)]
        read = ["".join(readings(image, sure_only=True)) for image in images]
        assert read == ["", "", ""]
        targets = ["".join(rng.choice(letters, count)) for count in (1, 2, 3)]
        assert ocr(images, [f'"{text}"' for text in targets], [{}] * 3)["score"] == [0.0] * 3

    def test_the_way_of_thresholding_can_be_chosen(self) -> None:
        rng = np.random.default_rng(1)
        noisy = render("WINDOW", 256, 128, 36) + rng.normal(0, 60, (128, 256, 3))
        image = np.clip(noisy, 0, 255).astype(np.uint8)
        scores = {
            way: ocr([image], ['"WINDOW"'], [{}], thresholding=way)["score"][0]
            for way in ("otsu", "sauvola", "sauvola-inverted", "best")
        }
        assert scores["best"] == max(scores.values()) > scores["otsu"]
        with pytest.raises(RewardSetupError, match=r"thresholding is 'otsy'; expected one of best, otsu"):
            check([], [], thresholding="otsy")  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("text", "remedy"),
        [
            ("ПРИВЕТ", "Cyrillic characters.*language: eng\\+rus .*apt-get install tesseract-ocr-rus"),
            ("こんにちはカナ", "Hiragana and Katakana characters.*eng\\+jpn .*tesseract-ocr-jpn\\)"),
            ("☃", "Symbol characters.*remove the prompt"),
        ],
    )
    def test_a_script_that_the_language_data_lacks_is_refused(self, text: str, remedy: str) -> None:
        with pytest.raises(RewardInputError, match=remedy):
            check([f'a sign "{text}"'], [{}])

    def test_the_characters_of_the_language_data_are_known(self, tmp_path: Path) -> None:
        data = next(d for d in Path("/usr/share").glob("tesseract*/*/tessdata/eng.traineddata"))
        assert set("abzAZ09é€") <= readable_characters(data)
        assert not set("жΩ中") & readable_characters(data)
        (tmp_path / "eng.traineddata").write_bytes(b"PK and more")
        with pytest.raises(RewardSetupError, match="has no character set that can be read"):
            readable_characters(tmp_path / "eng.traineddata")

    def test_check_looks_at_every_prompt(self) -> None:
        check(['"a"', '"b"'], [{}, {}])
        with pytest.raises(RewardInputError, match="'a cat'"):
            check(['"a"', "a cat"], [{}, {}])


class TestSetUp:
    @pytest.fixture(autouse=True)
    def _no_engine_yet(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ocr_module, "_engine", ocr_module._engine.__wrapped__)

    def test_without_tesserocr_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "tesserocr", None)
        with pytest.raises(RewardSetupError, match=r"pip install 'spotlight-rewards\[ocr\]'"):
            check([], [])

    @needs_tesseract
    def test_without_language_data_the_package_is_named(self) -> None:
        with pytest.raises(
            RewardSetupError, match="apt-get install tesseract-ocr-eng tesseract-ocr-chi-sim"
        ) as error:
            check([], [], language="eng+chi_sim")
        assert "eng.traineddata, chi_sim.traineddata is missing (looked in: " in str(error.value)

    @needs_tesseract
    def test_tessdata_prefix_decides(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TESSDATA_PREFIX", str(tmp_path))
        with pytest.raises(RewardSetupError, match=str(tmp_path)):
            check([], [])
        (tmp_path / "tessdata").mkdir()
        data = next(d for d in Path("/usr/share").glob("tesseract*/*/tessdata/eng.traineddata"))
        (tmp_path / "tessdata" / "eng.traineddata").symlink_to(data)
        check([], [])

    @needs_tesseract
    def test_damaged_language_data_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "eng.traineddata").write_bytes(b"damaged")
        monkeypatch.setenv("TESSDATA_PREFIX", str(tmp_path))
        with pytest.raises(RewardSetupError, match="does not open the language data 'eng'"):
            check([], [])
