"""A job whose configuration makes FLARE fetch an address, read a file or a variable of the party."""

from __future__ import annotations

import http.server
import io
import json
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from hypothesis import given
from hypothesis import strategies as st
from nvflare.apis.fl_constant import SiteType
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from nvflare.fuel.utils.config_factory import ConfigFactory
from nvflare.fuel.utils.json_scanner import JsonScanner
from nvflare.fuel.utils.wfconf import resolve_var_refs
from nvflare.lighter.tool_consts import NVFLARE_SUBMITTER_CRT_FILE
from nvflare.lighter.utils import sign_folders
from nvflare.private.fed.app.fl_app_validator import FLAppValidator
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator
from nvflare.private.fed.utils.app_authz import AppAuthzService
from nvflare.private.fed.utils.app_deployer import AppDeployer
from nvflare.private.privacy_manager import PrivacyService

from suture.execution.job import load_job, with_settings
from suture.execution.job_files import jobs_folder
from suture.flare import SCHEDULE
from suture.flare.compat.plain_json import PlainJson, references
from suture.flare.recipe import export_job
from suture_admin.policy import CLASSES
from suture_admin.remote import refusals

SECRET = "SUTURE_TEST_SECRET"


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[str]]]:
    """A web server: its address, and the paths that were requested of it."""
    paths: list[str] = []

    class Web(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    monkeypatch.setenv("no_proxy", "*")
    server = http.server.HTTPServer(("127.0.0.1", 0), Web)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/secret", paths
    server.shutdown()
    server.server_close()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[], PlainJson]:
    """Installs the validator as FLARE does from resources.json; FLARE's readers come back after the test."""
    monkeypatch.setattr(ConfigFactory, "_fmt2Loader", dict(ConfigFactory._fmt2Loader))
    return PlainJson


def exported(folder: Path) -> Path:
    return export_job(load_job("demo"), folder, "trial", ("alpha",), bundle=False)


def as_hocon(path: Path, address: str) -> None:
    """Make a JSON file of a job one that includes an address: every JSON is HOCON too."""
    path.with_suffix(".conf").write_text(f'{{ include url("{address}")\n{path.read_text()[1:]}')
    path.unlink()


def zipped(folder: Path, above: Path) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for path in sorted(folder.rglob("*")):
            archive.write(path, path.relative_to(above))
    return data.getvalue()


def submit(job: Path) -> tuple[bool, str]:
    """What FLARE's server does with a submitted job before it fires any event."""
    valid, error, _ = JobMetaValidator().validate(job.name, zipped(job, job.parent))
    return valid, error


def deploy(app: Path, root: Path, monkeypatch: pytest.MonkeyPatch, validator: PlainJson | None) -> str:
    """What FLARE's client does with an app; the text of its refusal."""
    for name in ("startup", "local"):
        (root / name).mkdir(parents=True, exist_ok=True)
    own = FLAppValidator(SiteType.CLIENT, [validator] if validator else None)
    monkeypatch.setattr(AppAuthzService, "app_validator", own)
    monkeypatch.setattr(PrivacyService, "is_scope_allowed", lambda _: True)
    workspace, meta = Workspace(str(root), "alpha"), {"submitter_name": "x", "submitter_org": "y"}
    try:
        return str(AppDeployer().deploy(workspace, "job", meta, "app", zipped(app, app), FLContext()) or "")
    except Exception as error:  # FLARE raises a plain Exception, and reports its text
        return str(error)


@pytest.mark.parametrize(
    "file",
    ["meta.json", "app_server/config/config_fed_server.json", "app_alpha/config/config_fed_client.json"],
)
def test_a_job_in_hocon_fetches_nothing(
    file: str, fetched: Any, install: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, paths = fetched
    job = exported(tmp_path)
    as_hocon(job / file, address)

    def taken(at: str, validator: PlainJson | None) -> str:
        if "client" in file:
            return deploy(job / "app_alpha", tmp_path / at, monkeypatch, validator)
        return submit(job)[1]

    assert taken("open", None) == ""
    assert set(paths) == {"/secret"}, "FLARE itself fetches it"
    paths.clear()
    assert taken("strict", install())
    assert not paths


@pytest.mark.parametrize("name", ["config_fed_client.yml", "config_fed_client.yaml", "deeper/other.conf"])
def test_no_other_file_lies_in_the_configuration(name: str, install: Any, tmp_path: Path) -> None:
    """But for the signatures of who has submitted it."""
    app = exported(tmp_path) / "app_alpha"
    crt = tmp_path / "submitter.crt"
    crt.write_text("certificate")
    sign_folders(str(app), rsa.generate_private_key(65537, 2048), str(crt))
    assert (app / "config" / NVFLARE_SUBMITTER_CRT_FILE).is_file()
    assert install().validate(str(app)) == ("", {})
    path = app / "config" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")
    assert f"config/{name}" in install().validate(str(app))[0]


@pytest.mark.parametrize("text", [f"{{${SECRET}}}", f"of {{${SECRET}}}", f"${{secret:{SECRET}}}"])
def test_plain_json_reads_no_variable_of_a_party(text: str, install: Any, tmp_path: Path) -> None:
    app = exported(tmp_path) / "app_server"
    path = app / "config" / "config_fed_server.json"
    config = json.loads(path.read_text())
    config["workflows"][0]["args"]["schedule"] = text
    path.write_text(json.dumps(config))
    assert text in install().validate(str(app))[0]


def test_a_file_that_is_no_json_is_refused(install: Any, tmp_path: Path) -> None:
    app = exported(tmp_path) / "app_alpha"
    for content in ("", "include url('http://x')", "[" * 100_000):
        (app / "config" / "config_fed_client.json").write_text(content)
        assert "config_fed_client.json" in install().validate(str(app))[0]


def test_braces_are_text_in_the_files_that_flare_does_not_read(install: Any, tmp_path: Path) -> None:
    job = with_settings(load_job("demo"), ["title=of {$HOME} <b>"])
    app = export_job(job, tmp_path, "trial", ("alpha",)) / "app_server"
    assert install().validate(str(app)) == ("", {})
    assert json.loads((app / "config" / SCHEDULE).read_text())["title"] == "of {$HOME} <b>"
    below = app / "config" / "more"
    below.mkdir()
    shutil.copy(app / "config" / SCHEDULE, below)
    assert "{$HOME}" in install().validate(str(app))[0], "FLARE may read another file of the name"


# The list of classes that a party allows


def strict(root: Path, *classes: str, role: str = "client", **more: Any) -> Path:
    """A party's workspace with a class_allow_list."""
    (root / "local").mkdir(parents=True)
    (root / "startup").mkdir()
    (root / "startup" / f"fed_{role}.json").touch()
    (root / "local" / "resources.json").write_text(json.dumps({"class_allow_list": list(classes), **more}))
    return root


def deployed(root: Path, source: Path) -> Path:
    """An app at a party, as FLARE lays it down for the process of a job."""
    return shutil.copytree(source, root / "JOB" / source.name)


@pytest.mark.parametrize(
    ("app", "missing"),
    [
        ("app_server", "suture.flare.controller.FederationController"),
        ("app_alpha", "suture.flare.executor.SiteExecutor"),
        ("app_alpha", "suture.flare.executor.EgressFilter"),
    ],
)
def test_a_component_that_is_not_allowed_is_refused_with_its_name_when_the_job_is_deployed(
    app: str, missing: str, install: Any, tmp_path: Path
) -> None:
    """FLARE finds it when the job's process starts, and the submitter reads EXECUTION_EXCEPTION."""
    listed = [name for names in CLASSES.values() for name in names if name != missing]
    root = strict(tmp_path / "party", *listed, role="server" if app == "app_server" else "client")
    placed = deployed(root, exported(tmp_path) / app)
    error, _ = install().validate(str(placed))
    (text,) = refusals({"job_deploy_detail": [f"harbor: {error}"]}, {})
    assert all(word in text for word in ("harbor", missing, "class_allow_list"))
    (placed / "custom").mkdir()
    assert install().validate(str(placed)) == ("", {}), "FLARE asks for another right"


@pytest.mark.parametrize("key", ["path", "class_path"])
def test_no_place_of_a_configuration_hides_a_component(key: str, install: Any, tmp_path: Path) -> None:
    root, foreign = strict(tmp_path / "party", "suture."), {key: "foreign.module.Class"}
    placed = deployed(root, exported(tmp_path) / "app_alpha")
    path = placed / "config" / "config_fed_client.json"
    for hide in (
        lambda config: config["components"].append({"id": "x", **foreign}),
        lambda config: config["executors"].append({"tasks": ["x"], "executor": foreign}),
        lambda config: config["executors"][0]["executor"]["args"].update(more=foreign),
    ):
        before = path.read_text()
        hide(config := json.loads(before))
        path.write_text(json.dumps(config))
        assert "'foreign.module.Class'" in install().validate(str(placed))[0]
        path.write_text(before)


@pytest.mark.parametrize(
    ("classes", "more"),
    [(["*"], {}), (["suture."], {}), (["other."], {"class_list_enforcement_mode": "warn"})],
)
def test_what_flare_allows_is_deployed(
    classes: list[str], more: dict[str, Any], install: Any, tmp_path: Path
) -> None:
    root = strict(tmp_path / "party", *classes, **more)
    assert install().validate(str(deployed(root, exported(tmp_path) / "app_alpha"))) == ("", {})


@pytest.mark.parametrize(("role", "other"), [("server", "site"), ("client", "server")])
def test_one_app_for_all_is_deployed_where_a_party_allows_its_own_part(
    role: str, other: str, install: Any, tmp_path: Path
) -> None:
    """A folder of jobs/ as it lies; FLARE builds nothing of the other role's part."""
    own = [name for kind, names in CLASSES.items() for name in names if kind != other]
    placed = deployed(strict(tmp_path / "party", *own, role=role), jobs_folder() / "demo" / "app")
    assert install().validate(str(placed)) == ("", {})
    path = placed / "config" / f"config_fed_{role}.json"
    foreign = {"components": [{"id": "x", "path": "a.b.C"}]}
    path.write_text(json.dumps({**json.loads(path.read_text()), **foreign}))
    assert "'a.b.C'" in install().validate(str(placed))[0]


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet="a{}$:@ .", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab{", max_size=3), inner, max_size=3)
    ),
)


@given(plain)
def test_what_passes_is_what_flare_leaves_alone(value: object) -> None:
    config = {"value": value}
    if not list(references(config)):
        read = json.loads(json.dumps(config))
        resolve_var_refs(JsonScanner(read), {})
        assert read == config
