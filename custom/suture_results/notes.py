"""What a person should know of a run, in sentences: of what its server has noted, and of its files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from suture.federation.server.selection import MEASURED_AT_SITES, MEASURED_HERE, coarsest
from suture.learning.metrics import mean_defined
from suture.privacy.robust import FEWEST, LONG, SHORT, outlying, usual_norm
from suture.protocol.messages import Spent
from suture.protocol.records import Metrics, Round, Run, SiteRound, read_history, read_metrics, read_run
from suture_results.sentences import listed, sentence, why_unmeasured


@dataclass(frozen=True)
class Sentences:
    """What the pages of a run say besides its figures.

    Attributes:
        kept: which round's model is the result, by which rule, and whether other rounds may be better; empty
            until the rounds are over.
        notes: on what happened, and on what sites have spent of their privacy.
        left_out: on the data, sites and classes that a figure of the run does not cover.
        cautions: on figures that say less than they seem to.
    """

    kept: str
    notes: list[str]
    left_out: list[str]
    cautions: list[str]


def read_sentences(folder: Path) -> Sentences:
    """Return those of a run folder.

    Raises:
        DataError: it is no run, or a file cannot be read.
    """
    return sentences(read_run(folder), read_history(folder), read_metrics(folder))


def sentences(run: Run, history: Sequence[Round], metrics: Metrics | None) -> Sentences:
    """Return what is to be said of a run; what its rounds show, only once they are over."""
    notes = [sentence(note.code, note.values) for note in run.notes]
    if run.selected_round is None:
        return Sentences("", notes, run.left_out, [])
    notes += describe_spent(run.protection, run.spent)
    notes += [*dominant(history), *outlier_notes(site_updates(history))]
    notes += run_away(history, {name: run.owners(name) for name in run.labels}) if run.method.pseudo else []
    left_out = [
        *rejected_sites(history),
        *validation_gaps(run, history),
        *(test_gaps(run, metrics) if metrics else []),
    ]
    kept, careful = kept_round(run, history), cautions(history, run.selection, run.selected_round)
    return Sentences(kept, notes, [*left_out, *run.left_out], careful)


_FIGURES = {"site_loss": "losses", "site_auroc": "AUROCs"}

_RULES = {
    "site_loss": "it has the lowest mean of the sites' validation losses",
    "site_auroc": "it has the highest mean of the sites' validation AUROCs",
    "server_metric": "it has the highest AUROC on the server's validation data",
    "server_balanced_accuracy": "it has the highest balanced accuracy on the server's validation data",
    "last": "it is the last",
}


def kept_round(run: Run, history: Sequence[Round]) -> str:
    """Say which round was kept, by which rule, and where an end of the run shows that it may be too short or
    too long: of the last round by the sites' AUROC, which has not selected it.
    """
    number, last = run.selected_round, max((r.round for r in history if r.status == "committed"), default=0)
    rule = _RULES.get(run.selection, run.selection)
    if run.method.personal == "model" and run.selection in MEASURED_AT_SITES:
        return f"Each site kept the round that is best by its own validation {_FIGURES[run.selection]}"
    kept, peak = f"Round {number} of {last} was kept: {rule}", number or last
    if run.selection == "last":
        areas = {r.round: r.validation.auroc for r in history if r.validation.auroc is not None}
        peak = max(areas, key=lambda one: areas[one] or 0.0, default=0)
    if 0 < 2 * peak <= last:
        where = "" if peak == number else f"; the sites' validation AUROC was highest after round {peak}"
        return (
            f"{kept}{where}, in the first half of the run, so fewer rounds or a lower learning rate may help"
        )
    return f"{kept}; no earlier one was better, so more rounds may help" if 1 < last == peak else kept


def describe_spent(
    protection: Mapping[str, Mapping[str, float]], stated: Mapping[str, Spent | None]
) -> list[str]:
    """Say for each protected site what its releases have spent of its privacy, as it states.

    Args:
        protection: clip, and noise or epsilon, and delta of each protected site.
        stated: the newest statement of each site.
    """
    return [_spent(site, own, stated.get(site)) for site, own in sorted(protection.items())]


def _spent(site: str, own: Mapping[str, float], spent: Spent | None) -> str:
    covers = "local differential privacy of its tensors; not per patient"
    if "epsilon" in own:
        text = f"{site} trains with DP-SGD per patient, for ε = {own['epsilon']:g} an experiment"
        covers = "per training patient, of whom a step draws one image; not of validation and test patients"
    else:
        text = f"{site} clips its updates to a norm of {own['clip']:g} and adds "
        text += f"noise of {own['noise']:g} times that" if own["noise"] else "no noise"
    if spent is None:
        return f"{text}; it did not report its spent ε."
    uncovered = f"Not protected by noise: the {spent.figures} figures of classes and {spent.numbers} other "
    uncovered += "numbers (losses, counts, weights) that have left it."
    if spent.epsilon is None:
        why = f"{spent.unprotected} of its {spent.updates} updates were sent without noise"
        return f"{text}: ε = ∞, because {why}. {uncovered}"
    if spent.missing:
        return (
            f"{text}: ε ≥ {spent.epsilon:g} at δ = {own['delta']:g}, a lower bound: its administrator has "
            f"accepted that at least {spent.missing} lines of its ledger are missing or changed. "
            f"{uncovered}"
        )
    return (
        f"{text}: ε ≤ {spent.epsilon:g} at δ = {own['delta']:g} over all its {spent.updates} updates in "
        f"{spent.experiments} experiment{'s' if spent.experiments != 1 else ''}, by its own ledger "
        f"({covers}). {uncovered}"
    )


def outlier_notes(found: Mapping[str, SiteUpdates]) -> list[str]:
    """Return a note on the sites whose updates were marked, and on those from which they differed.

    It accuses neither: the marks compare, and sites that agree on their lies are each other's measure.
    """
    marked = [f"{site}: {'; '.join(one.marks)} rounds" for site, one in found.items() if one.marks]
    others = [site for site, one in found.items() if not one.marks]
    if not marked:
        return []
    return [
        f"Two groups of sites have sent updates that differ: {', '.join(others) or 'none'}; and "
        f"{', '.join(marked)}. One group may have other data, or not follow the method. These marks cannot "
        "tell which: where half of the sites or more agree to lie, only an honest one is marked."
    ]


def rejected_sites(history: Sequence[Round]) -> list[str]:
    """Return a sentence on each site whose updates were rejected in more than half of its rounds."""
    answers: dict[str, list[SiteRound]] = {}
    for line in history:
        for site, answer in line.sites.items():
            if answer.status != "missing":
                answers.setdefault(site, []).append(answer)
    rejected = {site: [one for one in of if one.status == "rejected"] for site, of in answers.items()}
    return [
        (
            f"The updates of {site} were rejected in {len(refused)} of its {len(answers[site])} rounds; the "
            f"last time: {refused[-1].reason}"
        )
        for site, refused in sorted(rejected.items())
        if 2 * len(refused) > len(answers[site])
    ]


_FAR = 10
"""A row is taken over where a site counts this many times as much as every site that annotates the class."""

_MOST = 0.75
"""Share of the mean from which on the report names the site: it alone nearly makes the model."""


def dominant(history: Sequence[Round]) -> list[str]:
    """Return a sentence for each site that had most of the mean of three or more sites.

    A weight can be a number of images or a rescue factor that a site announces, and nobody can check it.
    """
    shares = [found for line in history if len(found := line.shares) >= 3]
    sites = sorted({site for found in shares for site in found})
    means = {site: mean_defined(found.get(site) for found in shares) for site in sites}
    return [
        (
            f"{site} had {share:.1%} of the weight in the mean of the sites' updates, so it determined the "
            "model almost alone. The server cannot check a site's weight."
        )
        for site, share in means.items()
        if share is not None and share > _MOST
    ]


def run_away(history: Sequence[Round], owners: Mapping[str, Collection[str]]) -> list[str]:
    """Return a sentence for each class whose row was taken over by sites that do not annotate it.

    Where the weights of a row are counts of labels and pseudo-labels (FedLSM, Eq. 7), sites that do not
    annotate a class can dominate its row; the mean teacher that results is even more confident. Prevalences
    at different sites seldom differ tenfold.

    Args:
        owners: the sites that annotate each class.
    """
    notes = []
    for name, annotating in owners.items():
        found = {r.round: _dominating(r, name, annotating) for r in history if r.has_row_weights}
        if rounds := [number for number, sites in found.items() if sites]:
            first, last = rounds[0], rounds[-1]
            notes.append(
                f"{name}: from round {first} sites that do not annotate the class weigh over {_FAR} "
                f"times as much as any site that does (in round {last}: {', '.join(found[last])}), "
                "through pseudo-labels. Such labels may reinforce themselves: they now determine the "
                "class's row."
            )
    return notes


def _dominating(line: Round, name: str, annotating: Collection[str]) -> list[str]:
    """Return the sites without the class that count far more in its row than every site with it."""
    counts = {n: (s.rows or {}).get(name) or 0.0 for n, s in line.sites.items() if s.status == "accepted"}
    most = max((counts[site] for site in annotating if site in counts), default=0.0)
    return [site for site, n in counts.items() if site not in annotating and n > _FAR * max(most, 1.0)]


def validation_gaps(run: Run, history: Sequence[Round]) -> list[str]:
    """Return a sentence on the sites, and one on the classes, that had no say in the selected round."""
    committed = [line for line in history if line.status == "committed"]
    if run.selection == "last" or not committed:
        return []
    found = []
    causes = {name: why_unmeasured(counts) for name, counts in run.unmeasured.items()}
    if run.selection in MEASURED_AT_SITES:
        figure = "loss" if run.selection == "site_loss" else "auroc"
        sent = ((name, getattr(s, f"validation_{figure}")) for r in committed for name, s in r.sites.items())
        heard = {name for name, value in sent if value is not None}
        if silent := {name: n for name, n in run.parties.items() if name not in heard}:
            by = f"the validation {_FIGURES[run.selection]} of {listed(heard)} only"
            found.append(f"The round was selected by {by}: {_why(silent, 'validation')}")
        unmeasured = set.intersection(*(set(line.validation.unmeasured) for line in committed))
    else:
        unmeasured = set(run.labels) - set(run.measured_here)
        causes = dict.fromkeys(unmeasured, "the server's validation data have no positive or no negative")
    for name in sorted(unmeasured):
        found.append(f"{name} was never validated: {causes.get(name, 'no site sent an AUROC')}")
    return found


_TIES = {
    "site_loss": "the highest AUROC decided, then the last",
    "site_auroc": "the lowest loss decided, then the last",
}

_COARSE = 0.05
"""A larger step than this hides what a round usually gains."""


def cautions(history: Sequence[Round], selection: str, selected: int) -> list[str]:
    """Return a sentence where the selection rests on a tie, and one where its figures are coarse."""
    key = {**MEASURED_HERE, **MEASURED_AT_SITES}.get(selection, "loss")  # type: ignore[call-overload]
    measured = [line for line in history if getattr(line.validation, key) is not None]
    chosen = next((line.validation for line in measured if line.round == selected), None)
    found = []
    if chosen is not None and selection != "last":
        value = getattr(chosen, key)
        equal = [r.round for r in measured if abs(getattr(r.validation, key) - value) < 1e-9]
        if len(equal) > 1:
            what = key.removeprefix("server_").removeprefix("selecting_").replace("_", " ")
            then = _TIES.get(selection, "the first was taken")
            found.append(
                f"The selection rests on a tie: the models of rounds {', '.join(map(str, equal))} have the "
                f"same validation {what}; of these, {then}"
            )
    steps = {
        "loss": coarsest(line.validation.loss_step for line in history),
        "AUROC": coarsest(line.validation.auroc_step for line in history),
    }
    coarse = [f"{name} {step:g}" for name, step in steps.items() if step is not None and step > _COARSE]
    if coarse:
        found.append(
            "The validation curves, and what is selected by them, are of figures that sites round, in steps "
            f"of up to {', '.join(coarse)}. Smaller differences between rounds mean nothing; more validation "
            "patients make the steps finer"
        )
    return found


def test_gaps(run: Run, metrics: Metrics) -> list[str]:
    """Return a sentence on the sites without test data, and one on the classes without a final AUROC."""
    found = []
    silent = {name: n for name, n in run.parties.items() if name not in run.tested}
    if metrics.source == "sites' test data" and silent:
        whence = f"come from {listed(run.tested)} only" if run.tested else "are lacking"
        found.append(f"The final figures {whence}: {_why(silent, 'test')}")
    if metrics.undefined:
        reasons = (
            f"{name} ({sentence(why.code, why.values)})" for name, why in sorted(metrics.undefined.items())
        )
        found.append(f"No test AUROC: {', '.join(reasons)}")
    return found


def _why(silent: Mapping[str, Mapping[str, int | None]], split: str) -> str:
    """Say why each of some sites sent no figure of a split."""
    few = f"sent none: too few labelled {split} images for its limits, or it did not answer"
    return "; ".join(
        f"{name} {few if n.get(split) else f'has no {split} images'}" for name, n in sorted(silent.items())
    )


@dataclass(frozen=True)
class SiteUpdates:
    """The accepted updates of one site.

    Attributes:
        rounds: number of rounds with at least three updates.
        norm: median over these rounds of the norm, in medians of the round.
        cosine, lowest: median and lowest cosine to the mean of the others.
        opposed, long, short: number of rounds in which the cosine and the norm were marked.
        loss: the site's newest validation loss.
    """

    rounds: int
    norm: float | None
    cosine: float | None
    lowest: float | None
    opposed: int
    long: int
    short: int
    loss: float | None

    @property
    def marks(self) -> list[str]:
        """What was so in more than half of the rounds."""
        counts = {
            "opposed to the other sites": self.opposed,
            f"over {LONG:g} times as long": self.long,
            "less than a hundredth as long": self.short,
        }
        return [f"{text} in {n} of {self.rounds}" for text, n in counts.items() if 2 * n > self.rounds]


def site_updates(history: Sequence[Round]) -> dict[str, SiteUpdates]:
    """Return what the updates of each site were like, where rounds had at least three of them."""
    norms: dict[str, list[float]] = {}
    cosines: dict[str, list[float]] = {}
    losses: dict[str, float] = {}
    opposed: Counter[str] = Counter()
    for line in history:
        losses |= {name: s.validation_loss for name, s in line.sites.items() if s.validation_loss is not None}
        sent = {name: s for name, s in line.sites.items() if s.status == "accepted" and s.norm is not None}
        if len(sent) < FEWEST:
            continue
        odd, usual = outlying(sent), usual_norm(sent)
        for name, site in sent.items():
            norms.setdefault(name, []).append((site.norm or 0.0) / usual if usual else 1.0)
            opposed[name] += "cosine" in odd.get(name, {})
            if site.cosine is not None:
                cosines.setdefault(name, []).append(site.cosine)
    return {
        name: _of(norms[name], cosines.get(name, []), opposed[name], losses.get(name))
        for name in sorted(norms)
    }


def _of(norms: Sequence[float], cosines: Sequence[float], opposed: int, loss: float | None) -> SiteUpdates:
    return SiteUpdates(
        len(norms),
        median(norms),
        median(cosines) if cosines else None,
        min(cosines, default=None),
        opposed,
        sum(one > LONG for one in norms),
        sum(one < SHORT for one in norms),
        loss,
    )
