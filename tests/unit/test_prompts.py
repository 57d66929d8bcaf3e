"""Prompts files: what is read, and what is said of files that cannot be used."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight_rewards.base.prompt_files import (
    PromptFileError,
    parse_prompts,
    prompt_id,
    read_text,
    with_tags,
)

COUNTING = {"tag": "counting", "prompt": "two circles", "include": [{"class": "circle", "count": 2}]}
POSITION = {
    "tag": "position",
    "prompt": "a red circle left of a square",
    "include": [
        {"class": "square", "count": 1},
        {"class": "circle", "count": 1, "color": "red", "position": ["left of", 0]},
    ],
    "exclude": [{"class": "circle", "count": 2}],
}


def lines(*records: object) -> str:
    return "\n".join(map(json.dumps, records)) + "\n"


def failure(text: str, source: str = "train.jsonl") -> str:
    with pytest.raises(PromptFileError) as error:
        parse_prompts(text, source)
    return str(error.value)


def record(**changes: object) -> str:
    return json.dumps({**COUNTING, **changes})


class TestReading:
    def test_plain_text_is_one_prompt_a_line(self) -> None:
        prompts = parse_prompts('\ufeffa cat\r\n\n  a sign "OPEN" \r\n', "train.txt")
        assert [(prompt.text, prompt.metadata) for prompt in prompts] == [
            ("a cat", {}),
            ('a sign "OPEN"', {}),
        ]

    def test_geneval_records_keep_their_metadata(self) -> None:
        first, second = parse_prompts(lines(COUNTING, POSITION), "metadata.jsonl")
        assert first.text == "two circles"
        assert first.metadata == {"tag": "counting", "include": [{"class": "circle", "count": 2}]}
        assert second.metadata["exclude"] == [{"class": "circle", "count": 2}]

    def test_metadata_of_ones_own_is_kept(self) -> None:
        (prompt,) = parse_prompts(lines({"prompt": "a cat", "wanted": [1, 2]}), "own.jsonl")
        assert prompt.metadata == {"wanted": [1, 2]}

    @pytest.mark.parametrize("source", ["a.jsonl", "a"])
    def test_the_format_is_known_by_ending_or_content(self, source: str) -> None:
        (prompt,) = parse_prompts(lines(COUNTING), source)
        assert prompt.metadata["tag"] == "counting"

    def test_a_line_break_is_only_what_editors_call_so(self) -> None:
        (prompt,) = parse_prompts("a\u2028cat", "a.txt")
        assert prompt.text == "a\u2028cat"

    @given(
        st.lists(
            st.text(
                st.characters(min_codepoint=32, blacklist_categories=["Cs"], blacklist_characters="\ufeff{[")
            ),
            unique_by=str.strip,
        )
    )
    def test_every_text_survives(self, texts: list[str]) -> None:
        wanted = [text.strip() for text in texts if text.strip()]
        if wanted:
            assert [prompt.text for prompt in parse_prompts("\n".join(texts), "a.txt")] == wanted
            records = lines(*({"prompt": text} for text in wanted))
            assert [prompt.text for prompt in parse_prompts(records, "a.jsonl")] == wanted


class TestIds:
    def test_they_are_fixed_for_ever(self) -> None:
        assert prompt_id("a cat", {}) == "2ec7f367e389c8e9"
        assert parse_prompts("a cat", "any.txt")[0].id == prompt_id("a cat", {})

    def test_they_depend_on_content_only(self) -> None:
        first, second = parse_prompts(lines(COUNTING, POSITION), "a.jsonl")
        shuffled = {key: POSITION[key] for key in reversed(POSITION)}
        assert [prompt.id for prompt in parse_prompts(lines(shuffled, COUNTING), "b.jsonl")] == [
            second.id,
            first.id,
        ]
        (other,) = parse_prompts(record(tag="other"), "a.jsonl")
        assert other.id != first.id


class TestTags:
    def test_only_prompts_with_the_tags_are_kept(self) -> None:
        prompts = parse_prompts(lines(COUNTING, POSITION, {"prompt": "untagged"}), "a.jsonl")
        assert [prompt.text for prompt in with_tags(prompts, "a.jsonl", ["counting"])] == ["two circles"]
        assert len(with_tags(prompts, "a.jsonl", ["counting", "position"])) == 2
        assert with_tags(prompts, "a.jsonl", ()) == prompts

    def test_an_unknown_tag_lists_those_of_the_file(self) -> None:
        prompts = parse_prompts(lines(COUNTING, POSITION), "train.jsonl")
        with pytest.raises(PromptFileError) as caught:
            with_tags(prompts, "train.jsonl", ["colour", "counting"])
        assert str(caught.value).startswith("tags: no prompt in train.jsonl has the tag 'colour'; ")
        assert "the tags in it are counting (1), position (1). Name some" in str(caught.value)
        with pytest.raises(PromptFileError, match=r"none \(only \.jsonl prompts have tags\)"):
            with_tags(parse_prompts("a cat", "a.txt"), "a.txt", ["counting"])


class TestBadFiles:
    def test_a_table_or_a_json_document(self) -> None:
        for source in ("a.JSON",):
            assert failure("prompt,tag\na,b", source=source).startswith(
                f"{source} ends with {source[1:].lower()}; expected a .txt file, one prompt a line"
            )
        for text in (
            '[{"prompt": "a"}]',
            '["a", "b"]',
            '[\n{"prompt": "a"}\n]',
            '["a",\n"b"]',
            '{\n"prompt": "a"\n}',
            '{"a": [',
        ):
            for source in ("a.txt", "a"):
                if source == "a.txt" or text.startswith("["):
                    assert "begins like a JSON document" in failure(text, source=source)
        for text in ("[oil on canvas] a cat", '["a cat"] on a sofa', '["red", "blue"] flag'):
            (prompt,) = parse_prompts(text, "a.txt")
            assert prompt.text == text

    @pytest.mark.parametrize("text", ["", "\n \n\t\n", "\ufeff"])
    def test_a_file_without_prompts(self, text: str) -> None:
        assert (
            failure(text)
            == "train.jsonl holds no prompts; expected one prompt a line, or one JSON object a line"
        )

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ('{"prompt": "a"', "no JSON (Expecting ',' delimiter at column 15)"),
            ("a cat", "no JSON (Expecting value at column 1): a cat; expected {"),
            ('["a"]', '["a"] is no JSON object'),
            (
                '{"prompt": "a", "prompt": "b"}',
                "the key 'prompt' stands twice; expected it once",
            ),
            ('{"prompt": "a", "own": [{"n": 1, "n": 1}]}', "the key 'n' stands twice"),
            ("{}", "'prompt' is missing; expected a text"),
            (record(prompt=3), "'prompt' is 3; expected a text"),
            (record(prompt="  "), "'prompt' is \"  \""),
            (record(tag=["counting"]), "'tag' is [\"counting\"]; expected a text"),
            (record(include={"class": "circle"}), '\'include\' is {"class": "circle"}; expected a list'),
            (record(include=["circle"]), "'include[0]' is \"circle\"; expected an object like"),
            (record(include=[{"class": "circle"}]), "'include[0].count' is missing; expected a whole number"),
            (record(exclude=[{"class": "circle", "count": 0}]), "'exclude[0].count' is 0"),
            (record(include=[{"class": "circle", "count": True}]), "'include[0].count' is true"),
            (record(include=[{"class": "circle", "count": 1, "color": 3}]), "'include[0].color' is 3"),
            (
                record(include=[{"class": "circle", "count": 1, "position": ["left of", 0]}]),
                "'include[0].position' is [\"left of\", 0]; expected [relation, index] with the index",
            ),
            (record(weight=float("nan")), "the number NaN, which JSON does not have"),
            (record(prompt="a\u0000b"), "the character '\\x00' in 'a\\x00b'"),
            (record(prompt="a\ud800b"), "the character '\\ud800' in 'a\\ud800b'"),
            (record(text="\ud83d"), "'\\ud83d', half a character, in '\\ud83d'; expected both halves"),
            (record(own=[{"\udc00": 1}]), "'\\udc00', half a character"),
            ('{"prompt": "a", "own": [{"n": -1e999}]}', "the number -1e999, which is too large; expected"),
            ('{"prompt": "a", "n": ' + "1" * 5000 + "}", "JSON that cannot be read (Exceeds the limit"),
            ('{"prompt": "a", "n": ' + "[" * 20000, "JSON that cannot be read (maximum recursion depth"),
        ],
    )
    def test_a_malformed_line_is_named_with_what_was_expected(self, line: str, said: str) -> None:
        found = failure(record() + "\n\n" + line + "\n")
        assert found.startswith("train.jsonl: malformed lines (1):\n  train.jsonl:3: ")
        assert said in found

    def test_objects_in_a_text_file_are_suspicious(self) -> None:
        assert "train.txt:1: looks like a JSON object" in failure(record(), "train.txt")

    def test_a_wrong_encoding_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "train.txt"
        path.write_bytes("a cat\ncaf\xe9".encode("latin-1"))
        with pytest.raises(ValueError, match=r"^line 2 is not UTF-8 \(byte 0xe9\): .*iconv -f ISO-8859-1"):
            read_text(path)
        path.write_text("an old file's mark, \ufffd, is a character", encoding="utf-8")
        assert parse_prompts(read_text(path), str(path))[0].text == path.read_text(encoding="utf-8")

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"PAR1\x15\x04", "it is a Parquet file that is not named .parquet: convert it"),
            (b"train.txt".ljust(257, b"\0") + b"ustar\x0000", "it is a tar archive"),
            (gzip.compress(b"a cat", mtime=0), "it is compressed by gzip"),
            ("a cat".encode("utf-16"), "it is text in UTF-16"),
        ],
    )
    def test_other_formats_are_named(self, tmp_path: Path, content: bytes, said: str) -> None:
        (tmp_path / "train").write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(said)):
            read_text(tmp_path / "train")

    def test_all_bad_lines_are_reported_at_once_up_to_ten(self) -> None:
        found = failure("\n".join(["{}"] * 13)).split("\n")
        assert found[0] == "train.jsonl: malformed lines (13):"
        assert [line.split(":")[1] for line in found[1:11]] == [str(number) for number in range(1, 11)]
        assert found[11] == "  ... and 3 more"

    def test_repeated_prompts_are_named(self) -> None:
        found = failure("a cat\na dog\na cat\n a dog\n", "train.txt")
        assert found.startswith(
            "train.txt: prompts that repeat an earlier one (2):\n  train.txt:3: a cat is already on line 1"
        )

    @pytest.mark.parametrize("times", [1, 60])
    @pytest.mark.parametrize(
        ("suffix", "lines"),
        [("txt", ["a cat", "a dog\t", " a cat \r", "a dog"]), ("jsonl", ['{"prompt": "a"}'] * 3)],
    )
    def test_the_remedy_for_repeated_prompts_works(
        self, tmp_path: Path, times: int, suffix: str, lines: list[str]
    ) -> None:
        path = tmp_path / f"train.{suffix}"
        path.write_bytes("\n".join(lines * times).encode())
        command = failure(read_text(path), str(path)).partition("for example with: ")[2]
        kept = tmp_path / f"kept.{suffix}"
        subprocess.run(["bash", "-c", command.replace("FILE", str(kept))], check=True)
        distinct = {line.strip() for line in lines}
        assert {line.strip() for line in read_text(kept).splitlines()} == distinct
        assert len(parse_prompts(read_text(kept), str(kept))) == len(distinct)

    def test_equal_objects_that_are_written_differently_repeat_each_other(self, tmp_path: Path) -> None:
        path = tmp_path / "train.jsonl"
        path.write_text('{"prompt": "a", "n": 1}\n{"n": 1, "prompt":"a "}\n', encoding="utf-8")
        assert f"sed '2d' {path} > FILE" in failure(read_text(path), str(path))

    def test_the_same_text_with_other_metadata_is_another_prompt(self) -> None:
        assert len(parse_prompts(record() + "\n" + record(tag="other"), "a.jsonl")) == 2
