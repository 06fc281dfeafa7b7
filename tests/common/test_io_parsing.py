"""Files: TOML and JSON that anyone may have written."""

from __future__ import annotations

import time

import pytest

from fp8stack.common.io import DEEPEST, parse_json, parse_toml, read_json, read_toml
from tests.conftest import refusal

HUNDRED_KB = 50_000
DEEP_TOML = {
    "a dotted key": ".".join("a" * HUNDRED_KB) + " = 1",
    "a dotted header": f"[{'.'.join('a' * HUNDRED_KB)}]",
    "a dotted header of an array": f"[[ {' . '.join('a' * HUNDRED_KB)} ]]",
    "a quoted key": ".".join(['"a.b"'] * (HUNDRED_KB // 5)) + " = 1",
    "a literal key": "x = 1\n  " + ".".join(["'a'"] * HUNDRED_KB) + " = 1",
    "an inline table": "x = {y = 1, " + ".".join("a" * HUNDRED_KB) + " = 1}",
    "inline tables": "x = " + "{a = " * HUNDRED_KB,
    "arrays": "x = " + "[" * HUNDRED_KB,
    "arrays that Python can take": "x = " + "[" * 100 + "]" * 100,
    "headers that build on each other": "".join(
        f"[{'.'.join(f'a{n}' for n in range(depth))}]\n" for depth in range(40, 70)
    ),
}


@pytest.mark.parametrize("case", DEEP_TOML)
def test_deep_toml_is_refused_in_one_line_at_once(case):
    began = time.process_time()
    message = refusal(parse_toml, DEEP_TOML[case], "my.toml")
    assert time.process_time() - began < 30  # quadratic time would be many times as much
    assert message.startswith("my.toml")
    assert "nested too deeply" in message
    assert len(message) < 300


def test_toml_of_the_most_levels_and_strings_with_many_dots_are_read():
    keys = ".".join("a" * DEEPEST)
    table = parse_toml(f"{keys} = 1", "x")
    for _ in range(DEEPEST):
        table = table["a"]
    assert table == 1
    dots = "..." * 200 + ".".join("word" for _ in range(200))
    assert parse_toml(f'x = "{dots}"\ny = 1.5', "x") == {"x": dots, "y": 1.5}


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "[" * 900 + "]" * 900, '{"a":' * 65 + "1" + "}" * 65]
)
def test_deep_json_is_refused_in_one_line(text):
    for content in (text, text.encode()):
        message = refusal(parse_json, content, "my.json")
        assert message.startswith("my.json is ")
        assert "nested too deeply" in message


@pytest.mark.parametrize("text", ["", "{", "nonsense", "9" * 5000, b"\xff\xfe", b"\x00"])
def test_what_is_no_json_is_named(text):
    assert refusal(parse_json, text, "my.json").startswith("my.json is not valid JSON: ")


def test_wide_json_is_no_deep_json():
    wide = [{"a": [1, {"b": []}]}] * 1000
    assert parse_json(str(wide).replace("'", '"'), "x") == wide


def test_files_that_cannot_be_read_are_named(tmp_path):
    for read, kind in ((read_toml, "TOML"), (read_json, "JSON")):
        assert refusal(read, tmp_path / "none").endswith(f"Give a {kind} file.")
        assert "is no regular file" in refusal(read, tmp_path)
        (tmp_path / "bytes").write_bytes(b"\xff\xfe")
        assert "it is not UTF-8 text" in refusal(read, tmp_path / "bytes")
        with (tmp_path / "hole").open("wb") as stream:
            stream.truncate(2**40)
        assert "is too large" in refusal(read, tmp_path / "hole")
