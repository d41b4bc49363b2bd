"""What the server holds of the sites' ledgers: the newest digest that each has stated, over all experiments.

The server sends it with each task, so that a site whose ledger was rolled back, with its states or without,
finds a digest that the ledger lacks; see `suture.federation.site.chain`. A digest is salted and says nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from suture.core.files import hold, replacing
from suture.core.plain import read_regular
from suture.protocol.messages import Digest

log = logging.getLogger(__name__)

LEDGERS = "ledgers.json"
"""File of the digests in the server's state folder."""

_WAIT = 60.0
"""Seconds to wait for another job of the server that writes the file."""

_DIGESTS = TypeAdapter(dict[str, Digest])


@dataclass(frozen=True)
class SiteLedgers:
    """The newest digest of each site's ledger; jobs that run at the same time share the file.

    It is not synchronised to the disk: after a power failure it may hold older digests, which sites still
    have.
    """

    path: Path

    def read(self) -> dict[str, str]:
        """Return the digests by site; none where the file cannot be read, with a warning."""
        try:
            return _DIGESTS.validate_json(read_regular(self.path))
        except FileNotFoundError:
            return {}
        except (OSError, ValidationError):
            log.warning(
                "%s is damaged: if a site rolled its ledger back meanwhile, the server cannot detect it",
                self.path,
            )
            return {}

    def note(self, stated: Mapping[str, str]) -> None:
        """Keep the digests that sites have stated with their answers.

        Raises:
            DiskError: the file cannot be written.
            InUse: another job holds it for too long.
        """
        if not stated:
            return
        with hold(self.path.with_name(f".{self.path.name}.lock"), _WAIT, f".{self.path.name}.*.tmp"):
            everything = self.read() | dict(stated)
            with replacing(self.path, durable=False, private=True) as temporary:
                temporary.write_text(json.dumps(everything, sort_keys=True))
