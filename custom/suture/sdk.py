"""What others import to write a method, a data set, simulated sites, an encoder, or a script for FLARE.

    from suture.sdk import About, LabelUse, LocalAveraging, hyperparameters

These names are stable; where they are defined is not. `suture.testing` checks what one has written.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from suture.core.errors import ConfigError, DataError, RejectedUpdate, SutureError
from suture.core.labels import LabelSet, canonical
from suture.core.runtime import generator_for
from suture.data.batch import Batch
from suture.data.dataset import DatasetConfig
from suture.data.published import PublishedTable
from suture.data.readers import DataConfig, DataSet
from suture.data.reading import (
    Reading,
    Sheet,
    fault,
    indicators,
    read_lines,
    read_sheet,
    restrict,
    row_faults,
)
from suture.data.split import by_patient
from suture.data.table import SPLITS, Table
from suture.execution.sites import Destination, Simulation, write_sites
from suture.execution.study import StudySites
from suture.learning.training import LocalRound, LocalTraining, SiteContext, fit, view_key
from suture.methods.averaging import (
    LocalAveraging,
    WeightedMean,
    mean_of_channel,
    train_update,
    weighted_mean,
)
from suture.methods.base import (
    About,
    ClassFacts,
    GlobalModel,
    LabelUse,
    Method,
    Phase,
    RoundContext,
    Share,
    SharingSpec,
    hyperparameters,
)
from suture.methods.composed import Component, Composed, LossTerm, Requirements, Step, Supervised
from suture.models import ModelSpec
from suture.models.encoders import Backbone
from suture.models.priors import PriorEntry
from suture.protocol.egress import (
    CLASSES,
    NUM_SAMPLES,
    OWNED_CLASSES,
    SCALE_OF_MODEL,
    VARIABLE,
    WEIGHT,
    Channel,
    Egress,
    Layout,
    add_prefix,
    strip_prefix,
)
from suture.protocol.messages import TaskData, Update, align_rows

if TYPE_CHECKING:
    from suture.flare.client import gradients, load, receive, send
    from suture.flare.compat.job_packages import installed
    from suture.flare.components import DeclaredResultFilter, MethodAggregator, SiteRowsFilter
    from suture.flare.kit import read_kit
    from suture.flare.local import LocalSite, network

_OF_FLARE = {
    "DeclaredResultFilter": "suture.flare.components",
    "LocalSite": "suture.flare.local",
    "MethodAggregator": "suture.flare.components",
    "SiteRowsFilter": "suture.flare.components",
    "gradients": "suture.flare.client",
    "installed": "suture.flare.compat.job_packages",
    "load": "suture.flare.client",
    "network": "suture.flare.local",
    "read_kit": "suture.flare.kit",
    "receive": "suture.flare.client",
    "send": "suture.flare.client",
}
"""Imported as they are first used: FLARE takes seconds."""


def __getattr__(name: str) -> Any:
    if name not in _OF_FLARE:
        raise AttributeError(f"module 'suture.sdk' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_OF_FLARE[name]), name)


__all__ = [
    "CLASSES",
    "NUM_SAMPLES",
    "OWNED_CLASSES",
    "SCALE_OF_MODEL",
    "SPLITS",
    "VARIABLE",
    "WEIGHT",
    "About",
    "Backbone",
    "Batch",
    "Channel",
    "ClassFacts",
    "Component",
    "Composed",
    "ConfigError",
    "DataConfig",
    "DataError",
    "DataSet",
    "DatasetConfig",
    "DeclaredResultFilter",
    "Destination",
    "Egress",
    "GlobalModel",
    "LabelSet",
    "LabelUse",
    "Layout",
    "LocalAveraging",
    "LocalRound",
    "LocalSite",
    "LocalTraining",
    "LossTerm",
    "Method",
    "MethodAggregator",
    "ModelSpec",
    "Phase",
    "PriorEntry",
    "PublishedTable",
    "Reading",
    "RejectedUpdate",
    "Requirements",
    "RoundContext",
    "Share",
    "SharingSpec",
    "Sheet",
    "Simulation",
    "SiteContext",
    "SiteRowsFilter",
    "Step",
    "StudySites",
    "Supervised",
    "SutureError",
    "Table",
    "TaskData",
    "Update",
    "WeightedMean",
    "add_prefix",
    "align_rows",
    "by_patient",
    "canonical",
    "fault",
    "fit",
    "generator_for",
    "gradients",
    "hyperparameters",
    "indicators",
    "installed",
    "load",
    "mean_of_channel",
    "network",
    "read_kit",
    "read_lines",
    "read_sheet",
    "receive",
    "restrict",
    "row_faults",
    "send",
    "strip_prefix",
    "train_update",
    "view_key",
    "weighted_mean",
    "write_sites",
]
