"""Plain values of strangers: whatever a file holds, one error names it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from suture.core.errors import ConfigError, DataError, as_word, show_value
from suture.core.files import (
    DEEPEST,
    LARGEST_FILE,
    LARGEST_TOML,
    MOST_VALUES,
    append_line,
    check_plain,
    parse_json,
    read_json,
    read_records,
    read_regular,
    read_toml,
    whole_lines,
)
from suture.core.validation import parse
from suture.federation.plan import Schedule
from suture.protocol.records import read_history


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000 + "]" * 100_000, "deep"),
        ("[" * (DEEPEST + 2) + "]" * (DEEPEST + 2), "deep"),
        ("NaN", "NaN"),
        (str(2**64), "more than 64 bits"),
        ("9" * 5_000, "integer"),
        ('"\\ud800"', "surrogates"),
        ('{"a\\ud800": 1}', "surrogates"),
        ("{", "Expecting"),
        (b"\xff", "utf-8"),
    ],
    ids=["very deep", "deep", "NaN", "long", "very long", "no text", "no key", "cut off", "no UTF-8"],
)
def test_json_that_is_refused(text: str | bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_json(text)


def test_what_is_within_the_bounds_is_read(tmp_path: Path) -> None:
    check_plain(nested(DEEPEST))
    check_plain({"x": [2**63 - 1, -(2**63), 1.5, None, True, "ü", (1, 2)]})
    with pytest.raises(ValueError, match="deep"):
        check_plain(nested(DEEPEST + 1))
    (tmp_path / "x.json").write_text('{"a": [1, "ü"]}')
    assert read_json(tmp_path / "x.json") == {"a": [1, "ü"]}
    (tmp_path / "x.toml").write_bytes("\ufeffa = [1, 'ü']".encode())
    assert read_toml(tmp_path / "x.toml") == {"a": [1, "ü"]}


@pytest.mark.parametrize("content", [b"[]", b"3", b"\xff{}", b"", b"[" * 100_000])
def test_a_file_of_no_object_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"x\.json is damaged"):
        read_json(path)
    with pytest.raises(DataError, match=r"y\.json cannot be read: No such file"):
        read_json(tmp_path / "y.json")


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_a_toml_file_of_another_encoding_is_told_which_to_use(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('name = "Köln"', encoding=encoding)
    with pytest.raises(ConfigError, match=r"a\.toml.*UTF-8"):
        read_toml(tmp_path / "a.toml")


def test_a_table_in_the_place_of_a_toml_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("image,Mass\na.png,1\n")
    with pytest.raises(ConfigError, match=r"a\.csv .*\.toml"):
        read_toml(tmp_path / "a.csv")


def test_a_file_without_an_end_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.toml"
    with path.open("wb") as file:
        file.truncate(LARGEST_TOML + 1)
    with pytest.raises(ConfigError, match=r"large\.toml is not valid TOML: it is larger than 1 MiB"):
        read_toml(path)
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(LARGEST_FILE + 1)
    with pytest.raises(DataError, match="larger than 64 MiB"):
        read_json(tmp_path / "large.json")
    with pytest.raises(DataError, match="not a regular file"):
        read_json(Path("/dev/zero"))


@pytest.mark.parametrize("text", ["[" + "0," * MOST_VALUES + "0]", b"[" + b"{}," * MOST_VALUES + b"0]"])
def test_json_of_too_many_values_is_refused_before_it_is_parsed(
    text: str | bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("json.loads", None)
    with pytest.raises(ValueError, match="more than 2,000,000 values"):
        parse_json(text)


@pytest.mark.parametrize(
    "text",
    ["a = " + "[" * 100_000, "a = 0x" + "f" * 5_000, "a = " + "9" * 5_000, "a = 1\na = 2", "a = 2024-99-99"],
)
def test_toml_that_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.toml is "):
        read_toml(path)


@pytest.mark.parametrize("values", [[1], "rounds", 3.0, None, {"rounds": nested(5_000)}, {"rounds": 2**70}])
def test_values_of_no_table_are_a_configuration_error(values: object) -> None:
    with pytest.raises(ConfigError, match="schedule: ") as caught:
        parse(Schedule, values, "schedule")  # type: ignore[arg-type]
    assert len(str(caught.value)) < 300


def test_a_message_shows_any_value_shortly() -> None:
    assert show_value("a\x00\ud800") == "'a\\x00\\ud800'"
    assert as_word("a\nb") == "a\\nb"
    for value in (nested(20_000), "x" * 10**6, 10**5_000, list(range(10**5)), {"x" * 10**5: 1}):
        assert len(show_value(value)) < 500


def test_the_lines_of_a_long_run_have_no_bound_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The history of 1,300 rounds of twenty sites is larger than any other file of JSON."""
    monkeypatch.setattr("suture.core.files.LARGEST_FILE", 100)
    path = tmp_path / "history.jsonl"
    path.write_text('{"round": 1}\n' * 20)
    assert len(read_records(path)) == 20
    with pytest.raises(DataError, match="it is larger than"):
        read_json(path)


LONG_KEY = ".".join(["a"] * 40_000)


@pytest.mark.parametrize(
    "text",
    [
        f"{LONG_KEY} = 1",
        ".".join(['"a"'] * 40_000) + " = 1",
        " . ".join(["'a'"] * 40_000) + " = 1",
        f"[{LONG_KEY}]",
        f"[[ {LONG_KEY} ]]",
        f"x = {{{LONG_KEY} = 1}}",
        f'x = [{{a = """x"""", {LONG_KEY} = 1}}]',
        f"x = [{{a = '''x'''', {LONG_KEY} = 1}}]",
        f'x = [{{a = "\\"", {LONG_KEY} = 1}}]',
        f"x = [{{a = '\\', {LONG_KEY} = 1}}]",
        f'# "\n{LONG_KEY} = 1',
        "x = " + "[" * 40 + "]" * 40,
        "x = " + "{a = " * 40 + "1" + "}" * 40,
        "x = " + "[{a = " * 20 + "1" + "}]" * 20,
    ],
)
def test_toml_that_is_long_or_deep_is_refused_before_it_is_parsed(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tomllib.loads", lambda _: pytest.fail("it was parsed"))
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"a\.toml is not valid TOML: .* more than 32 (parts|levels)"):
        read_toml(tmp_path / "a.toml")


DEEP_KEY = ".".join("a" * 28)


@pytest.mark.parametrize(
    "lines",
    [
        [f"[{DEEP_KEY}.b{i}]" for i in range(14_000)],
        [f"[[{DEEP_KEY}.b{i}]]" for i in range(14_000)],
        [f"{DEEP_KEY}.b{i} = 1" for i in range(14_000)],
        ["x = [", *(f"{{{DEEP_KEY} = 1}}," for _ in range(14_000)), "]"],
    ],
)
def test_keys_of_many_parts_are_counted_together(
    lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.toml"
    path.write_text("\n".join(lines[:100] + lines[-1:]))
    assert read_toml(path)
    monkeypatch.setattr("tomllib.loads", lambda _: pytest.fail("it was parsed"))
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"a\.toml is not valid TOML: its keys have more than 50,000 parts"):
        read_toml(path)


@pytest.mark.complete
def test_dots_and_brackets_in_texts_and_numbers_are_no_keys(tmp_path: Path) -> None:
    lines = [
        f'x = "{LONG_KEY}[[[{{"',
        "y = [" + "1.5, " * 60_000 + "]",
        f'z = """\n{LONG_KEY}\n' + "[" * 50 + '"""',
        f"# {LONG_KEY}",
        f"w = '''{LONG_KEY}'''",
        "v = '" + "{" * 50 + "'",
        f"[a.b.'c.d'.\"{LONG_KEY}\"]",
        "u = 1.25",
    ]
    (tmp_path / "a.toml").write_text("\n".join(lines))
    assert read_toml(tmp_path / "a.toml")["x"].startswith(LONG_KEY)


@pytest.mark.complete
@pytest.mark.parametrize("start", [b"", b"\n"])
def test_records_of_a_sparse_file_are_not_read_whole(start: bytes, tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(start)
    os.truncate(path, 40 << 30)
    readers: list[Callable[[], object]] = [
        lambda: read_records(path),
        lambda: whole_lines(path),
        lambda: read_history(tmp_path),
        lambda: append_line(path, {"round": 2}),
    ]
    for read in readers:
        with pytest.raises(
            DataError, match=rf"history\.jsonl.*line {2 if start else 1} is longer than 64 MiB"
        ):
            read()
    with pytest.raises(OSError, match="larger than 1,024 MiB"):
        read_regular(path)
    assert path.stat().st_size == 40 << 30


def test_the_records_of_a_file_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text('{"round": 1}\n' * 20)
    assert len(read_records(path)) == 20
    monkeypatch.setattr("suture.core.files.LARGEST_WHOLE", 100)
    with pytest.raises(DataError, match="it is larger than"):
        read_records(path)
