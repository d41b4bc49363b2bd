"""What the server checks before any training, and the labelled data with which it measures models itself."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from suture.core.errors import ConfigError, FederationError, as_word, check_known
from suture.core.labels import LabelSet, LabelType, canonical
from suture.core.runtime import check_device
from suture.core.validation import flat
from suture.data.batch import Augmentation, Samples, columns
from suture.data.config import SiteConfig
from suture.data.table import Split
from suture.federation.plan import Plan, Schedule, Selection, round_context
from suture.federation.server.global_model import classifier
from suture.federation.server.registry import SiteRegistry, one_name, statements
from suture.federation.server.selection import MEASURED_HERE, Best
from suture.learning.evaluation import (
    among_annotated,
    by_attribute,
    class_scores,
    entropy,
    mean_interval,
    overall,
)
from suture.learning.features import FeatureStore
from suture.learning.samples import load_samples
from suture.learning.training import SiteContext, predict
from suture.methods.base import GlobalModel, Method
from suture.privacy.secure_aggregation import SecureAggregation
from suture.protocol.decisions import DecisionSettings
from suture.protocol.messages import Labels, Metrics, SiteInfo
from suture.protocol.records import Round


class HeldOut:
    """Labelled data at the server, evaluated there.

    Args:
        config: the server's own suture.toml.
        plan: its model determines how samples are read.

    Attributes:
        labels: the classes of the data.
        groups: the classes of each group, under canonical names.
    """

    def __init__(self, config: SiteConfig, plan: Plan) -> None:
        check_device(config.training.device, "server")
        self._device = torch.device(config.training.device)
        self._plan = plan
        self._codes = config.data.stated_codes()
        self.labels, self._samples = load_samples(config, plan.model, "server")
        self._folder = config.storage.feature_folder
        self._read = not plan.model.reads_features  # whether the samples are as the model reads them
        self.groups: dict[str, tuple[str, ...]] = {
            group: tuple(canonical(name, config.data.synonyms) for name in names)
            for group, names in config.data.groups.items()
        }

    def take_names(self, registry: SiteRegistry) -> None:
        """Give the federation's names to the classes, by the names that sites have for them and by codes.

        Raises:
            ClassConflict: their codes contradict those of the federation.
            LabelError: two of them become one.
        """
        called, every = registry.names, (*self.labels, *chain(*self.groups.values()))
        own = {name: called.get(name, name) for name in every}
        codes = {own[name]: codes for name, codes in self._codes.items()}
        said = [*statements(codes, "the server's data"), *statements(registry.codes, "the sites")]
        classes = one_name(said, registry.labels)
        names = {name: classes.get(one, one) for name, one in own.items()}
        self.labels = LabelSet.of([names[name] for name in self.labels], label_type=self.labels.label_type)
        self.groups = {group: tuple(names[name] for name in of) for group, of in self.groups.items()}

    def check_groups(self, labels: Labels) -> None:
        """Check before any training that the groups consist of the federation's classes.

        Raises:
            ConfigError: a group names another class, or two groups name the same.
        """
        named = Counter(chain.from_iterable(self.groups.values()))
        for name, times in named.items():
            check_known("class under [data.groups] of the server's suture.toml", name, labels)
            if times > 1:
                raise ConfigError(
                    f"the server's suture.toml names {name!r} twice under [data.groups]; a class "
                    "belongs to one group"
                )

    def has(self, split: Split) -> bool:
        """Whether a split has any samples."""
        return split in self._samples and len(self._samples[split]) > 0

    def measurable_labels(self, split: Split) -> Labels:
        """The classes whose AUROC a split defines: they have a positive and a negative there."""
        if not self.has(split):
            return ()
        y = self._samples[split].y
        both = (y == 1).any(dim=0) & (y == 0).any(dim=0)
        return tuple(name for name, some in zip(self.labels, both.tolist(), strict=True) if some)

    def test(
        self, model: GlobalModel, of_round: int, bootstrap: int
    ) -> tuple[Metrics, tuple[float, float] | None]:
        """Evaluate the model on the test split, on every class that both the model and the data have.

        Returns:
            the metrics, and the 95 % interval of the mean AUROC.
        """
        part, logits, labels, names = self._predict(model, "test")
        seed = self._plan.seed
        metrics = Metrics(
            of_round,
            "test",
            len(part),
            entropy(part, logits, labels.label_type),
            class_scores(part, logits, labels, names, bootstrap=bootstrap, seed=seed),
            overall(part, logits, labels.label_type),
            by_attribute(part, logits, labels, names),
        )
        return metrics, mean_interval(part, logits, labels, metrics.classes, bootstrap, seed)

    def validate(self, model: GlobalModel) -> dict[str, dict[str, float]]:
        """Return the AUROC of each class that defines it and, for multiclass labels, the recall, by the name
        of their mean.
        """
        part, logits, labels, names = self._predict(model, "validation")
        scores = class_scores(part, logits, labels, names)
        found = {"server_auroc": {n: s.auroc for n, s in scores.items() if s.auroc is not None}}
        if labels.label_type == "multiclass":
            recalls = {name: s.recall for name, s in scores.items() if s.recall is not None}
            found["server_balanced_accuracy"] = recalls
        return found

    def _predict(self, model: GlobalModel, split: Split) -> tuple[Samples, Tensor, LabelSet, Labels]:
        """Return the samples of a split under the model's classes, its logits, the model's classes, and those
        that the data have too.
        """
        labels = LabelSet(model.labels, model.label_type)
        network = classifier(model, self._plan).to(self._device)
        if not self._read:
            store = FeatureStore(network, self._plan.model, self._samples, self._folder, "server")
            self._samples, self._read = dict(store.samples), True
        part = columns(self._samples[split], self.labels, labels)
        context = SiteContext(
            "server", network, {split: part}, self._plan.model.preprocessing, Augmentation(), self._device
        )
        logits = among_annotated(predict(context, part), part.y, labels.label_type)
        return part, logits, labels, tuple(n for n in model.labels if n in self.labels)


_FIXED = ("seed", "method", "hyperparameters", "model", "augmentation", "transport", "secure_aggregation")
"""The parts of a plan that a later job of the experiment may not change."""


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


def fixed_settings(plan: Plan) -> dict[str, Any]:
    """Return the settings of a plan that later jobs of the experiment may not change."""
    values = plan.to_dict()
    return {key: values[key] for key in _FIXED}


def check_unchanged(before: Mapping[str, Any], now: Mapping[str, Any], experiment: str) -> None:
    """Check that an experiment continues with the settings that it began with.

    Args:
        before, now: what `fixed_settings` returns, or a part of it.

    Raises:
        ConfigError: they differ; names the setting.
    """
    for part in (key for key in _FIXED if key in before and key in now):
        word = "method" if part == "hyperparameters" else part  # as in a job
        was, has = (flat(word, json.loads(json.dumps(plan[part]))) for plan in (before, now))
        for key in sorted(was.keys() | has.keys()):
            if was.get(key) != has.get(key):
                raise ConfigError(
                    f"the experiment {experiment!r} was begun with {as_word(key)}={as_word(was.get(key))}, "
                    f"and this job has {as_word(key)}={as_word(has.get(key))}; set it back, or begin a new "
                    "experiment"
                )
