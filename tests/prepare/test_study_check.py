"""suture_prepare.study_check: what only shows when sites are compared."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace

import pytest
from rich.console import Console

from small_job import SMALL
from suture.data.config import SiteConfig
from suture.data.inspection import ImageFacts
from suture.data.table import SPLITS, Split
from suture.execution.study import StudySites
from suture.methods.fedavg import FedAvg
from suture.methods.surgical import SurgicalAggregation
from suture.methods.vanilla import VanillaFL
from suture.privacy.robust import RobustMerge
from suture.privacy.secure_aggregation import SecureAggregation
from suture_papers.missing_labels.condist import ConDist
from suture_papers.rare_classes.focal import FocalFedAvg
from suture_prepare.quality import Count, Findings, Picture
from suture_prepare.study_check import compare, render_matrix

CONFIG = SiteConfig.model_validate(
    {"data": {"dataset": "hospital", "root": "r", "table": "t"}, "privacy": {"min_count": 0}}
)


COUNTS = dict.fromkeys(SPLITS, Count(10, 20, 0))


def site(without: Split | None = None) -> Findings:
    """30 images in each split, 10 with a mass and 20 without, but for the split `without`."""
    counts = {split: Count(0, 30, 0) if split == without else Count(10, 20, 0) for split in SPLITS}
    return Findings(images=dict.fromkeys(SPLITS, 30), counts={"Mass": counts}, label_type="multilabel")


@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_site_that_cannot_measure_a_class_is_named(split: Split) -> None:
    findings = {"alpha": site(split), "beta": site()}
    together = compare(dict.fromkeys(findings, CONFIG), findings)
    [warning] = together.warnings
    assert warning.startswith(f"alpha has no positive {split} image of 'Mass'")
    assert together.problems == ()


def test_a_class_that_no_site_can_measure_is_told_once() -> None:
    findings = {"alpha": site("test"), "beta": site("test")}
    together = compare(dict.fromkeys(findings, CONFIG), findings)
    (warning,) = together.warnings
    assert warning.startswith("'Mass': no site has a positive test image")


def test_a_faulty_job_is_a_problem() -> None:
    assert compare({"alpha": CONFIG}, {"alpha": site()}, None, ["job.toml: no"]).problems == ("job.toml: no",)


def test_the_remedies_that_a_problem_names_settle_it() -> None:
    counts = {split: Count(1, 2, 0) for split in SPLITS}
    counts["validation"] = Count(0, 0, 3)
    few = {
        "alpha": Findings(
            images=dict.fromkeys(SPLITS, 3), counts={"Xanthosis": counts}, label_type="multilabel"
        ),
        "beta": Findings(
            images=dict.fromkeys(SPLITS, 3), counts={"Xanthosys": counts}, label_type="multilabel"
        ),
    }
    configs = dict.fromkeys(few, CONFIG)
    alike, lossless = compare(configs, few, SMALL).problems
    assert 'accept_labels = ["Xanthosys"]' in alike
    assert 'selection = "last"' in lossless
    assert compare(configs, few, replace(SMALL, accept_labels=("Xanthosys",))).problems == (lossless,)
    assert compare(configs, few, replace(SMALL, accept_labels=True, selection="last")).problems == ()


def test_what_a_site_does_not_permit_is_told_and_with_limits_a_problem_before_anything_is_trained() -> None:
    permitting = CONFIG.model_copy(
        update={"privacy": CONFIG.privacy.model_copy(update={"label_view": "all"})}
    )
    configs = {"alpha": CONFIG, "beta": permitting}
    findings = dict.fromkeys(configs, site())
    assert compare(configs, findings, SMALL).problems == ()
    limited = replace(SMALL, simulation=StudySites(limits=True), method=ConDist())
    [problem] = compare(configs, findings, limited).problems
    assert problem.startswith("alpha: ConDist")
    assert 'label_view = "all" under [privacy]' in problem
    here = compare(configs, findings, replace(SMALL, method=ConDist()))
    assert here.problems == ()
    assert [text for text in here.warnings if "label_view" in text] == [
        f"in a federation, refused by {problem}"
    ]
    own = FedAvg(label_view="own")
    assert compare(configs, findings, replace(SMALL, method=own)).problems == ()


def test_labels_that_the_method_is_not_defined_for_are_a_problem_before_anything_is_trained() -> None:
    permitting = CONFIG.model_copy(
        update={"privacy": CONFIG.privacy.model_copy(update={"label_view": "all"})}
    )
    configs = dict.fromkeys(("alpha", "beta"), permitting)
    single = replace(SMALL, method=FocalFedAvg())
    several = dict.fromkeys(configs, replace(site(), label_type="multilabel"))
    [problem] = compare(configs, several, single).problems
    assert problem.startswith("FedAvg with focal loss does not support several labels an image")
    assert compare(configs, several, SMALL).problems == ()
    one = dict.fromkeys(configs, replace(site(), label_type="multiclass"))
    assert compare(configs, one, single).problems == ()


def coded(**codes: str) -> SiteConfig:
    return CONFIG.model_copy(update={"data": CONFIG.data.model_copy(update={"codes": codes})})


def test_codes_that_merge_classes_are_told_and_contradictions_stop_the_run() -> None:
    findings = {"alpha": site(), "beta": replace(site(), counts={"Lump": site().counts["Mass"]})}
    merged = compare({"alpha": coded(Mass="RADLEX:RID1"), "beta": coded(Lump="RADLEX:RID1")}, findings)
    (warning,) = merged.warnings
    assert all(fact in warning for fact in ("codes", "beta", "'Lump'", "'Mass'"))
    assert merged.problems == ()
    [problem] = compare({"alpha": coded(Mass="SCT:36118008"), "beta": CONFIG}, findings).problems
    assert (
        "'Mass' (alpha) and 'Pneumothorax' (Suture's table, alpha) are the same class by SCT:36118008"
        in problem
    )


def pictures(modalities: Mapping[str | None, int], side: int = 64) -> tuple[Picture, ...]:
    """Images of modalities, so many of each."""
    stated = [modality for modality, n in modalities.items() for _ in range(n)]
    return tuple(
        Picture(
            f"{i}.dcm",
            "train",
            (),
            ImageFacts(b"%d" % i, b"%d" % i, side, side, 8, None, False, 9.0, 99, one),
        )
        for i, one in enumerate(stated)
    )


def test_sites_with_images_that_the_model_is_not_for_are_named_before_anything_is_trained() -> None:
    chest = replace(SMALL, model=replace(SMALL.model, modalities=("CR", "DX")))
    most = {"DX": 90, "CR": 6, None: 20}
    cases = {"clean": most, "few": most | {"CT": 4}, "many": most | {"CT": 9, "": 3}}
    findings = {name: replace(site(), pictures=pictures(of)) for name, of in cases.items()}
    configs = dict.fromkeys(findings, CONFIG)
    together = compare(configs, findings, chest)
    assert [text for text in together.problems if "modality" in text] == [
        "many: DICOM images of another modality than CR, DX, which the model is for (model.modalities in the "
        "job): CT (9), not stated (3) of 128; remove their rows"
    ]
    [warning] = (text for text in together.warnings if "modality" in text)
    assert warning.startswith("few: DICOM images of another modality")
    assert warning.endswith("CT (4) of 120; they are left out")
    for job in (SMALL, None):
        assert not any("modality" in text for text in compare(configs, findings, job).problems)


def test_images_that_are_much_smaller_than_the_model_reads_are_told_for_each_site() -> None:
    side = SMALL.model.size // 2
    findings = {"alpha": replace(site(), pictures=pictures({None: 3}, side - 1)), "beta": site()}
    warnings = compare(dict.fromkeys(findings, CONFIG), findings, SMALL).warnings
    [told] = (text for text in warnings if "enlarged" in text)
    assert told.startswith("alpha: 3 images enlarged more than 2 times")


def test_a_site_with_epsilon_and_a_robust_merge_are_checked_before_anything_is_trained() -> None:
    private = CONFIG.model_copy(update={"privacy": CONFIG.privacy.model_copy(update={"epsilon": 4.0})})
    findings = dict.fromkeys(("alpha", "beta"), replace(site(), label_type="multilabel"))
    configs = {"alpha": private, "beta": CONFIG}
    [problem] = compare(configs, findings, SMALL).problems
    assert "mixes the images of a batch" in problem
    frozen = replace(SMALL, method=SurgicalAggregation(batch_norm="frozen"))
    assert compare(configs, findings, frozen).problems == ()
    [problem] = compare(configs, findings, replace(frozen, robust=RobustMerge())).problems
    assert "needs 3 sites or more, and 2 take part; remove [robust]" in problem


def test_classes_of_too_few_sites_for_secure_aggregation_are_named_before_the_run() -> None:
    """Mass is annotated at three sites, Hernia at one of them, which the job may call Mass."""
    findings = dict.fromkeys(("alpha", "beta"), replace(site(), label_type="multilabel"))
    job = replace(SMALL, secure_aggregation=SecureAggregation())
    [problem] = compare(dict.fromkeys(findings, CONFIG), findings, job).problems
    assert "needs 3 sites or more, and 2 take part" in problem
    findings["gamma"] = replace(findings["beta"], counts=findings["beta"].counts | {"Hernia": COUNTS})
    configs = dict.fromkeys(findings, CONFIG)
    [problem] = compare(configs, findings, job).problems
    assert "have fewer: Hernia (gamma). Leave such classes out" in problem
    assert any("is experimental" in told for told in compare(configs, findings, job).warnings)
    for other in (SMALL, replace(job, label_map={"Hernia": "Mass"}), replace(job, method=VanillaFL())):
        assert not [told for told in compare(configs, findings, other).problems if "have fewer" in told]


def test_classes_that_a_robust_merge_leaves_unprotected_are_named_before_the_run() -> None:
    """Mass is annotated at three sites, Hernia at one of them."""
    findings = dict.fromkeys(("alpha", "beta"), replace(site(), label_type="multilabel"))
    findings["gamma"] = replace(findings["beta"], counts=findings["beta"].counts | {"Hernia": COUNTS})
    configs = dict.fromkeys(findings, CONFIG)
    job = replace(SMALL, robust=RobustMerge())
    told = [text for text in compare(configs, findings, job).warnings if "plain mean" in text]
    assert told == [
        "Merged by the plain mean, not by robust.kind='median', because fewer than 3 sites send their rows: "
        "Hernia."
    ]
    for other in (SMALL, replace(job, label_map={"Hernia": "Mass"})):
        assert not [t for t in compare(configs, findings, other).warnings if "plain mean" in t]


def test_a_site_of_one_image_has_one_image() -> None:
    counts = {split: Count(int(split == "train"), 0, 0) for split in SPLITS}
    one = Findings(
        images={"train": 1, "validation": 0, "test": 0}, counts={"Mass": counts}, label_type="multilabel"
    )
    screen = Console(width=90, record=True, file=io.StringIO())
    screen.print(render_matrix({"alpha": one}, compare({"alpha": CONFIG}, {"alpha": one})))
    assert "1 image " in screen.export_text()
