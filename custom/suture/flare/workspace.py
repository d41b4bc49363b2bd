"""The FLARE workspace of the party that runs a job: what it allows, who submitted, and how it signs.

Secure aggregation signs by the keys of startup kits.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.padding import MGF1, PSS
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import NameOID
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import JobMetaKey, get_job_meta_study
from nvflare.apis.workspace import Workspace

from suture.core.entry_points import MODEL_GROUP, PRIOR_GROUP, find_foreign
from suture.core.errors import ConfigError, DataError, show_value
from suture.core.files import read_json, read_regular
from suture.data.config import SiteConfig
from suture.federation.ownership import Submitter, claim
from suture.federation.plan import Plan
from suture.flare import PLAN, SCHEDULE, SHARED_WITH, named_by
from suture.flare.compat.allow_list import refusal
from suture.flare.kit import CERTIFICATES, certificate, out_of_date, read_kit, read_kit_json
from suture.methods import entry_of
from suture.methods.source import class_path, list_entry
from suture.privacy.masking import Identity, MaskingRefused

_RELAY = "relay__resources.json"
"""FLARE's file of the relay that a site connects to."""

_PADDING = PSS(MGF1(SHA256()), PSS.DIGEST_LENGTH)


class KitIdentity(Identity):
    """The certificate and private key of a startup kit; it believes sites that the project has certified.

    FLARE's provisioning writes a role into users' certificates alone, and its distributed provisioning into
    all: `client` is a site's. The server, and the relays above a site, are known by their names in the kit.

    Args:
        folder: of the kit of a site, or of the server, which signs nothing.

    Raises:
        ConfigError: a file is missing or damaged, or the key is of a kind that FLARE's provisioning does not
            make.
    """

    def __init__(self, folder: Path) -> None:
        kit = read_kit(folder)
        startup, certificate_name = kit.folder / "startup", CERTIFICATES[kit.role]
        self._root = certificate(startup / "rootCA.pem")
        relay = read_kit_json(startup / _RELAY)["relay_config"] if (startup / _RELAY).is_file() else {}
        self._no_sites = {kit.identity, *str(relay.get("fqcn", "")).split(".")}
        if not kit.identity:
            raise ConfigError(f"{startup} names no server; provision the kit again")
        self.certificate = certificate(startup / certificate_name).public_bytes(Encoding.PEM).decode()
        file = (startup / certificate_name).with_suffix(".key")
        try:
            key = load_pem_private_key(read_regular(file), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{file}: {error}; provision the kit again") from error
        if not isinstance(key, RSAPrivateKey):
            raise ConfigError(f"{file} is not an RSA key; secure aggregation needs one")
        self._key = key

    def sign(self, message: bytes) -> bytes:
        """As `Identity.sign`."""
        return self._key.sign(message, _PADDING, SHA256())

    def check(self, site: str, certificate: str, signature: bytes, message: bytes) -> bytes:
        """As `Identity.check`."""
        try:
            cert = x509.load_pem_x509_certificate(certificate.encode())
            cert.verify_directly_issued_by(self._root)
            key = cert.public_key()
            if not _is_of(cert, site) or site in self._no_sites or out_of_date(cert, ""):
                raise ValueError("another party's, or out of date")
            if not isinstance(key, RSAPublicKey):
                raise ValueError("a key of another kind")
            key.verify(signature, message, _PADDING, SHA256())
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
            raise MaskingRefused(
                f"the signature of {site} is not by the key of a site's certificate of that name from this "
                "project"
            ) from None
        return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _is_of(cert: x509.Certificate, site: str) -> bool:
    """Whether a certificate states a site of this name: no user, no authority, and no host of a server."""
    name, role = (
        [attribute.value for attribute in cert.subject.get_attributes_for_oid(oid)]
        for oid in (NameOID.COMMON_NAME, NameOID.UNSTRUCTURED_NAME)
    )
    by_kind = {extension.oid: extension.value for extension in cert.extensions}
    hosts = by_kind.get(x509.SubjectAlternativeName.oid, ())
    authority = by_kind.get(x509.BasicConstraints.oid)
    return (
        (name, role) in (([site], []), ([site], ["client"]))
        and all(isinstance(host, x509.DNSName) and host.value == site for host in hosts)
        and not (isinstance(authority, x509.BasicConstraints) and authority.ca)
    )


def workspace_root(fl_ctx: FLContext) -> Path:
    """Return the folder of this party that outlives its jobs."""
    return Path(fl_ctx.get_engine().get_workspace().get_root_dir()).resolve()


def read_settings(name: str, fl_ctx: FLContext) -> dict[str, Any]:
    """Return the content of plan.json or schedule.json, in the config folder of the job's app.

    They are files of their own because FLARE takes a dict with a `path` for the configuration of a component,
    and replaces what is in braces in a text. `get_app_config_dir` knows the folder by the party's kit, and
    those of ``nvflare package`` name none.

    Raises:
        ConfigError: the job names another file, or the file is absent or damaged.
    """
    if name not in (PLAN, SCHEDULE):
        raise ConfigError(
            f"the job names {show_value(name)} in place of {PLAN} or {SCHEDULE}; export the job again with "
            "`suture export`"
        )
    workspace: Workspace = fl_ctx.get_engine().get_workspace()
    try:
        return read_json(Path(workspace.get_app_dir(fl_ctx.get_job_id()), "config", name))
    except DataError as error:
        raise ConfigError(f"{error}; export the job again with `suture export`") from error


def settled(settings: Mapping[str, Any], fl_ctx: FLContext, code: Callable[[], str]) -> dict[str, Any]:
    """Return a plan with what its job leaves open until the start: the experiment, and the hash of the code.

    Args:
        settings: those of plan.json, whose own values stay.
        code: gives the hash: at the server that of its code, at a site the one that the server states.
    """
    meta = fl_ctx.get_prop(FLContextKey.JOB_META) or {}
    own = {} if "code" in settings else {"code": code()}
    return {"experiment": named_by(meta, fl_ctx.get_job_id()), **own, **settings}


def fingerprint(plan: Mapping[str, Any], rounds: int) -> str:
    """Return a digest of a plan and the number of rounds, by which sites compare theirs with the server's."""
    return sha256(json.dumps([plan, rounds], sort_keys=True).encode()).hexdigest()


def claim_experiment(folder: Path, fl_ctx: FLContext) -> None:
    """Check that the job's submitter may use an experiment, or make them its owner; see `claim`.

    FLARE's server writes the submitter of its own login into the metadata of each job, in place of what the
    job says, and sends it to the sites. The simulator has no users.

    Raises:
        NotOwner: the experiment is another submitter's.
        ConfigError: the owner's file is broken.
    """
    meta = fl_ctx.get_prop(FLContextKey.JOB_META) or {}
    name, org = meta.get(JobMetaKey.SUBMITTER_NAME), meta.get(JobMetaKey.SUBMITTER_ORG)
    shared = meta.get(SHARED_WITH)
    claim(
        folder,
        Submitter(str(name), str(org), get_job_meta_study(meta)) if name else None,
        [str(user) for user in shared] if isinstance(shared, list) else None,
    )


def check_allowed(plan: Mapping[str, Any], fl_ctx: FLContext) -> None:
    """Check a plan's method, encoder and prior against FLARE's class_allow_list, before they are imported.

    Only those of other packages are checked, as FLARE checks the components of a job: not in jobs that bring
    their own code, since the right to submit them (``byoc``) permits any code. An unknown name passes;
    `Plan.from_dict` refuses it.

    Args:
        plan: as in the configuration of a job, whatever that holds.

    Raises:
        ConfigError: the party does not allow a class; names the command that allows its package.
    """
    method = entry_of(str(plan.get("method")))
    named = [("method", method)] if method else []
    model = plan.get("model")
    if isinstance(model, Mapping):
        named += [("encoder", point) for point in find_foreign(MODEL_GROUP).get(str(model.get("name")), [])]
    hyperparameters = plan.get("hyperparameters")
    prior = hyperparameters.get("prior") if isinstance(hyperparameters, Mapping) else None
    if isinstance(prior, Mapping) and not is_simulated():
        named += [("prior", point) for point in find_foreign(PRIOR_GROUP).get(str(prior.get("name")), [])]
    for what, point in named:
        path = class_path(point)
        if refusal({"path": path, "args": {}}, fl_ctx=fl_ctx):
            package = f" of {point.dist.name} {point.dist.version}" if point.dist else ""
            root = shlex.quote(str(workspace_root(fl_ctx)))
            raise ConfigError(
                f"{fl_ctx.get_identity_name()} does not allow the {what} {point.name!r} ({path}{package}). "
                f"Its administrator can allow it with `suture policy {root} --allow "
                f"{list_entry(point)}`, which adds the package to class_allow_list in local/resources.json"
            )


def on_assigned(config: SiteConfig, meta: Mapping[str, Any], site: str) -> SiteConfig:
    """Return the configuration of a site with the GPU that FLARE has assigned to the job.

    Where a job states GPUs, FLARE's GPU manager shows its process those alone (CUDA_VISIBLE_DEVICES), counted
    from 0 again: an index in ``[training] device`` would name another one, or none.
    """
    spec = meta.get(JobMetaKey.RESOURCE_SPEC.value) or {}
    own = {**(spec.get("@default") or {}), **(spec.get(site) or {})}
    if not own.get("num_of_gpus") or not config.training.device.startswith("cuda:"):
        return config
    training = config.training.model_copy(update={"device": "cuda"})
    return config.model_copy(update={"training": training})


def with_own_files(plan: Plan, folder: Path, *keys: str) -> Plan:
    """Return the plan with what it names by `keys` as files of a party's own folder; see `Plan.with_paths`.

    In a simulation (`SUTURE_SITES`) all parties are the person's who names a file: it may be any.
    """
    return plan if is_simulated() else plan.with_paths(folder, keys)


def is_simulated() -> bool:
    """Whether all parties are on this machine, in FLARE's simulator or a test of it."""
    return "SUTURE_SITES" in os.environ
