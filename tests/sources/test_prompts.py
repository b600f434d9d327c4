"""Files of prompts: each form gives pairs of (prompt, negative prompt), and what is none of them is refused."""

import json

import pytest

from cachestore.core.errors import BadInput
from cachestore.sources.prompts import as_prompts, read_prompts
from tests.fakes import tells_of


def file(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("line", "pair"),
    [
        ("a cat", ("a cat", "")),
        ("  a cat, sks  ", ("a cat, sks", "")),
        ("a cat --n ugly, blurred --w 512 --h 768", ("a cat", "ugly, blurred")),
        ("a cat --w 512 --s 20 --n ugly", ("a cat", "ugly")),
        ("a cat --d 1", ("a cat", "")),
        ("a cat -- on a mat", ("a cat -- on a mat", "")),
        ("a black--white cat", ("a black--white cat", "")),
        ("a cat --n", ("a cat", "")),
    ],
)
def test_a_line_is_read_as_sd_scripts_reads_its_sample_prompts(tmp_path, line, pair):
    assert read_prompts(file(tmp_path, "p.txt", f"# a remark\n\n{line}\n")) == (pair,)


def test_all_forms_of_file_and_a_list_give_the_same_prompts(tmp_path):
    wanted = (("a cat", "ugly"), ("ünï", ""))
    rows: list[object] = [{"prompt": "a cat", "negative_prompt": "ugly", "steps": 20}, {"prompt": "ünï"}]
    files = {
        "p.txt": "a cat --n ugly\nünï\n",
        "p.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "p.json": json.dumps(rows),
        "library.json": json.dumps({"cat": rows[0], "other": "ünï"}),
    }
    assert {read_prompts(file(tmp_path, name, text)) for name, text in files.items()} == {wanted}
    assert as_prompts([("a cat", "ugly"), "ünï", "ünï"]) == as_prompts([*rows, ["a cat", "ugly"]]) == wanted


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("p.toml", "a cat", "is not a file of prompts: its name must end in .txt, .json, .jsonl"),
        ("p.txt", "# nothing\n\n", "has no prompt"),
        ("p.jsonl", "\n", "has no prompt"),
        ("p.json", "[]", "has no prompt"),
        ("p.jsonl", '{"text": "a cat"}', "line 1 must be a text, or an object with the fields prompt and negative_prompt"),
        ("p.jsonl", "a cat", "line 1: not JSON"),
        ("p.json", "a cat", "is not JSON"),
        ("p.json", '"a cat"', "must hold a list of prompts"),
        ("p.json", '["a cat", 7]', "prompt 1 must be a text"),
        ("p.json", '{"cat": {"prompt": 7}}', "prompt cat must be a text"),
        ("p.json", '["\\ud800', "is not JSON"),
    ],
)
def test_what_is_no_file_of_prompts_is_refused_with_its_line(tmp_path, name, text, says):
    with pytest.raises(BadInput, match=says):
        read_prompts(file(tmp_path, name, text))


@pytest.mark.parametrize(("name", "text"), [("p.txt", "nul \0"), ("p.jsonl", '{"prompt": "half \\ud83d"}'), ("p.json", '["\\u0000"]')])
def test_a_prompt_that_cannot_be_encoded_is_refused_with_its_place(tmp_path, name, text):
    with pytest.raises(BadInput, check=tells_of(f"{name}, ")):
        read_prompts(file(tmp_path, name, text))


@pytest.mark.parametrize("given", [[7], [("a", "b", "c")], [("a", None)], [{}]])
def test_what_is_no_prompt_is_refused_with_its_number(given):
    with pytest.raises(BadInput):
        as_prompts(["a cat", *given])
