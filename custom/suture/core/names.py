"""Checks of names that other parties choose: of sites, experiments and classes.

They appear in paths, logs and reports.

FLARE's own check takes ``"x\\n"`` and names of 300 characters, so each is checked wherever it enters.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache

from suture.core.errors import ConfigError, LabelError
from suture.core.printable import JOINERS, escaped, printable

LONGEST = 200
"""Largest number of characters of a class name."""

SIGNS = " -_/()+,.&'<>=:%\u2044\u00b7\u05f3\u05f4\u0f0b\u30fb"
"""Other characters of a class name. The last six are the slash of ``½``, and signs that words of Catalan,
Hebrew, Tibetan and Japanese have inside (Unicode Standard Annex 31, table 3a)."""

_LEADING = frozenset("$@%")

_ASCII = re.compile(r"[A-Za-z0-9 \-_/()+,.&'<>=:%]*")
"""Names without another character, which most are: found many times as fast."""

_HIDDEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Letters and marks that nobody sees (Unicode's Default_Ignorable_Code_Point)."""

_JOINING = frozenset(
    {
        *("ARABIC", "SYRIAC", "MANDAIC", "NKO", "MONGOLIAN", "DEVANAGARI", "BENGALI", "GURMUKHI", "GUJARATI"),
        *("ORIYA", "TAMIL", "TELUGU", "KANNADA", "MALAYALAM", "SINHALA", "KHMER", "MYANMAR", "TIBETAN"),
    }
)
"""The scripts whose words have joiners, as Unicode's names of their letters begin."""

_VIRAMA = 9
"""Unicode's combining class of the signs that take a consonant's vowel."""

_PLAIN = r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,%d}"
_SITE = re.compile(_PLAIN % 63)
_EXPERIMENT = re.compile(_PLAIN % 127)
_RULE = "letters a-z and A-Z, digits, '.', '_' and '-', not starting with '.'"


def check_sites(names: Iterable[str]) -> None:
    """Check site names, which become file names.

    Raises:
        ConfigError: names the first one that cannot be used.
    """
    for name in names:
        if not _SITE.fullmatch(name):
            raise ConfigError(f"{name[:80]!r} is not a valid site name; use at most 64 {_RULE}")
        if name == "all":
            raise ConfigError("'all' is reserved for all sites together; choose another site name")


def check_experiment(name: str) -> str:
    """Check and return the name of an experiment, which becomes the name of the folder of its states.

    Raises:
        ConfigError: it cannot be used; the user gives it as last part of ``suture run --out`` or as
            ``suture export --experiment``.
    """
    if not _EXPERIMENT.fullmatch(name):
        raise ConfigError(
            f"{name[:80]!r} is not a valid name of an experiment (the last part of --out, or `suture "
            f"export --experiment`); use at most 128 {_RULE}"
        )
    return name


def check_job(name: str) -> str:
    """Check and return the name of a job, which becomes a part of the names of files and folders.

    Raises:
        ConfigError: it cannot be used.
    """
    if not _EXPERIMENT.fullmatch(name):
        raise ConfigError(f"{name[:80]!r} is not a valid name of a job; use at most 128 {_RULE}")
    return name


def as_job(text: str) -> str:
    """Return a text, such as the name of a folder, as a name of a job, with '_' for other characters."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text)[:64].lstrip(".") or "study"


def shown_name(name: object) -> str:
    """Return the name of a job or site that another party chose, quoted if Suture would refuse it."""
    text = str(name)
    return text if _EXPERIMENT.fullmatch(text) else f"{printable(text, 80)!r} (no valid name)"


def check_label(name: str, spelled: str | None = None) -> str:
    """Check and return the name of a class: one line of letters, marks and digits of any script, and `SIGNS`.

    Class names stand in files that programs interpret: as an expression where one begins with ``$``, as a
    reference where one begins with ``@`` or ``%`` (MONAI). Characters that nobody sees make two names look
    equal, or one name look like another.

    Args:
        spelled: the spelling that the user knows, for the message.

    Raises:
        LabelError: it cannot be used; says which character, and what to do.
    """
    if why := _fault(name):
        spelled = name if spelled is None else spelled
        shown = f"{spelled[:80]!r}{'…' if len(spelled) > 80 else ''}"
        raise LabelError(f"{shown} is not a label name: {why}")
    return name


def without_signs(text: str) -> str:
    """Return a text without the characters that a class name may not have.

    >>> without_signs("Pleural effusion?"), without_signs("$Mass [left]")
    ('Pleural effusion', 'Mass left')
    """
    return " ".join("".join(c if _usable(c) else " " for c in text).split()).lstrip("".join(_LEADING) + " ")


def _fault(name: str) -> str:
    """Return why a name is not that of a class; an empty text where it is."""
    if len(name) > LONGEST:
        return f"it has {len(name)} characters; at most {LONGEST} are allowed"
    if name[:1] in _LEADING:
        return f"it begins with {name[0]!r}, which a spreadsheet would run as a formula; rename the class"
    if name != name.strip():
        return "it begins or ends with a space; remove it"
    for at, c in enumerate("" if _ASCII.fullmatch(name) else name):
        if c in JOINERS and not _joins(name, at):
            return f"it has {_described(c)} where its script does not need it; remove it"
        if not _usable(c):
            return f"it has {_described(c)}; rename the class with letters, digits, spaces and {SIGNS[1:16]}"
    return "" if any(c.isalnum() for c in name) else "give it at least one letter or digit"


@lru_cache(maxsize=10_000)
def _usable(c: str) -> bool:
    """Whether a class name may have a character."""
    letter = unicodedata.category(c)[0] in "LMN" and not _HIDDEN.match(c)
    return letter or c in SIGNS or c in JOINERS


def _joins(text: str, at: int) -> bool:
    """Whether a joiner is where a script needs it: between two letters, or after a virama (RFC 5892, A.1)."""
    before, after = _script(text[at - 1 : at]), _script(text[at + 1 : at + 2])
    return before in _JOINING and (before == after or unicodedata.combining(text[at - 1]) == _VIRAMA)


def _script(c: str) -> str:
    """Return the script of a letter or mark, as its name begins; empty for another character."""
    return unicodedata.name(c, "").split(" ")[0] if c and unicodedata.category(c)[0] in "LM" else ""


def _described(c: str) -> str:
    """Return a character for a message: as it is where it is visible, and its number and name."""
    code = f"U+{ord(c):04X}"
    if unicodedata.category(c)[0] in "PS":
        return f"the character {c!r} ({code})"
    kind = "control character" if unicodedata.category(c) == "Cc" else "character"
    return f"the {kind} {code}" + (f" ({known})" if (known := unicodedata.name(c, "")) else "")


def check_value(text: str) -> str:
    """Check and return a value of an attribute: one printable line.

    Raises:
        LabelError: it cannot be used; says why.
    """
    if len(text) > LONGEST or escaped(text) != text or not text.strip():
        raise LabelError(
            f"{text[:80]!r} cannot be the value of an attribute; write at most {LONGEST} printable characters"
        )
    return text
