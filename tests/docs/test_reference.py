"""The reference pages say what the code says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field
from reference import FIRST, _family, _rows, _sections, pages, write_pages

from suture.cli.app import documented
from suture.data.config import SiteConfig
from suture.execution import catalogue
from suture.methods import METHODS

DOCS = Path(__file__).resolve().parents[2] / "docs"
ROOT = documented()


@pytest.mark.complete
def test_what_is_generated_is_what_is_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "FILE", tmp_path / "catalogue.json")
    (tmp_path / "catalogue.json").write_text("{}")
    written = [path.resolve().relative_to(tmp_path) for path in write_pages(ROOT, tmp_path / "docs")]
    assert {path.name for path in written} >= {"catalogue.json", "egress.md", "refusals.txt"}
    for path in written[1:]:
        committed = (DOCS.parent / path).read_text()
        assert (tmp_path / path).read_text() == committed, "write it again: python benchmarks/reference.py"


def test_every_key_of_a_suture_toml_has_an_explanation() -> None:
    keys = 0
    for section in _sections(SiteConfig):
        for line in section.splitlines():
            if line.startswith("| `"):
                keys += 1
                assert not line.endswith("|  |"), f"no text in `Attributes:` for {line}"
    assert keys > 20


def test_every_method_and_every_command_is_there() -> None:
    found = pages(ROOT)
    for name in METHODS:
        assert f"| `{name}` [" in found["reference/methods.md"]
        assert f"#### Method `{name}`\n" in found["reference/configuration.md"]
    commands = found["reference/commands.md"]
    for name, command in ROOT.items():
        inner = getattr(command, "commands", {"": command})
        for word, one in inner.items():
            full = f"{name} {word}".strip()
            assert (f"### `suture {full}`\n" in commands) is not one.hidden, full
    assert "One of `local`, `sim`, `poc`, `prod`." in commands
    assert "| `--bundle`, `--no-bundle` |  |" in commands


class Pond(BaseModel):
    """Still water.

    Attributes:
        kind: the word of this kind.
        depth, width: in metres.
    """

    kind: Literal["pond"]
    depth: float = Field(default=1.5, gt=0, le=3)
    width: int | None = None


class River(BaseModel):
    """Running water.

    Attributes:
        kind: the word of this kind.
        depth: in metres.
        names: what people call
            it.
    """

    kind: Literal["river"]
    depth: float = Field(default=1.5, gt=0, le=3)
    names: tuple[Annotated[str, Field(min_length=1)], ...] = ("Isar", "Inn")


class Water(BaseModel):
    """A configuration whose one section has two kinds."""

    water: Annotated[Pond | River, Field(discriminator="kind")]


def test_a_row_has_type_bounds_default_and_meaning() -> None:
    assert _rows(Pond) == [
        ("`kind`", "`pond`", "required", "the word of this kind."),
        ("`depth`", "number (> 0, ≤ 3)", "`1.5`", "in metres."),
        ("`width`", "integer", "", "in metres."),
    ]
    assert _rows(River)[2] == ("`names`", "list of text", "`[Isar, Inn]`", "what people call it.")


def test_kinds_of_a_section_name_what_they_share_once() -> None:
    heading, shared, pond, river = _sections(Water)
    assert heading == "### `[water]`\n"
    assert [shared, pond, river] == list(_family({"`pond`": Pond, "`river`": River}, "`kind` =", ["kind"]))
    assert "`depth`" not in pond + river
    assert "| `depth` | all | number (> 0, ≤ 3) | `1.5` | in metres. |" in shared
    assert "#### `kind` = `pond`\n\nStill water.\n" in pond
    assert "| `width` | integer |  | in metres. |" in pond
    assert "Running water." in river
    assert "`names`" in river


class Lake(Pond):
    """Still water, of another depth.

    Attributes:
        fish: those that live there.
    """

    depth: float = Field(default=9.5, gt=0, le=3)
    fish: int = 0


def test_a_kind_with_another_default_says_it() -> None:
    shared, pond, lake, puddle = _family({"pond": Pond, "lake": Lake, "puddle": Pond}, "Water", ["kind"])
    assert "| `depth` | all | number (> 0, ≤ 3) | `1.5` | in metres. |" in shared
    assert lake.count("\n| `") == 2
    assert "| `depth` | number (> 0, ≤ 3) | `9.5` | as above. |" in lake
    assert "| `fish` | integer | `0` | those that live there. |" in lake
    assert "|" not in pond + puddle


def test_the_kinds_of_a_shared_key_are_named() -> None:
    kinds = {"a": Pond, "b": River, "c": Pond}
    shared = next(_family(kinds, "Water", ["kind", "depth"]))
    assert "| `width` | all but b | integer |" in shared
    shared = next(_family({**kinds, "d": River, "e": River, "f": Lake}, "Water", ["kind", "depth"]))
    assert "| `width` | a, c, f | integer |" in shared
    assert "| `names` | b, d, e |" in shared


def test_a_beginner_sees_about_thirty_settings() -> None:
    page = pages(ROOT)["reference/configuration.md"]
    beginning, advanced = page.split("## Advanced: a site's suture.toml")
    assert beginning.count("\n| `") == sum(map(len, FIRST.values())) <= 35
    for shown in ("| `[data] root` |", "| `rounds` |", "| `model.name` |", "| `method.local.lr` |"):
        assert shown in beginning
    for elsewhere in ("| `table` |", "| `rounds` | integer (≥ 1, ≤ 1e+06) | required |", "| `batch_norm` |"):
        assert elsewhere not in advanced


def test_a_nested_table_stands_once() -> None:
    lines = pages(ROOT)["reference/configuration.md"].splitlines()
    for key in ("local", "iterations", "warmup_lr", "final_lr", "thresholds", "learning_rates"):
        rows = [line for line in lines if line.startswith(f"| `{key}` |") and "as above." not in line]
        assert len({row.split("|")[-2] for row in rows}) == len(rows), key
    assert sum(line.startswith("### `Augmentation`") for line in lines) == 0
