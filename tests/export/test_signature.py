"""A signed model folder, and everything that may be done to it."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from typer.testing import CliRunner

from suture.cli.app import app
from suture.core.errors import ConfigError, DataError
from suture.core.labels import LabelSet
from suture.export.signature import check_digest, sign, verify
from suture.models import ModelSpec, build
from suture.models.saved import save_model

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


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: change(folder / "model.json"), "signed: changed: model.json; get the"),
        (lambda folder: change(folder / "model.safetensors"), "signed: changed: model.safetensors; get the"),
        (lambda folder: (folder / "README.md").unlink(), "signed: missing: README.md; get the"),
        (lambda folder: (folder / "notes.txt").touch(), "signed: added: notes.txt; get the"),
        (lambda folder: (folder / "model.sig").unlink(), "nobody has signed"),
        (lambda folder: (folder / "model.sig").write_text("{}"), "is not what the owner"),
    ],
    ids=["changed", "weights", "missing", "added", "unsigned", "damaged signature"],
)
def test_what_was_done_to_a_signed_folder_is_named(
    damage: Callable[[Path], object], says: str, model: Path, tmp_path: Path
) -> None:
    pytest.importorskip("model_signing")
    private, public = keys(tmp_path, "ours")
    (model / "README.md").write_text("a card")
    sign(model, private)
    verify(model, public)
    verify(Path(shutil.copytree(model, tmp_path / "elsewhere")), public)
    damage(model)
    with pytest.raises(DataError, match=says) as caught:
        verify(model, public)
    assert "\n" not in str(caught.value)


def test_other_keys_are_refused(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("model_signing")
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
        with pytest.raises(ConfigError, match=r"P-256, P-384 or P-521( \(No such file or directory\))?$"):
            call()
    verify(model, public)


def test_it_covers_all_but_git_and_needs_no_network(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("model_signing")

    def connect(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", connect)
    private, public = keys(tmp_path, "ours")
    (model / "deep").mkdir()
    (model / "deep" / ".hidden").write_text("x")
    sign(model, private)
    for name in (".git", ".gitattributes", ".gitignore"):
        (model / name).mkdir() if name == ".git" else (model / name).touch()
    (model / ".git" / "HEAD").touch()
    verify(model, public)
    change(model / "deep" / ".hidden")
    with pytest.raises(DataError, match=r"changed: deep/\.hidden;"):
        verify(model, public)


def test_without_a_key_the_weights_are_compared(model: Path) -> None:
    done = CliRunner().invoke(app, ["verify", str(model)])
    assert done.exit_code == 0, done.output
    assert check_digest(model) in done.output.replace("\n", "")
    change(model / "model.safetensors")
    with pytest.raises(DataError, match="not the file whose digest"):
        check_digest(model)
    done = CliRunner().invoke(app, ["verify", str(model)])
    assert done.exit_code != 0
    (model / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"no model\.safetensors"):
        check_digest(model)


def test_the_command_signs_and_verifies(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("model_signing")
    private, public = keys(tmp_path, "ours")
    for words in (["sign", str(model), "--key", str(private)], ["verify", str(model), "--key", str(public)]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
