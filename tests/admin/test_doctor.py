"""Looking over a site: each fault is found, named and comes with a remedy."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import sys
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from cryptography.hazmat.primitives.serialization import Encoding
from startup_kits import Authority, MakeKit, write_kit

from outside_method import DISTRIBUTION, MODULE, NAME, install, on_path
from suture.core.privacy import PrivacyConfig
from suture.data.config import SiteConfig, TrainingConfig
from suture.federation.site.ledger import Ledger, Release
from suture.federation.state_files import EXPERIMENTS
from suture.flare.kit import read_kit
from suture_admin import doctor, kit_checks
from suture_admin.doctor import examine
from suture_admin.kit_checks import Finding, check_connection
from suture_admin.policy import FILTER, PRIVACY, allow_classes, make_strict, survive
from world import exit_of, suture


@pytest.fixture(autouse=True)
def refusal(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why servers refuse to register a site; in place of FLARE's connection to them."""
    reasons = [""]
    monkeypatch.setattr(kit_checks, "refusal", lambda _: reasons[-1])
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
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


@pytest.mark.parametrize(("dates", "status"), [({"begins": 2}, "error"), ({"ends": 12}, "warning")])
def test_dates_of_certificates(dates: dict[str, int], status: str, site: Callable[..., Path]) -> None:
    found = problems(examine(site(**dates)))["certificate"]
    assert (found.status, bool(found.remedy)) == (status, True)


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    """Write something else, once, into a file of the site."""

    def spoil(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return spoil


def add(section: str) -> Callable[[Path], None]:
    """Add a section to the site's suture.toml."""
    return lambda folder: edit("local/suture.toml", "[data]", f"{section}\n[data]")(folder)


def write(name: str, content: str | bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(
        content.encode() if isinstance(content, str) else content
    )


def merge(name: str, **values: Any) -> Callable[[Path], None]:
    """Change entries of a file of JSON of the site; what is listed is added."""

    def spoil(folder: Path) -> None:
        path = folder / "local" / name
        content = json.loads(path.read_text())
        more = {k: [*content[k], *v] if isinstance(v, list) else v for k, v in values.items()}
        path.write_text(json.dumps({**content, **more}))

    return spoil


def delete(pattern: str, most: int | None = None) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        for path in list(folder.glob(pattern))[:most]:
            path.unlink()

    return spoil


def lose_the_ledger(folder: Path) -> None:
    state = folder / "local" / "state"
    Ledger(state / "ledger.jsonl", PrivacyConfig(), state / EXPERIMENTS / "one").record(
        Release("2026-01-01T00:00:00+00:00", "one", "train", 1, answer="x")
    )
    (state / "ledger.jsonl").unlink()


ROOT = Authority().cert.public_bytes(Encoding.PEM).decode()
OFF = PRIVACY["scopes"][0] | {"task_result_filters": [{"path": FILTER, "disabled": True}]}
NO_FILTER = write("local/privacy.json", json.dumps(PRIVACY | {"scopes": [OFF]}))
NOISE = edit("local/suture.toml", "[privacy]", "[privacy]\nclip = 1.0\nnoise = 2.0")
NO_CODE = write("local/resources.json", '{"class_allow_list": ["nvflare."]}')


@pytest.mark.parametrize(
    ("spoil", "about", "status", "words"),
    [
        (write("startup/rootCA.pem", ROOT), "certificate", "error", "not signed"),
        (write("startup/client.key", "no key"), "private key", "error", "client.key"),
        (lambda folder: (folder / "startup/client.key").chmod(0o644), "private key", "warning", "users"),
        (delete("local/resources.json*"), "resources.json", "error", "resources.json"),
        (write("local/authorization.json", "["), "authorization.json", "error", "JSON"),
        (NO_CODE, "installed code", "error", "code"),
        (merge("resources.json", allow_log_streaming=True), "logs", "warning", "to the server"),
        (write("local/privacy.json", '{"scopes": 1}'), "privacy.json", "error", "scopes"),
        (NO_FILTER, "filter", "warning", "disabled"),
        (delete("local/privacy.json"), "filter", "warning", "privacy.json"),
        (merge("resources.json", app_validator={"path": "own.Validator"}), "filter", "warning", "addresses"),
        (merge("resources.json", class_allow_list=["nvflare."]), "filter", "warning", "1 more class"),
        (delete("data/images/*"), "images", "error", "25 of 25"),
        (delete("data/images/*", 1), "images", "warning", "1 of 25"),
        (lambda folder: (folder / "data/images").rename(folder / "gone"), "images", "error", "data/images"),
        (edit("data/labels.csv", ",train,", ",trian,"), "data", "error", "trian"),
        (delete("local/suture.toml"), "suture.toml", "error", "suture.toml"),
        (add("[storage]\nstat = 'x'"), "suture.toml", "error", "'state'"),
        (add("[storage]\nstate = '/proc/suture'"), "disk of the state", "error", "/proc"),
        (add("[training]\ndevice = 'cuda:99'"), "device", "error", "cuda:99"),
        (add("[training]\ndevice = 'gpu'"), "device", "error", '"gpu"'),
        (NOISE, "budget", "warning", "max_epsilon"),
        (lose_the_ledger, "ledger", "error", "line 1"),
    ],
)
def test_each_fault_is_found_and_has_a_remedy(
    spoil: Callable[[Path], None], about: str, status: str, words: str, site: Callable[..., Path]
) -> None:
    folder = site()
    spoil(folder)
    found = problems(examine(folder))[about]
    assert (found.status, words in found.text) == (status, True)
    assert found.remedy


@pytest.mark.parametrize("role", ["site", "server"])
def test_a_party_that_runs_code_of_jobs_is_not_sound_and_the_remedies_change_it(
    role: str, make_kit: MakeKit
) -> None:
    folder = make_kit(role, "server")
    if role == "server":
        for step in (allow_classes, survive):
            step(read_kit(folder))
    found = problems(examine(folder))
    assert found["code of jobs"].status == "warning"
    if role == "site":
        assert found["installed code"].status == "warning"
        assert "project_admin, lead" in found["code of jobs"].text
    else:
        assert "private key" in found["code of jobs"].text
        for word in ("may bring code", "1 more class", "fetch addresses"):
            assert word in found["jobs"].text
    suture(*found["code of jobs"].remedy.partition(":")[0].split()[1:])
    assert "code of jobs" not in problems(examine(folder))
    suture("policy", folder)
    assert not {"jobs", "installed code"} & problems(examine(folder)).keys()


def test_a_method_from_outside_is_shown_and_its_remedy_allows_it(
    site: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = site()
    install(tmp_path / "installed")
    with on_path(monkeypatch, tmp_path / "installed"):
        found = problems(examine(folder))["methods"]
        assert found.status == "warning"
        assert f"{NAME} ({MODULE}.Prox of {DISTRIBUTION} 1.0)" in found.text
        assert found.remedy == f"suture policy {folder} --allow {MODULE}."
        suture(*found.remedy.split()[1:])
        (allowed,) = (f for f in examine(folder) if f.about == "methods")
        assert allowed.status == "ok"
        assert MODULE not in sys.modules
    install(tmp_path / "two")
    points = next((tmp_path / "two").glob("*.dist-info")) / "entry_points.txt"
    points.write_text(points.read_text().replace(NAME, "surgical", 1))
    with on_path(monkeypatch, tmp_path / "two"):
        found = problems(examine(folder))["methods"]
    assert found.status == "error"
    assert f"{DISTRIBUTION} 1.0" in found.text
    assert "'surgical'" in found.text


def test_a_server_needs_no_data_and_its_port_may_be_free(make_kit: MakeKit) -> None:
    found = {f.about: f for f in examine(make_kit("server", "server"))}
    assert found["suture.toml"].status == found["connection"].status == "ok"


READ = {"resources.json": {"installed code", "launcher", "killed processes", "logs", "filter"}}
READ |= {"authorization.json": {"code of jobs", "filter"}, "privacy.json": {"filter"}}


def test_one_broken_file_or_an_unforeseen_failure_ends_no_other_check(
    site: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = site()

    def sound() -> set[str]:
        return {f.about for f in examine(folder) if f.status == "ok"}

    before = sound()
    for broken, lost in READ.items():
        path = folder / "local" / broken
        whole = path.read_text()
        for content in ("{", "[]", '{"permissions": 1, "components": 1, "scopes": 1}'):
            path.write_text(content)
            assert problems(examine(folder))[broken].status == "error"
            assert sound() >= before - lost
        path.write_text(whole)
    for name in ("check_clock", "check_certificates", "check_data", "load_table"):
        monkeypatch.setattr(doctor, name, lambda *_: {}["surprise"])
    told = {(f.status, f.text) for f in examine(folder) if f.about == "doctor"}
    assert told == {("error", "KeyError: 'surprise'")}
    assert sound() == before - {"clock", "certificate", "private key", "data", "images"}


@contextlib.contextmanager
def listening(
    kit: Callable[[int], Path | None], *, grpc: bool = False, proxied: list[str] | None = None
) -> Iterator[int]:
    """A server at a port: with TLS and the certificate of a kit, or another program.

    Args:
        proxied: gets the first line of who connects; a proxy stands before the server.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        folder = kit(port)

        def answer() -> None:
            plain, _ = listener.accept()
            with plain:
                if not folder:
                    plain.sendall(b"220 hello\r\n")
                    return
                if proxied is not None:
                    proxied.extend(plain.recv(1000).decode().splitlines())
                    plain.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
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


EXPIRED = {"begins": -10, "ends": -2}


@pytest.mark.parametrize(
    ("kit", "own", "status", "named"),
    [
        ({"role": "server", "name": "server"}, {}, "ok", ""),
        ({"role": "server", "name": "server"} | EXPIRED, {}, "error", ""),
        ({"role": "server", "name": "server"}, EXPIRED, "error", ""),
        ({"role": "server", "name": "server"}, None, "error", ""),  # the site's certificate is foreign
        ({"role": "site", "name": "lakeside"}, {}, "error", "'lakeside'"),
        (None, {}, "error", ""),  # another program
    ],
)
def test_who_answers_at_the_port(
    kit: dict[str, Any] | None,
    own: dict[str, int] | None,
    status: str,
    named: str,
    make_kit: MakeKit,
    site: Callable[..., Path],
) -> None:
    with listening(lambda port: make_kit(**kit, port=port) if kit else None) as port:
        folder = site(port=port, **(own or {}))
        if own is None:  # of another project, beside the right root
            other = write_kit(folder / "other", Authority(), "site", "harbor")
            for name in ("client.crt", "client.key"):
                (folder / "startup" / name).write_bytes((other / "startup" / name).read_bytes())
        found = examine(folder)
    connection = next(f for f in found if f.about == "connection")
    assert (connection.status, named in connection.text) == (status, True)
    assert (("certificate", "error") in {(f.about, f.status) for f in found}) is (own != {})


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


PROXY = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("scheme", "environment", "used"),
    [
        ("grpc", {"https_proxy": PROXY}, True),
        ("grpc", {"grpc_proxy": PROXY, "http_proxy": "http://else.invalid", "no_proxy": "calhost"}, True),
        ("grpc", {"grpc_proxy": PROXY, "no_grpc_proxy": "", "no_proxy": "localhost"}, True),
        ("grpc", {"grpc_proxy": PROXY, "no_proxy": "else.invalid, .localhost"}, False),
        ("grpc", {"grpc_proxy": "", "https_proxy": PROXY}, False),
        ("grpc", {"HTTPS_PROXY": PROXY}, False),
        ("tcp", {"grpc_proxy": PROXY}, False),
    ],
)
def test_a_proxy_is_taken_where_grpc_takes_one(
    scheme: str, environment: dict[str, str], used: bool, make_kit: MakeKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (found,) = check_connection(replace(read_kit(make_kit()), scheme=scheme))
    assert (found.status, "proxy 127.0.0.1:1 " in found.text) == ("error", used)


def test_the_server_is_examined_through_a_proxy_with_a_password(
    make_kit: MakeKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    with listening(lambda _: make_kit("server", "server"), grpc=True, proxied=asked) as port:
        monkeypatch.setenv("grpc_proxy", f"http://me:s%40y@127.0.0.1:{port}")
        found, *_ = check_connection(
            replace(read_kit(make_kit()), scheme="grpc", host="a.invalid", port=8002)
        )
    assert (found.status, "s%40y" in found.text) == ("ok", False)
    assert asked[0].startswith("CONNECT a.invalid:8002 HTTP/1.")
    assert f"Proxy-Authorization: Basic {b64encode(b'me:s@y').decode()}" in asked


def test_the_command_prints_json_and_fails_on_errors(
    site: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_of(monkeypatch, "doctor", site(), "--json") == 1
    findings = json.loads(capsys.readouterr().out)
    assert {"about", "status", "text", "remedy"} == findings[0].keys()
    assert [f["about"] for f in findings if f["status"] == "error"] == ["connection"]
    assert exit_of(monkeypatch, "doctor", tmp_path) == 1
    assert "startup kit" in capsys.readouterr().out


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
    assert (first.status, "Tesla T4, 5 of 16 GiB" in first.text) == ("ok", True)
    assert [(found.status, 'half = "fp16"' in found.remedy) for found in more] == [("warning", True)] * warned
