"""Looking over a site: each fault is found, named and comes with a remedy."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from startup_kits import Authority, MakeKit, write_kit
from typer.testing import CliRunner

from outside_method import DISTRIBUTION, MODULE, NAME, install, on_path
from suture.cli import app
from suture.core.privacy import PrivacyConfig
from suture.data.config import SiteConfig, TrainingConfig
from suture.federation.site.ledger import Ledger, Release
from suture.federation.state_files import EXPERIMENTS
from suture.flare.kit import read_kit
from suture_admin import doctor, kit_checks
from suture_admin.doctor import examine
from suture_admin.kit_checks import Finding
from suture_admin.policy import allow_classes, make_strict, survive


@pytest.fixture(autouse=True)
def refusal(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why servers refuse to register a site; in place of FLARE's connection to them."""
    reasons = [""]
    monkeypatch.setattr(kit_checks, "refusal", lambda _: reasons[-1])
    return reasons


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


def disable_filter(folder: Path) -> None:
    path = folder / "local" / "privacy.json"
    content = json.loads(path.read_text())
    content["scopes"][0]["task_result_filters"][0]["disabled"] = True
    path.write_text(json.dumps(content))


def include(folder: Path) -> None:
    path = folder / "local" / "resources.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "app_validator": {"path": "own.Validator"}}))


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


def empty_images(folder: Path) -> None:
    for path in (folder / "data" / "images").iterdir():
        path.unlink()


def lose_an_image(folder: Path) -> None:
    next((folder / "data" / "images").iterdir()).unlink()


def want_elsewhere(folder: Path) -> None:
    path = folder / "local" / "suture.toml"
    path.write_text(path.read_text() + '[storage]\nstate = "/proc/suture"\n')


def spoil_table(folder: Path) -> None:
    path = folder / "data" / "labels.csv"
    path.write_text(path.read_text().replace(",train,", ",trian,", 1))


def want_gpu(folder: Path) -> None:
    path = folder / "local" / "suture.toml"
    path.write_text(path.read_text() + '[training]\ndevice = "cuda:99"\n')


def misname_device(folder: Path) -> None:
    path = folder / "local" / "suture.toml"
    path.write_text(path.read_text() + '[training]\ndevice = "gpu"\n')


def lose_the_ledger(folder: Path) -> None:
    state = folder / "local" / "state"
    Ledger(state / "ledger.jsonl", PrivacyConfig(), state / EXPERIMENTS / "one").record(
        Release("2026-01-01T00:00:00+00:00", "one", "train", 1, answer="x")
    )
    (state / "ledger.jsonl").unlink()


def add_noise(folder: Path) -> None:
    path = folder / "local" / "suture.toml"
    path.write_text(path.read_text().replace("[privacy]\n", "[privacy]\nclip = 1.0\nnoise = 2.0\n"))


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
        (break_privacy, "privacy.json", "error", "scopes"),
        (disable_filter, "filter", "warning", "is disabled"),
        (empty_images, "images", "error", "25 of 25 are not in"),
        (lose_an_image, "images", "warning", "1 of 25 are not in"),
        (want_elsewhere, "disk of the state", "error", "/proc cannot be written"),
        (include, "filter", "warning", "fetch addresses"),
        (lose_privacy, "filter", "warning", "no privacy.json"),
        (allow_more, "filter", "warning", "1 more class"),
        (misspell, "suture.toml", "error", "did you mean 'state'"),
        (lose_the_ledger, "ledger", "error", "noted line 1 with its last answer"),
        (add_noise, "budget", "warning", "max_epsilon is not"),
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
    folder = make_kit()
    found = problems(examine(folder))
    assert found["installed code"].status == found["code of jobs"].status == "warning"
    assert "project_admin, lead" in found["code of jobs"].text
    assert "sets byoc to none" in found["code of jobs"].remedy
    remedy = found["code of jobs"].remedy.partition(":")[0]
    assert CliRunner().invoke(app, remedy.split()[1:]).exit_code == 0
    assert "code of jobs" not in problems(examine(folder))


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
    assert f"{DISTRIBUTION} 1.0" in found.text
    assert "'surgical'" in found.text


def test_a_server_needs_no_data_and_its_port_may_be_free(make_kit: MakeKit) -> None:
    found = {f.about: f for f in examine(make_kit("server", "server"))}
    assert found["suture.toml"].status == found["connection"].status == "ok"
    assert "free" in found["connection"].text


@pytest.mark.parametrize("broken", ["resources.json", "authorization.json", "privacy.json"])
@pytest.mark.parametrize("content", ["{", "[]", '{"permissions": 1, "components": 1, "scopes": 1}'])
def test_one_broken_file_ends_no_other_check(broken: str, content: str, site: Callable[..., Path]) -> None:
    folder = site()
    sound = [f.about for f in examine(folder) if f.status == "ok"]
    (folder / "local" / broken).write_text(content)
    found = examine(folder)
    assert [f.about for f in found if f.status == "error" and f.about == broken]
    read_it = {"resources.json": {"installed code", "launcher", "killed processes", "logs", "filter"}}
    read_it |= {"authorization.json": {"code of jobs", "filter"}, "privacy.json": {"filter"}}
    assert {f.about for f in found if f.status == "ok"} >= set(sound) - read_it[broken]
    assert CliRunner().invoke(app, ["doctor", str(folder)]).exit_code == 1


def test_an_unforeseen_failure_of_a_check_ends_no_other_check(
    site: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from suture_admin import doctor

    def fail(*_: object) -> None:
        raise KeyError("surprise")

    folder = site()
    sound = {f.about for f in examine(folder) if f.status == "ok"}
    for name in ("check_clock", "check_certificates", "check_data", "load_table"):
        monkeypatch.setattr(doctor, name, fail)
    found = examine(folder)
    told = {(f.status, f.text) for f in found if f.about == "doctor"}
    assert told == {("error", "KeyError: 'surprise'")}
    lost = {"clock", "certificate", "private key", "data", "images"}
    assert {f.about for f in found if f.status == "ok"} == sound - lost


def test_a_server_that_runs_code_of_jobs_is_not_sound(make_kit: MakeKit) -> None:
    """The README's own recipe of before left the right to bring code, and doctor called that ok."""
    folder = make_kit("server", "server")
    kit = read_kit(folder)
    allow_classes(kit)
    survive(kit)
    found = problems(examine(folder))
    assert {"code of jobs", "jobs"} <= found.keys()
    assert "private key" in found["code of jobs"].text
    for word in ("may bring code", "1 more class", "fetch addresses"):
        assert word in found["jobs"].text
    assert CliRunner().invoke(app, ["policy", str(folder)]).exit_code == 0
    assert not problems(examine(folder))


@contextlib.contextmanager
def listening(kit: Callable[[int], Path | None], *, grpc: bool = False) -> Iterator[int]:
    """A server at a port: with TLS and the certificate of a kit, or another program."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        folder = kit(port)

        def answer() -> None:
            plain, _ = listener.accept()
            with plain:
                if not folder:
                    plain.sendall(b"220 hello\r\n")
                    return
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                own = next((folder / "startup").glob("*.crt"))
                context.load_cert_chain(own, own.with_suffix(".key"))
                context.load_verify_locations(folder / "startup" / "rootCA.pem")
                context.verify_mode = ssl.CERT_REQUIRED
                context.set_alpn_protocols(["h2"] if grpc else [])
                with contextlib.suppress(OSError), context.wrap_socket(plain, server_side=True) as tls:
                    if not grpc or tls.selected_alpn_protocol() == "h2":  # as gRPC demands
                        tls.sendall(b"0")  # as a server of HTTP/2, which speaks first

        thread = threading.Thread(target=answer)
        thread.start()
        yield port
        thread.join()


def connection(folder: Path) -> Finding:
    return next(f for f in examine(folder) if f.about == "connection")


@pytest.mark.parametrize("tls", [True, False], ids=["the federation", "another program"])
def test_who_answers_at_the_port(tls: bool, make_kit: MakeKit, site: Callable[..., Path]) -> None:
    with listening(lambda port: make_kit("server", "server", port=port) if tls else None) as port:
        found = connection(site(port=port))
    assert found.status == ("ok" if tls else "error")
    assert ("with the server's certificate" in found.text) is tls


@pytest.mark.parametrize("reason", ["", "Client 'harbor' is disabled"])
def test_a_site_that_the_server_refuses_is_told_so_over_grpc(
    reason: str, refusal: list[str], make_kit: MakeKit, site: Callable[..., Path]
) -> None:
    refusal.append(reason)
    with listening(lambda port: make_kit("server", "server", port=port), grpc=True) as port:
        folder = site(port=port)
        path = folder / "startup" / "fed_client.json"
        path.write_text(path.read_text().replace('"http"', '"grpc"'))
        found = {f.about: f for f in examine(folder)}
    assert found["connection"].status == "ok"
    registration = found["registration"]
    assert (registration.status, reason in registration.text) == ("error" if reason else "ok", True)
    assert ("enable-client harbor" in registration.remedy) is bool(reason)


def test_a_site_that_answers_in_place_of_the_server_is_found(
    make_kit: MakeKit, site: Callable[..., Path]
) -> None:
    with listening(lambda port: make_kit("site", "lakeside", port=port)) as port:
        found = connection(site(port=port))
    assert found.status == "error"
    assert "the certificate of 'lakeside', not of 'server'" in found.text


def foreign(folder: Path) -> None:
    """A certificate and key of another project, beside the right root."""
    other = write_kit(folder / "other", Authority(), "site", "harbor")
    for name in ("client.crt", "client.key"):
        (folder / "startup" / name).write_bytes((other / "startup" / name).read_bytes())


@pytest.mark.parametrize(
    ("dates", "spoil"), [({"begins": -10, "ends": -2}, None), ({}, foreign)], ids=["expired", "foreign"]
)
def test_a_certificate_that_the_server_refuses_gets_no_ok(
    dates: dict[str, int],
    spoil: Callable[[Path], None] | None,
    make_kit: MakeKit,
    site: Callable[..., Path],
) -> None:
    with listening(lambda port: make_kit("server", "server", port=port)) as port:
        folder = site(port=port, **dates)
        if spoil:
            spoil(folder)
        found = examine(folder)
    assert {("connection", "error"), ("certificate", "error")} <= {(f.about, f.status) for f in found}


def test_an_expired_certificate_of_the_server_gets_no_ok(
    make_kit: MakeKit, site: Callable[..., Path]
) -> None:
    with listening(lambda port: make_kit("server", "server", port=port, begins=-10, ends=-2)) as port:
        assert connection(site(port=port)).status == "error"


def test_the_command_prints_json_and_fails_on_errors(site: Callable[..., Path], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", str(site()), "--json"])
    assert done.exit_code == 1
    findings = json.loads(done.stdout)
    assert {"about", "status", "text", "remedy"} == findings[0].keys()
    assert [f["about"] for f in findings if f["status"] == "error"] == ["connection"]
    done = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert done.exit_code == 1
    assert "is not a startup kit" in done.stdout


@pytest.mark.parametrize(
    ("half", "native", "warned"), [("bf16", False, 1), ("fp16", False, 0), ("bf16", True, 0)]
)
def test_a_gpu_without_bf16_and_its_free_memory_are_named(
    half: Literal["bf16", "fp16"], native: bool, warned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "unusable", lambda _: "")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5 * 2**30, 16 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: native or including_emulation
    )
    training = TrainingConfig(device="cuda:0", amp=True, half=half)
    first, *more = doctor.check_device(SiteConfig.model_construct(training=training))
    assert (first.status, first.text) == ("ok", "cuda:0: Tesla T4, 5 of 16 GiB free")
    assert [(found.status, found.remedy) for found in more] == [
        ("warning", 'write half = "fp16" under [training]')
    ] * warned
