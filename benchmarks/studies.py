"""What a setting of a job is worth and costs, over seeds: `python benchmarks/studies.py STUDY`.

  transport  each type of transport, and as a control float32 with a learning rate that is larger by one
             part in a million: how far two runs of one seed lie apart that differ by rounding alone
  limits     sites with exact figures, and with default limits under [privacy]: the training is the same, and
             the figures decide which round is selected
  patients   DP-SGD with several ε per patient, a head on a frozen EfficientNet-Lite0; the sites' noise (σ)
  encoders   an encoder with all of it trained, with adapters, and the head alone; the ViT begins with random
             weights. The first run of a frozen encoder computes features, which SUTURE_CACHE keeps. Numbers:
             those that a round carries either way. Images/s: of training steps of 64 images by the time of a
             processor, without reading and augmentation; for the head on stored features

`--job` is another job than the study's own (the demo, or surgical_nih, which needs SUTURE_DATA), `--set`
changes its settings, `--only` names some variants. Each run is a process of its own, a plain loop with one
thread; with `--records FILE` what is in the file already is not run again. AUROC is of the selected model on
the test set of the server; differences to the first variant are paired by seed, with 95 % intervals of
Student's t. To choose a learning rate, run with each (`--set lr=...`) and compare AUROC of validation.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args
from unittest.mock import patch

import torch
from harness import apart, command, interval, outcome, ran, ranged, recorded, show

from suture.core.files import read_json
from suture.core.labels import LabelSet
from suture.core.privacy import PrivacyConfig
from suture.data.batch import FEATURES, Augmentation
from suture.execution.job import Job, load_job, with_settings
from suture.methods.base import SharingSpec
from suture.models import ModelSpec, build
from suture.models.adapters import Adapters
from suture.models.classifier import Trains
from suture.protocol.packing import Transport


@dataclass(frozen=True)
class Variant:
    """A job as a study runs it.

    Attributes:
        privacy: what else its sites have under [privacy].
    """

    name: str
    job: Job
    privacy: Mapping[str, Any] = field(default_factory=dict)


def transport(job: Job) -> Iterator[Variant]:
    """The types of transport, and the control."""
    for kind in get_args(Transport):
        yield Variant(kind, with_settings(job, [f"transport={kind}"]))
    method: Any = job.method
    local = replace(method.local, lr=method.local.lr * (1 + 1e-6))
    yield Variant("control", replace(job, method=replace(method, local=local)))


def limits(job: Job) -> Iterator[Variant]:
    """Figures as they are, and as default limits let them leave."""
    yield Variant("exact figures", job)
    yield Variant("default limits", job, PrivacyConfig().model_dump(exclude={"label_view"}))


def patients(job: Job) -> Iterator[Variant]:
    """One rule for every ε: batches of a tenth of a site's patients, few rounds, and the clip, by Adam."""
    job = replace(job, augmentation=Augmentation())
    yield Variant("none", job)
    for epsilon in (8, 4, 1):
        yield Variant(f"ε {epsilon}", job, {"epsilon": epsilon, "clip": 1.0})


ENCODERS = {
    "cnn": ModelSpec("cnn"),
    "resnet_small": ModelSpec("resnet_small"),
    "efficientnet_lite0": ModelSpec("efficientnet_lite0", weights="package"),
    "vit_tiny": ModelSpec("timm:vit_tiny_patch16_224"),
}
ADAPTERS = {"efficientnet_lite0": Adapters("bias")}
"""Of encoders that do not take the default ones: Lite0's convolutions pad in their own way."""

LABELS = LabelSet(tuple(f"class {i}" for i in range(14)))
COSTS = ("numbers", "images/s of a core")


def encoders(job: Job) -> Iterator[Variant]:
    """Each encoder by what of it is trained."""
    for name, encoder in ENCODERS.items():
        for trains in get_args(Trains):
            weights = encoder.weights if trains != "head" or encoder.weights else "random"
            adapters = ADAPTERS.get(name) if trains == "adapters" else None
            spec = replace(encoder, train=trains, adapters=adapters, weights=weights)
            yield Variant(f"{name}, {trains}", replace(job, model=spec))


def travelling(spec: ModelSpec) -> int:
    """Numbers of a model that a round carries in each direction."""
    model = build(spec, LABELS, 0, pretrained=False)
    state = model.state_dict()
    return sum(state[n].numel() for n in (*SharingSpec("average").shared(model), "head.weight", "head.bias"))


def pace(spec: ModelSpec) -> float:
    """Training images a second of a processor."""
    torch.set_num_threads(1)
    model = build(spec, LABELS, 0, pretrained=False).train()
    image = torch.rand(64, spec.preprocessing.channels, spec.size, spec.size)
    inputs = {FEATURES: torch.rand(64, model.encoding)} if spec.reads_features else {"image": image}
    optimiser = torch.optim.Adam([parameter for parameter in model.parameters() if parameter.requires_grad])
    seconds = []
    for _ in range(5):
        start = time.process_time()
        optimiser.zero_grad()
        model(inputs).square().mean().backward()
        optimiser.step()
        seconds.append(time.process_time() - start)
    return 64 / min(seconds)


HEAD_ALONE = (
    *("model.name=efficientnet_lite0", "model.weights=package", "model.train=head"),
    *("method.batch_norm=frozen", "rounds=5", "lr=5e-3", "batch_size=256", "epochs=1"),
)
STUDIES = {
    "transport": (transport, "demo", ("simulation.images=500", "simulation.held_out=1000", "rounds=12")),
    "limits": (limits, "surgical_nih", ("rounds=10",)),
    "patients": (patients, "surgical_nih", HEAD_ALONE),
    "encoders": (encoders, "surgical_nih", ("rounds=10",)),
}
"""The variants of each study, its job, and the settings of the job."""

HEAD = ("variant", "seeds", "AUROC (range)", "difference", "of validation", "rounds selected", "kB a round")
MORE = ("bytes to first", "kB up", "s", "peak MB", "σ")


def measured(job: Job, privacy: Mapping[str, Any]) -> dict[str, Any]:
    """Run once, in a process that has done nothing before."""
    public = PrivacyConfig.of_public_data

    def of_sites(label_view: Any) -> PrivacyConfig:
        return public(label_view).model_copy(update=dict(privacy))

    with patch.object(PrivacyConfig, "of_public_data", of_sites), ran(job) as out:
        counts = [read_json(path) for path in sorted(out.rglob("counts.json"))]
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
        noise = [one["multiplier"] for one in counts if one.get("multiplier")]
        return outcome(out) | {"memory": memory, "noise": noise}


def main(
    study: Literal["transport", "limits", "patients", "encoders"],
    job: str | None = None,
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5),
    set: tuple[str, ...] = (),
    only: tuple[str, ...] = (),
    records: Path | None = None,
) -> None:
    """Print a row for each variant."""
    variants, usual, settings = STUDIES[study]
    made = with_settings(load_job(job or usual), () if job else settings)

    def runs(variant: Variant) -> Iterator[dict[str, Any]]:
        changed = with_settings(variant.job, set)
        for seed in seeds:
            conditions = {"study": study, "variant": variant.name, "job": job or usual, "set": [*set]}
            run = replace(changed, seed=seed)

            def measure(run: Job = run) -> dict[str, Any]:
                return apart(measured, run, variant.privacy)

            yield recorded(records, {**conditions, "seed": seed}, measure) if records else measure()

    def rows() -> Iterator[list[object]]:
        first: list[dict[str, Any]] = []
        for variant in variants(made):
            if not only or variant.name in only:
                found = [*runs(variant)]
                first = first or found
                spec = variant.job.model
                costs = [f"{travelling(spec):,}", f"{apart(pace, spec):,.0f}"] if study == "encoders" else []
                yield [variant.name, len(found), *cells(found, first), *costs]

    show((*HEAD, *MORE, *(COSTS if study == "encoders" else ())), rows(), f"{study}: {' '.join(set)}")


def cells(found: list[dict[str, Any]], first: list[dict[str, Any]]) -> Iterator[str]:
    """The figures of a variant, beside those of the first one."""
    of = {key: [one[key] for one in found] for key in found[0]}
    yield ranged(of["auroc"])
    yield interval([a["auroc"] - b["auroc"] for a, b in zip(found, first, strict=True)], 4)
    yield f"{statistics.mean(of['validation']):.3f}"
    yield ", ".join(map(str, of["round"]))
    yield f"{of['bytes'][0] / 1e3:,.1f}"
    yield f"{of['bytes'][0] / first[0]['bytes']:.4f}"
    yield f"{of['bytes_up'][0] / 1e3:,.1f}"
    yield f"{statistics.mean(of['seconds']):.1f}"
    yield f"{max(of['memory']):,.0f}"
    yield ", ".join(f"{sigma:.2f}" for sigma in of["noise"][0])


if __name__ == "__main__":
    command(main, seeds=(1,), set=("rounds=1", "epochs=1"))
