"""`suture init`, `suture check` and `suture labels`: a study of one's own hospitals."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from suture.cli.common import Json, Trust, console, emit, print_line
from suture.core.errors import ConfigError, SutureError
from suture.core.escaping import escape_text, number_of, rich

if TYPE_CHECKING:
    from suture.core.ontology import Decision
    from suture_prepare.actions import Checked
    from suture_prepare.description import Answers, Discovery
    from suture_prepare.study_labels import LabelLists

_Study = Annotated[Path, typer.Argument(help="Folder of the study.")]


def init(
    study: _Study,
    site: Annotated[
        list[str], typer.Option("--site", help="NAME=PATH of a site's folder or table. Repeatable.")
    ],
    site_column: Annotated[
        str | None, typer.Option("--site-column", help="Column whose cells name the sites of a table.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Accept every guess without asking.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be written, and write nothing.")
    ] = False,
) -> None:
    """Inspect each site's data, and write its suture.toml and a job."""
    from suture.data.config import CONFIG
    from suture_prepare.description import Answers
    from suture_prepare.new_study import (
        agreed,
        as_toml,
        by_column,
        look,
        place,
        refuse_existing,
        summary,
        write_study,
    )

    sites, rows = _sites(site), dict[str, Answers]()
    if site_column:
        sites, rows = by_column(sites, site_column)
    if not dry_run:
        refuse_existing(study, sites)
        if not yes and not _can_ask():
            raise ConfigError("this is not an interactive terminal; add --yes, or --dry-run to write nothing")

    def show(some: dict[str, Discovery]) -> None:
        for name, guess in some.items():
            if dry_run:
                console.print(f"[bold]{rich(name)}[/]")
                print_line(as_toml(place(guess, study / name)))
            for line in () if dry_run else summary(name, guess, study / name / CONFIG):
                print_line(escape_text(line))

    refused: dict[str, str] = {}
    found = look(sites, rows, refused)
    show(found)
    if not yes and not dry_run:
        answers = {
            name: replace(answer, rows=rows[name].rows if name in rows else None)
            for name, guess in found.items()
            if (answer := _ask(name, guess))
        }
        again = look({name: sites[name] for name in answers}, answers) if answers else {}
        show(again)
        found |= again
    for line in agreed(found)[1]:
        print_line(f"all sites: {line}")
    if not yes and not dry_run:
        typer.confirm("write these files?", default=True, abort=True)
    for path in write_study(study, found) if not dry_run else ():
        print_line(f"written: {path}")
    drafts = [study / name / CONFIG for name, guess in found.items() if guess.is_draft]
    if refused:
        rest = shlex.join(word for name in refused for word in ("--site", f"{name}={sites[name]}"))
        then = "" if dry_run else f"\nthen: suture init {shlex.quote(str(study))} {rest}{' --yes' * yes}"
        raise SutureError("\n".join(refused.values()) + then)
    for path in drafts:
        print_line(f"open: {path} asks what its labels are; answer there")
    if not dry_run:
        print_line(f"next: suture check {shlex.quote(str(study))}")
        print_line(f"then: suture run {shlex.quote(str(study))} --env local")


def _can_ask() -> bool:
    return sys.stdin.isatty()


def _ask(site: str, guess: Discovery) -> Answers | None:
    """Ask about what is doubtful at a site; None where the answers change nothing."""
    from suture.core.labels import is_generic
    from suture_prepare.description import Answers

    keys, no_labels = _classes(site, guess), guess.doubtful
    if len(no_labels) > 1 and _confirm(
        f"{site}: are all of these findings: {', '.join(map(repr, no_labels))}?"
    ):
        no_labels = ()
    no_labels = tuple(name for name in no_labels if not _confirm(f"{site}: is {name!r} a finding?"))
    names = {
        name: finding
        for name in guess.doubtful
        if name not in no_labels and is_generic(name)
        if (
            finding := _ask_person(
                f"{site}: which finding does column {name!r} show? (to be named later: press Enter)"
            )
        )
    }
    patient = "" if guess.has_patients else _patient_column(site, guess)
    if not (no_labels or names or patient or keys):
        return None
    return Answers(patient or None, no_labels, names, keys)


def _classes(site: str, guess: Discovery) -> dict[str, Any]:
    """The keys of [data] for a column whose words, or numbers, are classes or grades by a person's answer."""
    labels = guess.data.get("labels")
    for name, words in guess.offered.items():
        what = f"{site}: column {name!r} has the values {', '.join(words)}"
        if not all(map(str.isdigit, words)):
            if _confirm(f"{what}: are these the classes?", default=not labels):
                return {"finding_column": name}
        elif not labels:
            how = "the first that means present, c where each is a class, or nothing where it is no finding"
            said = _ask_person(f"{what}; write {how}")
            if said in words:
                grades = {word: int(int(word) >= int(said)) for word in words}
                return {"labels": [name], "values": grades}
            if said == "c":
                return {"finding_column": name, "synonyms": {word: f"{name} {word}" for word in words}}
    return {}


def _confirm(question: str, *, default: bool = True) -> bool:
    return typer.confirm(escape_text(question), default=default)


def _ask_person(question: str) -> str:
    return str(typer.prompt(escape_text(question), default="", show_default=False)).strip()


def _patient_column(site: str, guess: Discovery) -> str:
    """The column that a person names; empty where none names the patients."""
    while True:
        name = _ask_person(f"{site}: which column names the patients? (none: press Enter)")
        if not name or name in guess.columns:
            return name
        print_line(f"there is no column {name!r}; the columns are {', '.join(guess.columns)}")


def _sites(given: list[str]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for text in given:
        name, separator, path = text.partition("=")
        if not separator or not path:
            raise ConfigError(f"--site {text!r} has no path; write name=PATH")
        if name in found:
            raise ConfigError(f"--site {name} is given twice; name the sites differently")
        found[name] = Path(path).expanduser()
    if missing := [f"{name}: {path} does not exist" for name, path in found.items() if not path.exists()]:
        raise ConfigError(
            "\n".join([*missing, "give each site's folder with a table and images, or its table"])
        )
    return found


def check(study: _Study, trust: Trust = False, as_json: Json = False) -> None:
    """Check the data of all sites of a study: counts, similar class names, problems.

    Also writes check.html, with a few images of each site as the model sees them.
    """
    from suture_prepare import actions

    done = actions.check(study, trust=trust)
    problems = len(done.problems)
    if as_json:
        emit("check", done)
    else:
        _show(done)
    if problems:
        raise SutureError(f"{study}: {number_of(problems, 'problem')}; correct the study before you run it")
    if not as_json:
        print_line(f"next: suture run {shlex.quote(str(study))} --env local{' --trust' if trust else ''}")


def _show(done: Checked) -> None:
    """Print what a check has found."""
    from suture_prepare.quality import render
    from suture_prepare.study_check import render_matrix

    problems = len(done.problems)
    print_line(f"not ready: {number_of(problems, 'problem')}" if problems else "ready")
    for name, found in done.sites.items():
        console.rule(f"[bold]{rich(name)}")
        console.print(render(found, most=5))
    console.rule("[bold]all sites")
    console.print(render_matrix(done.sites, done.together))
    if done.together.limits:
        print_line("in a federation the sites' limits would round or withhold metrics: see the page, Limits")
    print_line(f"page: {done.page} (data of patients: it stays on this machine)")


def labels(
    study: _Study,
    same: Annotated[
        list[str] | None,
        typer.Option("--same", metavar="NAME=OF", help="NAME is another name of OF. Repeatable."),
    ] = None,
    different: Annotated[
        list[str] | None,
        typer.Option("--different", metavar="NAME=OF", help="NAME and OF are different classes. Repeatable."),
    ] = None,
    child: Annotated[
        list[str] | None,
        typer.Option("--child", metavar="NAME=OF", help="OF becomes the parent of NAME. Repeatable."),
    ] = None,
    by: Annotated[str | None, typer.Option("--by", help="Who decides; required with a decision.")] = None,
    page: Annotated[
        Path | None,
        typer.Option("--page", metavar="FILE", help="Write the atlas as a page (HTML) to print and discuss."),
    ] = None,
    part: Annotated[
        str | None,
        typer.Option("--excerpt", metavar="SITE=FILE", help="Write one site's part of labels.toml."),
    ] = None,
    encoder: Annotated[
        Path | None,
        typer.Option("--encoder", metavar="FOLDER", help="Text encoder: also compares meanings."),
    ] = None,
) -> None:
    """Compare the label lists of the sites of a study, and record decisions about names in labels.toml."""
    from suture.core.labels import canonical
    from suture.core.ontology import LABELS, record, study_atlas, write_excerpt
    from suture_prepare.study_labels import atlas_faults, read_tables, render_lists, study_lists

    tables = read_tables(study)
    lists = study_lists(tables, study_atlas(study), encoder)
    known = {own for names in lists.sites.values() for own in names}
    known.update(canonical(one.name) for one in study_atlas(study).decisions)
    given = {"same": same or (), "different": different or (), "child": child or ()}
    decisions = _decide(given, by, lists, known)
    if decisions:
        record(study, decisions)
        print_line(f"recorded: {study / LABELS}")
        lists = study_lists(tables, study_atlas(study), encoder)
    if wrong := atlas_faults(study, known):
        raise ConfigError("\n".join(wrong))
    console.print(render_lists(lists))
    if page:
        from suture_prepare.atlas_page import write_atlas_page
        from suture_prepare.study_page import job_of

        job, _ = job_of(study)
        title = job.title if job else study.expanduser().resolve().name
        write_atlas_page(page, title, tables, lists, study_atlas(study))
        print_line(f"page: {page} (exact counts: share it with the study's sites only)")
    if part:
        site, _, file = part.partition("=")
        if site not in tables or not file:
            raise ConfigError(f"--excerpt {part!r}: write SITE=FILE with a site of {', '.join(tables)}")
        if Path(file).exists():
            raise ConfigError(f"--excerpt: {file} exists; remove it, or name a new file")
        write_excerpt(Path(file), study_atlas(study), tables[site].labels)
        print_line(f"excerpt for {site}: {file} (names of its classes and their ancestors only)")
    if lists.proposals and not decisions:
        one = lists.proposals[0]
        pair = shlex.quote(f"{one.name}={one.of}")
        words = f"suture labels {shlex.quote(str(study))} --{one.relation} {pair} --by NAME"
        print_line(f"decide, for example: {words} (or --different)")


def _decide(
    given: Mapping[str, Sequence[str]], by: str | None, lists: LabelLists, known: Collection[str]
) -> list[Decision]:
    """Return the decisions that the options of `labels` state.

    Args:
        given: texts of the form NAME=OF, by relation.
        known: the classes of the sites, and of earlier decisions.

    Raises:
        ConfigError: a text names an unknown class or one class alone, makes one of two classes that a site
            has, or nobody is said to decide.
    """
    import datetime

    from suture.core.errors import nearest, unknown
    from suture.core.labels import canonical
    from suture.core.ontology import Decision
    from suture.core.validation import parse
    from suture.core.vocabulary import CANONICAL

    if any(given.values()) != bool(by):
        raise ConfigError("give --by NAME with a decision (--same, --different, --child), and only then")
    decisions: list[Decision] = []
    for relation, texts in given.items():
        for text in texts:
            name, separator, of = text.partition("=")
            if not separator:
                raise ConfigError(f"--{relation} {text!r} names one class; write NAME=OF")
            if canonical(name) not in {*known, *CANONICAL}:
                raise unknown("class", name, known)
            values = {"name": name, "relation": relation, "of": of, "by": by, "on": datetime.date.today()}
            decisions.append(parse(Decision, values, f"--{relation} {text}"))
            names = {canonical(name), canonical(of)}
            both = [site for site, own in lists.sites.items() if len(names & {*own}) == 2]
            if relation == "same" and both:
                raise ConfigError(
                    f"--same {text!r}: {both[0]} has both classes, so they are two; write --different or "
                    "--child, or correct its table"
                )
            if not names <= {*known, *CANONICAL}:
                print_line(f"no site and no atlas has {of!r}: {nearest(of, [*known, *CANONICAL])}")
    return decisions
