"""Notes of a run for the reader of its report: what a person should know and no figure shows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from suture.core.errors import nearest
from suture.core.labels import canonical
from suture.core.printable import number_of
from suture.federation.plan import Plan, Selection
from suture.federation.server.global_model import classifier
from suture.federation.server.registry import Member, SiteRegistry
from suture.federation.server.scores import coarsest
from suture.federation.server.selection import MEASURED_HERE
from suture.federation.server.state import RunState
from suture.learning.metrics import mean_defined
from suture.methods.base import ClassFacts, GlobalModel
from suture.methods.robust import RobustMerge
from suture.models import encoder_of
from suture.protocol.messages import ClassScore, Metrics
from suture.protocol.records import Metrics as Figures
from suture.protocol.records import Round

_SHOWN = 200
"""Notes of one kind: classes times sites may be millions."""


def notes_at_start(
    state: RunState, refused: Mapping[str, str], registry: SiteRegistry, label_map: Mapping[str, str]
) -> list[str]:
    """Return what is known before the first round of a job.

    Args:
        refused: why sites do not take part.
        label_map: of the job.
    """
    notes = [*_code_notes(state.codes), *exclusion_notes(state.excluded), *ledger_notes(refused)]
    return [*notes, *_class_notes(registry, label_map), *_one_sided_notes(registry)]


def method_notes(model: GlobalModel, plan: Plan, facts: ClassFacts) -> list[str]:
    """Return the notes of a run at its start: on the model's pretraining, and the method's own.

    FedBN+ freezes the values of pretraining; without pretraining, each batch norm stays at mean 0 and
    variance 1. MetaFL leaves a small network no other choice: hence a note, and no error.
    """
    notes, spec, policy = [], plan.model, plan.method.sharing.batch_norm
    entry = encoder_of(spec)
    if spec.pretrained and entry.reads == "image" and entry.size not in (None, spec.size):
        notes.append(
            f"{spec.name} was pretrained on images of {entry.size} px, and model.size is {spec.size}; for "
            f"the size of its pretraining: --set model.size={entry.size}"
        )
    if policy == "average" or entry.reads != "image":
        pass
    elif not classifier(model, plan).norm_names:
        notes.append(f"{spec.name} has no batch norm, so batch_norm={policy!r} changes nothing.")
    elif policy == "frozen" and not spec.pretrained:
        notes.append(
            f"Batch norm is frozen (FedBN+), and {spec.name} was not pretrained: it keeps mean 0 and "
            "variance 1, so it does not normalise. Set model.weights, or another batch_norm."
        )
    return [*notes, *facts.notes]


EXPERIMENTAL = (
    "[secure_aggregation] is experimental: nobody outside of this project has reviewed it, and a server that "
    "lies can still learn from sums (docs/threat_model.md)."
)


def secure_notes(plan: Plan, owners: Mapping[str, Collection[str]]) -> list[str]:
    """Return notes on what secure aggregation hides, what it does not, and what it switches off.

    Args:
        owners: the sites that annotate each class.
    """
    if plan.secure_aggregation is None:
        return []
    fewest, notes = plan.secure_aggregation.fewest, [EXPERIMENTAL]
    if few := [name for name, sites in owners.items() if len(sites) < fewest]:
        notes.append(
            f"Secure aggregation: fewer than {fewest} sites annotate {', '.join(few[:_SHOWN])}. All sites "
            "train these classes, the others as absent: a server that lies could let their sites alone learn."
        )
    return [
        *notes,
        "Secure aggregation: the server added up masked updates. One that follows the program knows who "
        "has which class, numbers of images, weights, losses and figures of each site, and no site's "
        "tensors. So max_update, exclusion of a site, norms, cosines and marks of outliers were off; each "
        "site checked its update.",
    ]


def unprotected_note(robust: RobustMerge, classes: Collection[str], round_: int | None = None) -> list[str]:
    """Return a note on the classes whose rows too few sites send for a robust merge.

    Args:
        round_: the round in which it was so, because sites were missing; None at the start.
    """
    if not classes:
        return []
    named = sorted(name or "the shared tensors" for name in classes)
    shown = ", ".join(named[:_SHOWN]) + (", ..." if len(named) > _SHOWN else "")
    why = f"fewer than {robust.fewest} sites send their rows{f' in round {round_}' if round_ else ''}"
    return [f"Merged by the plain mean, not by robust.kind={robust.kind!r}, because {why}: {shown}."]


def _class_notes(registry: SiteRegistry, label_map: Mapping[str, str]) -> list[str]:
    """Return a note on each class whose codes have shown what it is, and on spellings that no site has."""
    mapped = {canonical(spelling): canonical(name) for spelling, name in label_map.items()}
    found = [
        f"By its codes, {own!r} of {site} is the class {name!r}."
        for site, member in registry.members.items()
        for own, name in zip(member.own, member.names, strict=True)
        if mapped.get(canonical(own), canonical(own)) != name
    ]
    more = [f"{len(found) - _SHOWN} more classes of sites were matched by their codes."]
    unused = [spelling for spelling in label_map if canonical(spelling) not in registry.names]
    return [
        *found[:_SHOWN],
        *(more if len(found) > _SHOWN else []),
        *(
            f"label_map names {spelling!r}, which no site has: {nearest(spelling, registry.names)}"
            for spelling in unused
        ),
    ]


def _one_sided_notes(registry: SiteRegistry) -> list[str]:
    """Return a note on each class that sites train of which they know positives alone."""
    sites = {
        name: ", ".join(site for site, member in registry.members.items() if name in member.one_sided)
        for name in registry.labels
    }
    return [
        f"{name} is trained but not measured at {at}: the atlas implies its presence, never its absence."
        for name, at in sites.items()
        if at
    ][:_SHOWN]


def _code_notes(codes: Sequence[tuple[int, str]]) -> list[str]:
    """Return a note on every change of the code during an experiment.

    An update of the software must not end an experiment of weeks. But its rounds are then of two codes.

    Args:
        codes: the number of rounds before, and the hash of the code from there on.
    """
    return [
        (
            f"The code changed after round {number}, from {before} to {code}: earlier and later rounds were "
            "computed by different code."
        )
        for (_, before), (number, code) in pairwise(codes)
    ]


def ledger_notes(reasons: Mapping[str, str]) -> list[str]:
    """Return a note on every site that abstains because its ledger is not whole.

    Args:
        reasons: why sites do not take part, or did not in a round.
    """
    return [
        (
            f"{site} releases nothing: lines of its ledger are missing or were changed. Its administrator "
            "can restore the newest copy, or accept the gap with suture ledger --accept."
        )
        for site, reason in reasons.items()
        if reason.startswith("ledger (")
    ]


def older_state_notes(round_: int, states: Mapping[str, int], sent: Mapping[str, int]) -> list[str]:
    """Return a note on every site that has trained from an older state than that of its newest update.

    Args:
        states: round of the state from which each site trained; 0 where it had none.
        sent: round of the newest of each site's updates that was taken.
    """
    return [
        (
            f"{site} trained round {round_} "
            + (f"from its state of round {state}" if state else "without a state")
            + f", although it had sent an update of round {sent[site]}: its state was lost, damaged or "
            "restored from a backup. The model therefore differs from that of an undisturbed run."
        )
        for site, state in states.items()
        if state < sent.get(site, 0)
    ]


def exclusion_notes(excluded: Mapping[str, str]) -> list[str]:
    """Return a note on every site that takes no further part."""
    return [f"{site} left this experiment: {why}." for site, why in excluded.items()]


# At the end

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


def validation_gaps(
    history: Sequence[Round],
    members: Mapping[str, Member],
    labels: Sequence[str],
    selection: Selection,
    at_server: Collection[str] = (),
    causes: Mapping[str, str] | None = None,
) -> list[str]:
    """Return a sentence on the sites, and one on the classes, that had no say in the selected round.

    Args:
        members: the sites that take part.
        labels: all classes.
        at_server: the classes that the server's validation data measure; see `HeldOut.measured`.
        causes: why sites did not measure a class; see `why_unmeasured`.
    """
    committed = [line for line in history if line.status == "committed"]
    if selection == "last" or not committed:
        return []
    found = []
    if selection == "site_loss":
        heard = {name for r in committed for name, s in r.sites.items() if s.validation_loss is not None}
        if silent := {name: member.n for name, member in members.items() if name not in heard}:
            found.append(
                f"The round was selected by the validation losses of {_listed(heard)} only: "
                f"{_why(silent, 'validation')}"
            )
        unmeasured = set.intersection(*(set(line.validation.unmeasured) for line in committed))
    else:
        unmeasured = set(labels) - set(at_server)
        causes = dict.fromkeys(unmeasured, "the server's validation data have no positive or no negative")
    for name in sorted(unmeasured):
        found.append(f"{name} was never validated: {(causes or {}).get(name, 'no site sent an AUROC')}")
    return found


def why_unmeasured(scores: Mapping[str, ClassScore]) -> str:
    """Return why none of some sites has an AUROC of a class: each cause, and the sites that it holds for.

    Args:
        scores: of the class, at each site that has measured it.
    """
    causes: dict[str, list[str]] = {}
    for site, score in scores.items():
        if score.positives is None or score.negatives is None:
            cause = (
                "withheld, because fewer than min_count images have it, or lack it, or because one patient "
                "would move the figure by over half its range (`suture data check` says which)"
            )
        elif score.positives or score.negatives:
            kind, n = ("negative", score.positives) if score.positives else ("positive", score.negatives)
            cause = f"no {kind} among {number_of(n, 'labelled case')}"
        else:
            cause = "no labelled case"
        causes.setdefault(cause, []).append(site)
    said = [f"{cause} at {_listed(sites)}" for cause, sites in causes.items()]
    return "; ".join(said) or "no site that annotates it has validation images"


_COARSE = 0.05
"""A larger step than this hides what a round usually gains."""


def cautions(history: Sequence[Round], selection: Selection, selected: int) -> list[str]:
    """Return a sentence where the selection rests on a tie, and one where its figures are coarse."""
    key = MEASURED_HERE.get(selection, "loss")
    measured = [line for line in history if getattr(line.validation, key) is not None]
    chosen = next((line.validation for line in measured if line.round == selected), None)
    found = []
    if chosen is not None and selection != "last":
        value = getattr(chosen, key)
        equal = [r.round for r in measured if abs(getattr(r.validation, key) - value) < 1e-9]
        if len(equal) > 1:
            what = "loss" if key == "loss" else key.removeprefix("server_").replace("_", " ")
            then = "the highest AUROC decided, then the last" if key == "loss" else "the first was taken"
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


def test_gaps(figures: Figures, tested: Mapping[str, Metrics], members: Mapping[str, Member]) -> list[str]:
    """Return a sentence on the sites without test data, and one on the classes without a final AUROC.

    Args:
        figures: metrics.json.
        tested: each site's metrics on its own test data; of no account where the server has a test set.
    """
    found = []
    if figures.source == "sites' test data":
        heard = [name for name, metrics in sorted(tested.items()) if metrics.n]
        if silent := {name: member.n for name, member in members.items() if name not in heard}:
            whence = f"come from {_listed(heard)} only" if heard else "are lacking"
            found.append(f"The final figures {whence}: {_why(silent, 'test')}")
    if figures.undefined:
        reasons = (f"{name} ({why})" for name, why in sorted(figures.undefined.items()))
        found.append(f"No test AUROC: {', '.join(reasons)}")
    return found


def _why(silent: Mapping[str, Mapping[str, int | None]], split: str) -> str:
    """Say why each of some sites sent no figure of a split."""
    few = f"sent none: too few labelled {split} images for its limits, or it did not answer"
    return "; ".join(
        f"{name} {few if n.get(split) else f'has no {split} images'}" for name, n in sorted(silent.items())
    )


def _listed(names: Collection[str]) -> str:
    *most, last = sorted(names) or ["no site"]
    return f"{', '.join(most)} and {last}" if most else last
