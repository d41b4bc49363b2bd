"""Which site annotates which class, by name and by code; who is left out, and who stops the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
from parties import METHOD, events, exported, run, says

from steps import steps
from suture.core import labels
from suture.core.errors import FederationError, LabelError
from suture.core.vocabulary import CANONICAL, SYNONYMS
from suture.federation.server.registry import (
    Agreement,
    ClassConflict,
    SiteRegistry,
    Statement,
    agree,
    misfits,
    one_name,
)
from suture.federation.server.server import Server
from suture.methods.base import LabelStatistics
from suture.protocol.messages import MOST_CLASSES, SiteInfo, Update, ones
from suture.protocol.packing import pack, unpack
from world import refused

PTX, OTHER = "SCT:36118008", "SCT:16838000"
"""Codes of built-in classes: Pneumothorax and Pneumomediastinum."""

ONE, TWO, THREE = "RADLEX:RID1", "RADLEX:RID2", "RADLEX:RID3"
ICD_A, ICD_B = "I10:Q10", "I10:Q11"
CODED = "I10C:J93.83"
"""A code that the vocabulary does not have, of Pneumothorax at some sites."""


def info(*labels: str, **more: Any) -> SiteInfo:
    return SiteInfo(labels, {"train": 3}, 1, "code", **more)


def coded(**codes: str | tuple[str, ...]) -> SiteInfo:
    """A site of these classes; an empty code is none."""
    given = {name: (c,) if isinstance(c, str) else c for name, c in codes.items() if c}
    return info(*codes, codes=given)


def agreed(sites: Mapping[str, SiteInfo], *previous: str, **more: Any) -> SiteRegistry:
    """The registry, which is the same in any order of the sites."""
    found = [agree(dict(order), Agreement(previous, **more)) for order in permutations(sites.items())]
    assert all(one == found[0] for one in found)
    return found[0]


def unfit(sites: Mapping[str, SiteInfo], *previous: str, **more: Any) -> dict[str, str]:
    return misfits(sites, Agreement(previous, {}, **{"accept": False, **more}))


def test_union_is_sorted_and_owners_are_known() -> None:
    registry = agreed({"b": info("Mass", "Edema"), "a": info("Mass")})
    assert registry.labels == ("Edema", "Mass")
    assert registry.owners() == {"Edema": ("b",), "Mass": ("a", "b")}
    assert registry.rows_for("b", "own") == ("Edema", "Mass")  # whatever the site's order
    assert registry.rows_for("a", "all") == ("Edema", "Mass")
    assert agreed({"a": info("Mass")}, "Edema").labels == ("Edema", "Mass"), "its owner left"


def test_spellings_meet_and_each_site_keeps_its_own() -> None:
    registry = agreed({"a": info("Effusion", "Mass"), "b": info("pleural_effusion")})
    assert registry.labels == ("Mass", "Pleural Effusion")
    assert registry.to_site("b", registry.rows_for("b", "own")) == ("pleural_effusion",)
    update = Update(1, ("pleural_effusion",), {}, {"w": torch.ones(1, 2)}, ones(("x",)))
    assert registry.from_site("b", update).labels == ("Pleural Effusion",)
    # Edema is the federation's own spelling of a class that this site does not know.
    values = registry.rename_keys("a", {"Mass": 1, "Effusion": 2, "Edema": 3})
    assert values == {"Mass": 1, "Pleural Effusion": 2, "Edema": 3}


def test_lookalikes_are_refused_with_their_sites_unless_a_person_has_decided() -> None:
    sites = {"a": info("Lung Scar"), "b": info("Lung Scra")}
    with refused("'Lung Scar' (a)", "'Lung Scra' (b)", "label_map", by=FederationError):
        agree(sites, Agreement())
    for accept in (True, ("lung scra",)):
        assert agreed(sites, accept=accept).labels == ("Lung Scar", "Lung Scra")
    mapped = agreed(sites, label_map={"lung_scra": "Lung Scar"})
    assert mapped.labels == ("Lung Scar",)
    assert mapped.to_site("b", ("Lung Scar",)) == ("Lung Scra",)
    organs = [Statement("Thyroid Nodule", "SCT:27925004", "b")]
    assert one_name(organs, ("Nodule",)) == {"Thyroid Nodule": "Thyroid Nodule"}
    slip = {"a": coded(Melanoma=ONE), "b": coded(Nevus=ONE)}
    assert agreed(slip, label_map={"Nevus": "Melanoma"}).labels == ("Melanoma",)
    with refused("a: 'Lung Scar'", by=LabelError):
        agree({"a": info("Lung Scar", "Scarring")}, Agreement((), {"Scarring": "Lung Scar"}))


def test_a_class_of_which_some_sites_know_positives_alone_belongs_to_the_others() -> None:
    below = info("Mass", "Lung Lesion", one_sided=("Lung Lesion",))
    alone = agreed({"a": below, "b": info("Mass")})
    assert (alone.labels, alone.members["a"].names) == (("Mass",), ("Mass",))
    # It stays in an experiment that has it, whoever annotated it then.
    assert agreed({"a": below}, "Lung Lesion", "Mass").members["a"].one_sided == ("Lung Lesion",)
    registry = agreed({"a": below, "b": info("lung_lesion")})
    assert registry.rows_for("a", "own") == ("Lung Lesion", "Mass")
    assert registry.owners() == {"Lung Lesion": ("b",), "Mass": ("a",)}
    named = info("Mass", "Blob", "Lung Lesion", one_sided=("Lung Lesion",))
    member = agreed({"a": named}, label_map={"Blob": "Lung Lesion"}).members["a"]
    assert (member.own, member.names, member.one_sided) == (("Mass", "Blob"), ("Mass", "Lung Lesion"), ())


GENERIC = (
    "label",
    "Target",
    "class_1",
    "Diagnosis",
    "y",
    "1",
    "A",
    "Label (0/1)",
    "has_disease",
    "is_abnormal",
)
GENERIC += ("target variable", "Finding (binary)", "Class A", "image_label", "true label", "any abnormality")


@pytest.mark.parametrize("name", GENERIC)
def test_two_sites_with_a_name_that_says_nothing_are_not_taken_for_one_class(name: str) -> None:
    sites = {"a": info(name, "Mass"), "b": info(name), "c": info("Mass")}
    with refused("a, b", by=FederationError):
        agree(sites, Agreement())
    for accept in (True, (name,)):
        assert len(agree(sites, Agreement(accept=accept)).labels) == 2
    assert len(agree({"a": info(name), "c": info("Mass")}, Agreement()).labels) == 2
    assert agree(sites, Agreement((), {name: "Tuberculosis"})).labels == ("Mass", "Tuberculosis")
    one = info(name, codes={name: ("I10C:A15.0",)})
    assert len(agree({"a": one, "b": one}, Agreement()).labels) == 1


def test_a_newcomer_with_such_a_name_does_not_stop_the_experiment() -> None:
    sites = {"a": info("Label", "Mass"), "b": info("Mass"), "z": info("label")}
    owners = {"Label": {"a"}, "Mass": {"a", "b"}}
    assert unfit(sites, "Label", "Mass", owners=owners).keys() == {"z"}
    assert unfit(sites, "Label", "Mass", owners=owners, accept=("label",)) == {}


def test_the_classes_of_the_data_sets_say_what_they_mean() -> None:
    names = {*CANONICAL, *SYNONYMS, "Other", "Normal", "Abnormal", "Class I Malocclusion", "Heart Disease"}
    names |= {"Cold Case", "Grade 3", "Skin Condition", "Disease of the Heart", "Diagnosis (tuberculosis)"}
    assert not [name for name in names if labels.is_generic(name)]


def test_a_census_is_under_the_federations_names() -> None:
    one = info("Effusion", "Mass", counts={"Effusion": (1, 2), "Mass": None})
    two = SiteInfo(("pleural_effusion",), {"test": 4}, 1, "code", counts={"pleural_effusion": (0, 5)})
    sites = {"b": one, "a": two}
    counts = {"a": {"Pleural Effusion": (0, 5)}, "b": {"Pleural Effusion": (1, 2), "Mass": None}}
    found = agreed(sites).statistics(sites)
    assert found == LabelStatistics(("Mass", "Pleural Effusion"), {"a": 0, "b": 3}, counts)
    silent = {site: replace(one, counts={}) for site, one in sites.items()}
    assert found.counts.keys() == agreed(sites).statistics(silent).counts.keys()
    assert {*agreed(sites).statistics(silent).counts["b"].values()} == {None}


# Codes


@pytest.mark.parametrize(
    ("sites", "previous", "labels", "codes"),
    [
        # The name of the built-in code, also where the others state none.
        ({"a": coded(PTX=PTX, Mass=""), "b": coded(Pneumothorax=PTX)}, (), ("Mass", "Pneumothorax"), (PTX,)),
        ({"a": coded(PTX=PTX), "b": coded(Pneumothorax="")}, (), ("Pneumothorax",), (PTX,)),
        # A name without a code is the class of that name.
        (
            {"a": coded(Lung_scar=ONE), "b": coded(lung_scar=""), "c": coded(Narbe=ONE)},
            (),
            ("Lung Scar",),
            (ONE,),
        ),
        # Of other codes the vocabulary's name, or else the first of the alphabet.
        ({"a": coded(Bruch=ONE), "b": coded(Hernia=ONE)}, (), ("Hernia",), (ONE,)),
        ({"a": coded(Zyste=ONE), "b": coded(Cyst=ONE), "c": coded(Quiste=ONE)}, (), ("Cyst",), (ONE,)),
        # A class has the codes of all its sites, and so it is the built-in class of one of them.
        (
            {"a": coded(Cyst=(ONE, ICD_A)), "b": coded(Zyste=(ICD_A, OTHER))},
            (),
            ("Pneumomediastinum",),
            (ICD_A, ONE, OTHER),
        ),
        # A site may know better than the built-in code.
        (
            {"a": coded(Pneumothorax=CODED), "b": coded(Pneumothorax=""), "c": coded(PTX=PTX)},
            (),
            ("Pneumothorax",),
            (CODED, PTX),
        ),
        ({"a": coded(PTX=(PTX, CODED)), "b": coded(Pneumothorax=CODED)}, (), ("Pneumothorax",), (CODED, PTX)),
        # An experiment keeps the names of its classes.
        ({"a": coded(Cyst=ONE), "b": coded(Zyste=ONE)}, ("Zyste",), ("Zyste",), (ONE,)),
        ({"a": coded(PTX=PTX), "b": coded(Pneumothorax="")}, ("PTX",), ("PTX",), (PTX,)),
        # Look-alikes of one code are one class and need no decision.
        ({"a": coded(Lung_Scar=ONE), "b": coded(Lung_Scra=ONE)}, (), ("Lung Scar",), (ONE,)),
    ],
    ids=range(11),
)
def test_names_of_one_code_are_one_class(
    sites: dict[str, SiteInfo], previous: tuple[str, ...], labels: tuple[str, ...], codes: tuple[str, ...]
) -> None:
    registry = agreed(sites, *previous)
    assert registry.labels == labels
    assert registry.codes == {labels[-1]: codes}
    assert unfit(sites, *previous) == {}


def test_a_site_of_another_name_is_answered_in_its_own() -> None:
    registry = agreed({"a": coded(PTX=PTX, Mass=""), "b": coded(Pneumothorax=PTX)})
    assert registry.owners()["Pneumothorax"] == ("a", "b")
    assert registry.rows_for("a", "own") == ("Mass", "Pneumothorax"), "in the order of its names"
    assert registry.to_site("a", ("Mass", "Pneumothorax")) == ("Mass", "PTX")
    gone = agree({"a": coded(Cyst=ONE)}, Agreement(("Zyste",), codes={"Zyste": (ONE,)}))
    assert (gone.labels, gone.codes) == (("Zyste",), {"Zyste": (ONE,)}), "the site that stated it has left"


@pytest.mark.parametrize(
    ("sites", "previous", "named"),
    [
        ({"alpha": coded(Cyst=ONE), "beta": coded(cyst=TWO)}, (), (f"{ONE} at alpha", f"{TWO} at beta")),
        ({"a": coded(Cyst=(ONE, ICD_A)), "b": coded(Zyste=(ONE, ICD_B))}, (), (ICD_A, ICD_B, ONE)),
        (
            {"a": coded(X=(ONE, "SCT:60046008")), "b": coded(Y=(ONE, ICD_A)), "c": coded(Z=(ICD_A, OTHER))},
            (),
            ("SCT:60046008", OTHER),
        ),
        # Though one states the built-in code.
        (
            {"a": coded(Pneumothorax=CODED), "b": coded(Pneumothorax="I10C:J93.9")},
            (),
            (f"{CODED} at a", "I10C:J93.9 at"),
        ),
        # A code of one class never joins it to another by the table.
        (
            {"a": coded(Foo=(ONE, PTX)), "b": coded(Pneumonia=ONE)},
            (),
            ("'Pneumonia' (b)", "'Pneumothorax' (Suture's table, a)"),
        ),
        # Two names of the vocabulary are never merged by a slip.
        (
            {"a": coded(Melanoma=ONE), "b": coded(Nevus=ONE)},
            (),
            ("'Melanocytic Nevus' (b)", "'Melanoma' (a)"),
        ),
        # An experiment with both classes cannot merge them.
        ({"a": coded(Cyst=ONE), "b": coded(Zyste=ONE)}, ("Cyst", "Zyste"), ("'Cyst'", "'Zyste'")),
        # Two classes of one site that others' codes make one: either may be wrong.
        ({"a": coded(Cyst=ONE, Hole=ICD_A), "b": coded(Zyste=(ONE, ICD_A))}, (), ("'Cyst'", "'Hole'")),
    ],
    ids=range(8),
)
def test_contradictions_stop_the_run_by_name(
    sites: dict[str, SiteInfo], previous: tuple[str, ...], named: tuple[str, ...]
) -> None:
    """One line that is the same in any order of the sites."""
    texts = set()
    for order in permutations(sites.items()):
        with pytest.raises(ClassConflict) as caught:
            agree(dict(order), Agreement(previous))
        texts.add(str(caught.value))
    (text,) = texts
    assert "\n" not in text
    assert [name for name in named if name not in text] == []


SITES = {"a": coded(Cyst=ONE), "b": coded(Cyst=ONE), "c": coded(Cyst=TWO), "d": coded(Zyste=ONE)}
PLAIN = {"h1": coded(Zebra="", Pneumothorax=""), "h2": coded(Zebra="", Pneumothorax=""), "h3": coded(Mass="")}


@pytest.mark.parametrize(
    ("sites", "previous", "codes", "out"),
    [
        ({"a": coded(Pneumothorax=OTHER), "b": coded(Mass="")}, (), {}, "a"),
        ({"a": coded(PTX=(PTX, "I10C:J90"))}, (), {}, "a"),  # Pneumothorax by one, effusion by the other
        ({"a": coded(Pneumothorax=CODED)}, (), {}, ""),
        ({"b": coded(PTX="I10C:J93.9")}, (), {"Pneumothorax": (CODED,)}, "b"),
        (SITES, (), {}, "c"),
        ({"a": SITES["a"], "c": SITES["c"]}, (), {}, ""),  # of two, neither is known to be wrong
        ({"c": SITES["c"]}, ("Cyst",), {"Cyst": (ONE,)}, "c"),
        ({**SITES, "e": coded(Nodule=OTHER)}, (), {}, "ce"),
        ({"a": coded(Cyst=ONE, Hole=ICD_A), "b": coded(Zyste=(ONE, ICD_A))}, (), {}, ""),
        ({**PLAIN, "z": coded(Zebra=PTX)}, (), {}, "z"),  # nobody because of a code that another states
        (PLAIN, (), {}, ""),
    ],
    ids=range(11),
)
def test_a_site_that_alone_contradicts_the_others_is_left_out(
    sites: dict[str, SiteInfo], previous: tuple[str, ...], codes: Any, out: str
) -> None:
    found = unfit(sites, *previous, codes=codes)
    assert found.keys() == {*out}
    assert all(
        "SCT:16838000" in found[site] for site in out if sites[site].codes == {"Pneumothorax": (OTHER,)}
    )


# Newcomers


OTHERS = {"a": info("Mass", "Nodule"), "b": info("Nodule", "Mass")}

LIES: dict[str, dict[str, Any]] = {
    "two spellings of one class": {"labels": ("Mass", "mass")},
    "another label type": {"label_type": "multiclass"},
    "look-alikes of its own": {"labels": ("Sarcoidosis", "Sarcoidosys")},
    "a look-alike of a shared class": {"labels": ("Nodules of lung", "Nodulle")},
}
WITHOUT: dict[bool, bytes] = {}
"""The model without alpha, of a continued experiment or not; every test has the same data."""


@pytest.mark.complete
@pytest.mark.parametrize("continued", [False, True], ids=["at the start", "in a continued experiment"])
@pytest.mark.parametrize("kind", LIES)
def test_a_site_whose_labels_fit_nobody_elses_loses_its_place(kind: str, continued: bool, tiny: Any) -> None:
    """gamma and beta share the class Nodule."""
    assert misfits({**OTHERS, "liar": replace(info("Mass"), **LIES[kind])}, Agreement()).keys() == {"liar"}

    def without_or_lied(out: str, lie: Any) -> Server:
        if continued:
            run(tiny(METHOD, min_sites=2, rounds=1, selection="last"), out)
        return run(tiny(METHOD, min_sites=2, selection="last"), out, says("alpha", SiteInfo, lie))

    server = without_or_lied("lied", lambda found: pack(replace(found, **LIES[kind])))
    if continued not in WITHOUT:
        WITHOUT[continued] = exported(without_or_lied("lost", None))
    assert exported(server) == WITHOUT[continued]
    assert events(server, "begin")[-1]["refused"].keys() == {"alpha"}


def test_the_experiment_decides_what_is_usual() -> None:
    """Even against the majority: its model exists."""
    new = {s: replace(i, label_type="multiclass", prior="new") for s, i in OTHERS.items()}
    agreed_on = Agreement(("Mass",), {}, False, "multilabel", "old")
    assert set(misfits({**new, "c": info("Mass", prior="old")}, agreed_on)) == {"a", "b"}
    others = {site: replace(one, prior="123456") for site, one in OTHERS.items()}
    assert "abcdef" in unfit({**others, "liar": info("Mass", prior="abcdef")})["liar"]
    assert set(unfit({"a": info("Sarcoidosys"), "b": info("Sarcoidosis")}, "Sarcoidosis")) == {"a"}
    sites = {"a": info("Sarcoidosis"), "b": info("Silicosis"), "liar": info("Sarcoidosys", "Sillicosis")}
    assert list(unfit(sites)) == ["liar"], "it imitates several others"


def test_what_nobody_can_attribute_stops_the_run() -> None:
    sites = {"a": info("Sarcoidosis"), "b": info("Sarcoidosys"), "c": info("Mass")}
    assert unfit(sites) == {}
    with refused("Sarcoidosys", by=FederationError):
        agree(sites, Agreement())
    single = info("Mass", label_type="multiclass")
    assert unfit({"a": info("Mass"), "b": single}) == {}
    with refused("a is multilabel", "b is multiclass", "[data] label_type", by=FederationError):
        agree({"a": info("Mass"), "b": single}, Agreement())
    registry = agreed({"a": single, "b": single})
    assert registry.label_type == registry.to_dict()["label_type"] == "multiclass"
    assert agreed({"a": info("Mass")}).label_type == "multilabel"


def test_a_site_without_a_place_counts_against_the_quorum(tiny: Any) -> None:
    lie = says("alpha", SiteInfo, lambda found: pack(replace(found, labels=("Mass", "mass"))))
    with refused("alpha: ", "label map", by=LabelError):
        run(tiny(METHOD), change=lie)


# Many names


@pytest.mark.complete
@pytest.mark.parametrize(
    "made",
    [lambda i: f"{i * 7919 % 100003:06d}" * 30, lambda i: f"{'a' * 90}{i:05d}{'b' * 90}"],
    ids=["far", "near"],
)
def test_the_names_of_a_long_hello_are_compared_few_times(
    made: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    within = labels._within
    monkeypatch.setattr(labels, "_within", lambda *args: compared.append(args) or within(*args))
    infos = {"beta": info(*(made(i) for i in range(9_000))), "alpha": info("Mass"), "gamma": info("Mass")}
    found = misfits(infos, Agreement((), {}, False))
    infos = {site: one for site, one in infos.items() if site not in found}
    agree(infos, Agreement())
    assert len(compared) < 400_000


def test_an_error_lists_few_pairs_of_names() -> None:
    letters = str.maketrans("0123456789", "abcdefghij")
    far = [f"{i * 7919 % 100003:06d}".translate(letters) * 3 for i in range(60)]
    with pytest.raises(FederationError) as error:
        agree({"a": info(*far), "b": info(*(f"{name}x" for name in far))}, Agreement())
    assert str(error.value).count(" (a) and ") == 20


@pytest.mark.complete
def test_ten_thousand_classes_are_agreed_on_and_no_more() -> None:
    half = MOST_CLASSES // 2
    sites = {
        site: unpack(pack(info(*(f"Finding {n:05d} x{n * 7919 % 10007:05d}" for n in range(at, at + half)))))
        for site, at in (("a", 0), ("b", half))
    }
    registry = agree(sites, Agreement(accept=True))  # type: ignore[arg-type]
    assert len(registry.labels) == MOST_CLASSES
    assert sum(map(len, registry.owners().values())) == MOST_CLASSES
    more = {**sites, "c": info("Mass")}
    with refused("10001", "10000", by=FederationError):
        agree(more, Agreement(accept=True))  # type: ignore[arg-type]
    flood = info(*(f"Junk {n}" for n in range(MOST_CLASSES)))
    assert "exceed 10000" in misfits({**OTHERS, "liar": flood}, Agreement((), {}, True))["liar"]


@pytest.mark.complete
def test_a_hostile_site_cannot_make_the_comparison_of_codes_slow() -> None:
    def steps_for(classes: int) -> int:
        codes = [(f"RADLEX:RID{j + 1}", f"I10:A{j % 100:02d}.{j // 100}") for j in range(classes)]
        sites = {f"s{i}": coded(**{f"Class {j} of {i}": c for j, c in enumerate(codes)}) for i in range(8)}
        made, taken = steps(lambda: agree(sites, Agreement(accept=True)))
        assert len(made.labels) == classes
        return taken

    assert steps_for(200) < 2.5 * steps_for(100)
