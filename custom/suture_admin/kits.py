"""What the administration reads and changes of a startup kit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from suture.core.errors import ConfigError
from suture.core.files import write_json
from suture.federation.ownership import DEFAULT_STUDY
from suture.flare.kit import (
    CERTIFICATES,
    Kit,
    certificate,
    lead,
    out_of_date,
    poc_folder,
    read_kit,
    read_kit_json,
)


def policy_file(kit: Kit, name: str) -> Path:
    """Return the file that FLARE reads for ``resources`` or ``authorization``; it may be absent.

    It is ``local/NAME.json``, and where that is absent ``local/NAME.json.default``, as provisioned.
    """
    own = kit.folder / "local" / f"{name}.json"
    default = own.with_name(f"{name}.json.default")
    return default if default.exists() and not own.exists() else own


def change_policy(kit: Kit, name: str, **changes: object) -> Path:
    """Set fields of ``resources`` or ``authorization``; return the file, which is ``local/NAME.json``.

    The ``.default`` of ``resources`` gets the same content: ``nvflare deploy prepare`` reads it alone, and
    deletes the other file.

    Raises:
        ConfigError: the party has no such file yet, or a broken one.
    """
    target = kit.folder / "local" / f"{name}.json"
    content = {**read_kit_json(policy_file(kit, name)), **changes}
    write_json(target, content)
    default = target.with_name(f"{name}.json.default")
    if name == "resources" and default.exists():
        write_json(default, content)
    return target


def components_of(resources: Path) -> list[dict[str, Any]]:
    """Return the components that a party's resources.json lists.

    Raises:
        ConfigError: the file is absent or broken, or lists none.
    """
    components = read_kit_json(resources).get("components")
    if not isinstance(components, list) or not all(isinstance(c, dict) for c in components):
        raise ConfigError(f"{resources} lists no components; restore it from the startup kit's archive")
    return components


def check_valid_now(kit: Kit) -> None:
    """Check the dates of a kit's certificates; FLARE would end a connection without saying why.

    Raises:
        ConfigError: one of them has expired or is not valid yet; names it and the remedy.
    """
    for name in (CERTIFICATES[kit.role], "rootCA.pem"):
        path = kit.folder / "startup" / name
        if wrong := out_of_date(certificate(path), "ask the project's administrator for a new startup kit"):
            raise ConfigError(f"{path} {'; '.join(wrong)}")


def admin_kit(startup_kit: Path | None, env: str = "poc", study: str = DEFAULT_STUDY) -> Kit:
    """Return the startup kit of a user: by default that of the POC's lead, who runs its experiments.

    Args:
        study: of FLARE, in which the user acts.

    Raises:
        ConfigError: no kit is named for ``prod``, there is no POC, or the kit belongs to another party.
    """
    if startup_kit is None and env != "poc":
        raise ConfigError(
            f"--env {env} needs an administrator's startup kit and none was named; give --startup-kit DIR"
        )
    kit = read_kit(startup_kit) if startup_kit else lead(poc_folder())
    if kit.role != "admin":
        raise ConfigError(f"{kit.folder} is the startup kit of a {kit.role}; name an administrator's")
    return replace(kit, study=study)


def options_of(kit: Kit) -> list[str]:
    """Return the options of a command that acts with a user's kit, in their study."""
    study = ["--study", kit.study] if kit.study != DEFAULT_STUDY else []
    return ["--startup-kit", str(kit.folder), *study]
