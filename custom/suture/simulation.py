"""Sites for a simulation, each written to disk as a hospital would have it.

A simulated site is an ordinary site: a folder with a labels.csv that holds its own columns only, and a
suture.toml. Who knows what stays in the run folder of the machine that starts the simulation.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from suture.config import DataConfig, PrivacyConfig, SiteConfig, StorageConfig, TrainingConfig, write_site_config
from suture.data.partition import nih_sites, write_site
from suture.data.phantom import DEMO, write_sites
from suture.errors import ConfigError
from suture.messages import STRICT
from suture.methods.contract import LabelView

SERVER = "server"


def _config(folder: Path, data: DataConfig, view: LabelView) -> SiteConfig:
    """A simulated site's own configuration; its data are public, so it withholds no count."""
    return SiteConfig(
        data=data,
        training=TrainingConfig(),
        privacy=PrivacyConfig(label_view=view, min_count=0),
        storage=StorageConfig(state=folder / "state", cache=folder / "cache"),
    )
