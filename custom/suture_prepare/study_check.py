"""The data of all sites of a study, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.table import Table as Grid

from suture.core.escaping import number_of, rich
from suture.core.labels import LabelSet, canonical, is_generic, lookalikes
from suture.core.privacy import PrivacyConfig
from suture.data.config import SiteConfig
from suture.data.decoding import other_modality
from suture.data.table import SPLITS, Split
from suture.execution.exact_figures import forecast
from suture.execution.job import Job
from suture.execution.study import StudySites, exact
from suture.federation.server.notes import unprotected_note
from suture.federation.server.registry import ClassConflict, one_name, shared_generic, statements
from suture.models import own_words
from suture_prepare.quality import Count, Findings
from suture_prepare.site_images import SUMMARY, Shared, describe, differences, find_shared, summarise
from suture_results.inspection import counted_modalities, size_notes, stated_modalities
from suture_results.refusals import owners_of, refusals, rows_sent
from suture_results.sentences import EXPERIMENTAL, sentence

_SAY: dict[Split, str] = {"validation": "the selection of the round", "test": "the final figures"}
"""What a split of a site has a say in."""


@dataclass(frozen=True)
class Together:
    """What only shows when sites are compared.

    Attributes:
        problems: what stops a run.
        warnings: what a person should know.
        limits: what each site's limits would round or withhold in a federation.
        images: a summary for each site, as of `summarise`.
    """

    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    images: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def compare(
    configs: Mapping[str, SiteConfig],
    findings: Mapping[str, Findings],
    job: Job | None = None,
    faults: Sequence[str] = (),
) -> Together:
    """Compare the sites of a study.

    Args:
        configs, findings: of each site.
        job: of the study; sites may refuse it, and it may accept names that look alike, and select no round
            by a loss.
        faults: of the study's job and labels.toml.
    """
    images = {site: summarise(found, configs[site]) for site, found in findings.items()}
    twins = find_shared(findings)
    merged, contradictions = _by_code(configs, findings, job.label_map if job else {})
    strict = isinstance(job.simulation, StudySites) and job.simulation.limits if job else False
    refused = [*refusals(configs if strict else exact(configs), _labels(findings), job)] if job else []
    problems = [
        *faults,
        *refused,
        *_problems(configs, findings, job),
        *(_other_modalities(configs, findings, job, refused=True) if job else ()),
        *contradictions,
        *_list_torn(twins, "image"),
    ]
    warnings = [*merged, *_warnings(configs, findings, twins, job)]
    limits = [f"{site} would send of {line}" for site, config in configs.items() for line in forecast(config)]
    if job:
        elsewhere = [text for text in refusals(configs, _labels(findings), job) if text not in refused]
        warnings += [f"in a federation, refused by {text}" for text in elsewhere]
        warnings += _other_modalities(configs, findings, job, refused=False)
        for site, found in findings.items():
            sizes = [(one.name, one.facts.width, one.facts.height) for one in found.pictures]
            warnings += [f"{site}: {note}" for note in size_notes(sizes, job.model.size)]
    return Together(tuple(problems), tuple(warnings), tuple(limits), images)


def _by_code(
    configs: Mapping[str, SiteConfig], findings: Mapping[str, Findings], label_map: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Return which names are other sites' classes by their codes, and the contradictions of codes."""
    mapped = {canonical(own): canonical(name) for own, name in label_map.items()}
    said = [
        statement._replace(name=mapped.get(statement.name, statement.name))
        for site, config in configs.items()
        for statement in statements(config.data.stated_codes(), site)
    ]
    try:
        classes = one_name(said)
    except ClassConflict as conflict:
        return [], [str(conflict)]
    names = [(site, mapped.get(own, own)) for site, found in findings.items() for own in found.counts]
    return [
        f"by its codes, {name!r} of {site} is the class {classes[name]!r}"
        for site, name in names
        if classes.get(name, name) != name
    ], []


def _labels(findings: Mapping[str, Findings]) -> dict[str, LabelSet]:
    """Return the classes of each site whose labels can be read."""
    return {
        site: LabelSet(tuple(found.counts), found.label_type)
        for site, found in findings.items()
        if found.counts and found.label_type
    }


def _problems(
    configs: Mapping[str, SiteConfig], findings: Mapping[str, Findings], job: Job | None
) -> Iterator[str]:
    own_targets = job is not None and job.method.labels.view == "target"
    owners, accept = owners_of(_labels(findings), job), own_targets or (job.accept_labels if job else ())
    accepted = {canonical(name) for name in accept} if isinstance(accept, tuple) else set()
    pairs = [] if accept is True else [{*pair} for pair in lookalikes(owners) if not {*pair} & accepted]
    unnamed = sorted({name for pair in pairs if all(map(is_generic, pair)) for name in pair})
    if unnamed:
        where = ", ".join(sorted({site for name in unnamed for site in owners[name]}))
        lines = ", ".join(f'"{name}" = "NAME OF THE FINDING"' for name in unnamed)
        yield (
            f"{', '.join(map(repr, unnamed))} ({where}) do not say which findings they are. Write "
            f"under [data.synonyms]: {lines}"
        )
    for a, b in (sorted(pair) for pair in pairs if not pair <= {*unnamed}):
        yield (
            f"{a!r} ({', '.join(owners[a])}) and {b!r} ({', '.join(owners[b])}) are nearly the same. If "
            f'they are the same class, write under [data.synonyms] of {owners[b][0]}: "{b}" = "{a}"; if '
            f'not, in job.toml: accept_labels = ["{b}"]'
        )
    for name, sites in shared_generic(owners, accept).items():
        yield (
            f"{', '.join(sites)} each have a class {name!r}, which does not say which finding is meant. "
            f'Write under [data.synonyms] of each: "{name}" = "NAME OF THE FINDING"; if it is the same '
            f'class at all of them, in job.toml: accept_labels = ["{name}"]'
        )
    if len({config.data.color for config in configs.values()}) > 1:
        yield "some sites read images in colour and some in gray; set [data] color to the same value at all"
    if _by_loss(job) and not any(
        _behind_the_loss(found, PrivacyConfig().exact()) for found in findings.values()
    ):
        yield (
            f"no site has a labelled validation {_noun(findings)}, so no round can be selected by its loss; "
            'give some sites a validation split, or set selection = "last" in job.toml'
        )


def _noun(findings: Mapping[str, Findings]) -> str:
    """What the data of a study are."""
    return "document" if all(found.noun == "document" for found in findings.values()) else "image"


def _by_loss(job: Job | None) -> bool:
    return job is not None and job.selection == "site_loss"


def _other_modalities(
    configs: Mapping[str, SiteConfig], findings: Mapping[str, Findings], job: Job, *, refused: bool
) -> Iterator[str]:
    """Sites with DICOM images that the model is not for: too many to take part (`refused`), or a few."""
    modalities = job.model.modalities
    for site, found in findings.items():
        facts = [picture.facts for picture in found.pictures]
        others = [one for one in facts if other_modality(one.modality, modalities)]
        lost, used = len(others) + len(found.unreadable), len(facts) + len(found.unreadable)
        too_many = lost > configs[site].privacy.max_faults * used or lost == used
        if others and too_many is refused:
            yield (
                f"{site}: DICOM images of another modality than {', '.join(modalities)}, which the model is "
                f"for (model.modalities in the job): {counted_modalities(stated_modalities(others))} of "
                f"{used:,}; {'remove their rows' if refused else 'they are left out'}"
            )


def _list_torn(twins: Shared, kind: str) -> Iterator[str]:
    if twins.torn and twins.noun == kind:
        yield (
            f"{describe(twins)}. {twins.torn:,} of them: for training at one site and for validation or "
            f"test at another, so the figures would include training {kind}s; leave the split of such a "
            "row blank at one of the sites, or remove the row"
        )


def _warnings(
    configs: Mapping[str, SiteConfig], findings: Mapping[str, Findings], twins: Shared, job: Job | None
) -> Iterator[str]:
    yield from _list_unmeasured(findings)
    if job and job.robust and len(findings) >= job.robust.fewest:
        sent = rows_sent(_labels(findings), job, len(findings))
        few = [name for name, sites in sent.items() if sites < job.robust.fewest]
        yield from (sentence(note.code, note.values) for note in unprotected_note(job.robust, few))
    if job and job.secure_aggregation:
        yield EXPERIMENTAL
    if job and (own := own_words(job.model)):
        yield own
    if _by_loss(job) and not any(
        _behind_the_loss(found, configs[site].privacy) >= max(configs[site].privacy.min_loss, 1)
        for site, found in findings.items()
    ):
        yield (
            "in a federation no round can be selected: no site has enough validation images for its "
            '[privacy] min_loss and min_count; lower them there, or set selection = "last" in job.toml'
        )
    yield from _list_torn(twins, "document")  # which may be of a template
    if twins.images and not twins.torn:
        yield f"{describe(twins)}. Each is counted at each of its sites"
    yield from differences(findings)
    for site, found in findings.items():
        for split, what in _SAY.items():
            if found.images and not found.images.get(split):
                by_column = getattr(configs[site].data, "split", "") == "column"
                anew = '; [data] split = "patients" divides its patients anew' if by_column else ""
                yield f"{site} has no {split} {found.noun}s, so it does not contribute to {what}{anew}"
        limits = configs[site].privacy
        n, least = _behind_the_loss(found, limits), limits.min_loss
        if found.images.get("validation") and n < least:
            yield (
                f"{site}: {number_of(n, f'validation {found.noun}')} of a class with at least "
                f"{limits.min_count} positives and {limits.min_count} negatives ([privacy] min_count); a "
                f"loss needs {least} (min_loss), so the site sends none and does not contribute to the "
                "selection"
            )


def _list_unmeasured(findings: Mapping[str, Findings]) -> Iterator[str]:
    """Classes without a positive image in a split, anywhere or at a site that annotates them."""
    lacking: dict[tuple[str, Split], list[str]] = {}
    for label, sites in owners_of(_labels(findings), None).items():
        for split in _SAY:
            without = [site for site in sites if not findings[site].counts[label][split].positives]
            if not any(found.images.get(split) for found in findings.values()):
                continue  # which is said of each site
            if len(without) == len(sites):
                what = f"{split} {_noun(findings)}"
                yield f"{label!r}: no site has a positive {what}, so its AUROC is not measured"
                continue
            for site in without:
                if findings[site].images.get(split):
                    lacking.setdefault((site, split), []).append(label)
    for (site, split), labels in lacking.items():
        yield (
            f"{site} has no positive {split} {findings[site].noun} of {', '.join(map(repr, labels))}: in "
            f"{_SAY[split]}, {'it is' if len(labels) == 1 else 'they are'} measured at other sites only"
        )


def _behind_the_loss(found: Findings, limits: PrivacyConfig) -> int:
    """The largest number of validation images that a site's loss may be of: withheld classes do not count."""
    of = [counts["validation"] for counts in found.counts.values()]
    shown = [c for c in of if min(c.positives, c.negatives) >= limits.min_count]
    return min(found.images.get("validation", 0), sum(c.positives + c.negatives for c in shown))


def render_matrix(findings: Mapping[str, Findings], together: Together) -> RenderableType:
    """Render classes by sites: present / absent / unknown images over all splits."""
    what = _noun(findings)
    grid = Grid(title=f"{what.capitalize()}s of each class at each site: present / absent / unknown")
    grid.add_column("class")
    for site, found in findings.items():
        grid.add_column(f"{rich(site)}\n{number_of(sum(found.images.values()), found.noun)}", justify="right")
    for label, cells in matrix(findings).items():
        grid.add_row(rich(label), *map(_cell, cells))
    lines = [f"[bold red]problem[/] {rich(text)}" for text in together.problems]
    lines += [f"[bold yellow]warning[/] {rich(text)}" for text in together.warnings]
    grids = [grid, _image_grid(together)] if any(together.images.values()) else [grid]
    return Group(*grids, *lines)


def _image_grid(together: Together) -> Grid:
    grid = Grid(title="Images of each site")
    grid.add_column("")
    for site in together.images:
        grid.add_column(rich(site), justify="right")
    for name in SUMMARY:
        grid.add_row(name, *(summary.get(name, "–") for summary in together.images.values()))
    return grid


def matrix(findings: Mapping[str, Findings]) -> dict[str, list[Count | None]]:
    """Return, for each class, the labels of each site over all splits; None where a site lacks the class."""
    labels = sorted({label for found in findings.values() for label in found.counts})
    return {label: [_count(found, label) for found in findings.values()] for label in labels}


def _count(found: Findings, label: str) -> Count | None:
    if label not in found.counts:
        return None
    of = [found.counts[label][split] for split in SPLITS]
    return Count(*(sum(getattr(c, kind) for c in of) for kind in ("positives", "negatives", "unknown")))


def _cell(count: Count | None) -> str:
    return f"{count.positives:,} / {count.negatives:,} / {count.unknown:,}" if count else "–"
