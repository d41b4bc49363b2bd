"""Names: spellings that are one name, names that only look like one, and what is let in as a name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from suture.core import labels
from suture.core.errors import ConfigError, LabelError
from suture.core.labels import (
    LabelSet,
    Synonyms,
    canonical,
    check_experiment,
    check_label,
    check_sites,
    lookalikes,
    union,
)
from suture.core.vocabulary import CANONICAL
from suture.data.batch import Augmentation
from suture.execution.job import load_job
from suture.execution.run import run_job
from suture.federation.plan import Plan
from suture.flare.recipe import export_job
from suture.methods.surgical import SurgicalAggregation
from suture.models import ModelSpec
from world import refused, site_config

words = st.text(st.characters(categories=("L", "N"), include_characters=" _-"), min_size=1).filter(
    lambda t: any(c.isalnum() for c in t)
)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("Effusion", "Pleural Effusion"),
        ("Pleural_Thickening", "Pleural Thickening"),
        ("  pleural   EFFUSION ", "Pleural Effusion"),
        ("Ｅｄｅｍａ", "Edema"),  # full-width letters
        ("oedema", "Edema"),
        ("covid–19", "COVID-19"),  # an en dash
        ("MEL", "Melanoma"),
        ("akiec", "Actinic Keratosis or Intraepithelial Carcinoma"),
        ("lung scar", "Lung Scar"),
        ("LUNG_SCAR", "Lung Scar"),
        ("COPD exacerbation", "COPD Exacerbation"),  # an acronym of the vocabulary's list
        ("malocclusion class iii", "Malocclusion Class III"),
        ("bi-rads 4", "BI-RADS 4"),
        ("Πνευμοθώρακας δεξιά", "Πνευμοθώρακας Δεξιά"),  # a final sigma, in the middle of the name
        ("ΚΑΡΔΙΑΚΟΣ", "Καρδιακος"),
        ("Erguß", "Erguss"),  # as a site writes it in capitals, or in Switzerland
    ],
)
def test_spellings_of_one_name(spelling: str, name: str) -> None:
    assert canonical(spelling) == name


@given(words)
@example("\u0390")  # folding the case takes it apart
@example("a\u03b0")
@example("\u1f50\u01f0")
def test_canonical_is_a_fixed_point(name: str) -> None:
    assert canonical(canonical(name)) == canonical(name)


def test_a_sites_own_synonyms_go_first() -> None:
    assert canonical("PE", {"pe": "Effusion"}) == "Pleural Effusion"
    assert canonical("Mass", {"Mass": "Lung Lesion"}) == "Lung Lesion"
    assert canonical("CODE 7", Synonyms({f"code {i}": f"Finding {i}" for i in range(10)})) == "Finding 7"
    # A slash between two words is an or.
    assert canonical("Obstetrics / Gynecology") == canonical("obstetrics or gynecology")
    assert "/" not in canonical("Mass/Nodule")
    for nothing in ("", "   ", "_", "a\x07b"):
        with refused(by=LabelError):
            canonical(nothing)


def test_union_align_and_index() -> None:
    one, two = LabelSet(("Mass", "Edema")), LabelSet(("Edema", "Hernia"))
    assert union([one, two]).names == ("Edema", "Hernia", "Mass")
    assert one.align(two) == [1, -1]
    assert two.index("Hernia") == 1
    with refused("'Mass'", by=LabelError):
        two.index("Mass")
    with refused(by=LabelError):
        union([one, LabelSet(("Mass",), "multiclass")])
    with refused("'Effusion'", "'pleural_effusion'", "'Pleural Effusion'", by=LabelError):
        LabelSet.of(["Effusion", "Mass", "pleural_effusion"])
    for names in ((), ("Mass", "Mass")):
        with refused(*names, by=LabelError):
            LabelSet(names)


@given(st.permutations(["Mass", "Edema", "Hernia", "Nodule"]), st.integers(1, 3))
def test_union_does_not_depend_on_order(names: list[str], cut: int) -> None:
    sets = [LabelSet(tuple(names[:cut])), LabelSet(tuple(names[cut:]))]
    assert union(sets) == union(sets[::-1])


def test_typos_are_found_and_vocabulary_names_never_are() -> None:
    assert lookalikes(["Atelectasis", "Atelectasys"]) == [("Atelectasis", "Atelectasys")]
    assert lookalikes(["Emphysema", "Emphysmea"]) == [("Emphysema", "Emphysmea")]  # swapped neighbours
    assert lookalikes(["Nodule", "Nodules"]) == [("Nodule", "Nodules")]
    assert lookalikes(["Lung Scar", "Rib Notch"]) == []
    grades = ["Grade 0", "Grade 1", "Grade 10", "Lesion Type I", "Lesion Type II", "Label 1", "Label 2"]
    assert lookalikes([*grades, "Grade 01"]) == [
        *(("Grade 0", "Grade 01"), ("Grade 01", "Grade 1"), ("Grade 01", "Grade 10"), ("Label 1", "Label 2"))
    ]
    assert lookalikes(CANONICAL) == []


def test_the_number_of_comparisons_is_linear_in_the_number_of_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the names: here each differs from every other in two characters of 200."""
    compared = []
    monkeypatch.setattr(labels, "_within", lambda *names_and_limit: compared.append(names_and_limit[-1]))
    for names in (100, 1_000):
        compared.clear()
        lookalikes(f"{chr(0x4E00 + n)}{'x' * 198}{chr(0x4E00 + n)}" for n in range(names))
        # Both orders are one here: each with the next 20, and the last 20 with 19 to 0 others.
        assert len(compared) == 20 * names - 210
        assert max(compared) <= 2


@pytest.mark.complete
def test_a_typo_is_found_among_many_names() -> None:
    many = [f"Finding {n * 7919 % 100003:06d}" for n in range(0, 3_000, 3)]
    assert ("Sarcoidosis", "Sarkoidosys") in lookalikes([*many, "Sarcoidosis", "Sarkoidosys"])
    assert ("Xarcoidosis", "Sarcoidosis")[::-1] in lookalikes([*many, "Sarcoidosis", "Xarcoidosis"])


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        *(("mass", "mass", 0), ("mass", "msas", 1), ("mass", "mas", 1), ("nodule", "nodulle", 1)),
        *(("ab", "ba", 1), ("effusion", "efusoin", 2), ("effusion", "fefusino", 2), ("abc", "ca", 3)),
        ("kitten", "sitting", 3),
    ],
)
def test_the_edit_distance_by_hand(a: str, b: str, distance: int) -> None:
    for one, two in ((a, b), (b, a)):
        assert [labels._within(one, two, limit) for limit in range(4)] == [distance <= n for n in range(4)]


@given(st.text("abc", max_size=6), st.text("abc", max_size=6))
def test_the_edit_distance_is_that_of_the_whole_table(a: str, b: str) -> None:
    """The recursion of the definition (Boytsov 2011), without any shortcut."""

    def distance(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        found = min(distance(i - 1, j), distance(i, j - 1)) + 1
        found = min(found, distance(i - 1, j - 1) + (a[i - 1] != b[j - 1]))
        if i > 1 and j > 1 and a[i - 1] == b[j - 2] and a[i - 2] == b[j - 1]:
            found = min(found, distance(i - 2, j - 2) + 1)
        return found

    true = distance(len(a), len(b))
    assert [labels._within(a, b, limit) for limit in range(3)] == [true <= n for n in range(3)]


# What is let in

BAD = [
    "",
    "x\n",
    "x" * 300,
    "../x",
    "a/b",
    "a\\b",
    ".hidden",
    "..",
    "a b",
    "a\x00b",
    "naïve",
    "$(x)",
    "a\u202eb",
]


@pytest.mark.parametrize("name", BAD)
def test_a_name_that_could_be_a_path_or_a_second_line_is_refused(name: str) -> None:
    plan = Plan(SurgicalAggregation(), ModelSpec("cnn", size=32), Augmentation(), 1, "fine", "code")
    checks: list[Callable[[], object]] = [
        lambda: check_sites([name]),
        lambda: check_experiment(name),
        lambda: replace(plan, experiment=name),
        lambda: Plan.from_dict({**plan.to_dict(), "experiment": name}),
    ]
    for check in checks:
        with pytest.raises(ConfigError) as caught:
            check()
        assert len(str(caught.value)) < 500
        assert str(caught.value).isprintable()


def test_plain_names_pass() -> None:
    check_sites(["site-1", "St_Mary.2", "x" * 64])
    assert check_experiment("surgical_nih-20250101-120000") == "surgical_nih-20250101-120000"
    assert check_label("肺炎") == "肺炎"
    with refused("'all'", by=ConfigError):
        check_sites(["a", "all"])


def test_a_label_with_other_signs_needs_a_synonym(tmp_path: Path) -> None:
    own: dict[str, Any] = {
        "dataset": "hospital",
        "root": "i",
        "table": "t.csv",
        "labels": ["Hernia", "Mass?"],
    }
    with refused(tmp_path / "suture.toml", "labels", "'Mass?'", by=ConfigError):
        site_config(tmp_path, data=own)
    config = site_config(tmp_path, data={**own, "synonyms": {"mass?": "Mass"}})
    assert config.data.labels == ("Hernia", "Mass?")


def test_names_on_the_command_line_and_at_the_server(tmp_path: Path, tiny: Any) -> None:
    job = load_job("demo")
    with refused("--out", by=ConfigError):
        run_job(job, "local", tmp_path / "a b", resume=False, overwrite=False, workers=None)
    with refused("--experiment", by=ConfigError):
        export_job(job, tmp_path, "../elsewhere", ("a",))
    with refused("b\\n", by=ConfigError):
        export_job(job, tmp_path, "fine", ("a", "b\n"))
    assert not list(tmp_path.iterdir())
    server = tiny(SurgicalAggregation()).server()
    with refused("../beta"):
        server.handshake(["alpha", "../beta"])
    assert server.collector.lines == {}
