"""Whole runs on one machine: of each kind of sites, of documents, and what their figures do not cover."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tailed import write_flamby, write_tones

from official import Report, write_nih, write_openi
from small_hospitals import LABELS, small_study, write_hospital
from suture.core.errors import ConfigError
from suture.core.files import atomic_write
from suture.data.config import load_site_config
from suture.data.readers import load_table
from suture.execution.job import Job, load_job, with_settings
from suture.execution.run import run_job
from suture.execution.study import StudySites
from suture.learning.training import LocalTraining
from suture.methods.base import Method
from suture.methods.fedavg import FedAvg
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from suture_papers.chest_xrays.chest_sites import NihSites
from suture_papers.chest_xrays.openi import FINDINGS, THIRTEEN
from suture_papers.skin_lesions.flamby import LABELS as SKIN
from suture_papers.skin_lesions.flamby_sites import AttributeSites, FlambySites
from suture_prepare.quality import check
from suture_results.notes import read_sentences
from suture_results.report_command import show_run
from suture_synthetic.phantom_hospitals import PhantomSites
from world import refused, write_table

pytestmark = pytest.mark.complete

FEW = LocalTraining(lr=1e-3, iterations=2, batch_size=8)
MODEL = "model/model.safetensors"


def job(simulation: Any, method: Method | None = None, color: bool = False, **more: Any) -> Job:
    method = method or SurgicalAggregation(local=LocalTraining(lr=1e-3, batch_size=16))
    own = {"name": "small", "title": "small", "rounds": 1} | more
    return Job(method=method, model=ModelSpec("cnn", size=16, color=color), simulation=simulation, **own)


def record(run: Path, name: str = "metrics") -> Any:
    return json.loads((run / f"{name}.json").read_text())


def lines(run: Path) -> list[Any]:
    return [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def nih(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_nih(tmp_path_factory.mktemp("nih") / "nih"))


@pytest.mark.parametrize("method", ["surgical", "central_full"])
def test_groups_of_classes_are_those_of_the_sites_whoever_trains(
    method: str, nih: str, tmp_path: Path
) -> None:
    made = with_settings(job(NihSites(root=nih, classes="disjoint")), [f"method={method}"])
    run = run_job(made, "local", tmp_path / "r")
    facts, groups = record(run, "run"), record(run)["groups"]
    assert [len(site["labels"]) for site in facts["sites"].values()] == [7, 7]
    assert groups["shared"] is None
    assert groups["unique"] is not None
    assert set(facts["threads"]) == {"server", *(["pooled"] if "central" in method else facts["sites"])}


def test_models_that_stay_at_the_sites_are_measured_on_the_servers_images(nih: str, tmp_path: Path) -> None:
    run = run_job(with_settings(job(NihSites(root=nih)), ["method=pfl"]), "local", tmp_path / "r")
    held_out = load_table(load_site_config(run / "sites" / "server" / "suture.toml").data)
    assert (record(run)["n"], record(run)["source"]) == (2 * len(held_out), "sites' test data")
    assert not (run / "model").exists()


def test_pooled_data_take_the_learning_rate_of_the_job(tmp_path: Path) -> None:
    """Whatever the first site's own is."""
    sites = PhantomSites(images=30, held_out=30)
    models = [
        run_job(with_settings(job(one), ["method=central"]), "local", tmp_path / name) / MODEL
        for name, one in (("plain", sites), ("own", replace(sites, learning_rates={"harbor": 0.5})))
    ]
    assert models[0].read_bytes() == models[1].read_bytes()


@pytest.mark.parametrize("kind", ["centres", "tones"])
def test_long_tailed_sites_run(kind: str, tmp_path: Path) -> None:
    """With a server that selects, tests and groups; tones are told apart, and no label."""
    flamby = str(write_flamby(tmp_path / "flamby"))
    tones = AttributeSites(tones=str(write_tones(tmp_path)), root=flamby, clients=2, split="images")
    simulation = tones if kind == "tones" else FlambySites(root=flamby)
    own = {"rounds": 2, "selection": "server_balanced_accuracy"}
    method = FedAvg(local=FEW, keep_local=True)
    run = run_job(job(simulation, method, color=True, **own), "local", tmp_path / "r")
    metrics = record(run)
    assert metrics["source"] == "server test set"
    found = [line["validation"]["server_balanced_accuracy"] for line in lines(run)]
    assert metrics["selected_round"] == 1 + found.index(max(found))
    groups = metrics["long_tail"]
    assert {group: sorted(names) for group, names in groups["classes"].items()} == {
        "tail": sorted(SKIN.names)  # 44 images of a class at most
    }
    recall = [value for value in metrics["recall"].values() if value is not None]
    assert groups["accuracy"]["tail"] == groups["accuracy"]["all"] == pytest.approx(np.mean(recall))
    assert metrics["overall"]["balanced_accuracy"] == pytest.approx(np.mean(recall))
    assert set(metrics["local_models"]["sites"]) == set(metrics["sites"])
    if kind == "centres":
        assert metrics["attributes"] == {}
        return
    by_tone = metrics["attributes"]["values"]
    assert sum(by_tone[tone]["n"] for tone in ("light", "dark")) == metrics["n"] > 0
    right = sum(part["n"] * part["accuracy"] for part in by_tone.values())
    assert right == pytest.approx(metrics["n"] * metrics["overall"]["accuracy"])
    mean = np.mean([part["balanced_accuracy"] for part in by_tone.values()])
    assert metrics["attributes"]["mean"]["balanced_accuracy"] == pytest.approx(mean)


DAY = "2024-03-01"


def as_omop(rows: list[dict[str, str]], classes: tuple[str, ...]) -> tuple[str, str, str]:
    """The labels as rows of OBSERVATION: a file, its text, and the keys of suture.toml that read it."""
    text = "person_id,visit_occurrence_id,observation_concept_id,observation_date,value_as_concept_id\n"
    for concept, name in enumerate(classes, 100):
        for row in rows:
            text += f"{row['patient']},,{concept},{DAY},{4188539 if row[name] == '1' else 4188540}\n"
    codes = ", ".join(f'"{name}" = {concept}' for concept, name in enumerate(classes, 100))
    keys = f'dataset = "omop"\nobservations = "observation.csv"\nclasses = {{ {codes} }}'
    return "observation.csv", text, keys


def as_fhir(rows: list[dict[str, str]], classes: tuple[str, ...]) -> tuple[str, str, str]:
    """The labels as Observations."""
    answers = [
        {
            "resourceType": "Observation",
            "status": "final",
            "code": {"coding": [{"system": "http://x", "code": name}]},
            "subject": {"reference": f"Patient/{row['patient']}"},
            "effectiveDateTime": DAY,
            "valueBoolean": row[name] == "1",
        }
        for name in classes
        for row in rows
    ]
    codes = ", ".join(f'"{name}" = "http://x|{name}"' for name in classes)
    keys = f'dataset = "fhir"\nobservations = ["o.ndjson"]\nclasses = {{ {codes} }}'
    return "o.ndjson", "".join(f"{json.dumps(one)}\n" for one in answers), keys


def test_the_same_labels_from_a_clinical_database_make_the_same_model(tmp_path: Path) -> None:
    study = small_study(tmp_path / "study")
    small = with_settings(load_job(study), ["rounds=1"])
    before = run_job(small, "local", tmp_path / "tables")
    for site, patient, form in (
        (study / "alpha", "person_id", as_omop),
        (study / "beta", "patient", as_fhir),
    ):
        with (site / "labels.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        images = [[row["image"], row["patient"], DAY, row["split"]] for row in rows]
        write_table(site / "images.csv", [["image", patient, "date", "split"], *images])
        name, text, keys = form(rows, LABELS[site.name])
        (site / name).write_text(text)
        toml = (site / "suture.toml").read_text().replace('dataset = "hospital"', keys)
        atomic_write(site / "suture.toml", toml.replace("labels.csv", "images.csv").encode())
        (site / "labels.csv").unlink()
        found = check(load_site_config(site / "suture.toml"))
        assert not found.problems
        assert "50 of 50 answers" in " ".join(found.notes)
    after = run_job(small, "local", tmp_path / "clinical")
    for name in (MODEL, "metrics.json"):
        assert (after / name).read_bytes() == (before / name).read_bytes()


REPORTS: list[Report] = [
    (f"It shows {FINDINGS[i % 8].lower()}.", "", (f"{FINDINGS[i % 8]}/mild",))
    if i % 2
    else (f"{FINDINGS[i % 8]} and {FINDINGS[(i + 3) % 8]}.", "", (FINDINGS[i % 8], FINDINGS[(i + 3) % 8]))
    for i in range(240)
]
"""Each has one finding or two, and says so."""


@pytest.fixture(scope="module")
def openi(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_openi(tmp_path_factory.mktemp("openi") / "openi", REPORTS).parent)


def test_the_job_of_text_trains_on_a_few_documents(openi: str, tmp_path: Path) -> None:
    small = ["rounds=2", "method.local.lr=0.01", "simulation.clients=2", "model.vocabulary=corpus"]
    settings = [*small, f"simulation.root={openi}", "method=vanilla"]
    run = run_job(with_settings(load_job("surgical_openi"), settings), "local", tmp_path / "r")
    known = [set(site["labels"]) for site in record(run, "run")["sites"].values()]
    assert [len(labels) for labels in known] == [4, 4]
    assert record(run)["auroc"].keys() == set.union(*known)
    first, last = (sum(site["train_loss"] for site in line["sites"].values()) for line in lines(run))
    assert last < first


@pytest.mark.parametrize("method", ["surgical", "pmfl"])
def test_a_run_with_the_words_of_its_documents_goes_on_where_it_stopped(
    method: str, openi: str, tmp_path: Path
) -> None:
    """As every preset of PMFL needs it, whose words are known only when the sites are written."""
    few = ["simulation.cap=8", "method.batches=3", "finetuning.runs=1", "finetuning.epochs=1"]
    small = ["simulation.clients=2"] if method == "surgical" else [*few, "finetuning.few=8"]
    settings = [*small, "model.vocabulary=corpus", f"simulation.root={openi}", "rounds=3"]
    made = with_settings(load_job(f"{method}_openi"), settings)
    part = run_job(with_settings(made, ["rounds=2"]), "local", tmp_path / "part")
    run_job(made, "local", part, resume=True)
    whole = run_job(made, "local", tmp_path / "whole")
    for name in (MODEL, "model/model.json"):
        assert (part / name).read_bytes() == (whole / name).read_bytes()
    refuses_other_words(made, part, "clinical")


def refuses_other_words(made: Job, run: Path, words: str) -> None:
    before = (run / "run.json").read_bytes()
    with refused(f"and this job has model.vocabulary={words}", by=ConfigError):
        run_job(with_settings(made, ["rounds=4", f"model.vocabulary={words}"]), "local", run, resume=True)
    assert (run / "run.json").read_bytes() == before


def test_a_run_of_other_words_does_not_go_on_with_those_of_its_documents(openi: str, tmp_path: Path) -> None:
    settings = ["rounds=1", "simulation.clients=2", f"simulation.root={openi}"]
    made = with_settings(load_job("surgical_openi"), settings)
    refuses_other_words(made, run_job(made, "local", tmp_path / "r"), "corpus")


def test_vectors_of_documents_train_and_no_site_shares_a_finding(tmp_path: Path) -> None:
    reports: list[Report] = [
        (f"It shows {THIRTEEN[i % 13].lower()}.", "", (f"{THIRTEEN[i % 13]}/mild",)) for i in range(260)
    ]
    root = write_openi(tmp_path / "openi", reports).parent
    settings = ["rounds=4", "method.local.batch_size=8", f"simulation.root={root}"]
    run = run_job(with_settings(load_job("reports_openi"), settings), "local", tmp_path / "r")
    known = [site["labels"] for site in record(run, "run")["sites"].values()]
    assert sorted(map(len, known)) == [4, 4, 5]
    assert sorted(name for own in known for name in own) == sorted(THIRTEEN)
    losses = [line["validation"]["loss"] for line in lines(run)]
    assert losses[-1] < losses[0]


@pytest.fixture
def lacking(tmp_path: Path) -> Job:
    """Of alpha's 40 images five are missing and one is broken; beta validates and tests nothing."""
    folder = tmp_path / "study"
    own = {"alpha": ("Mass", "Nodule"), "beta": ("Nodule", "Hernia"), "gamma": ("Fibrosis", "Nodule")}
    for seed, (name, labels) in enumerate(own.items()):
        write_hospital(folder / name, labels, 40, seed)
    alpha, beta = folder / "alpha", folder / "beta" / "labels.csv"
    for number in range(5):
        (alpha / "images" / f"00{number}.png").unlink()
    (alpha / "images" / "011.png").write_bytes(b"no image")
    toml = (alpha / "suture.toml").read_text()
    (alpha / "suture.toml").write_text(toml.replace("[data]", "[data]\npartial = true"))
    beta.write_text(beta.read_text().replace(",validation,", ",train,").replace(",test,", ",train,"))
    return job(StudySites(str(folder)))


def test_what_a_runs_figures_do_not_cover_is_named_on_the_terminal_and_in_the_report(
    lacking: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_job(lacking, out=tmp_path / "r", progress=True)
    printed = capsys.readouterr().out
    facts = [
        ("alpha", "5 of 40 rows", str(tmp_path / "study" / "alpha" / "images")),
        ("alpha", "1 of 35 images", "suture data check"),
        ("selected", "alpha and gamma", "beta"),
        ("final", "alpha and gamma", "beta"),
        ("validated", "Hernia"),
        ("test AUROC", "Hernia"),
    ]
    whole = read_sentences(run).left_out
    assert len(whole) == len(facts)
    for words in facts:
        assert any(all(word in sentence for word in words) for sentence in whole), words
    show_run(run)
    shown = " ".join(capsys.readouterr().out.split())
    page = " ".join((run / "report.html").read_text().split())
    for sentence in whole:
        assert f"warning: {sentence}" in shown
        assert f"<li>{sentence}</li>" in page
    assert "(2 of 3 sites)" in printed
    everything = "".join((run / name).read_text() for name in ("history.jsonl", "events.jsonl"))
    assert "cannot be read" not in everything, "the count stays at the site"
    before = record(run, "run")["left_out"]
    run_job(lacking, out=run, overwrite=True)
    assert record(run, "run")["left_out"] == before
    alone = job(StudySites(str(tmp_path / "study"), sites=("gamma",)))
    whole_run = run_job(alone, out=tmp_path / "alone")
    assert record(whole_run, "run")["left_out"] == []
    assert ">Left out</h2>" not in (whole_run / "report.html").read_text()
