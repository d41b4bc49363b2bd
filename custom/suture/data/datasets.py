"""The words that a `suture.toml` has for formats of data, and what each of them allows."""

from __future__ import annotations

from typing import Literal

from suture.core.labels import LabelType

Images = Literal["hospital", "nih", "chexpert", "mimic", "isic2018", "flamby_isic", "hyperkvasir"]
Texts = Literal["openi", "eicu", "mimic_reports", "mtsamples"]
Dataset = Literal[Images, Texts]
"""A hospital's own table may also hold text."""

SplitRule = Literal["column", "official", "patients", "test", "lesions", "images", "folds"]

SPLIT_RULES: dict[Dataset, tuple[SplitRule, ...]] = {
    "hospital": ("column", "patients"),
    "nih": ("official", "patients"),
    "chexpert": ("patients", "official"),
    "mimic": ("test", "official", "patients"),
    "isic2018": ("lesions", "images"),
    "flamby_isic": ("official", "lesions", "images"),
    "hyperkvasir": ("folds", "images"),
    "openi": ("patients",),
    "eicu": ("patients",),
    "mimic_reports": ("patients", "test"),
    "mtsamples": ("patients",),
}
"""The ways in which a data set can be divided; the first is the default."""

TASKS: dict[Dataset, tuple[LabelType, ...]] = {
    "hospital": ("multilabel", "multiclass"),
    "nih": ("multilabel",),
    "chexpert": ("multilabel",),
    "mimic": ("multilabel",),
    "isic2018": ("multiclass",),
    "flamby_isic": ("multiclass",),
    "hyperkvasir": ("multiclass",),
    "openi": ("multilabel",),
    "eicu": ("multilabel",),
    "mimic_reports": ("multilabel",),
    "mtsamples": ("multilabel",),
}
"""What the labels of a data set can be; the first is the default."""

EicuText = Literal["admissionDrug", "pastHistory", "medication"]
"""Tables of eICU that a document may be made of, besides the one that names the label."""

EICU_TEXTS: tuple[EicuText, ...] = ("admissionDrug", "pastHistory", "medication")
