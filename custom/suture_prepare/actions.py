"""`suture.init` and `suture.check`: the commands as functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from suture.execution.study import StudySites
from suture_prepare.description import Answers
from suture_prepare.new_study import by_column, look, refuse_existing, write_study
from suture_prepare.quality import Findings
from suture_prepare.quality import check as check_site
from suture_prepare.study_check import Together
from suture_prepare.study_check import compare as compare_sites
from suture_prepare.study_labels import atlas_faults
from suture_prepare.study_page import job_of, write_page

AnyPath = str | Path


def init(
    study: AnyPath,
    sites: Mapping[str, AnyPath],
    answers: Mapping[str, Answers] | None = None,
    site_column: str | None = None,
) -> list[Path]:
    """Write a suture.toml for each site of a new study, and a job; return the files. Check what they guess.

    Args:
        sites: folder or table of each site, by its name.
        answers: what you know about the columns of a site.
        site_column: a column that divides each table over sites, which its cells name.

    Raises:
        ConfigError, DataError: a site's data cannot be read, or the study has files already.
    """
    folder, paths = Path(study), {name: Path(path) for name, path in sites.items()}
    if site_column:
        paths, answers = by_column(paths, site_column)
    refuse_existing(folder, paths)
    return write_study(folder, look(paths, answers))


@dataclass(frozen=True)
class Checked:
    """A study that was checked.

    Attributes:
        sites: the findings of each site.
        together: what only shows when sites are compared.
        page: check.html, which holds images of patients.
    """

    sites: Mapping[str, Findings]
    together: Together
    page: Path

    @property
    def problems(self) -> list[str]:
        """What stops a run, of all sites."""
        own = [f"{site}: {text}" for site, found in self.sites.items() for text in found.problems]
        return [*own, *self.together.problems]


def check(study: AnyPath, *, trust: bool = False) -> Checked:
    """Check the data of all sites of a study, and write check.html.

    Args:
        trust: whether its job.py may be run.

    Raises:
        ConfigError: the study has no site, or a suture.toml is wrong.
    """
    folder = Path(study)
    configs = StudySites(str(folder)).configs()
    job, fault = job_of(folder, trust=trust)
    findings = {name: check_site(config, job.model if job else None) for name, config in configs.items()}
    classes = {name for found in findings.values() for name in found.counts}
    faults = [*filter(None, [fault]), *atlas_faults(folder, classes)]
    together = compare_sites(configs, findings, job, faults)
    return Checked(findings, together, write_page(folder, job, configs, findings, together))
