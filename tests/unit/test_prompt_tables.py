"""Prompts of .csv and .tsv tables: rows as the same objects in .jsonl."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight_rewards.base.prompt_files import PromptFileError, parse_prompts, read_text
from spotlight_rewards.base.prompts import Prompt

TEXT = st.text(st.characters(min_codepoint=32, exclude_categories=["C"]), min_size=1, max_size=20)


def read(folder: Path, content: str, name: str = "prompts.csv") -> list[Prompt]:
    path = folder / name
    path.write_bytes(content.encode())
    return parse_prompts(read_text(path), str(path))


@pytest.mark.parametrize(("ending", "delimiter"), [("csv", ","), ("tsv", "\t")])
def test_columns_beside_prompt_are_metadata(tmp_path: Path, ending: str, delimiter: str) -> None:
    include = [{"class": "cat", "count": 2}]
    rows = [
        ["prompt", "tag", "include"],
        ["two cats, please", "counting", json.dumps(include)],
        ['a "sign"', "", ""],
    ]
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter).writerows(rows)
    first, second = read(tmp_path, text.getvalue(), f"prompts.{ending}")
    assert (first.text, first.metadata) == ("two cats, please", {"tag": "counting", "include": include})
    assert (second.text, second.metadata) == ('a "sign"', {})
    line = json.dumps({"prompt": "two cats, please", "tag": "counting", "include": include})
    assert parse_prompts(line, "a.jsonl") == [first]


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=8, unique=True))
def test_tables_and_objects_give_the_same_prompts(tmp_path_factory: pytest.TempPathFactory, rows) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp("tables")
    text = io.StringIO()
    csv.writer(text).writerows([("prompt", "note"), *rows])
    objects = [{"prompt": prompt, "note": note} for prompt, note in rows]
    lines = [json.dumps({name: cell for name, cell in each.items() if cell.strip()}) for each in objects]

    def outcome(name: str, content: str) -> list[tuple[str, object]] | str:
        try:
            return [(each.text, dict(each.metadata)) for each in read(folder, content, name)]
        except PromptFileError as error:
            return "repeat" if "repeat" in str(error) else "malformed"

    found, expected = outcome("a.csv", text.getvalue()), outcome("a.jsonl", "\n".join(lines))
    if not any(note.lstrip()[:1] in ("[", "{") for _, note in rows):
        assert found == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("text,tag\na,b\n", "expected names of columns, each once, one of them prompt, separated by ','"),
        ("prompt,prompt\na,b\n", "each once"),
        ("", "each once"),
        ("prompt,tag\na\n", "line 2 has 1 cells; expected 2"),
        ('prompt\n"a\n', "is not that of a table"),
        ("prompt,tag\na,b\n,c\n", ":3: 'prompt' is missing"),
        ('prompt,tag\n"a\nb",c\nd,"[1"\n"a\nb",c\n', ":5: a\nb is already on line 2"),
        ("prompt,include\na,cat\n", ":2: 'include' is \"cat\"; expected a list"),
    ],
)
def test_tables_that_are_none_are_refused_by_line(tmp_path: Path, content: str, expected: str) -> None:
    with pytest.raises((PromptFileError, ValueError)) as error:
        read(tmp_path, content)
    assert expected in str(error.value)


def test_a_mark_of_utf8_and_crlf_are_no_part_of_a_table(tmp_path: Path) -> None:
    assert [each.text for each in read(tmp_path, "\ufeffprompt,tag\r\na cat,x\r\n\r\na dog,\r\n")] == [
        "a cat",
        "a dog",
    ]
