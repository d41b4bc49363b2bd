"""Looking over a site: each fault is found, named and comes with a remedy."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from startup_kits import MakeKit
from typer.testing import CliRunner

from outside_method import DISTRIBUTION, MODULE, NAME, install, on_path
from suture.cli import app
from suture.flare.admin.doctor import examine
from suture.flare.admin.kit import read_kit
from suture.flare.admin.kit_checks import Finding
from suture.flare.admin.policy import allow_classes, make_strict, survive


@pytest.fixture
def site(make_kit: MakeKit, hospital: Callable[..., Path]) -> Callable[..., Path]:
    """Makes a site that has data and a policy; only its server is not there."""

    def make(**dates: int) -> Path:
        folder = make_kit("site", **dates)
        config = hospital(folder / "data", ("Mass", "Nodule"), 25, 1)
        text = (
            config.read_text().replace('"images"', '"../data/images"').replace('"labels', '"../data/labels')
        )
        (folder / "local" / "suture.toml").write_text(text)
        kit = read_kit(folder)
        allow_classes(kit)
        survive(kit)
        make_strict(kit)
        return folder

    return make


def problems(findings: list[Finding]) -> dict[str, Finding]:
    return {f.about: f for f in findings if f.status != "ok" and f.about not in ("connection", "clock")}


def test_a_sound_site_has_no_problem_but_the_absent_server(site: Callable[..., Path]) -> None:
    findings = examine(site())
    assert not problems(findings)
    (connection,) = (f for f in findings if f.about == "connection")
    assert connection.status == "error"
    assert "localhost:1" in connection.text
    data = next(f for f in findings if f.about == "data")
    assert "2 classes" in data.text
    assert "15 train" in data.text


@pytest.mark.parametrize(
    ("dates", "status", "words"),
    [
        ({"begins": -10, "ends": -2}, "error", "expired"),
        ({"begins": 2}, "error", "valid from"),
        ({"ends": 12}, "warning", "more days"),
    ],
)
def test_dates_of_certificates(
    dates: dict[str, int], status: str, words: str, site: Callable[..., Path]
) -> None:
    found = problems(examine(site(**dates)))["certificate"]
    assert (found.status, words in found.text) == (status, True)
    assert found.remedy


def spoil_root(folder: Path) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding
    from startup_kits import Authority

    root = folder / "startup" / "rootCA.pem"
    root.write_bytes(Authority().cert.public_bytes(Encoding.PEM))


def spoil_key(folder: Path) -> None:
    (folder / "startup" / "client.key").write_text("no key")


def show_key(folder: Path) -> None:
    (folder / "startup" / "client.key").chmod(0o644)


def lose_policy(folder: Path) -> None:
    for path in (folder / "local").glob("resources.json*"):
        path.unlink()


def lose_rights(folder: Path) -> None:
    (folder / "local" / "authorization.json").write_text("[")


def forget_classes(folder: Path) -> None:
    (folder / "local" / "resources.json").write_text('{"class_allow_list": ["nvflare."]}')


def stream_logs(folder: Path) -> None:
    path = folder / "local" / "resources.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "allow_log_streaming": True}))


def break_privacy(folder: Path) -> None:
    (folder / "local" / "privacy.json").write_text('{"scopes": 1}')


def lose_privacy(folder: Path) -> None:
    (folder / "local" / "privacy.json").unlink()


def allow_more(folder: Path) -> None:
    path = folder / "local" / "resources.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "class_allow_list": [*content["class_allow_list"], "nvflare."]}))


def misspell(folder: Path) -> None:
    path = folder / "local" / "suture.toml"
    path.write_text(path.read_text() + '[storage]\nstat = "x"\n')


def lose_config(folder: Path) -> None:
    (folder / "local" / "suture.toml").unlink()


def lose_images(folder: Path) -> None:
    (folder / "data" / "images").rename(folder / "data" / "gone")


def spoil_table(folder: Path) -> None:
    path = folder / "data" / "labels.csv"
    path.write_text(path.read_text().replace(",train,", ",trian,", 1))


def want_gpu(folder: Path) -> None:
    path = folder / "local" / "suture.toml"
    path.write_text(path.read_text() + '[training]\ndevice = "cuda:99"\n')


def misname_device(folder: Path) -> None:
    path = folder / "local" / "suture.toml"
    path.write_text(path.read_text() + '[training]\ndevice = "gpu"\n')


@pytest.mark.parametrize(
    ("spoil", "about", "status", "words"),
    [
        (spoil_root, "certificate", "error", "not signed"),
        (spoil_key, "private key", "error", "client.key"),
        (show_key, "private key", "warning", "other users"),
        (lose_policy, "resources.json", "error", "resources.json"),
        (lose_rights, "authorization.json", "error", "not valid JSON"),
        (forget_classes, "installed code", "error", "may bring no code"),
        (stream_logs, "logs", "warning", "to the server"),
        (break_privacy, "filter", "error", "scopes"),
        (lose_privacy, "filter", "warning", "no privacy.json"),
        (allow_more, "filter", "warning", "1 more class"),
        (misspell, "suture.toml", "error", "did you mean 'state'"),
        (lose_config, "suture.toml", "error", "no suture.toml"),
        (lose_images, "images", "error", "does not exist"),
        (spoil_table, "data", "error", "trian"),
        (want_gpu, "device", "error", "cuda:99"),
        (misname_device, "device", "error", '"gpu" cannot be used'),
    ],
)
def test_each_fault_is_found_and_has_a_remedy(
    spoil: Callable[[Path], None], about: str, status: str, words: str, site: Callable[..., Path]
) -> None:
    folder = site()
    spoil(folder)
    found = problems(examine(folder))
    assert about in found
    assert found[about].status == status
    assert words in found[about].text
    assert found[about].remedy


def test_travelling_code_is_a_warning_at_a_site(make_kit: MakeKit) -> None:
    found = problems(examine(make_kit()))
    assert found["installed code"].status == found["code of jobs"].status == "warning"
    assert "project_admin, lead" in found["code of jobs"].text
    assert "--refuse-code" in found["code of jobs"].remedy


def test_a_method_from_outside_is_shown_and_its_remedy_allows_it(
    site: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = site()
    install(tmp_path / "installed")
    with on_path(monkeypatch, tmp_path / "installed"):
        found = problems(examine(folder))["methods"]
        assert found.status == "warning"
        assert f"{NAME} ({MODULE}.Prox of {DISTRIBUTION} 1.0) is installed and not allowed" in found.text
        assert found.remedy == f"suture policy {folder} --allow {MODULE}."
        assert CliRunner().invoke(app, found.remedy.split()[1:]).exit_code == 0
        (allowed,) = (f for f in examine(folder) if f.about == "methods")
        assert (allowed.status, allowed.text.endswith("is installed and allowed")) == ("ok", True)
        assert MODULE not in sys.modules


def test_two_methods_of_one_name_are_an_error(
    site: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "installed")
    points = next((tmp_path / "installed").glob("*.dist-info")) / "entry_points.txt"
    points.write_text(points.read_text().replace(NAME, "surgical", 1))
    with on_path(monkeypatch, tmp_path / "installed"):
        found = problems(examine(site()))["methods"]
    assert found.status == "error"
    assert f"{DISTRIBUTION} 1.0 registers a method 'surgical', and so does suture" in found.text


OLD = {"id": "abandoned_jobs", "path": "suture.flare.abandoned.AbandonedJobs", "args": {}}


def test_a_component_that_has_moved_is_an_error_until_the_remedy_replaces_it(make_kit: MakeKit) -> None:
    folder = make_kit("server", "server")
    path = folder / "local" / "resources.json"
    content = json.loads(path.with_name("resources.json.default").read_text())
    path.write_text(json.dumps({**content, "components": [*content["components"], OLD]}))
    found = problems(examine(folder))
    assert "killed processes" not in found
    assert found["components"].status == "error"
    assert str(path) in found["components"].text
    assert f"names {OLD['path']}" in found["components"].text
    assert "suture.flare.stale_jobs.StaleJobs" in found["components"].text
    command = found["components"].remedy.partition(":")[0]
    assert command == f"suture policy {folder} --survive"
    assert CliRunner().invoke(app, command.split()[1:]).exit_code == 0
    assert not {"components", "killed processes"} & problems(examine(folder)).keys()
    paths = [component["path"] for component in json.loads(path.read_text())["components"]]
    assert paths == [*(c["path"] for c in content["components"]), "suture.flare.stale_jobs.StaleJobs"]


def test_a_server_needs_no_data_and_its_port_may_be_free(make_kit: MakeKit) -> None:
    found = {f.about: f for f in examine(make_kit("server", "server"))}
    assert found["suture.toml"].status == found["connection"].status == "ok"
    assert "free" in found["connection"].text


@pytest.mark.parametrize("tls", [True, False], ids=["the federation", "another program"])
def test_who_answers_at_the_port(tls: bool, make_kit: MakeKit, site: Callable[..., Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        server = make_kit("server", "server", port=port)

        def answer() -> None:
            plain, _ = listener.accept()
            with plain:
                if not tls:
                    plain.sendall(b"220 hello\r\n")
                    return
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(server / "startup" / "server.crt", server / "startup" / "server.key")
                context.load_verify_locations(server / "startup" / "rootCA.pem")
                context.verify_mode = ssl.CERT_REQUIRED
                with contextlib.suppress(OSError), context.wrap_socket(plain, server_side=True):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        found = {f.about: f for f in examine(site(port=port))}["connection"]
        thread.join()
    assert found.status == ("ok" if tls else "error")
    assert ("with a certificate of this project" in found.text) is tls


def test_the_command_prints_json_and_fails_on_errors(site: Callable[..., Path], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", str(site()), "--json"])
    assert done.exit_code == 1
    findings = json.loads(done.stdout)
    assert {"about", "status", "text", "remedy"} == findings[0].keys()
    assert [f["about"] for f in findings if f["status"] == "error"] == ["connection"]
    done = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert done.exit_code == 1
    assert "is no startup kit" in done.stdout
