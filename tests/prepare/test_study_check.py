"""suture_prepare.study_check and .site_images: what only shows when sites are compared."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from small_job import SMALL
from suture.data.config import SiteConfig
from suture.data.table import SPLITS, Split
from suture.execution.job import Job
from suture.execution.study import StudySites
from suture.methods.fedavg import FedAvg
from suture.methods.surgical import SurgicalAggregation
from suture.methods.vanilla import VanillaFL
from suture.privacy.robust import RobustMerge
from suture.privacy.secure_aggregation import SecureAggregation
from suture_papers.missing_labels.condist import ConDist
from suture_papers.rare_classes.focal import FocalFedAvg
from suture_prepare.quality import Count, Findings, Picture
from suture_prepare.site_images import describe, differences, find_shared, summarise
from suture_prepare.study_check import Together, compare, render_matrix
from suture_results.inspection import ImageFacts

CONFIG = SiteConfig.model_validate(
    {"data": {"dataset": "hospital", "root": "r", "table": "t"}, "privacy": {"min_count": 0}}
)
COUNTS = dict.fromkeys(SPLITS, Count(10, 20, 0))


def with_(section: str, **keys: Any) -> SiteConfig:
    """A site's settings that differ from `CONFIG` in some keys."""
    return CONFIG.model_copy(update={section: getattr(CONFIG, section).model_copy(update=keys)})


def site(without: Split | None = None, **fields: Any) -> Findings:
    """30 images in each split, 10 with a mass and 20 without, but for the split `without`."""
    own = {"counts": {"Mass": COUNTS | ({without: Count(0, 30, 0)} if without else {})}}
    return Findings(**{"images": dict.fromkeys(SPLITS, 30), "label_type": "multilabel"} | own | fields)


def checked(
    findings: Mapping[str, Findings], job: Job | None = None, configs: Mapping[str, SiteConfig] | None = None
) -> Together:
    return compare(configs or dict.fromkeys(findings, CONFIG), findings, job)


PAIR = dict.fromkeys(("alpha", "beta"), site())
WITH_HERNIA = PAIR | {"gamma": site(counts={"Mass": COUNTS, "Hernia": COUNTS})}
"""Mass is annotated at three sites, Hernia at one of them."""

PERMITTING = with_("privacy", label_view="all")


@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_site_that_cannot_measure_a_class_is_named(split: Split) -> None:
    together = checked({"alpha": site(split), "beta": site()})
    [warning] = together.warnings
    assert f"alpha has no positive {split} image of 'Mass'" in warning
    assert together.problems == ()


def test_a_class_that_no_site_can_measure_is_told_once() -> None:
    (warning,) = checked({"alpha": site("test"), "beta": site("test")}).warnings
    assert "'Mass'" in warning
    assert "alpha" not in warning


def test_a_faulty_job_is_a_problem() -> None:
    assert compare({"alpha": CONFIG}, {"alpha": site()}, None, ["job.toml: no"]).problems == ("job.toml: no",)


def test_the_remedies_that_a_problem_names_settle_it() -> None:
    counts = dict.fromkeys(SPLITS, Count(1, 2, 0)) | {"validation": Count(0, 0, 3)}
    few = {
        name: site(images=dict.fromkeys(SPLITS, 3), counts={label: counts})
        for name, label in (("alpha", "Xanthosis"), ("beta", "Xanthosys"))
    }
    by_loss = replace(SMALL, selection="site_loss")
    alike, lossless = checked(few, by_loss).problems
    assert 'accept_labels = ["Xanthosys"]' in alike
    assert 'selection = "last"' in lossless
    assert checked(few, replace(by_loss, accept_labels=("Xanthosys",))).problems == (lossless,)
    for selection in ("last", "site_auroc"):
        assert checked(few, replace(by_loss, accept_labels=True, selection=selection)).problems == ()


def test_what_a_site_does_not_permit_is_told_and_with_limits_a_problem() -> None:
    configs = {"alpha": CONFIG, "beta": PERMITTING}
    assert checked(PAIR, SMALL, configs).problems == ()
    limited = replace(SMALL, simulation=StudySites(limits=True), method=ConDist())
    [problem] = checked(PAIR, limited, configs).problems
    assert all(named in problem for named in ("alpha", "ConDist", 'label_view = "all"', "[privacy]"))
    here = checked(PAIR, replace(SMALL, method=ConDist()), configs)
    assert here.problems == ()
    assert [problem in text for text in here.warnings if "label_view" in text] == [True]
    assert checked(PAIR, replace(SMALL, method=FedAvg(label_view="own")), configs).problems == ()


def test_labels_that_the_method_is_not_defined_for_are_a_problem() -> None:
    configs, single = dict.fromkeys(PAIR, PERMITTING), replace(SMALL, method=FocalFedAvg())
    [problem] = checked(PAIR, single, configs).problems
    assert "FedAvg with focal loss" in problem
    assert checked(PAIR, SMALL, configs).problems == ()
    one = dict.fromkeys(PAIR, site(label_type="multiclass"))
    assert checked(one, single, configs).problems == ()


def test_codes_that_merge_classes_are_told_and_contradictions_stop_the_run() -> None:
    findings = {"alpha": site(), "beta": site(counts={"Lump": COUNTS})}
    codes = {"alpha": {"Mass": "RADLEX:RID1"}, "beta": {"Lump": "RADLEX:RID1"}}
    merged = checked(findings, None, {name: with_("data", codes=of) for name, of in codes.items()})
    (warning,) = merged.warnings
    assert all(fact in warning for fact in ("codes", "beta", "'Lump'", "'Mass'"))
    assert merged.problems == ()
    wrong = {"alpha": with_("data", codes={"Mass": "SCT:36118008"}), "beta": CONFIG}
    [problem] = checked(findings, None, wrong).problems
    assert all(fact in problem for fact in ("'Mass' (alpha)", "'Pneumothorax'", "SCT:36118008"))


def test_a_site_with_epsilon_and_a_robust_merge_are_checked() -> None:
    configs = {"alpha": with_("privacy", epsilon=4.0), "beta": CONFIG}
    [problem] = checked(PAIR, SMALL, configs).problems
    assert all(named in problem for named in ("epsilon", 'method.batch_norm = "frozen"'))
    frozen = replace(SMALL, method=SurgicalAggregation(batch_norm="frozen"))
    assert checked(PAIR, frozen, configs).problems == ()
    [problem] = checked(PAIR, replace(frozen, robust=RobustMerge()), configs).problems
    assert all(named in problem for named in ("3 sites", "2", "[robust]"))


def test_classes_of_too_few_sites_for_secure_aggregation_or_a_robust_merge_are_named() -> None:
    job = replace(SMALL, secure_aggregation=SecureAggregation())
    [problem] = checked(PAIR, job).problems
    assert "3 sites or more, and 2" in problem
    together = checked(WITH_HERNIA, job)
    assert ["Hernia (gamma)" in text for text in together.problems] == [True]
    assert any("experimental" in told for told in together.warnings)
    for other in (SMALL, replace(job, label_map={"Hernia": "Mass"}), replace(job, method=VanillaFL())):
        assert not [text for text in checked(WITH_HERNIA, other).problems if "Hernia" in text]
    job = replace(SMALL, robust=RobustMerge())
    [told] = [text for text in checked(WITH_HERNIA, job).warnings if "Merged by" in text]
    assert all(named in told for named in ("kind='median'", "3 sites", "Hernia"))
    for other in (SMALL, replace(job, label_map={"Hernia": "Mass"})):
        assert not [text for text in checked(WITH_HERNIA, other).warnings if "Merged by" in text]


def test_a_site_of_one_image_has_one_image() -> None:
    counts = {split: Count(int(split == "train"), 0, 0) for split in SPLITS}
    one = {"alpha": site(images={"train": 1, "validation": 0, "test": 0}, counts={"Mass": counts})}
    screen = Console(width=90, record=True, file=io.StringIO())
    screen.print(render_matrix(one, checked(one)))
    assert "1 image " in screen.export_text()


# Images


def picture(name: str, split: str = "train", **facts: Any) -> Picture:
    plain: dict[str, Any] = {
        "file": f"file {name}".encode(),
        "pixels": f"pixels {name}".encode(),
        "width": 100,
        "height": 80,
        "bits": 8,
        "highest": None,
        "colour": False,
        "mean": 100.0,
        "brightest": 255,
    }
    return Picture(name, split, (), ImageFacts(**plain | facts))


def sites(**pictures: Sequence[Picture]) -> dict[str, Findings]:
    return {name: Findings(pictures=tuple(of)) for name, of in pictures.items()}


def test_sites_with_images_that_the_model_is_not_for_are_named() -> None:
    chest = replace(SMALL, model=replace(SMALL.model, modalities=("CR", "DX")))
    most: dict[str | None, int] = {"DX": 90, "CR": 6, None: 20}
    findings = {
        name: site(pictures=[picture(f"{m}{i}", modality=m) for m, n in of.items() for i in range(n)])
        for name, of in {"clean": most, "few": most | {"CT": 4}, "many": most | {"CT": 9, "": 3}}.items()
    }
    together = checked(findings, chest)
    [problem] = (text for text in together.problems if "modality" in text)
    assert all(named in problem for named in ("many", "CR, DX", "CT (9), not stated (3) of 128"))
    [warning] = (text for text in together.warnings if "modality" in text)
    assert all(named in warning for named in ("few", "CR, DX", "CT (4) of 120"))
    for job in (SMALL, None):
        assert not any("modality" in text for text in checked(findings, job).problems)


def test_images_that_are_much_smaller_than_the_model_reads_are_told_for_each_site() -> None:
    side = SMALL.model.size // 2 - 1
    small = [picture(str(i), width=side, height=side) for i in range(3)]
    warnings = checked({"alpha": site(pictures=small), "beta": site()}, SMALL).warnings
    [told] = (text for text in warnings if "enlarged" in text)
    assert "alpha: 3 images" in told


@pytest.mark.parametrize(
    ("a", "b", "torn"),
    [("train", "test", 1), ("validation", "train", 1), ("train", "train", 0), ("validation", "test", 0)],
)
def test_an_image_at_two_sites_is_torn_between_training_and_measuring(a: str, b: str, torn: int) -> None:
    same = {"pixels": b"the same"}
    pictures = {"alpha": [picture("1", a, **same), picture("2")], "beta": [picture("x", b, **same)]}
    found = find_shared(sites(**pictures))
    assert (found.images, found.torn) == (1, torn)
    shown = f"'1' of alpha ({a}) = 'x' of beta ({b})"
    assert shown in describe(found)
    together = checked({name: site(pictures=of) for name, of in pictures.items()})
    assert [shown in text for text in together.problems] == [True] * torn
    assert any(shown in text for text in together.warnings) is not bool(torn)
    alone = sites(alpha=[picture("1", a, **same), picture("2", b, **same)], beta=[picture("x")])
    assert find_shared(alone).images == 0, "images of one site alone are not shared"


def test_the_torn_ones_are_named_first_and_only_a_few() -> None:
    alpha = [picture(f"a{i}", pixels=bytes([i])) for i in range(5)]
    beta = [picture(f"b{i}", "test" if i == 4 else "train", pixels=bytes([i])) for i in range(5)]
    found = find_shared(sites(alpha=alpha, beta=beta))
    assert (found.images, found.torn, len(found.examples)) == (5, 1, 3)
    first = describe(found).partition("; ")[0]
    assert all(fact in first for fact in ("5 images", "'a4' of alpha (train) = 'b4' of beta (test)"))
    assert describe(found).endswith("; …")


@pytest.mark.parametrize("pixels", [(b"as 12 bits", b"as 16 bits"), (b"p", b"p")])
def test_the_same_file_read_differently_is_the_same_image(pixels: tuple[bytes, bytes]) -> None:
    alpha, beta = picture("1", file=b"f", pixels=pixels[0]), picture("x", file=b"f", pixels=pixels[1])
    assert find_shared(sites(alpha=[alpha], beta=[beta])).images == 1


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"width": 9, "height": 9}, ["c: ", "9 pixels", "elsewhere 100:"]),
        ({"mean": 20.0}, ["c: ", "is 20, elsewhere 100"]),
        ({"bits": 16, "highest": 60000}, ["8 bits: a, b; ", "more: c."]),
    ],
)
def test_a_difference_names_the_site(facts: dict[str, Any], named: list[str]) -> None:
    [warning] = differences(sites(a=[picture("1")], b=[picture("2")], c=[picture("3", **facts)]))
    assert [name for name in named if name not in warning] == []
    assert list(differences(sites(a=[picture("1")], c=[picture("3", **facts)]))), "and of two sites, one"


def test_like_sites_differ_in_nothing() -> None:
    alike = sites(a=[picture("1")], b=[picture("2", mean=130.0, width=150)], text=[])
    for findings in (alike, sites(a=[picture("1")]), {}):
        assert list(differences(findings)) == []


def test_a_summary_says_how_the_images_are_read() -> None:
    deep = picture("1", bits=16, highest=4000)
    other = picture("2", width=20, height=10, colour=True, mean=50.0)
    assert summarise(Findings(pictures=(deep, other)), with_("data", bits=12)) == {
        "pixels": "20 × 10 to 100 × 80",
        "depth": "1 of 8 bits, 1 of 16 bits, read as 12; values to 4,000",
        "channels": "1 of 2 in colour, read as gray",
        "gray levels": "mean 75; images from 50 to 100",
    }
    assert summarise(Findings(), CONFIG) == {}
