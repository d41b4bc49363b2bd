r"""Label sets: names, not positions, identify classes.

A label set is an ordered tuple of canonical names. Spellings of a name that differ in Unicode form, case,
white space or underscores, or are synonyms in the vocabulary, have one canonical name. So sites agree on
the meaning of a row of the head without any exchange.

Names that other parties choose (of sites, experiments, classes) appear in paths, logs and reports. FLARE's
own check takes ``"x\n"`` and names of 300 characters, so each is checked wherever it enters.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal

from suture.core.errors import ConfigError, LabelError
from suture.core.escaping import JOINERS, escape_text, printable
from suture.core.vocabulary import CANONICAL, SYNONYMS, rows

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
            return f"it has {_describe(c)} where its script does not need it; remove it"
        if not _usable(c):
            return f"it has {_describe(c)}; rename the class with letters, digits, spaces and {SIGNS[1:16]}"
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


def _describe(c: str) -> str:
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
    if len(text) > LONGEST or escape_text(text) != text or not text.strip():
        raise LabelError(
            f"{text[:80]!r} cannot be the value of an attribute; write at most {LONGEST} printable characters"
        )
    return text


LabelType = Literal["multilabel", "multiclass"]


@lru_cache(maxsize=20_000)  # the names of a federation are asked for again and again
def key(name: str) -> str:
    """Return the key that spellings of one name share: NFKC, case-folded, with one dash, apostrophe, space.

    A slash becomes "or": a class name is never a path.
    """
    text = re.sub(r"[/\\]", " or ", unicodedata.normalize("NFKC", name)).replace("_", " ")
    text = "".join("-" if unicodedata.category(c) == "Pd" else c for c in text).replace("\u2019", "'")
    # Folding takes some letters, such as U+0390, apart again.
    return " ".join(unicodedata.normalize("NFKC", text.casefold()).split())


_ACRONYMS = {row["word"].casefold(): row["word"] for row in rows("acronyms")}

_KNOWN: dict[str, str] = {key(name): name for name in CANONICAL} | {
    key(spelling): name for spelling, name in SYNONYMS.items()
}

MOST_SYNONYMS = 10_000
"""Largest number of entries of a site's own table: as many as there may be classes."""


class Synonyms(dict[str, str]):
    """A site's own table, spelling to name, whose keys are made once, not for each name that is looked up."""

    @cached_property
    def by_key(self) -> dict[str, str]:
        """The names by the keys of the spellings."""
        return {key(spelling): target for spelling, target in self.items()}


def canonical(name: str, synonyms: Mapping[str, str] | None = None) -> str:
    """Return the canonical name of a label.

    Args:
        name: any spelling, e.g. ``"Pleural_Thickening"``.
        synonyms: a site's own table, spelling to name; it has precedence over the built-in vocabulary.
            For many names, give `Synonyms`.

    Returns:
        the vocabulary's name or, for a name that is not in it, its words with capital first letters, and
        acronyms of the vocabulary in capitals. It is the same for all spellings of sites that do not know of
        each other, so none of them can be kept as it is.

    Raises:
        LabelError: it cannot be the name of a class; see `suture.core.labels.check_label`.

    >>> canonical("effusion"), canonical("Pleural_Thickening"), canonical("my  finding")
    ('Pleural Effusion', 'Pleural Thickening', 'My Finding')
    """
    k = key(name)
    if synonyms:
        own = (synonyms if isinstance(synonyms, Synonyms) else Synonyms(synonyms)).by_key
        if k in own and key(own[k]) != k:
            return canonical(own[k])
    found = _KNOWN.get(k) or " ".join(map(_write_name, k.split(" ")))
    return check_label(found, spelled=name)


def _write_name(word: str) -> str:
    """Return a word of a key as it is written: with a capital first letter, and a Greek final sigma."""
    return _ACRONYMS.get(word) or word[:1].upper() + re.sub(r"(?<=\w)\u03c3$", "\u03c2", word[1:])


def canonical_or_none(name: str, synonyms: Mapping[str, str] | None = None) -> str | None:
    """Return the canonical name of a label; None for a text that cannot be one."""
    try:
        return canonical(name, synonyms)
    except LabelError:
        return None


def check_spelling(name: str) -> str:
    """Check and return a name of a class as another party spells it: it and its canonical name can be used.

    The canonical name may be longer: one character of Arabic calligraphy (U+FDFA) becomes 18.

    Raises:
        LabelError: one of them cannot be used; says why.
    """
    canonical(check_label(name))
    return name


@dataclass(frozen=True)
class LabelSet:
    """An ordered set of canonical class names.

    Attributes:
        names: canonical, unique, at least one.
        label_type: ``multilabel`` (any subset is true) or ``multiclass`` (exactly one is).
        one_sided: classes of a site that it does not annotate, each with its annotated classes below: where
            one of these is present, so is the class, and where all are absent, it is unknown.

    Raises:
        LabelError: there is no name, or a name appears twice.
    """

    names: tuple[str, ...]
    label_type: LabelType = "multilabel"
    one_sided: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    _index: dict[str, int] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        if not self.names:
            raise LabelError("the label set is empty; name at least one label column")
        index = {name: i for i, name in enumerate(self.names)}
        if len(index) != len(self.names):
            twice = min(name for name, times in Counter(self.names).items() if times > 1)
            raise LabelError(f"label {twice!r} appears twice in one label set; remove one")
        object.__setattr__(self, "_index", index)

    @classmethod
    def of(
        cls,
        spellings: Sequence[str],
        synonyms: Mapping[str, str] | None = None,
        label_type: LabelType = "multilabel",
    ) -> LabelSet:
        """Return a label set from any spellings, in their order.

        Raises:
            LabelError: two spellings collapse into one canonical name.
        """
        seen: dict[str, str] = {}
        for spelling in spellings:
            name = canonical(spelling, synonyms)
            if name in seen:
                raise LabelError(
                    f"labels {seen[name]!r} and {spelling!r} both mean {name!r}; remove or rename one of them"
                )
            seen[name] = spelling
        return cls(tuple(seen), label_type)

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def index(self, name: str) -> int:
        """Return the position of a class.

        Raises:
            LabelError: the class is not in this set.
        """
        if name not in self._index:
            raise LabelError(f"class {name!r} is not among {', '.join(self.names)}")
        return self._index[name]

    def align(self, to: LabelSet) -> list[int]:
        """Return for each class of `to` its position in this set, or -1 where this set lacks it."""
        return [self._index.get(name, -1) for name in to.names]

    @property
    def annotated(self) -> tuple[str, ...]:
        """The names of the classes that are not one-sided."""
        return tuple(name for name in self.names if name not in self.one_sided)


def union(sets: Iterable[LabelSet]) -> LabelSet:
    """Return the sorted union C of the sites' label sets (Surgical Aggregation, Sec. 3.1.1).

    Raises:
        LabelError: there is no set, or label types differ.
    """
    members = list(sets)
    types = {s.label_type for s in members}
    if len(types) > 1:
        raise LabelError(
            "some sites are multilabel and some multiclass; all sites of a federation need the same label "
            "type"
        )
    names = sorted({name for s in members for name in s.names})
    return LabelSet(tuple(names), members[0].label_type if members else "multilabel")


_ANY = (
    r"(label|target|class|category|outcome|output|result|diagnosis|diagnose|dx|disease|pathology|condition"
    r"|finding|annotation|ground truth|gt|positive|negative|abnormality|case|befund|klasse|diagnostic"
    r"|diagnostico)(s|es)?"
)

_VALUES = r"( ?\((\d|[ynpb]|yes|no|true|false|binary|pos|neg|positive|negative|or|vs|[ ,;:=|-])+\))?"

_GENERIC = re.compile(
    rf"((is|has|any|true|final|binary|image) )*{_ANY}"
    rf"( ({_ANY}|variable|value|name|flag|id|code|column|binary))*{_VALUES}[ -]?(\d*|(?<= )[a-z])"
    r"|(is|has|any) (abnormal|positive|negative)|\d+|[a-zα-ωа-я]"
)


def is_generic(name: str) -> bool:
    """Whether a class name, such as "Label", does not say what is meant: equal ones need not be one class.

    >>> is_generic("Label"), is_generic("target_1"), is_generic("Class I Malocclusion")
    (True, True, False)
    >>> is_generic("Label (0/1)"), is_generic("has_disease"), is_generic("Abnormal")
    (True, True, False)
    """
    words = key(name)
    return words not in _KNOWN and _GENERIC.fullmatch(words) is not None


_WINDOW = 20
"""Number of following names, in each of two orders, that a name is compared with."""

_NUMBERS = re.compile(r"0(?!\d)|[1-9]\d*|\b[ivx]+\b")

_COMPARED = 50_000
"""Number of comparisons in each order: of more names than any hospital has, each is compared with fewer."""


def lookalikes(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return pairs of different names that are nearly the same, one of which may be a typo.

    Two names of the built-in vocabulary are never a pair: they are known to differ. Nor are two that differ
    in a number alone, as grades do, unless the name says nothing else. Names come from other parties, so the
    time is linear in their number: each is compared with its neighbours in the order of their beginnings and
    of their ends (Hernandez, Stolfo 1995, the sorted-neighbourhood method).
    """
    keys = {name: key(name) for name in names}
    window = min(_WINDOW, 1 + _COMPARED // max(len(keys), 1))
    near = {
        (min(a, b), max(a, b))
        for order in (sorted(keys), sorted(keys, key=lambda name: keys[name][::-1]))
        for i, a in enumerate(order)
        for b in order[i + 1 : i + 1 + window]
    }
    return [
        (a, b)
        for a, b in sorted(near)
        if not (keys[a] in _KNOWN and keys[b] in _KNOWN)
        and (is_generic(a) or _NUMBERS.sub("#", keys[a]) != _NUMBERS.sub("#", keys[b]))
        and _within(keys[a], keys[b], _tolerance(a, b))
    ]


def _tolerance(a: str, b: str) -> int:
    """Return the largest edit distance of a typo: 0 in very short names, 1 in short ones, 2 in long ones."""
    shorter = min(len(a), len(b))
    return 0 if shorter < 4 else 1 if shorter < 8 else 2


def _within(a: str, b: str, limit: int) -> bool:
    """Whether the optimal string alignment distance is at most `limit`.

    It counts insertions, deletions, substitutions and transpositions. What two names have in common at their
    beginning costs nothing, so at most ``4 ** limit`` ways to go on are tried.
    """
    if abs(len(a) - len(b)) > limit or not _alike_in_part(a, b, limit):
        return False
    at = _common(a, b)
    a, b = a[at:], b[at:]
    if not (limit and a and b):
        return max(len(a), len(b)) <= limit
    left = limit - 1
    if a[:2] == b[1::-1] and _within(a[2:], b[2:], left):
        return True
    return _within(a[1:], b[1:], left) or _within(a[1:], b, left) or _within(a, b[1:], left)


def _alike_in_part(a: str, b: str, limit: int) -> bool:
    """Whether one of ``2 limit + 1`` parts of a name is in the other one: an edit changes two at most."""
    size = len(a) // (2 * limit + 1)
    starts = range(0, size * (2 * limit + 1), size or 1)
    return not size or any(a[i : i + size] in b[max(i - limit, 0) : i + size + limit] for i in starts)


def _common(a: str, b: str) -> int:
    """Return the length of the common beginning: comparing slices is fast, and most names differ early."""
    low, high, most = 0, 1, min(len(a), len(b))
    while high < most and a[low:high] == b[low:high]:
        low, high = high, 2 * high
    high = min(high, most)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
    return low
