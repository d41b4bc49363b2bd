"""Open-i's chest X-ray reports partitioned among sites that know different findings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as validated

from suture.core.validation import LIMIT, STRICT
from suture.data.readers import load_table
from suture.methods.base import Method
from suture_papers.chest_xrays.openi import FINDINGS, THIRTEEN, OpeniConfig
from suture_papers.partition import Classes, PartitionedSites
from suture_papers.public_data import data_folder, table_in


@validated(frozen=True, config=STRICT)
class OpeniSites(PartitionedSites):
    """Open-i's reports at K sites; the most frequent findings, of which each site knows some.

    Attributes:
        findings: how many: eight, or thirteen with devices.
        root: folder of NLMCXR_reports.tgz; by default openi_reports in SUTURE_DATA.
    """

    findings: Literal[8, 13] = 8
    clients: Annotated[int, Field(ge=1, le=LIMIT)] = 4
    classes: Classes = "round_robin"
    per_client: Annotated[int, Field(ge=1, le=LIMIT)] = 4

    def prepare(self, folder: Path, runs: Path, seed: int, method: Method) -> list[str]:
        """Write each site, and the held-out rows of the server; see `PhantomSites.prepare`.

        Raises:
            ConfigError: there is no archive.
        """
        root = data_folder(self.root, "openi_reports", "the archive of Open-i's reports")
        table = table_in(root, "NLMCXR_reports.tgz")
        findings = FINDINGS if self.findings == 8 else THIRTEEN
        pooled = load_table(OpeniConfig(root=table, table=table, labels=findings, seed=self.seed))
        return self.write_partitioned(folder, runs, method, pooled)
