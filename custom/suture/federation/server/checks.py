"""What the server checks before any training."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from suture.core.errors import ConfigError, FederationError, as_word
from suture.core.labels import LabelType
from suture.federation.plan import Plan, Schedule, Selection, round_context
from suture.federation.server.selection import MEASURED_HERE, Best
from suture.methods.base import Method
from suture.privacy.secure_aggregation import SecureAggregation
from suture.protocol.decisions import DecisionSettings
from suture.protocol.messages import SiteInfo
from suture.protocol.records import Round

if TYPE_CHECKING:
    from suture.federation.server.aggregator import HeldOut


def check_selection(schedule: Schedule, method: Method, held_out: HeldOut | None) -> None:
    """Check before any training that the rounds can be compared as the schedule requests.

    Raises:
        ConfigError: the server is to measure models that it does not have.
        FederationError: it has no data for it.
    """
    check_has_models(schedule.selection, method)
    if schedule.selection not in MEASURED_HERE:
        return
    if not (held_out and held_out.has("validation")):
        raise FederationError(
            f"selection={schedule.selection!r} needs labelled validation data at the server; name it in the "
            "server's suture.toml, or select by 'site_loss'"
        )
    if schedule.selection == "server_balanced_accuracy" and held_out.labels.label_type != "multiclass":
        raise FederationError(
            "selection='server_balanced_accuracy' needs one label for each image, but the server's "
            "data have several; select by 'server_metric'"
        )


def check_has_models(selection: Selection, method: Method) -> None:
    """Check of a job that the server has the models that it is to measure.

    Raises:
        ConfigError: they stay at the sites.
    """
    if selection in MEASURED_HERE and method.sharing.personal != "nothing":
        raise ConfigError(
            f"{method.about.title} keeps its models at the sites, so the server cannot measure them; set "
            "selection = 'site_loss'"
        )


def check_liars(schedule: Schedule, sites: int) -> None:
    """Check before round 1 that enough sites take part for the robust merge.

    Raises:
        FederationError: too few do.
    """
    robust = schedule.robust
    if robust and sites < robust.fewest:
        raise FederationError(
            f"robust.kind={robust.kind!r} with liars={robust.liars} needs {robust.fewest} sites or more, "
            f"and {sites} take part. Remove [robust] or, with 3 sites or more, change robust.liars or kind"
        )


def check_owners(
    secure: SecureAggregation | None, sent: Mapping[str, int], owners: Mapping[str, Sequence[str]], sites: int
) -> None:
    """Check before round 1 that enough sites send each row for secure aggregation.

    A row of fewer would be no sum. It is refused rather than left at the sites, where it would never be
    trained and yet be part of the model.

    Args:
        sent: the number of sites that send a row of each class.
        owners: the sites that annotate each class.
        sites: number of all.

    Raises:
        FederationError: names each class with too few, and their sites.
    """
    if secure is None:
        return
    if sites < secure.fewest:
        raise FederationError(
            f"secure_aggregation with colluders={secure.colluders} needs {secure.fewest} sites or more, and "
            f"{sites} take part. Find more sites or, in a new experiment, lower colluders or remove the "
            "section"
        )
    few = {name: owners[name] for name, number in sent.items() if 0 < number < secure.fewest}
    if few:
        listed = "; ".join(f"{name} ({', '.join(annotating) or 'none'})" for name, annotating in few.items())
        raise FederationError(
            "secure_aggregation adds the classifier weights of a class over the sites that label it, "
            f"{secure.fewest} or more, and these have fewer: {listed}. Leave such classes out at their "
            "sites, or find more sites. Or, in a new experiment, remove the section or choose vanilla, whose "
            "sites send all weights. From a server that lies, vanilla does not hide such a site's update"
        )


def check_same_classes(
    secure: SecureAggregation | None,
    method: Method,
    label_type: LabelType,
    owners: Mapping[str, Collection[str]],
    sites: int,
) -> None:
    """Check that all sites have the same classes, where secure aggregation needs that.

    Where one of a site's classes is right, rows that are equal move nothing: a server that chooses them could
    let one site alone learn, though each class has many.

    Args:
        owners, sites: see `check_owners`.

    Raises:
        FederationError: names a class that not all have.
    """
    if secure is None or label_type != "multiclass" or method.labels.unknown != "masked":
        return
    if lacking := [name for name, annotating in owners.items() if len(annotating) < sites]:
        raise FederationError(
            f"secure_aggregation: where an image has one class, {method.about.title} needs the same "
            f"classes at all sites, and not all have {lacking[0]!r}. In a new experiment, remove the section "
            "or choose a method that teaches unknown classes as absent (vanilla)"
        )


def check_decision(
    decision: DecisionSettings | None,
    method: Method,
    label_type: LabelType,
    owners: Mapping[str, Collection[str]],
    sites: int,
) -> None:
    """Check that sites would fit thresholds to the probabilities that the model predicts.

    Where an image has one class, those of a site that sees only its own classes are among these alone.

    Args:
        owners, sites: see `check_owners`.

    Raises:
        FederationError: names a class that not all have.
    """
    own_rows = method.labels.view == "own" and method.sharing.personal == "nothing"
    if decision is None or label_type != "multiclass" or not own_rows:
        return
    if lacking := [name for name, annotating in owners.items() if len(annotating) < sites]:
        raise FederationError(
            f"[decision]: where an image has one class, a site of {method.about.title} has probabilities "
            f"among its own classes, the model among all. Not all sites have {lacking[0]!r}. Remove the "
            "section and fit thresholds to the trained model with `suture decide`"
        )


def check_measurable(schedule: Schedule, infos: Mapping[str, SiteInfo], best: Best | None) -> None:
    """Check before round 1 that a site can measure a loss, where rounds are selected by the sites' losses.

    Args:
        infos: of each site that takes part.
        best: the best round of an experiment that continues.

    Raises:
        FederationError: none can; says why, and what to set.
    """
    held = {site: info.n.get("validation", 0) for site, info in infos.items()}
    if schedule.selection != "site_loss" or best or any(held[s] and infos[s].measures for s in infos):
        return
    few = "{} validation images are too few for its min_loss and min_count"
    why = (f"{s}: {few.format(n) if n else 'no validation images'}" for s, n in sorted(held.items()))
    raise FederationError(
        f"no site has a validation loss that may leave it ({'; '.join(why)}), so no round could be selected "
        "by selection='site_loss'. Give a site more validation images, or set selection='last'. With "
        "labelled validation data at the server, set selection='server_metric'"
    )


def check_label_type(method: Method, label_type: LabelType) -> None:
    """Refuse a federation of labels that the method is not defined for.

    Raises:
        ConfigError: names the methods that are.
    """
    if label_type in method.labels.types:
        return
    kind = {"multilabel": "several labels an image", "multiclass": "one label an image"}[label_type]
    raise ConfigError(
        f"{method.about.title} does not support {kind}, which the sites have; choose another method "
        "(`suture list methods` shows what each is for)"
    )


def check_phase(plan: Plan, rounds: int, trained: int, line: Round | None) -> None:
    """Refuse a number of rounds that would put the last committed round into another phase.

    Args:
        trained: number of that round.
        line: of the history, while its losses are not known yet.

    Raises:
        ConfigError: names both phases.
    """
    if line is None or trained > rounds:
        return
    now = round_context(plan.method, plan.seed, rounds, trained).phase.name
    if (was := line.phase) != now:
        raise ConfigError(
            f"round {trained} was trained in the phase {as_word(was)}, but in a run of {rounds} "
            f"rounds it belongs to the phase {now}. Set rounds to its former value, or begin a new "
            "experiment"
        )
