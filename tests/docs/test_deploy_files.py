"""The files for a hospital's IT are valid, and agree with one another, the project and the version."""

from __future__ import annotations

import re
import subprocess
from configparser import RawConfigParser
from pathlib import Path

import pytest
import yaml
from nvflare.tool.deploy.slurm_deploy import validate_config

import suture

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "deploy"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((FOLDER / "compose.yml").read_text())


def test_the_image_is_of_this_version_and_of_files_that_exist() -> None:
    assert f"ARG VERSION={suture.__version__}\n" in DOCKERFILE
    sources = " ".join(re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE)).split()
    built = "dist/suture-${VERSION}-py3-none-any.whl"
    assert built in sources
    assert all((ROOT / source).is_file() for source in sources if source != built)


def test_compose_starts_the_projects_parties_with_the_images_volumes() -> None:
    project = yaml.safe_load((ROOT / "poc_workspace" / "project.yml").read_text())
    parties = {p["name"]: p["type"] for p in project["participants"] if p["type"] != "admin"}
    assert COMPOSE["services"].keys() == parties.keys()
    volumes = set(re.findall(r'"(/\w+)"', DOCKERFILE.partition("VOLUME")[2].partition("\n")[0]))
    used = set()
    for name, service in COMPOSE["services"].items():
        build = service["build"]
        assert (FOLDER / build["context"] / build["dockerfile"]).resolve() == FOLDER / "Dockerfile"
        assert build["args"].keys() <= set(re.findall(r"^ARG (\w+)=", DOCKERFILE, re.MULTILINE))
        mounts = {target: source for source, target in (re.split(r":(?=/)", v) for v in service["volumes"])}
        assert {target.removesuffix(":ro") for target in mounts} == (
            {"/kit", "/state"} if parties[name] == "server" else volumes
        )
        assert mounts["/kit"].endswith(f"/{name}")
        used |= {source for source in mounts.values() if "/" not in source}
    assert used == COMPOSE["volumes"].keys()


def test_the_service_runs_a_sites_own_script_with_a_users_rights() -> None:
    unit = RawConfigParser(strict=False)
    unit.read(FOLDER / "suture.service")
    service = unit["Service"]
    assert service["User"] != "root"
    assert service["ExecStart"].startswith(service["WorkingDirectory"])
    assert service["WorkingDirectory"].startswith(service["ReadWritePaths"])
    assert Path(service["ExecStart"].split()[0]).name in DOCKERFILE


def test_flare_accepts_the_configuration_of_slurm() -> None:
    validate_config(yaml.safe_load((FOLDER / "slurm.yaml").read_text()))


def test_no_file_names_a_host_of_packages() -> None:
    assert not [path.name for path in FOLDER.iterdir() if "://" in path.read_text()]


@pytest.mark.complete
def test_the_script_is_one_of_bash() -> None:
    subprocess.run(["bash", "-n", FOLDER / "wheels.sh"], check=True)
