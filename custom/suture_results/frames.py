"""The results of a run as pandas frames: what a notebook opens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from html import escape
from pathlib import Path

import pandas as pd
from rich.table import Table

from suture.core.errors import DataError
from suture.core.escaping import printable
from suture.protocol.records import Metrics, Round, Run, read_history, read_metrics, read_run
from suture_results.finetuning_results import finetuning_table, nothing_measured, read_finetuning_results
from suture_results.notes import Sentences, read_sentences
from suture_results.prediction import Model, open_model
from suture_results.tables import class_table


@dataclass(frozen=True)
class Results:
    """A run folder.

    Attributes:
        folder: of the run; see the documentation for its files. A relative one is resolved at once.
    """

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder).expanduser().resolve())

    @cached_property
    def info(self) -> Run:
        """What was run: job, method, settings, sites, versions and status."""
        return read_run(self.folder)

    @cached_property
    def metrics(self) -> Metrics:
        """The figures of the selected model, as in metrics.json.

        Raises:
            DataError: the run ended before there were any.
        """
        found = read_metrics(self.folder)
        if found is None:
            why = f"{self.info.status}: {self.info.error}" if self.info.error else self.info.status
            raise DataError(f"{self.folder} has no metrics; the run is {why}")
        return found

    @property
    def sentences(self) -> Sentences:
        """What a person should know of the run: its notes, what it left out, and cautions."""
        return read_sentences(self.folder)

    @property
    def mean_auroc(self) -> float | None:
        """The mean AUROC over the classes where it is defined."""
        return self.metrics.mean_auroc

    @property
    def classes(self) -> pd.DataFrame:
        """One row a class: AUROC with its 95 % interval, counts, recall, the step to which sites have rounded
        them (empty where they are exact), and the sites that know it.
        """
        metrics = self.metrics
        rows = []
        for name, auroc in metrics.auroc.items():
            low, high = metrics.intervals.get(name) or (None, None)
            positives, negatives = metrics.counts.get(name) or (None, None)
            rows.append(
                {
                    "class": name,
                    "auroc": auroc,
                    "low": low,
                    "high": high,
                    "positives": positives,
                    "negatives": negatives,
                    "recall": metrics.recall.get(name),
                    "step": metrics.steps.get(name),
                    "sites": ", ".join(self.info.owners(name)),
                }
            )
        return pd.DataFrame(rows).set_index("class")

    @property
    def rounds(self) -> pd.DataFrame:
        """One row a round: phase, status, seconds, bytes, and the validation figures of its model."""
        own = ("round", "phase", "status", "seconds", "bytes_down", "bytes_up")
        rows = [{**{key: getattr(r, key) for key in own}, **asdict(r.validation)} for r in self._history]
        return pd.DataFrame(rows).set_index("round") if rows else pd.DataFrame()

    @property
    def sites(self) -> pd.DataFrame:
        """One row a round and site: status, reason, weight, losses, bytes and seconds."""
        rows = [
            {"round": r.round, "site": name, **asdict(site)}
            for r in self._history
            for name, site in r.sites.items()
        ]
        if not rows:
            return pd.DataFrame()
        return pd.DataFrame(rows).set_index(["round", "site"]).drop(columns=["scalars", "rows"])

    def tables(self) -> list[Table]:
        """Return the tables that `suture results` shows: of the classes, and of fine-tuned tasks."""
        tuned, metrics = read_finetuning_results(self.folder), read_metrics(self.folder)
        found = [] if metrics is None or (tuned and nothing_measured(metrics)) else [metrics]
        tables = [class_table(self.info, one) for one in found]
        return [*tables, finetuning_table(tuned)] if tuned else tables

    @property
    def report(self) -> Path:
        """The page of the run."""
        return self.folder / "report.html"

    def model(self, device: str = "cpu") -> Model:
        """Open the selected model.

        Raises:
            DataError: the run left no global model.
        """
        folder = self.folder / "model"
        if not folder.is_dir():
            personal = self.info.method.personal != "nothing"
            why = "keeps its models at the sites" if personal else self.info.status
            raise DataError(f"{self.folder} has no model: {self.info.method.title} {why}")
        return open_model(folder, device)

    @cached_property
    def _history(self) -> list[Round]:
        return read_history(self.folder)

    def _repr_html_(self) -> str:
        """What a notebook shows: the table of classes, and where the report is."""
        head = f"<b>{escape(printable(self.info.title))}</b>, {escape(self.info.status)}: {self.report}"
        return f"<p>{head}</p>{self.classes.to_html(na_rep='') if self.info.status == 'finished' else ''}"

    def __repr__(self) -> str:
        return f"Results({str(self.folder)!r}: {printable(self.info.title)}, {self.info.status})"


def open_results(folder: str | Path) -> Results:
    """The results of a run.

    Raises:
        DataError: the folder is no run folder.
    """
    results = Results(Path(folder))
    _ = results.info
    return results
