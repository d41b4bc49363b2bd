"""Following the lines of a file that another process writes."""

from pathlib import Path

from suture.execution.progress import follow


def test_lines_come_once_each_and_only_when_they_are_whole(tmp_path: Path) -> None:
    path, lines = tmp_path / "events.jsonl", []
    path.write_text("before\n")
    with follow(path, lines.append), path.open("a") as file:
        file.write("one\ntw")
        file.flush()
    assert lines == ["one\n"]
    with follow(path, lines.append), path.open("a") as file:
        file.write("three\n")
    assert lines == ["one\n", "three\n"]


def test_a_file_that_is_replaced_is_read_from_its_beginning(tmp_path: Path) -> None:
    path, lines = tmp_path / "events.jsonl", []
    path.write_text("a long line of the run before\n")
    with follow(path, lines.append):
        path.unlink()
        path.write_text("new\n")
    assert lines == ["new\n"]
