"""eICU's stays partitioned among sites that code different groups of diagnoses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass as validated

from suture.core.validation import LIMIT, STRICT
from suture.data.config import parse_data
from suture.data.readers import load_table
from suture.methods.base import Method
from suture_papers.partition import Classes, PartitionedSites
from suture_papers.public_data import data_folder, table_in


@validated(frozen=True, config=STRICT)
class EicuSites(PartitionedSites):
    """eICU's drugs and past history at K sites; groups of 100 stays or more, of which each site codes some.

    Attributes:
        root: folder of patient.csv and the tables beside it; by default eicu_demo in SUTURE_DATA.
    """

    clients: Annotated[int, Field(ge=1, le=LIMIT)] = 3
    classes: Classes = "disjoint"

    def prepare(self, folder: Path, runs: Path, seed: int, method: Method) -> list[str]:
        """Write each site, and the held-out rows of the server; see `PhantomSites.prepare`.

        Raises:
            ConfigError: there is no patient.csv.
        """
        table = table_in(data_folder(self.root, "eicu_demo", "eICU"), "patient.csv*")
        values = {"dataset": "eicu", "table": table, "labels_from": "diagnosis", "seed": self.seed}
        pooled = load_table(parse_data(values, "simulation"))
        return self.write_partitioned(folder, runs, method, pooled)
