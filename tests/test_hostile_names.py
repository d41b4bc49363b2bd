"""Names are data: no written file lets a program obey one, and permitted names come back unchanged.

The rule of names is passed over where files are written (`unruled`), so that each encoder is tried by itself.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
import subprocess
import sys
import tomllib
import unicodedata
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import yaml
from markdown_it import MarkdownIt
from PIL import Image
from rich.console import Console

from between import Between
from dicom_files import dicom
from example_run import history_records, metrics_record, run_record, write_run
from hostile_names import CODE, PERMITTED, REFUSED
from suture.core.errors import ConfigError, LabelError, RejectedUpdate
from suture.core.escaping import as_cell, escape_text, from_cell, printable, printable_lines
from suture.core.files import read_json, write_json
from suture.core.labels import LabelSet, canonical, check_label
from suture.data.config import SiteConfig
from suture.data.readers import read_table
from suture.data.reading import read_sheet
from suture.data.table import SPLITS, Table
from suture.execution.job import load_job
from suture.execution.sites import write_site
from suture.federation.loop import federate
from suture.federation.plan import Schedule
from suture.federation.server.global_model import unpack_model
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec, build
from suture.models.saved import load_model, save_model
from suture.protocol import messages
from suture.protocol.decisions import Decisions, DecisionSettings, Operating
from suture.protocol.messages import SiteInfo, TaskData
from suture.protocol.packing import Packed, pack, unpack
from suture.protocol.records import Metrics, Run
from suture.protocol.records import parse as parse_record
from suture_papers.tables.cells import Grid
from suture_papers.tables.render import markdown, show_grid
from suture_prepare.description import Discovery
from suture_prepare.label_discovery import discover_labels
from suture_prepare.new_study import as_toml
from suture_prepare.quality import Count, Findings, render
from suture_prepare.study_check import Together, render_matrix
from suture_results.card import PAGE, write_card
from suture_results.cooccurrence import Frequency
from suture_results.frames import Results
from suture_results.model_export.bundle import write_bundle
from suture_results.model_export.onnx import metadata
from suture_results.plots import plot_cooccurrence, plot_frequencies
from suture_results.prediction import open_model, predict_to_csv
from suture_results.report import Live, render_report
from suture_results.saved_models import Evaluated, GroupFigures, write_scores
from suture_results.tables import class_table
from suture_synthetic.method_checks import SMALL
from suture_synthetic.trial import Trial
from world import refused, site_config, write_table

NAMES = tuple(name for name in (*PERMITTED, *REFUSED) if len(name) <= 200)
PLAIN = tuple(f"Class {i:03}" for i in range(len(NAMES)))
SPEC = ModelSpec("cnn", size=16)


def text(name: str) -> str:
    """What a person sees of a name."""
    return escape_text(name)


@pytest.fixture
def unruled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without the rule of names, as if one had been forgotten there."""
    monkeypatch.setattr(messages, "check_spelling", lambda name: name)
    messages._known_spelling.cache_clear()
    yield
    messages._known_spelling.cache_clear()


def saved(folder: Path, names: tuple[str, ...]) -> Path:
    """A model of these classes, of which all but the last are decided."""
    decided = Decisions(
        DecisionSettings(), {n: Operating({"sensitivity": 0.5}, None, 0.5) for n in names[:-1]}, {}
    )
    facts = {"job": "x\x1b[2J\\|<b>$x$", "round": 3, "decisions": asdict(decided)}
    save_model(build(SPEC, LabelSet(names), 1, pretrained=False), SPEC, folder / "model", facts)
    return folder / "model"


# The rule


def test_permitted_names_come_back() -> None:
    for name in PERMITTED:
        assert check_label(name) == name
        assert unpack(pack(SiteInfo((name,), {"train": 3}, 1, "code"))).labels == (name,)  # type: ignore[union-attr]
        assert canonical(canonical(name)) == canonical(name)


def test_others_are_refused_where_they_enter() -> None:
    for name in REFUSED:
        with pytest.raises(LabelError) as caught:
            check_label(name)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 700
    for name, character in (("$x", "'$'"), ("a#b", "U+0023"), ("a\u202eb", "RIGHT-TO-LEFT OVERRIDE")):
        with refused(character, by=LabelError):
            check_label(name)
    # The server forms canonical names of what it was sent; one that has none must not end the run.
    info = pack(SiteInfo(("Mass",), {"train": 3}, 1, "code"))
    for name in (*REFUSED, "\ufdfa" * 20, "A/" * 99 + "A", "\uff9e"):
        with pytest.raises(RejectedUpdate, match=r"^SiteInfo: labels"):
            unpack(Packed({}, {**info.header, "labels": [name]}))


def test_a_model_a_state_and_a_job_with_such_a_name_say_so(tmp_path: Path) -> None:
    folder = saved(tmp_path, ("Mass", CODE.format(hex="00")))
    with refused("model.json", "labels.1", "$exec", by=ConfigError):
        load_model(folder)
    with refused("labels.0", "'a#b'", by=ConfigError):
        unpack_model(Packed({}, {"labels": ["a#b"], "label_type": "multilabel"}))
    for table in ({"$x": "Mass"}, {"Masse": "$x"}):
        with refused("label_map", "'$x'", by=ConfigError):
            Schedule.from_dict({"name": "a", "title": "a", "rounds": 2, "label_map": table})


@pytest.mark.parametrize("name", [CODE.format(hex="00"), "\ufdfa" * 20])
def test_the_server_refuses_the_site_and_goes_on(name: str) -> None:
    method = SurgicalAggregation()
    with Trial(method, method.adapted(SMALL), "multilabel", rounds=2) as trial:
        server = trial.server
        server.schedule = replace(server.schedule, min_sites=1)

        def lie(site: str, task: TaskData, answer: Packed) -> Packed:
            if site != "alpha" or task.task != "handshake":
                return answer
            own = answer.header["labels"]
            return Packed(answer.tensors, {**answer.header, "labels": [name, *own[1:]]})

        federate(server, Between(trial.sites, lie))
        assert server.round == 2
        assert "alpha" not in server.registry.members
        events = map(json.loads, (server.record.folder / "events.jsonl").read_text().splitlines())
        assert next(event for event in events if "refused" in event)["refused"].keys() == {"alpha"}


def site_of(folder: Path, header: str, cell: object, **data: object) -> SiteConfig:
    write_table(folder / "labels.csv", [header.split(","), ["a.png", "p", "train", *([cell] * 2), 1]])
    return site_config(folder, data={"dataset": "hospital", "root": ".", "table": "labels.csv"} | data)


@pytest.mark.parametrize(
    ("header", "cell", "data", "named"),
    [
        ("$x", "1", {}, ["'$x'"]),
        ("found", "Mass|a#b", {"finding_column": "found"}, ["row 2, column 'found'", "'a#b'"]),
        ("x", "1", {"labels": ["@x"]}, ["labels", "'@x'"]),
        ("x", "1", {"synonyms": {"x": "%x"}}, ["synonyms.x", "'%x'"]),
        ("tone", "a\x1bb", {"attribute_column": "tone"}, ["row 2, column 'tone'"]),
    ],
)
def test_the_file_and_the_place_of_a_name(
    header: str, cell: str, data: dict[str, object], named: list[str], tmp_path: Path
) -> None:
    with refused(tmp_path, *named):
        read_table(site_of(tmp_path, f"image,patient,split,{header},y,Mass", cell, **data).data)


def test_a_column_that_is_no_label_may_have_any_name(tmp_path: Path) -> None:
    config = site_of(tmp_path, "image,patient,split,Follow-up #,@x,Mass", 1, labels=["Mass"])
    assert read_table(config.data).table.labels.names == ("Mass",)
    sheet = read_sheet(tmp_path / "labels.csv")
    guess = discover_labels(sheet, ("image", "patient", "split"), (), "image", {}, {}, ())
    assert guess.data["labels"] == ["Mass"]
    assert any("'@x'" in warning for warning in guess.warnings)


# MONAI

RUN = """
import sys
from monai.bundle import ConfigParser, run
run(config_file="configs/inference.json", meta_file="configs/metadata.json", dataset_dir=sys.argv[1],
    output_file=sys.argv[2], site="all")
parser = ConfigParser()
parser.read_config("configs/inference.json")
parser.read_meta("configs/metadata.json")
import json
meta = parser.get_parsed_content("_meta_::network_data_format::outputs::pred::channel_def")
with open(sys.argv[3], "w") as file:
    json.dump([parser.get_parsed_content("labels"), list(meta.values())], file)
"""


@pytest.mark.complete
def test_a_monai_bundle_runs_no_name_and_gives_each_back(
    tmp_path: Path, unruled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from monai.bundle import ConfigParser

    monkeypatch.chdir(tmp_path)
    name = CODE.format(hex=b"open('ran', 'w').close()".hex())
    assert ConfigParser({"labels": [name]}).get_parsed_content("labels") == ["mass"]
    assert Path("ran").exists(), "MONAI runs such a name where it is written as it is"
    Path("ran").unlink()

    names = (*NAMES, name)
    bundle = write_bundle(saved(tmp_path, names), tmp_path / "bundle", "$1/0\nmit % #2")
    (tmp_path / "images").mkdir()
    Image.new("L", (16, 16)).save(tmp_path / "images" / "a.png")
    words = [str(tmp_path / part) for part in ("images", "out.csv", "names.json")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN, *words]
    done = subprocess.run(command, cwd=bundle, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("ran"))
    assert json.loads((tmp_path / "names.json").read_text()) == [list(names), list(names)]
    plain = tuple(n for n in read_json(bundle / "configs" / "inference.json")["labels"] if n[:1] != "$")
    assert set(PERMITTED) - set(plain) == {"5%::x", "a %:: b"}, (
        "others stand as they are, for who reads the file as JSON"
    )
    header = read_sheet(tmp_path / "out.csv").header
    assert set(PERMITTED) <= set(header)
    readme = (bundle / "docs" / "README.md").read_text()
    assert_markdown_shows(readme, names)


# Markdown, YAML and HTML


def assert_markdown_shows(source: str, names: tuple[str, ...]) -> None:
    """Read with HTML, tables and strike-through."""
    found, kinds = [], set()
    for token in MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(source):
        kinds.add(token.type)
        if token.children is not None:
            kinds |= {child.type for child in token.children}
            found.append("".join(c.content for c in token.children if c.type in ("text", "code_inline")))
    active = "html_inline html_block link_open em_open image s_open blockquote_open"
    assert kinds.isdisjoint(active.split())
    whole = "\n".join(found)
    for name in names:
        assert text(name).strip() in whole, name
    assert all(c.isprintable() or c in "\n\u200c\u200d" for c in source)


class Structure(HTMLParser):
    """The elements of a page with the names of their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.parts: list[str] = []
        self.feed(page)
        self.text = "".join(self.parts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(name for name, _ in attrs)))
        self.parts += [value or "" for _, value in attrs]

    def handle_data(self, data: str) -> None:
        self.parts.append(data)


def a_run(folder: Path, names: tuple[str, ...]) -> Path:
    """A run whose sites know these classes; its title, notes and reasons hold them, too."""
    half = len(names) // 2
    sites = {
        site: {"labels": list(part), "n": {"train": 100, "validation": 10, "test": 10}}
        for site, part in (("harbour", names[:half]), ("hillside", names[half:]), ("st-anne", names[:9]))
    }
    run = run_record() | {
        "labels": list(names),
        "sites": sites,
        "title": f"of {names[-1]}\x1b[2J",
        "notes": [{"code": "method", "values": {"text": name}} for name in names],
    }
    history, metrics = history_records(2), metrics_record()
    history[0]["sites"]["harbour"] |= {"status": "rejected", "reason": names[-2]}
    for key in ("auroc", "recall"):
        metrics[key] = dict.fromkeys(names, 0.75)
    metrics |= {"intervals": dict.fromkeys(names, (0.7, 0.8)), "counts": dict.fromkeys(names, (20, 30))}
    metrics |= {
        "sites": {site: dict.fromkeys(of["labels"], 0.7) for site, of in sites.items()},
        "site_counts": {},  # whose place depends on the order of the names
        "undefined": {},
    }
    metrics["attributes"] = {"values": {name: {"auroc": 0.5} for name in names}, "mean": {"auroc": 0.5}}
    folder.mkdir(exist_ok=True)
    write_run(folder, run, history, metrics)
    return folder


@pytest.mark.complete
def test_the_report_and_the_page_of_watch_have_the_elements_of_harmless_names(tmp_path: Path) -> None:
    for live in (None, Live("x", "now", NAMES[-3:])):
        hostile, plain = (
            Structure(render_report(a_run(tmp_path / kind, names), live))
            for kind, names in (("hostile", NAMES), ("plain", PLAIN))
        )
        # Not `==` of the whole: to show the difference of so many takes minutes.
        assert len(hostile.elements) == len(plain.elements)
        others = [pair for pair in zip(hostile.elements, plain.elements, strict=True) if pair[0] != pair[1]]
        assert others[:5] == []
        for name in NAMES:
            assert printable_lines(name) in hostile.text, name
    page = render_report(tmp_path / "hostile")
    kinds = {unicodedata.category(c) for c in page if c not in "\n\u200c\u200d"}
    assert not kinds & {"Cc", "Cf", "Cs", "Zl", "Zp"}


@pytest.mark.complete
def test_the_card_and_its_page(tmp_path: Path, unruled: None) -> None:
    folder = a_run(tmp_path / "run", NAMES)
    saved(folder, NAMES)
    source = write_card(folder).read_text()
    _, front, card = source.split("---\n", 2)
    assert yaml.safe_load(front)["model-index"][0]["name"] == printable(f"of {NAMES[-1]}\x1b[2J")
    assert_markdown_shows(card, NAMES)
    assert all(c.isprintable() or c in "\n\u200c\u200d" for c in source)
    plain = a_run(tmp_path / "plain", PLAIN)
    saved(plain, PLAIN)
    write_card(plain)
    pages = [Structure((path / "model" / PAGE).read_text()) for path in (folder, plain)]
    assert pages[0].elements == pages[1].elements
    for name in NAMES:
        assert text(name).strip() in pages[0].text, name


def test_the_page_of_a_table() -> None:
    rows = [[name, "0.9"] for name in NAMES]
    assert_markdown_shows(markdown([show_grid(Grid("AUROC", ["class", "a"], rows))]), NAMES)


# Tables


def starts_a_formula(cell: str) -> bool:
    return cell[:1] in ("=", "+", "-", "@", "\t", "\r", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def test_a_cell_is_no_formula_and_reads_back() -> None:
    for name in NAMES:
        assert not starts_a_formula(as_cell(name)), name
        assert from_cell(as_cell(name)) == text(name)


def columns_of(path: Path) -> tuple[str, ...]:
    """The header as Suture reads it; every cell, as it is written, begins no formula."""
    with path.open(newline="", encoding="utf-8") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert not any(map(starts_a_formula, cells))
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for cell in cells for c in cell)
    return read_sheet(path).header


def test_predictions_scores_and_the_tables_of_sites(tmp_path: Path, unruled: None) -> None:
    model = saved(tmp_path, NAMES)
    Image.new("L", (16, 16)).save(tmp_path / "=a.png")
    predict_to_csv(model, tmp_path / "=a.png", tmp_path / "p.csv")
    assert set(PERMITTED) <= set(columns_of(tmp_path / "p.csv"))
    zeros = np.zeros((1, len(NAMES)), dtype=np.float32)
    done = Evaluated(NAMES, (), zeros, zeros, zeros, ("=1+1",), {}, (), GroupFigures(None, None))
    write_scores(done, tmp_path / "s.csv")
    assert set(PERMITTED) <= set(columns_of(tmp_path / "s.csv"))
    table = Table(LabelSet(PERMITTED), ("a.png",), ("-7",), zeros[:, : len(PERMITTED)], ("train",), tmp_path)
    path = write_site(tmp_path, table, LabelSet(PERMITTED))
    assert columns_of(path) == ("image", "patient", "split", *(name.strip() for name in PERMITTED))
    assert read_sheet(path).column("patient", "") == ["-7"]


# DICOM and ONNX

UIDS = ("StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID")
CAPTURE = "1.2.840.10008.5.1.4.1.1.7"


@pytest.mark.complete
def test_structured_reports(tmp_path: Path) -> None:
    import highdicom as hd
    from pydicom import dcmread

    from suture_results.model_export.dicom_report import Reporter, _read, concept, report

    image = _read(dicom(np.eye(8, dtype=np.uint8), **dict.fromkeys(UIDS, "1.2.3"), SOPClassUID=CAPTURE))
    names = tuple(name for name in NAMES if name.strip())
    row = pd.Series({k: v for name in names for k, v in ((name, 0.5), (f"{name} decision", "above"))})
    concepts = {name: concept(name) for name in names}
    job = "job x\\y\x1b" * 20
    reporter = Reporter(concepts, dict.fromkeys(names, 0.5), "0\\1", job, "ab" * 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The string length|Invalid value for VR UI|.*component")
        report(reporter, image, row).save_as(tmp_path / "a.dcm")
    groups = hd.sr.srread(tmp_path / "a.dcm").content.get_image_measurement_groups()
    assert [group.tracking_identifier for group in groups] == [printable(name).strip() for name in names]
    meanings = [group.get_qualitative_evaluations()[0].name.meaning for group in groups]
    assert all(meaning.isprintable() or "\u200c" in meaning or "\u200d" in meaning for meaning in meanings)
    assert all(0 < len(meaning) <= 64 and "\\" not in meaning for meaning in meanings)
    short = [name for name in PERMITTED if len(name) <= 64]
    assert [meanings[names.index(name)] for name in short] == short
    found = dcmread(tmp_path / "a.dcm")
    assert isinstance(found.SoftwareVersions, str)
    assert len(found.ManufacturerModelName) <= 64


@pytest.mark.complete
def test_the_metadata_of_onnx(tmp_path: Path, unruled: None) -> None:
    import onnx

    folder = saved(tmp_path, NAMES)
    proto = onnx.ModelProto()
    onnx.helper.set_model_props(proto, metadata(open_model(folder), read_json(folder / "model.json")))
    proto.ParseFromString(proto.SerializeToString())
    found = {one.key: one.value for one in proto.metadata_props}
    assert tuple(json.loads(found["labels"])) == NAMES
    assert found["labels"].isascii()


# TOML, FLARE


def test_the_toml_that_init_writes() -> None:
    data = {"root": "=x\x7f", "labels": list(NAMES)}
    reasons = {"root": f"because {chr(10).join(NAMES)}", "labels": "\nx = 1"}
    guess = Discovery({"split_column": "s", **data}, reasons, NAMES, dict.fromkeys(NAMES, "it\nx = 1"))
    found = tomllib.loads(as_toml(guess))
    assert found.keys() == {"data", "privacy", "training"}
    assert found["data"] == {"split_column": "s", **data}


def test_flare_reads_settings_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyhocon
    from nvflare.fuel.utils.config_factory import ConfigFactory
    from nvflare.fuel.utils.json_scanner import JsonScanner
    from nvflare.fuel.utils.secret_utils import resolve_secret_refs
    from nvflare.fuel.utils.wfconf import resolve_var_refs

    from suture.flare import SCHEDULE
    from suture.flare.compat.plain_json import faults
    from suture.flare.recipe import export_job

    monkeypatch.setenv("HOME", "evaluated")
    settings = {"label_map": {name: name for name in NAMES}, "accept_labels": list(NAMES)}
    folder = export_job(load_job("demo"), tmp_path, "trial", ("alpha",)) / "app_server" / "config"
    write_json(folder / SCHEDULE, settings)
    assert read_json(folder / SCHEDULE) == settings
    assert not list(faults(folder))
    path = folder / "config_fed_server.json"
    config = json.loads(path.read_text())
    loaded = ConfigFactory.load_config(str(path)).to_dict()
    scanned = json.loads(json.dumps(loaded))
    resolve_var_refs(
        JsonScanner(scanned, str(path)), {"$HOME": "evaluated", "name": "evaluated", "x": "evaluated"}
    )
    hocon = pyhocon.ConfigFactory.parse_string(path.read_text()).as_plain_ordered_dict()
    for one in (loaded, scanned, resolve_secret_refs(scanned), hocon):
        assert one == config, "FLARE has replaced something"


# Terminals, notebooks, figures, shells


def printed(*what: Any) -> str:
    out = io.StringIO()
    console = Console(file=out, width=1000, emoji=False, force_terminal=False)
    for one in what:
        console.print(one, soft_wrap=True)
    return out.getvalue()


@pytest.mark.complete
def test_what_a_terminal_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from suture.cli.common import print_line

    folder = a_run(tmp_path, NAMES)
    run = parse_record(Run, json.loads((folder / "run.json").read_text()), "")
    metrics = parse_record(Metrics, json.loads((folder / "metrics.json").read_text()), "")
    counts = {name: {split: Count(1, 2, 3) for split in SPLITS} for name in NAMES}
    findings = Findings(
        counts=counts, label_type="multilabel", problems=NAMES, warnings=NAMES, notes=NAMES, unreadable=NAMES
    )
    shown = printed(
        class_table(run, metrics),
        render(findings),
        render_matrix({"a": findings}, Together(problems=NAMES, warnings=NAMES)),
    )
    for name in NAMES:
        print_line(name)
    for output in (shown, capsys.readouterr().out):
        assert not {c for c in output if not c.isprintable()} - set("\n\u200c\u200d\u202f")
        for name in PERMITTED:
            assert name in output, name


def test_what_a_notebook_shows(tmp_path: Path) -> None:
    hostile, plain = (
        Structure(Results(a_run(tmp_path / kind, names)).classes.to_html(max_rows=None))
        for kind, names in (("hostile", NAMES), ("plain", PLAIN))
    )
    assert hostile.elements == plain.elements
    assert repr(Results(tmp_path / "hostile")).isprintable()


def test_figures_draw_names_and_no_formulas() -> None:
    names = tuple(escape_text(name) for name in NAMES[-200:] if name.strip())
    found = {name: Frequency(1, 2, 3) for name in names[:60]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a font lacks letters
        pages = [
            plot_frequencies({"_x": found, "$y$": found}),
            plot_frequencies({"a": dict.fromkeys(NAMES[-60:], Frequency(1, 2, 3))}),
            plot_cooccurrence(NAMES[-9:], np.full((9, 9), 0.5)),
        ]
    for page in pages:
        ElementTree.fromstring(page)
    assert b">_x<" in pages[0], "a data set whose name begins with _ is in the legend"


def test_command_lines_hold_a_path_as_one_word(tmp_path: Path) -> None:
    from suture_admin.kit_checks import _policy
    from suture_admin.recovery import how_to_continue

    class Kit:
        folder = tmp_path / "a b; touch x $(y)'"
        study = "default"

    assert shlex.split(_policy(Kit()))[-1] == str(Kit.folder)  # type: ignore[arg-type]
    line = how_to_continue("x", Kit()).partition("suture resume")[2]  # type: ignore[arg-type]
    assert shlex.split(line)[-1] == str(Kit.folder)


@pytest.mark.complete
def test_what_libraries_warn_and_log_reaches_a_terminal_without_control_characters() -> None:
    script = """
import logging, warnings
from suture.core.escaping import clean_warnings
clean_warnings()
warnings.warn("a\\x1b[2J\\nerror: forged")
logging.getLogger("pydicom").warning("b\\x1b[2J\\x9bc")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "\\x1b[2J\\nerror: forged" in done.stderr
    assert "b\\x1b[2J\\x9bc" in done.stderr
    assert all(c.isprintable() or c == "\n" for c in done.stderr)
