"""Whether a server would register a site, asked without registering it.

FLARE 2.9.0: a server refuses the site that its administrator has disabled when the site registers; a site
that runs logs no reason. A registration ends the session of the site's own process. One without a certificate
does not: the server looks first whether the site is disabled, then logs "missing client cert" and registers
nobody.
Where: nvflare/private/fed/server/client_manager.py: authenticated_client
Where: nvflare/private/fed/authenticator.py: authenticate
Expires with: test_a_registration_without_a_certificate_tells_who_is_disabled_and_registers_nobody
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING
from uuid import uuid4

from nvflare.apis.shareable import Shareable
from nvflare.apis.utils.decomposers import flare_decomposers
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.defs import IdentityChallengeKey, MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.private.defs import CellChannel, CellChannelTopic, CellMessageHeaderKeys, new_cell_message

from suture.flare.compat.cells import stop

if TYPE_CHECKING:
    from suture.flare.kit import Kit

_WAIT = 10.0


def refusal(kit: Kit) -> str:
    """Return why a server that answers would not register a site; empty where it would."""
    flare_decomposers.register()
    startup, before = kit.folder / "startup", logging.root.manager.disable
    cell = Cell(
        fqcn=FQCN.join([kit.name, f"doctor-{uuid4()}"]),  # a name beside that of the site's own process
        root_url=f"{kit.scheme}://{kit.server}",
        secure=True,
        credentials={
            DriverParams.CA_CERT.value: str(startup / "rootCA.pem"),
            DriverParams.CLIENT_CERT.value: str(startup / "client.crt"),
            DriverParams.CLIENT_KEY.value: str(startup / "client.key"),
        },
        create_internal_listener=False,
        auth_identity_map={FQCN.ROOT_SERVER: kit.identity},
    )
    challenge = {IdentityChallengeKey.COMMON_NAME: kit.name, IdentityChallengeKey.NONCE: str(uuid4())}
    site = {CellMessageHeaderKeys.CLIENT_NAME: kit.name, CellMessageHeaderKeys.PROJECT_NAME: kit.project}
    logging.disable(logging.CRITICAL)
    try:
        cell.start()
        end = time.monotonic() + _WAIT
        while (why := _ask(cell, CellChannelTopic.Challenge, challenge)) and time.monotonic() < end:
            time.sleep(0.1)  # the connection is not there at once
        return why or _ask(cell, CellChannelTopic.Register, site)
    finally:
        stop(cell)
        logging.disable(before)


def _ask(cell: Cell, topic: str, headers: dict[str, str]) -> str:
    """Return why the server refuses a request; empty where it does not."""
    answer = cell.send_request(
        channel=CellChannel.SERVER_MAIN,
        topic=topic,
        target=FQCN.ROOT_SERVER,
        request=new_cell_message(headers, Shareable()),
        timeout=_WAIT,
        optional=True,
    )
    code = answer.get_header(MessageHeaderKey.RETURN_CODE)
    return "" if code == ReturnCode.OK else str(answer.get_header(MessageHeaderKey.ERROR) or code)
