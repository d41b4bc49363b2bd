"""A signed model folder, and everything that may be done to it."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from typer.testing import CliRunner

from suture.cli.app import app
from suture.core.errors import ConfigError, DataError
from suture.core.labels import LabelSet
from suture.models import ModelSpec, build
from suture.models.saved import save_model
from suture_results.model_export.signature import check_digest, sign, verify

SPEC = ModelSpec("cnn", size=32)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_model(build(SPEC, LabelSet(("Edema",)), 1, pretrained=False), SPEC, tmp_path / "model", {})
    return tmp_path / "model"


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


def in_folder(folder: Path, name: str = "x") -> None:
    folder.mkdir(parents=True)
    (folder / name).touch()


@pytest.mark.complete
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: change(folder / "model.json"), "changed: model.json; get the"),
        (lambda folder: change(folder / "model.safetensors"), "changed: model.safetensors; get the"),
        (lambda folder: (folder / "README.md").unlink(), "missing: README.md; get the"),
        (lambda folder: (folder / "notes.txt").touch(), "added: notes.txt; get the"),
        (lambda folder: (folder / ".gitignore").touch(), r"added: \.gitignore; get the"),
        (lambda folder: (folder / ".gitattributes").touch(), r"added: \.gitattributes; get the"),
        (lambda folder: in_folder(folder / ".git"), r"added: \.git/x; get the"),
        (lambda folder: in_folder(folder / ".github"), r"added: \.github/x; get the"),
        (lambda folder: in_folder(folder / "a" / ".b"), r"added: a/\.b/x; get the"),
        (lambda folder: in_folder(folder / "a", "model.sig"), r"added: a/model\.sig; get the"),
        (lambda folder: (folder / "l").symlink_to("model.json"), "links or special files: l; replace"),
        (lambda folder: (folder / ".git").symlink_to("/"), r"links or special files: \.git; replace"),
        (lambda folder: os.mkfifo(folder / "pipe"), "links or special files: pipe; replace"),
        (lambda folder: (folder / "model.sig").unlink(), "it is not signed"),
        (lambda folder: (folder / "model.sig").write_text("{}"), "differs from what was signed"),
    ],
)
def test_what_was_done_to_a_signed_folder_is_named(
    damage: Callable[[Path], object], says: str, model: Path, tmp_path: Path
) -> None:
    private, public = keys(tmp_path, "ours")
    (model / "README.md").write_text("a card")
    sign(model, private)
    verify(model, public)
    verify(Path(shutil.copytree(model, tmp_path / "elsewhere")), public)
    damage(model)
    with pytest.raises(DataError, match=says) as caught:
        verify(model, public)
    assert "\n" not in str(caught.value)


@pytest.mark.complete
def test_other_keys_are_refused(model: Path, tmp_path: Path) -> None:
    private, public = keys(tmp_path, "ours")
    sign(model, private)
    with pytest.raises(DataError, match="theirs"):
        verify(model, keys(tmp_path, "theirs")[1])
    rsa_private, rsa_public = keys(tmp_path, "rsa", rsa_key=True)
    for call in (
        lambda: sign(model, rsa_private),
        lambda: sign(model, tmp_path / "nowhere.pem"),
        lambda: sign(model, public),
        lambda: verify(model, rsa_public),
    ):
        with pytest.raises(ConfigError, match=r"nowhere.pem cannot be read|P-256"):
            call()
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
        in_folder(path)
        with pytest.raises(DataError, match=rf"does not cover: {re.escape(path.name)}/x; remove"):
            verify(model, public)
        shutil.rmtree(path)


@pytest.mark.complete
def test_it_covers_every_file_and_needs_no_network(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def connect(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", connect)
    private, public = keys(tmp_path, "ours")
    (model / "deep").mkdir()
    (model / "deep" / ".hidden").write_text("x")
    in_folder(model / ".git", "HEAD")
    sign(model, private)
    verify(model, public)
    change(model / ".git" / "HEAD")
    with pytest.raises(DataError, match=r"changed: \.git/HEAD;"):
        verify(model, public)
    (model / ".git" / "HEAD").write_text("")
    change(model / "deep" / ".hidden")
    with pytest.raises(DataError, match=r"changed: deep/\.hidden;"):
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
    with pytest.raises(DataError) as caught:
        verify(model, public)
    assert f"changed: {', '.join(sorted(names))}; get" in str(caught.value)


@pytest.mark.complete
def test_another_key_and_a_changed_signature_are_told_apart(model: Path, tmp_path: Path) -> None:
    private, public = keys(tmp_path, "ours")
    sign(model, private)
    with pytest.raises(DataError, match=r"model\.sig was made with another key; ask"):
        verify(model, keys(tmp_path, "theirs")[1])
    content = json.loads((model / "model.sig").read_text())
    signed = content["dsseEnvelope"]["signatures"][0]
    signed["sig"] = f"AAAA{signed['sig'][4:]}"
    (model / "model.sig").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"model\.sig was changed or damaged; get"):
        verify(model, public)


def certificate(folder: Path, private: Path) -> Path:
    """A certificate of a private key, as FLARE's provisioning writes one of its own."""
    path = private.with_suffix(".crt")
    subject = ["req", "-x509", "-key", str(private), "-subj", "/CN=site", "-days", "3", "-out", str(path)]
    subprocess.run(["openssl", *subject], cwd=folder, check=True)
    return path


@pytest.mark.complete
@pytest.mark.skipif(shutil.which("openssl") is None, reason="the remedies are commands of openssl")
def test_what_a_file_holds_in_place_of_a_key_is_told_with_the_command_that_makes_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    private, _ = keys(tmp_path, "our key")
    flare, _ = keys(tmp_path, "client", rsa_key=True)
    sign(model, private)
    held = {
        (verify, private): r"a private key \(EC P-256\); a public key",
        (verify, certificate(tmp_path, private)): r"a certificate \(EC P-256\); a public key",
        (sign, flare): r"a private key \(RSA\); a private key of the curve P-256, P-384 or P-521",
    }
    for (call, path), says in held.items():
        (tmp_path / "key.pub").unlink(missing_ok=True)
        with pytest.raises(ConfigError, match=says) as caught:
            call(model, path)
        assert "\n" not in str(caught.value)
        subprocess.run(str(caught.value).rpartition(": ")[2], shell=True, cwd=tmp_path, check=True)
        if call is verify:
            verify(model, tmp_path / "key.pub")
        else:
            sign(model, tmp_path / "key.pem")
    for path in (flare, certificate(tmp_path, flare)):
        with pytest.raises(ConfigError, match=r"\(RSA\); a public key .* ask the signer"):
            verify(model, path)
    with pytest.raises(ConfigError, match="holds no key"):
        verify(model, model / "model.sig")


def test_without_a_key_the_weights_are_compared(model: Path) -> None:
    done = CliRunner().invoke(app, ["model", "verify", str(model)])
    assert done.exit_code == 0, done.output
    assert check_digest(model) in done.output.replace("\n", "")
    change(model / "model.safetensors")
    with pytest.raises(DataError, match="does not match the digest"):
        check_digest(model)
    done = CliRunner().invoke(app, ["model", "verify", str(model)])
    assert done.exit_code != 0
    (model / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"no model\.safetensors"):
        check_digest(model)


@pytest.mark.complete
def test_the_command_signs_and_verifies(model: Path, tmp_path: Path) -> None:
    private, public = keys(tmp_path, "ours")
    for words in (
        ["model", "sign", str(model), "--key", str(private)],
        ["model", "verify", str(model), "--key", str(public)],
    ):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
