"""A signed model folder, and everything that may be done to it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from small_models import saved_model
from suture.core.errors import ConfigError, DataError
from suture_results.model_export.signature import check_digest, sign, verify
from world import refused, suture


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return saved_model(tmp_path / "model")


def keys(folder: Path, name: str, rsa_key: bool = False) -> tuple[Path, Path]:
    key = rsa.generate_private_key(65537, 2048) if rsa_key else ec.generate_private_key(ec.SECP256R1())
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    shape = serialization.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, shape))
    return private, public


def change(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def add(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "description": (lambda folder: change(folder / "model.json"), "changed: model.json;"),
    "weights": (lambda folder: change(folder / "model.safetensors"), "changed: model.safetensors;"),
    "hidden": (lambda folder: change(folder / "deep" / ".hidden"), "changed: deep/.hidden;"),
    "git": (lambda folder: change(folder / ".git" / "HEAD"), "changed: .git/HEAD;"),
    "missing": (lambda folder: (folder / "README.md").unlink(), "missing: README.md;"),
    "added": (lambda folder: add(folder / "notes.txt"), "added: notes.txt;"),
    "ignored": (lambda folder: add(folder / ".gitignore"), "added: .gitignore;"),
    "of git": (lambda folder: add(folder / ".git" / "x"), "added: .git/x;"),
    "deep": (lambda folder: add(folder / "a" / ".b" / "x"), "added: a/.b/x;"),
    "second": (lambda folder: add(folder / "a" / "model.sig"), "added: a/model.sig;"),
    "link": (lambda folder: (folder / "l").symlink_to("model.json"), "special files: l;"),
    "link out": (lambda folder: (folder / ".github").symlink_to("/"), "special files: .github;"),
    "pipe": (lambda folder: os.mkfifo(folder / "pipe"), "special files: pipe;"),
    "unsigned": (lambda folder: (folder / "model.sig").unlink(), "model.sig"),
    "no signature": (lambda folder: (folder / "model.sig").write_text("{}"), "ours.pub"),
}


@pytest.mark.complete
@pytest.mark.parametrize("kind", DAMAGE)
def test_what_was_done_to_a_signed_folder_is_named(
    kind: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No network is needed."""
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection was opened"))
    damage, named = DAMAGE[kind]
    private, public = keys(tmp_path, "ours")
    for name in ("README.md", "deep/.hidden", ".git/HEAD"):
        add(model / name)
    sign(model, private)
    verify(model, public)
    verify(Path(shutil.copytree(model, tmp_path / "elsewhere")), public)
    damage(model)
    with refused(named, by=DataError):
        verify(model, public)


@pytest.mark.complete
def test_files_of_any_name_are_named_as_they_are(model: Path, tmp_path: Path) -> None:
    private, public = keys(tmp_path, "ours")
    names = [
        "o'brien.txt",
        'the "best".txt',
        "'quoted', here.txt",
        "back\\slash.txt",
        "Hash mismatch for 'x'",
    ]
    for name in names:
        (model / name).touch()
    sign(model, private)
    for name in names:
        change(model / name)
    with refused(f"changed: {', '.join(sorted(names))};", by=DataError):
        verify(model, public)


@pytest.mark.complete
def test_another_key_and_a_changed_signature_are_refused(model: Path, tmp_path: Path) -> None:
    private, public = keys(tmp_path, "ours")
    rsa_private, rsa_public = keys(tmp_path, "rsa", rsa_key=True)
    sign(model, private)
    with refused("theirs.pub", by=DataError):
        verify(model, keys(tmp_path, "theirs")[1])
    for call, key in (
        (sign, rsa_private),
        (sign, tmp_path / "nowhere.pem"),
        (sign, public),
        (verify, rsa_public),
        (verify, model / "model.sig"),
    ):
        with refused(key, by=ConfigError):
            call(model, key)
    verify(model, public)
    content = json.loads((model / "model.sig").read_text())
    signed = content["dsseEnvelope"]["signatures"][0]
    signed["sig"] = f"AAAA{signed['sig'][4:]}"
    (model / "model.sig").write_text(json.dumps(content))
    with refused("ours.pub", "model.sig", by=DataError):
        verify(model, public)


@pytest.mark.complete
def test_a_signature_of_another_tool_that_leaves_files_out_is_no_signature_of_all(
    model: Path, tmp_path: Path
) -> None:
    import model_signing as package

    private, public = keys(tmp_path, "ours")
    config = package.signing.Config().use_elliptic_key_signer(private_key=private)
    config.set_hashing_config(package.hashing.Config().set_ignored_paths(paths=["model.sig", "extra"]))
    config.sign(model, model / "model.sig")
    verify(model, public)
    for path in (model / "extra", model / ".git"):
        add(path / "x")
        with refused(f": {path.name}/x;", by=DataError):
            verify(model, public)
        shutil.rmtree(path)


@pytest.mark.complete
@pytest.mark.skipif(shutil.which("openssl") is None, reason="the remedies are commands of openssl")
def test_what_a_file_holds_in_place_of_a_key_is_told_with_the_command_that_makes_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def certificate(private: Path) -> Path:
        """As FLARE's provisioning writes one of its own key."""
        subject = ["openssl", "req", "-x509", "-key", private, "-subj", "/CN=site", "-days", "3", "-out"]
        subprocess.run([*subject, private.with_suffix(".crt")], check=True)
        return private.with_suffix(".crt")

    private, flare = keys(tmp_path, "our key")[0], keys(tmp_path, "client", rsa_key=True)[0]
    sign(model, private)
    for call, path, algorithm in (
        (verify, private, "(EC P-256)"),
        (verify, certificate(private), "(EC P-256)"),
        (sign, flare, "(RSA)"),
    ):
        with pytest.raises(ConfigError) as caught:
            call(model, path)
        assert algorithm in str(caught.value)
        for name in ("key.pub", "key.pem"):
            (tmp_path / name).unlink(missing_ok=True)
        subprocess.run(str(caught.value).rpartition(": ")[2], shell=True, check=True)
        call(model, tmp_path / ("key.pub" if call is verify else "key.pem"))
    for path in (flare, certificate(flare)):
        with refused("(RSA)", by=ConfigError):
            verify(model, path)


def test_without_a_key_the_weights_are_compared(model: Path) -> None:
    assert check_digest(model) in suture("model", "verify", model).replace("\n", "")
    change(model / "model.safetensors")
    with refused("model.safetensors", by=DataError):
        suture("model", "verify", model)
    (model / "model.safetensors").unlink()
    with refused("model.safetensors", by=DataError):
        check_digest(model)


@pytest.mark.complete
def test_the_command_signs_and_verifies(model: Path, tmp_path: Path) -> None:
    private, public = keys(tmp_path, "ours")
    suture("model", "sign", model, "--key", private)
    suture("model", "verify", model, "--key", public)
