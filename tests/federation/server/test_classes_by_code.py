"""Names of equal codes are one class, and contradictions are refused by name."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from steps import steps
from suture.core.errors import FederationError
from suture.federation.server.registry import (
    Agreement,
    ClassConflict,
    SiteRegistry,
    Statement,
    agree,
    misfits,
    one_name,
)
from suture.protocol.messages import SiteInfo

PTX, OTHER = "SCT:36118008", "SCT:16838000"
"""Codes of built-in classes: Pneumothorax and Pneumomediastinum."""

ONE, TWO, THREE = "RADLEX:RID1", "RADLEX:RID2", "RADLEX:RID3"
ICD_A, ICD_B = "I10:Q10", "I10:Q11"


def info(**codes: str | tuple[str, ...]) -> SiteInfo:
    """A site of these classes; an empty code is none."""
    given = {name: (c,) if isinstance(c, str) else c for name, c in codes.items() if c}
    return SiteInfo(tuple(codes), {"train": 3}, 1, "code", codes=given)


def agreed(previous: tuple[str, ...] = (), **sites: SiteInfo) -> SiteRegistry:
    """The registry, which is the same in any order of the sites."""
    found = [agree(dict(order), Agreement(previous)) for order in permutations(sites.items())]
    assert all(one == found[0] for one in found)
    return found[0]


def refusal(previous: tuple[str, ...] = (), **sites: SiteInfo) -> str:
    """The refusal, one line that is the same in any order of the sites."""
    texts = set()
    for order in permutations(sites.items()):
        with pytest.raises(ClassConflict) as caught:
            agree(dict(order), Agreement(previous))
        texts.add(str(caught.value))
    (text,) = texts
    assert "\n" not in text
    return text


def unfit(sites: dict[str, SiteInfo], previous: tuple[str, ...] = (), **more: Any) -> dict[str, str]:
    return misfits(sites, Agreement(previous, {}, False, **more))


def test_two_names_of_one_code_are_one_class_with_the_name_of_the_built_in_code() -> None:
    registry = agreed(a=info(PTX=PTX, Mass=""), b=info(Pneumothorax=PTX))
    assert registry.labels == ("Mass", "Pneumothorax")
    assert registry.owners()["Pneumothorax"] == ("a", "b")
    assert registry.rows_for("a", "own") == ("Mass", "Pneumothorax"), "in the order of its names"
    assert registry.to_site("a", ("Mass", "Pneumothorax")) == ("Mass", "PTX"), "and its own names"
    assert registry.codes == {"Pneumothorax": (PTX,)}


def test_a_built_in_code_names_the_class_where_the_others_state_none() -> None:
    assert agreed(a=info(PTX=PTX), b=info(Pneumothorax="")).labels == ("Pneumothorax",)
    assert agreed(a=info(PTX=PTX)).labels == ("Pneumothorax",)


def test_a_name_without_a_code_is_the_class_of_that_name() -> None:
    registry = agreed(a=info(Lung_scar=ONE), b=info(lung_scar=""), c=info(Narbe=ONE))
    assert registry.labels == ("Lung Scar",)
    assert registry.codes == {"Lung Scar": (ONE,)}


def test_other_codes_give_the_vocabularys_name_or_else_the_first_of_the_alphabet() -> None:
    assert agreed(a=info(Bruch=ONE), b=info(Hernia=ONE)).labels == ("Hernia",)
    assert agreed(a=info(Zyste=ONE), b=info(Cyst=ONE), c=info(Quiste=ONE)).labels == ("Cyst",)


def test_a_class_has_the_codes_of_all_its_sites() -> None:
    assert agreed(a=info(Cyst=(ONE, ICD_A)), b=info(Zyste=(ICD_A, OTHER))).codes == {
        "Pneumomediastinum": (ICD_A, ONE, OTHER)
    }, "and so it is the built-in class of one of them"


def test_differing_codes_of_one_name_are_refused_with_both_sites_and_codes() -> None:
    text = refusal(alpha=info(Cyst=ONE), beta=info(cyst=TWO))
    assert text.startswith("'Cyst' is RADLEX:RID1 at alpha and RADLEX:RID2 at beta; correct the [data] codes")


def test_a_chain_that_contradicts_itself_is_refused() -> None:
    text = refusal(a=info(Cyst=(ONE, ICD_A)), b=info(Zyste=(ONE, ICD_B)))
    assert text.startswith(
        "'Cyst' (I10:Q10, a) and 'Zyste' (I10:Q11, b) are different classes by these codes, but the "
        "same class by RADLEX:RID1;"
    )
    longer = refusal(a=info(X=(ONE, "SCT:60046008")), b=info(Y=(ONE, ICD_A)), c=info(Z=(ICD_A, OTHER)))
    assert "SCT:60046008" in longer
    assert OTHER in longer


def test_a_built_in_code_of_another_class_is_refused_and_only_that_site() -> None:
    sites = {"a": info(Pneumothorax=OTHER), "b": info(Mass="")}
    (why,) = unfit(sites).values()
    assert why.startswith(
        "'Pneumomediastinum' (Suture's table, a) and 'Pneumothorax' (a) are the same class by SCT:16838000, "
    )
    assert unfit({"a": info(PTX=(PTX, "I10C:J90"))}).keys() == {"a"}, (
        "Pneumothorax by one, effusion by the other"
    )


def test_a_site_may_know_better_than_the_built_in_code() -> None:
    own = "I10C:J93.83"
    registry = agreed(a=info(Pneumothorax=own), b=info(Pneumothorax=""), c=info(PTX=PTX))
    assert registry.labels == ("Pneumothorax",)
    assert registry.codes == {"Pneumothorax": (own, PTX)}
    assert unfit({"a": info(Pneumothorax=own)}) == {}
    assert agreed(a=info(PTX=(PTX, own)), b=info(Pneumothorax=own)).labels == ("Pneumothorax",)


def test_sites_that_contradict_each_other_are_refused_though_one_states_the_built_in_code() -> None:
    own, built_in = info(Pneumothorax="I10C:J93.83"), "I10C:J93.9"
    for other in (info(Pneumothorax=built_in), info(PTX=built_in)):
        assert "J93.83 at a and I10C:J93.9 at Suture's table, b" in refusal(a=own, b=other)
    assert unfit({"b": info(PTX=built_in)}, codes={"Pneumothorax": ("I10C:J93.83",)}).keys() == {"b"}


def test_a_code_of_one_class_never_joins_it_to_another_by_the_table() -> None:
    text = refusal(a=info(Foo=(ONE, PTX)), b=info(Pneumonia=ONE))
    assert "'Pneumonia' (b) and 'Pneumothorax' (Suture's table, a) are the same class by" in text


def test_nodules_of_two_organs_stay_two_classes() -> None:
    said = [Statement("Thyroid Nodule", "SCT:27925004", "b")]
    assert one_name(said, ("Nodule",)) == {"Thyroid Nodule": "Thyroid Nodule"}


def test_a_site_that_alone_contradicts_several_is_refused_alone() -> None:
    sites = {"a": info(Cyst=ONE), "b": info(Cyst=ONE), "c": info(Cyst=TWO), "d": info(Zyste=ONE)}
    assert unfit(sites).keys() == {"c"}
    assert unfit({"a": info(Cyst=ONE), "c": info(Cyst=TWO)}) == {}, "of two, neither is known to be wrong"
    assert unfit({"c": info(Cyst=TWO)}, ("Cyst",), codes={"Cyst": (ONE,)}).keys() == {"c"}
    assert unfit(sites | {"e": info(Nodule=OTHER)}).keys() == {"c", "e"}, "each of several"


def test_two_names_of_the_vocabulary_are_never_merged_by_a_slip() -> None:
    text = refusal(a=info(Melanoma=ONE), b=info(Nevus=ONE))
    assert "'Melanocytic Nevus' (b) and 'Melanoma' (a) are the same class by" in text
    one = agree({"a": info(Melanoma=ONE), "b": info(Nevus=ONE)}, Agreement((), {"Nevus": "Melanoma"}))
    assert one.labels == ("Melanoma",), "but a person can"


def test_two_classes_of_one_site_that_others_codes_make_one_stop_the_run() -> None:
    sites = {"a": info(Cyst=ONE, Hole=ICD_A), "b": info(Zyste=(ONE, ICD_A))}
    with pytest.raises(ClassConflict, match=r"different classes of one site; correct the \[data\] codes"):
        agree(sites, Agreement())
    assert unfit(sites) == {}, "either may be wrong"


def test_no_site_is_refused_because_of_a_code_that_another_one_states() -> None:
    honest = {
        "h1": info(Zebra="", Pneumothorax=""),
        "h2": info(Zebra="", Pneumothorax=""),
        "h3": info(Mass=""),
    }
    assert unfit({**honest, "z": info(Zebra=PTX)}).keys() == {"z"}
    assert unfit(honest) == {}


def test_an_experiment_keeps_the_names_of_its_classes() -> None:
    assert agreed(("Zyste",), a=info(Cyst=ONE), b=info(Zyste=ONE)).labels == ("Zyste",)
    assert agreed(("Ptx",), a=info(PTX=PTX), b=info(Pneumothorax="")).labels == ("Ptx",)
    gone = agree({"a": info(Cyst=ONE)}, Agreement(("Zyste",), codes={"Zyste": (ONE,)}))
    assert gone.labels == ("Zyste",), "though the site that stated the code has left"
    assert gone.codes == {"Zyste": (ONE,)}


def test_an_experiment_with_both_classes_cannot_merge_them() -> None:
    text = refusal(("Cyst", "Zyste"), a=info(Cyst=ONE), b=info(Zyste=ONE))
    assert "different classes of this experiment" in text
    assert "begin a new experiment" in text


def test_look_alikes_of_one_code_are_one_class_and_need_no_decision() -> None:
    assert agreed(a=info(Lung_Scar=ONE), b=info(Lung_Scra=ONE)).labels == ("Lung Scar",)
    with pytest.raises(FederationError, match="nearly the same"):
        agree({"a": info(Lung_Scar=ONE), "b": info(Lung_Scra="")}, Agreement())


@pytest.mark.complete
def test_a_hostile_site_cannot_make_the_comparison_slow() -> None:
    def steps_for(classes: int) -> int:
        sites = {
            f"s{i}": info(
                **{
                    f"Class {j} of {i}": (f"RADLEX:RID{j + 1}", f"I10:A{j % 100:02d}.{j // 100}")
                    for j in range(classes)
                }
            )
            for i in range(8)
        }
        made, taken = steps(lambda: agree(sites, Agreement(accept=True)))
        assert len(made.labels) == classes
        return taken

    assert steps_for(200) < 2.5 * steps_for(100)
