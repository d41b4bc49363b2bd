"""Errors for users: each message says what is wrong and what to do about it."""

from __future__ import annotations

import difflib
import errno
import reprlib
from collections.abc import Collection, Iterable

from suture.core.escaping import printable


class SutureError(Exception):
    """Base of every expected failure. The command line prints it without a traceback and exits non-zero."""


class ConfigError(SutureError):
    """A configuration, job or command line that cannot be used."""


class CodeMismatch(ConfigError):
    """A job that another version of the package created than the one that runs it."""


class InUse(ConfigError):
    """A folder that another process is using.

    Args:
        folder: the folder.
        process: number of the process, as text; empty where it is not known.
    """

    def __init__(self, folder: object, process: str = "") -> None:
        self.who = f" (process {process})" if process else ""
        super().__init__(
            f"another process is using {folder}{self.who}; wait for it or end it, then try again"
        )


class DiskError(SutureError, OSError):
    """A file or folder that cannot be written: ``DiskError(errno, strerror, path)``.

    It is an `OSError` too, so that code which looks at `errno` needs to know nothing of it.
    """

    def __str__(self) -> str:
        remedy = _REMEDIES.get(self.errno or 0, "check that disk, then try again")
        return f"{self.filename}: {self.strerror}; {remedy}"


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The system's numbers of a full disk, a full quota and a file that is too large."""

LOCKED = (errno.EROFS, errno.EACCES, errno.EPERM)
"""The system's numbers of a read-only disk and of missing rights."""

MISPLACED = (errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG)
"""The system's numbers of a place where no such file or folder can be made."""

_REMEDIES = {
    **dict.fromkeys(FULL, "make room there, then try again"),
    **dict.fromkeys(LOCKED, "make it writable, or choose another folder"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "create its folder, or choose another folder"),
    **dict.fromkeys((errno.EEXIST, errno.EISDIR), "choose another name, or remove the file of this name"),
    errno.ENAMETOOLONG: "choose a shorter name",
}


class DataError(SutureError):
    """A data set that cannot be read; names the site, file, row or class."""


class LabelError(SutureError):
    """A label set that is empty, ambiguous or not agreed."""


class RejectedUpdate(SutureError):
    """A message that does not match what its method declares; it never reaches the global model.

    Its text may quote the message, hence it is `printable`.
    """

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


class RescueFactorError(SutureError):
    """A rescue factor (Fed-MAS) that cannot weight a mean because it is not positive and finite."""


class FederationError(SutureError):
    """A federation that cannot continue."""


def is_bug(error: BaseException) -> bool:
    """Whether whoever mends an error needs its traceback: it is neither one for users nor the system's."""
    return not isinstance(error, (SutureError, OSError))


class Aborted(FederationError):
    """A federation that its transport has ended, or is about to end: nothing more is computed."""


class _Values(reprlib.Repr):
    """Shows true and false as files and command lines have them."""

    def repr_bool(self, value: bool, level: int) -> str:  # noqa: ARG002
        return str(value).lower()


_SHORT = _Values()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 200, 200


_LIST, _FEW = 4_000, 20
"""Most characters of a list of known names, which may come out of a file; and names shown of a longer one."""


def show_value(value: object) -> str:
    """Return a value for a message: printable, and short whatever it is."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python refuses to print the longest integers
        return f"a {type(value).__name__} too long to print"


def as_word(name: object) -> str:
    """Return a name for a message, without quotes: printable and short."""
    return show_value(name) if isinstance(name, bool) else show_value(str(name))[1:-1]


def nearest(name: str, options: Iterable[str], listed: Iterable[str] | None = None) -> str:
    """Return the hint of an "unknown name" message: the nearest valid word, or else those that contain it, or
    all (of `listed`) if short, or else the nearest.
    """
    known, word = sorted(options), name.casefold()
    spelled = {option.casefold(): option for option in reversed(known)}  # the first of those alike
    if close := difflib.get_close_matches(word[:200], spelled, n=1, cutoff=0.6):
        return f"did you mean {show_value(spelled[close[0]])}?"
    names = known if listed is None else sorted(listed)
    with_it = [option for option in names if word and word in option.casefold()]
    with_it.sort(key=lambda option: not option.casefold().startswith(word))
    text = ", ".join(map(as_word, with_it or names))
    if with_it:
        return f"{len(with_it)} contain it: {text if len(text) <= _LIST else f'{text[:_LIST]} ...'}"
    if len(text) <= _LIST:
        return f"known: {text}"
    few = difflib.get_close_matches(name[:200], names, n=_FEW, cutoff=0)
    return f"the nearest of {len(names):,}: {', '.join(map(as_word, few))}"


def unknown(kind: str, name: str, options: Iterable[str], listed: Iterable[str] | None = None) -> ConfigError:
    """Return a `ConfigError` for a word that is not among `options`.

    >>> str(unknown("method", "surgcal", ["surgical", "vanilla"]))
    "unknown method 'surgcal'; did you mean 'surgical'?"
    """
    return ConfigError(f"unknown {kind} {show_value(name)}; {nearest(name, options, listed)}")


def check_known(kind: str, name: str, options: Collection[str]) -> None:
    """Check that a word is among `options`.

    Raises:
        ConfigError: `unknown`.
    """
    if name not in options:
        raise unknown(kind, name, options)
