"""ISIC 2019 as six centres: FLamby's Fed-ISIC2019 (du Terrail et al., 2022) and the lists of Fed-MAS (2023).

`table` is either `flamby_train_test_split.csv`, the images of all centres with a column per class, or one
centre's training list `train_flamby_isic_fl_<centre>_<fold>.csv`, the class as a number. Either may be
gzipped. Of HAM10000's ``akiec`` these tables say whether it is actinic keratosis or squamous cell carcinoma.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from suture.core.errors import DataError
from suture.core.labels import LabelSet
from suture.data.dataset import ReleaseConfig
from suture.data.published import PublishedTable
from suture.data.readers import DataSet
from suture.data.reading import Reading, Sheet, fault, read_sheet, restrict, row_faults, rows_text
from suture.data.split import Codes, classes, divide, stratify
from suture.data.table import SPLITS, Table
from suture_papers.public_data import one_class
from suture_papers.skin_lesions.isic import one_hot

SPELLINGS = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
"""The eight classes as the tables write them, in the order of their numbers."""

LABELS = LabelSet.of(SPELLINGS, label_type="multiclass")

TRUTH = "flamby_train_test_split.csv"
LESIONS = {"ISIC_2019_Training_Metadata.csv": "image", "HAM10000_metadata.csv": "image_id"}
"""The official files that say which images show one lesion, and their columns of images."""

VALIDATION = 0.1
"""The share of the training images that is held out: the validation and test files of Fed-MAS are one."""

TONES = ("light", "dark")

NUMBERS = {str(i): i for i in range(len(SPELLINGS))}
"""The column of each `dx` of a list."""


_KEY = 'dataset = "flamby_isic"'


class FlambyConfig(ReleaseConfig):
    """ISIC 2019 as FLamby divides it; `table` is flamby_train_test_split.csv or one centre's training list.

    Attributes:
        split: ``official`` follows `table` for training and testing, and holds out a tenth of each class of
            the training images for validation; ``lesions`` and ``images`` cut each class 70/10/20.
        lists: the folder of the official file that names the lesion of each image. By default, the folder of
            `table`.
    """

    dataset: Literal["flamby_isic"] = "flamby_isic"
    split: Literal["official", "lesions", "images"] = "official"

    def idle(self) -> dict[str, str]:
        """As in the base, and `lists` where the split reads none."""
        remedy = f'with split = "{self.split}"; remove it, or write split = "lesions"'
        return super().idle() | ({} if self.split == "lesions" else {"lists": remedy})


def read_flamby(config: FlambyConfig) -> Reading:
    """Reads either table; each image is of exactly one of the eight classes.

    With `split = "official"`, all images of a centre's list train, and the other table has a column of
    training and testing; a tenth of each class of the training images is for validation. Images of one
    lesion may then be in several splits, as in FLamby's own. With ``lesions`` and ``images`` each class is
    cut 70/10/20; an image whose lesion is unknown counts as a lesion of its own.

    Raises:
        DataError: a table cannot be read, or the file of lesions is missing.
        ConfigError: `labels` names something that is not among the eight.
        LabelError: `labels` names one class twice.
    """
    sheet = read_sheet(config.table)
    if "image_name" in sheet.header:
        names, words = sheet.column("image_name", _KEY), sheet.column("dx", _KEY)
        y, faults = one_class(sheet, words, NUMBERS, NUMBERS, "dx")
    elif "image" in sheet.header:
        names, (y, faults) = sheet.column("image", _KEY), one_hot(sheet, SPELLINGS, _KEY)
    else:
        raise DataError(
            f"{sheet.path} has the columns neither of {TRUTH} nor of a centre's list; correct [data] table"
        )
    images = [_file_name(name) for name in names]
    lesions = _lesions(names, config) if config.split == "lesions" else images
    table = Table(LABELS, tuple(images), tuple(lesions), y, ("",) * len(images), config.root)
    if config.split == "official":
        split, more = _official(sheet, table, config.seed)
        faults += more
    else:
        split = divide(table, (0.7, 0.1, 0.2), config.seed)
    # A lesion has one split by construction, and an image without one is its own.
    faults += row_faults(sheet, images, ["lesion"] * len(images), [""] * len(images))
    table = Table(LABELS, table.images, table.patients, y, split, config.root)
    return Reading(restrict(table, config), tuple(faults))


def centres(path: Path) -> dict[str, int]:
    """The centre of each image of `flamby_train_test_split.csv`: 0 BCN, 1 Vienna's MoleMax, 2 its other
    images, 3 Rosendahl, 4 MSK, 5 Vienna's older ones.

    Raises:
        DataError: the file cannot be read, or a centre is no number.
    """
    sheet = read_sheet(path)
    cells = sheet.column("center", _KEY)
    bad = [number for cell, number in zip(cells, sheet.numbers, strict=True) if not cell.isdecimal()]
    if bad:
        raise DataError(f"{path} {rows_text(bad)}: column 'center' is not a number; use the official table")
    names = sheet.column("image", _KEY)
    return {_file_name(name): int(cell) for name, cell in zip(names, cells, strict=True)}


def list_images(path: Path) -> frozenset[str]:
    """The images of a centre's training list.

    Raises:
        DataError: the file cannot be read.
    """
    sheet = read_sheet(path)
    return frozenset(_file_name(name) for name in sheet.column("image_name", _KEY))


def tones(path: Path) -> dict[str, str]:
    """The skin tone, light or dark, of each image of a CSV with the columns `image` and `skin_tone`.

    Raises:
        DataError: the file cannot be read, or a cell is neither of the two.
    """
    sheet = read_sheet(path)
    names = sheet.cells(sheet.position("image", "a table of skin tones"))
    words = [word.lower() for word in sheet.cells(sheet.position("skin_tone", "a table of skin tones"))]
    for word, number in zip(words, sheet.numbers, strict=True):
        if word not in TONES:
            raise DataError(f"{path} row {number}: unknown skin_tone {word!r}; write light or dark")
    return {_file_name(name): word for name, word in zip(names, words, strict=True)}


def with_validation(
    table: Table, trained: NDArray[np.bool_], seed: int, strata: Codes | None = None
) -> tuple[str, ...]:
    """Return the split of each row: a tenth of each stratum of the training rows validates, other rows test.

    Args:
        strata: by default the classes.
    """
    rows = table.rows(trained)
    of = classes(rows.y) if strata is None else strata[trained]
    part = stratify(of, (1 - VALIDATION, VALIDATION), seed, rows.patients)
    split = np.full(len(table), "test", dtype="<U10")
    split[trained] = np.array(SPLITS)[part]
    return tuple(split.tolist())


def _official(sheet: Sheet, table: Table, seed: int) -> tuple[tuple[str, ...], list[str]]:
    """The split of each row, and a fault for each word that is neither train nor test."""
    words = ["train"] * len(table) if "image_name" in sheet.header else sheet.column("fold", _KEY)
    bad = [word not in ("train", "test") for word in words]
    split = with_validation(table, np.array([word == "train" for word in words]), seed)
    return split, fault(sheet, bad, "column 'fold' must be train or test; use the official table")


def _lesions(names: list[str], config: FlambyConfig) -> list[str]:
    """The lesion of each image, or the image itself."""
    folder = config.lists_folder
    for name, column in LESIONS.items():
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                sheet = read_sheet(path)
                of = dict(zip(sheet.column(column, _KEY), sheet.column("lesion_id", _KEY), strict=True))
                return [of.get(image) or _file_name(image) for image in names]
    raise DataError(
        f"{folder} has neither {' nor '.join(LESIONS)}; set [data] lists to the folder of one, or write "
        'split = "images"'
    )


def _file_name(name: str) -> str:
    return name if not name or name.endswith(".jpg") else f"{name}.jpg"


FLAMBY = DataSet(
    FlambyConfig,
    read_flamby,
    "ISIC 2019 as FLamby divides it: its split CSV, or the list of one of six centres",
    (
        PublishedTable("ISIC 2019 of FLamby", ("image", *SPELLINGS, "center", "fold"), {"split": "official"}),
        PublishedTable(
            "ISIC 2019",
            ("image", *SPELLINGS, "UNK"),
            {"split": "images"},
            {name: {"split": "lesions"} for name in LESIONS},
        ),
    ),
)
