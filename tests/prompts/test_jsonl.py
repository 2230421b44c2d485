"""Prompts from JSON lines: what a file may hold, and what is wrong with one that does not fit."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from align_circuits.prompts.jsonl import SCHEMA, read_jsonl
from align_circuits.prompts.prompts import WRONG, Prompts

MOVER = {"query": "END", "keys": ["one"], "candidates": ["one", "two"]}
LINE: dict[str, Any] = {
    "text": "ab:",
    "answer": "a",
    "wrong": "b",
    "corrupted": "ba:",
    "corrupted_answer": "b",
    "positions": {"one": 1, "two": ["b", 0]},
    "relations": {"mover": MOVER},
    "group": "g",
}
LONGER = LINE | {"text": "xdc:", "corrupted": "xcd:", "positions": {"one": "c", "two": -3}, "group": 3}


@pytest.fixture
def file(tmp_path):
    """Writes lines and returns the file's path."""

    def write(*lines: Any, raw: str | None = None) -> Any:
        path = tmp_path / "prompts.jsonl"
        path.write_text(raw if raw is not None else "\n".join(map(json.dumps, lines)), encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize("page", ["README.md", "docs/your-own-data.md"])
def test_the_files_of_the_documentation_are_read(file, page):
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```json\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    files = [read_jsonl(file(raw=block))[0] for block in blocks]
    assert files[0].keys() == {"text", "answer", "wrong", "corrupted"}
    assert all(answer.startswith(" ") for columns in files for answer in columns["answer"])


def test_the_documentation_has_every_key():
    page = (Path(__file__).parents[2] / "docs/your-own-data.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE) == list(SCHEMA.items())


def test_every_key_is_read(file, char_tokenizer):
    assert LINE.keys() == SCHEMA.keys()
    clean, corrupted = Prompts.from_jsonl(file(LINE, LONGER), char_tokenizer)
    answers: Any = {"answer": ["a", "a"], "wrong": ["b", "b"], "corrupted_answer": ["b", "b"]}
    pairs: Any = answers | {"positions": {"one": [1, 3], "two": [2, 2]}, "groups": [0, 1]}
    other, partner = Prompts.from_pairs(["ab:", "xdc:"], ["ba:", "xcd:"], char_tokenizer, **pairs)
    assert corrupted is not None and clean.digest == other.digest and corrupted.digest == partner.digest
    assert clean.targets[WRONG].equals(other.targets[WRONG])
    assert str(clean.positions) == str(other.positions)
    assert clean.group is not None and clean.group.tolist() == [0, 1]
    mover = clean.relations["mover"]
    assert mover.exchangeable and corrupted.relations["mover"] is mover
    keys, among = mover.expand()
    assert keys.nonzero()[:, 1].tolist() == clean.positions["one"].tolist() and among.sum(1).tolist() == [2, 2]


def test_corrupted_texts_of_another_length_are_read_only_where_they_are_needed(file, char_tokenizer):
    path = file(LINE | {"corrupted": "bab:"})
    with pytest.raises(ValueError, match=r"line 1: at token .* take words of equally many tokens"):
        Prompts.from_jsonl(path, char_tokenizer)
    with pytest.raises(ValueError, match=r"line 1: .* take words of equally many tokens; so it is with line 2, line 3"):
        Prompts.from_jsonl(file(*[LINE | {"corrupted": "bab:"}] * 3), char_tokenizer)
    path = file(LINE | {"corrupted": "bab:"})
    clean, corrupted = Prompts.from_jsonl(path, char_tokenizer, with_corrupted=False)
    assert corrupted is None and clean.digest == Prompts.from_jsonl(file(LINE), char_tokenizer)[0].digest


def test_pairs_that_differ_in_most_tokens_are_told(file, char_tokenizer):
    far = LINE | {"text": "abcdef:", "corrupted": "bcdefe:"}
    with pytest.warns(UserWarning, match=r"1 of 2 pairs differ in most of their tokens, such as line 2 in 6 of \d"):
        Prompts.from_jsonl(file(LINE, far), char_tokenizer)
    Prompts.from_jsonl(file(far | {"corrupted": "bcdeef:"}), char_tokenizer)  # four of eight


def test_only_the_text_is_required(file, char_tokenizer):
    clean, corrupted = Prompts.from_jsonl(file({"text": "abc"}, {"text": "de"}), char_tokenizer)
    assert corrupted is None and len(clean.targets) == 5 and clean.group is None
    relation = {"positions": {"one": 1}, "relations": {"own": {"query": "END", "keys": ["one"]}}}
    clean, _ = Prompts.from_jsonl(file({"text": "ab", "answer": "c"} | relation), char_tokenizer)
    assert not clean.relations["own"].exchangeable, "among all tokens, since no candidates are named"


def test_line_separators_inside_of_strings_and_byte_order_marks(file):
    line, other = (json.dumps({"text": text}, ensure_ascii=False) for text in ("a\u2028b\x85c", "d"))
    assert read_jsonl(file(raw=f"\ufeff{line}\r\n\n{other}\n")) == ({"text": ["a\u2028b\x85c", "d"]}, [1, 3])


def test_lines_with_the_same_text_are_one_group(file, char_tokenizer):
    lines = [{"text": text, "answer": answer} for text, answer in ("ax", "bx", "ay", "cx", "ax")]
    with pytest.warns(UserWarning, match="2 texts repeat earlier ones, first line 3; equal texts count as one group"):
        prompts, _ = Prompts.from_jsonl(file(*lines), char_tokenizer)
    assert prompts.group is not None and prompts.group.tolist() == [0, 1, 0, 2, 0]
    pairs = [{"text": text, "answer": "a", "corrupted": other} for text, other in ("ab", "ba", "cd", "ee")]
    with pytest.warns(UserWarning, match="2 of 3 pairs are the reverse of another one"):
        prompts, _ = Prompts.from_jsonl(file(*pairs[:3]), char_tokenizer, with_corrupted=False)
    assert prompts.group is not None and prompts.group.tolist() == [0, 0, 1]
    assert Prompts.from_jsonl(file(pairs[3]), char_tokenizer, with_corrupted=False)[0].group is None
    own = [line | {"group": number} for number, line in enumerate(lines)]
    with pytest.warns(UserWarning, match="line 3 repeats an earlier text in another group"):
        assert Prompts.from_jsonl(file(*own), char_tokenizer)[0].n_groups == 5, "a file's own groups stand"


def changed(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in (LINE | changes).items() if value is not ...}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[]", "line 2: a list; give one object a line, without brackets around them"),
        ("3", "line 2: give an object with a string 'text'"),
        ("{", r"line 2: no JSON \("),
        (changed(text=3), "line 2: give an object with a string 'text'"),
        (changed(size=2, colour="red"), "line 2: unknown key 'colour': a line may have text, answer"),
        (changed(answer=None), "line 2: answer is null; give a string"),
        (changed(positions=["one"]), r'line 2: positions is \["one"\]; give an object, by name'),
        (changed(positions={"one": True}), r"line 2: positions\['one'\] is true; give a part of the text"),
        (changed(positions={"one": ["a"]}), r"""line 2: positions\['one'\] is \["a"\]; give a part of the text"""),
        (changed(group=None), "line 2: group is null; give a string or a number"),
        (changed(group=True), "line 2: group is true; give a string or a number"),
        (changed(text="a\ud83d"), "line 2: .* is half a character"),
        ('{"text": "a", "text": "b"}', "line 2: the key 'text' stands there twice; give it once"),
        (changed(group=...), "line 2: 'group' stands in some lines only"),
        (changed(wrong=..., group=...), "line 2: 'group' stands in some lines only"),
        (changed(positions={"one": 1}), "line 2: positions has other names than the first line"),
        (changed(positions={"none": 1}), "line 2: positions has other names than the first line"),
        (changed(relations={}), "line 2: relations has other names than the first line"),
        (changed(relations={"mover": ["END"]}), "line 2: relation 'mover' needs 'query' and 'keys'"),
        (changed(relations={"mover": {"query": "END"}}), "line 2: relation 'mover' needs 'query' and 'keys'"),
        (changed(relations={"mover": MOVER | {"candidate": ["one"]}}), "may have 'candidates', and nothing else"),
        (changed(relations={"mover": {"query": "END", "keys": "one"}}), "keys and candidates are lists of names"),
        (changed(relations={"mover": {"query": "END", "keys": []}}), "with at least one"),
        (changed(relations={"mover": {"query": "END", "keys": [2, 1]}}), "2 is no name; name places under 'positions'"),
        (changed(relations={"mover": {"query": 3, "keys": ["one"]}}), "3 is no name"),
    ],
)
def test_a_line_that_does_not_fit_is_named(file, line, message):
    raw = "\n".join([json.dumps(LINE), line if isinstance(line, str) else json.dumps(line)])
    refused(message, read_jsonl, file(raw=raw))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (["answer", "corrupted", "corrupted_answer", "relations"], "has the key 'wrong' without 'answer'"),
        (["answer", "wrong", "corrupted_answer"], "has the key 'corrupted' without 'answer'"),
        (["corrupted"], "has the key 'corrupted_answer' without 'corrupted'"),
    ],
)
def test_keys_that_need_others(file, missing, message):
    refused(message, read_jsonl, file(changed(**dict.fromkeys(missing, ...))))


def test_files_that_hold_no_prompts(file, tmp_path, char_tokenizer):
    refused("has no lines", read_jsonl, file(raw="\n\n"))
    with pytest.raises(ValueError, match=r"no file .*missing.jsonl': give one JSON object a line, with the keys text"):
        Prompts.from_jsonl(tmp_path / "missing.jsonl", char_tokenizer)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    refused("is no text in UTF-8", read_jsonl, tmp_path / "bytes")


def test_what_the_tokenizer_finds_is_named_too(file, char_tokenizer):
    changes = [
        ({"corrupted": "xcdd:"}, "at token . the clean text has"),
        ({"corrupted": "xdc:"}, None),
        ({"answer": ""}, "the answer '' is no token of its own"),
        ({"wrong": "a"}, "the answer 'a' cannot be compared"),
        ({"positions": {"one": "c", "two": 9}}, r"positions\['two'\]: no token 9; the text has 5"),
        (
            {"text": "ccc:", "corrupted": "ddd:"},
            r"positions\['one'\]: 'c' occurs 3 times; say which one, as \[\"c\", 0\]",
        ),
    ]
    for change, message in changes:
        path = file(raw=f"{json.dumps(LINE)}\n\n{json.dumps(LONGER | change)}\n")
        says = "such as line 3, have" if message is None else f"prompts.jsonl', line 3: {message}"
        refused(says, Prompts.from_jsonl, path, char_tokenizer)
    path = file(LINE, LONGER | {"corrupted_answer": ""})
    refused("line 2, corrupted: the answer ''", Prompts.from_jsonl, path, char_tokenizer)
    behind = LONGER | {
        "relations": {"mover": MOVER | {"query": "one", "keys": ["two"]}},
        "positions": {"one": 1, "two": 2},
    }
    refused(
        "relation 'mover', line 2: key 'two' lies behind its query 'one'",
        Prompts.from_jsonl,
        file(LINE, behind),
        char_tokenizer,
    )
    wrong = LINE | {"relations": {"mover": {"query": "END", "keys": ["three"]}}}
    says = "relation 'mover', line 1: no position 'three' in these prompts: they have 'one', 'two', 'END'"
    with pytest.raises(KeyError, match=says):
        Prompts.from_jsonl(file(wrong), char_tokenizer)
