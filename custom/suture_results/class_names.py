"""The classes of a saved model under the names that data have for them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import Field
from pydantic.dataclasses import dataclass as validated

from suture.core.errors import LabelError
from suture.core.files import read_json
from suture.core.ontology import GENERAL, Stated, codes_of
from suture.core.validation import OPEN, parse


@validated(frozen=True, config=OPEN)
class _Code:
    system: str
    code: str


@validated(frozen=True, config=OPEN)
class _Facts:
    """Of model.json: the classes, their codes, and what its sites call them where that is another name."""

    labels: tuple[str, ...]
    codes: dict[str, tuple[_Code, ...]] = Field(default_factory=dict)
    site_names: dict[str, str] = Field(default_factory=dict)


def class_names(folder: Path, names: Iterable[str], stated: Stated) -> dict[str, str]:
    """Return the model's name of each class of some data: the same, else a site's for it, else by a code.

    A class that the model does not have keeps its name.

    Args:
        folder: of the model.
        names: canonical names of the data's classes.
        stated: the codes that the data state of them.

    Raises:
        ConfigError: model.json is damaged.
        LabelError: two of the names are one class of the model, or the codes of one are of two.
    """
    facts = parse(_Facts, read_json(folder / "model.json"), str(folder / "model.json"))
    by_code = {f"{one.system}:{one.code}": label for label, of in facts.codes.items() for one in of}
    found: dict[str, str] = {}
    for name in names:
        known = name if name in facts.labels else facts.site_names.get(name)
        if known not in facts.labels:
            codes = {*map(str, codes_of([name], stated).get(name, ()))} - GENERAL
            meant = sorted({by_code[code] for code in codes & by_code.keys()})
            if len(meant) > 1:
                raise LabelError(f"the codes of {name!r} are of {meant[0]!r} and {meant[1]!r} in {folder}")
            known = meant[0] if meant else name
        if (other := next((own for own, of in found.items() if of == known), None)) is not None:
            raise LabelError(f"{other!r} and {name!r} of the data are both the class {known!r} of {folder}")
        found[name] = known
    return found
