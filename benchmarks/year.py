"""A year of a network in fast motion, with TLS and real processes: the commands of docs/deployment.md.

    python benchmarks/year.py --out year

Each party has a folder in place of a host, a key that never leaves it, and an installation of its own.
OUT/log has each command, what it printed and [its exit code]. The year ends where an expected line lacks.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from harness import ROOT, command, show

from suture_admin.poc import free_port

ADMIN, SERVER, LEAD, OPERATOR = "admin", "localhost", "lead@example.org", "ops@example.org"
HARBOR, LAKESIDE, NORTHFIELD = SITES = ("harbor", "lakeside", "northfield")
KIND = {SERVER: "type: server", LEAD: "type: admin, role: lead", OPERATOR: "type: admin, role: org_admin"}
SETTINGS = "--set images=60 --set held_out=30 --set model.size=32"
PAST = 40
"""Days that have passed, for the files, when they are cleaned."""

LONGEST = 300
"""Seconds for which a line is repeated on a busy machine."""


class Year:
    """The hosts of a network, and the log of what was done at them.

    Attributes:
        folder: of all hosts.
        log: of the step.
        jobs: FLARE's ids of those that were run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.port = free_port(20_000 + 10 * secrets.randbelow(800))
        self.jobs: list[str] = []

    def kit(self, host: str) -> Path:
        """The startup kit of a party, at its host."""
        return self.folder / host / "workspace" / "suture" / "prod_00" / host

    def at(
        self, host: str, line: str, *expected: str, code: int = 0, seconds: float = 0, cwd: Path | None = None
    ) -> str:
        """Run a line of bash at a host, by default in its own folder, and return what it prints.

        Args:
            expected: patterns of what it prints.
            seconds: for which it is repeated until it does as expected.

        Raises:
            AssertionError: it ends with another code than `code`, or prints something else.
        """
        here, end = self.folder / host, time.monotonic() + seconds
        own = {"HOME": str(here), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        own |= {"PYTHONPATH": str(here / "code"), "NO_COLOR": "1", "COLUMNS": "200"}
        own |= {"OPENBLAS_NUM_THREADS": "1"}
        while True:
            with tempfile.TemporaryFile("w+") as printed:  # a party that it starts keeps it open
                shell = ["bash", "-c", f"umask 077; {line}"]
                streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": printed, "stderr": printed}
                ended = subprocess.run(shell, cwd=cwd or here, env=os.environ | own, check=False, **streams)
                printed.seek(0)
                said = printed.read()
            missing = [text for text in expected if not re.search(text, said, re.MULTILINE)]
            if (ended.returncode == code and not missing) or time.monotonic() > end:
                break
            time.sleep(1)
        with self.log.open("a") as log:
            print(f"{host}$ {line}\n{said}[{ended.returncode}]\n", file=log)
        assert (ended.returncode, missing) == (code, []), f"{host}$ {line}\n{said}"
        return said

    def party(self, host: str, line: str, *expected: str, code: int = 0, seconds: float = 0) -> str:
        """Run a line in the kit of a party; see `at`."""
        return self.at(host, line, *expected, code=code, seconds=seconds, cwd=self.kit(host))

    def lead(self, line: str, *expected: str, code: int = 0, seconds: float = 0) -> str:
        """Run a command of Suture as the lead; see `at`."""
        line = f"suture {line} --env prod --startup-kit {self.kit(LEAD)}"
        return self.at(LEAD, line, *expected, code=code, seconds=seconds)

    # What several steps do

    def request(self, host: str, options: str = "", sign: str = "", pack: str = "") -> None:
        """Make a key at a host, have its request signed, and make a kit of the answer; with more options."""
        here, admin = self.folder / host, self.folder / ADMIN
        here.mkdir(exist_ok=True)
        org = "coordinator" if host in KIND else f"{host}_hospital"
        about = f"name: {host}, {KIND.get(host, 'type: client')}, org: {org}"
        (here / f"{host}.yml").write_text(f"{{name: suture, participants: [{{{about}}}]}}\n")
        self.at(host, f"nvflare cert request -p {host}.yml{options}", "^request_zip: ")
        shutil.copy(here / host / f"{host}.request.zip", admin)
        approve = f"nvflare cert approve {host}.request.zip -c ca --profile profile.yml{sign}{options}"
        self.at(ADMIN, approve, "^signed_zip: ")
        shutil.copy(admin / f"{host}.signed.zip", here)
        fingerprint = json.loads((admin / "ca" / "ca.json").read_text())["rootCA_fingerprint"]
        package = f"nvflare package {host}.signed.zip --request-dir {host} --fingerprint {fingerprint}{pack}"
        self.at(host, package, f"^endpoint: grpc://localhost:{self.port}$")
        key = (here / host / f"{host}.key").read_bytes()
        seen = [path for path in self.folder.rglob("*.key") if path.read_bytes() == key]
        assert all(path.is_relative_to(here) for path in seen), f"{host}'s key has left it: {seen}"

    def install(self, host: str) -> None:
        """Put the code at a host, a site's data, and the strict policy."""
        shutil.copytree(
            ROOT / "custom", self.folder / host / "code", ignore=shutil.ignore_patterns("__pycache__")
        )
        if host in SITES:
            data = self.folder / "data" / host
            (self.kit(host) / "local" / "suture.toml").write_text(
                f'[data]\ndataset = "hospital"\nroot = "{data / "images"}"\ntable = "{data / "labels.csv"}"\n'
                '[privacy]\nmin_count = 2\n[storage]\nstate = "state"\n'
            )
        if host in (SERVER, *SITES):
            self.party(host, "suture policy .", "^restart")

    def enrol(self, **studies: tuple[str, ...]) -> None:
        """Write FLARE's studies at the server, which reads them when it starts."""
        registry = {
            name: {"admins": [LEAD], "site_orgs": {f"{site}_hospital": [site] for site in sites}}
            for name, sites in studies.items()
        }
        path = self.kit(SERVER) / "study_registry.json"
        path.write_text(json.dumps({"format_version": "1.0", "studies": registry}))

    def start(self, *hosts: str) -> None:
        """Start parties, and wait for the sites among them."""
        for host in hosts:
            self.party(host, "startup/start.sh")
        for host in hosts:
            self.lead("status", rf"\b{host} \(" if host in SITES else "last contact", seconds=LONGEST)

    def stop(self, *hosts: str) -> None:
        """Stop parties as their administrators do."""
        for host in hosts:
            self.party(host, "echo y | startup/stop_fl.sh", "Shutdown request created")
        for host in hosts:
            self.party(host, "test ! -e daemon_pid.fl", seconds=LONGEST)

    def disable(self, site: str) -> None:
        """Have the server refuse a site."""
        kit = self.kit(OPERATOR)
        self.at(OPERATOR, f"nvflare system disable-client {site} --startup-kit {kit} --force", site)

    def run(self, name: str, study: str, sites: tuple[str, ...]) -> None:
        """Run a job of two rounds to its end."""
        how = f"--rounds 2 {SETTINGS} --set selection=last --study {study} --sites {','.join(sites)}"
        said = self.lead(f"run demo --out runs/{name} {how}", "^round 2/2", "^report: ")
        self.jobs.append(re.findall(r"job ([0-9a-f-]{36})", said)[0])

    def end(self) -> None:
        """End all processes of the year, however it went."""
        for path in self.folder.glob("*/workspace/suture/prod_00/*/*pid.fl"):
            with suppress(psutil.NoSuchProcess, ValueError):
                top = psutil.Process(int(path.read_text()))
                if str(path.parent) in " ".join(top.cmdline()):
                    for process in (top, *top.children(recursive=True)):
                        process.kill()


def make_keys_at_the_sites(year: Year) -> None:
    profile = f"server: {{host: localhost, fed_learn_port: {year.port}}}"
    admin = year.folder / ADMIN
    admin.mkdir()
    (admin / "profile.yml").write_text(
        f"{{name: suture, scheme: grpc, connection_security: mtls, {profile}}}\n"
    )
    year.at(ADMIN, "nvflare cert init --profile profile.yml -o ca", "^rootca_fingerprint_sha256: SHA256:")
    for host in (SERVER, HARBOR, LEAD, OPERATOR):
        year.request(host)
    year.request(LAKESIDE, sign=" --valid-days 20")


def install_and_join(year: Year) -> None:
    (year.folder / "data").mkdir()
    year.at("data", f"suture data simulate demo --out . {SETTINGS}", "harbor/suture.toml")
    for host in (SERVER, HARBOR, LAKESIDE, LEAD):
        year.install(host)
    year.enrol(spring=(HARBOR, LAKESIDE), autumn=SITES)
    year.start(SERVER, HARBOR, LAKESIDE)
    for host in (SERVER, HARBOR):
        year.party(host, "suture doctor .", "^ok +connection: .* answers")
    year.lead("status --check", "^suture at localhost:")


def run_in_spring(year: Year) -> None:
    year.run("first", "spring", (HARBOR, LAKESIDE))


def lose_sight_of_a_site(year: Year) -> None:
    year.party(HARBOR, "kill -STOP $(cat pid.fl)")
    year.lead("status --check", "^harbor is silent", code=1, seconds=LONGEST)
    year.party(HARBOR, "kill -CONT $(cat pid.fl)")
    year.lead("status --check", seconds=LONGEST)


def renew_a_certificate(year: Year) -> None:
    year.party(LAKESIDE, "suture doctor .", "^warning certificate: client.crt .* 19 more days")
    year.request(LAKESIDE, " --force", pack=" -w renewed")
    year.stop(LAKESIDE)
    kits = Path("suture", "prod_00")
    year.at(LAKESIDE, f"cp -r renewed/{kits / LAKESIDE}/startup workspace/{kits / LAKESIDE}")
    year.start(LAKESIDE)
    found = ("^ok +certificate: client.crt .* 109. more days", "^ok +private key", "^ok +registration")
    year.party(LAKESIDE, "suture doctor .", *found)
    year.run("second", "spring", (HARBOR, LAKESIDE))


def back_up_and_restore(year: Year) -> None:
    year.stop(HARBOR, LAKESIDE, SERVER)
    kits = "workspace/suture/prod_00"
    for host in (SERVER, HARBOR):
        year.at(host, f"tar czf backup.tgz -C {kits} {host}")
        year.at(host, f"mv {kits}/{host} lost")
        year.at(host, f"tar xzf backup.tgz -C {kits}")
        year.at(host, f"diff -r lost {kits}/{host} && rm -r lost")
    year.party(HARBOR, "suture ledger .", "^experiments: 2 ")
    year.start(SERVER, HARBOR, LAKESIDE)
    year.party(HARBOR, "suture doctor .", "^ok +ledger: [1-9]", "^ok +connection: .* answers")
    year.lead(f"results {year.jobs[0]} --out runs/again --study spring", "^report: ")


def upgrade_a_site(year: Year) -> None:
    year.stop(HARBOR)
    year.at(HARBOR, "mv code former")
    year.install(HARBOR)
    year.start(HARBOR)
    hashes = {
        re.findall("code ([0-9a-f]{16})", year.party(host, "suture doctor ."))[0] for host in (SERVER, HARBOR)
    }
    assert len(hashes) == 1, hashes


def add_a_site_and_run_in_autumn(year: Year) -> None:
    year.request(NORTHFIELD)
    year.install(NORTHFIELD)
    year.start(NORTHFIELD)
    year.party(NORTHFIELD, "suture doctor .", "^ok +connection: .* answers", "^ok +registration")
    year.run("third", "autumn", SITES)


def revoke_a_site(year: Year) -> None:
    year.disable(LAKESIDE)
    year.party(LAKESIDE, "suture doctor .", "^error +registration: .*disabled", code=1, seconds=LONGEST)
    year.stop(LAKESIDE, SERVER)
    year.start(SERVER)
    year.party(LAKESIDE, "startup/start.sh")
    year.lead("status", rf"\b{HARBOR} \(", rf"\b{NORTHFIELD} \(", seconds=LONGEST)
    year.party(LAKESIDE, "suture doctor .", "^error +registration: .*disabled", code=1)
    assert f"{LAKESIDE} (" not in year.lead("status")


def leave(year: Year) -> None:
    year.stop(NORTHFIELD)
    year.party(NORTHFIELD, "suture ledger . --json > released.json")
    year.party(NORTHFIELD, "cat released.json", '"experiments": 1,', year.jobs[2])
    year.disable(NORTHFIELD)
    year.lead("status --check --study autumn", f"^{NORTHFIELD} is ", code=1, seconds=LONGEST)


def clean(year: Year) -> None:
    for host in (SERVER, HARBOR):
        for path in year.kit(host).rglob("*"):  # in their order: the last task says whether a run has ended
            then = path.lstat().st_mtime - PAST * 86_400
            os.utime(path, (then, then), follow_symlinks=False)
        year.party(host, "suture clean . --days 30", "^states of experiment", "can be deleted")
        year.party(host, "suture clean . --days 30 --yes", "^deleted: states")
    assert not any((year.kit(HARBOR) / job).exists() for job in year.jobs), "a folder of a job is left"


def audit(year: Year) -> None:
    lines = (f"job {job} of {LEAD}$" for job in year.jobs)
    year.party(HARBOR, "suture ledger .", "^experiments: 3 ", *lines)
    for job, study in zip(year.jobs, ("spring", "spring", "autumn"), strict=True):
        year.lead(f"status --study {study}", f"^{job} +FINISHED:COMPLETED")
    year.lead(f"results {year.jobs[2]} --out runs/audit --study autumn", "^report: ")
    year.party(SERVER, "cat audit.log", f"U:{LEAD}.*submit_job", f"U:{OPERATOR}.*disable_client")


def not_run(logs: Path) -> list[str]:
    """The commands of the documentation that no log has."""
    run = "".join(path.read_text() for path in logs.glob("*.txt"))
    missing = []
    for page, title in (("deployment", "Administer a network"), ("recovery", "Back up and restore")):
        text = (ROOT / "docs" / f"{page}.md").read_text().partition(f"## {title}")[2].partition("\n## ")[0]
        shown = text.partition("**Renew after")[0]  # `nvflare provision` has a test of its own
        for line in re.findall(r"^ {4}([a-z].+?)(?: {2,}#.*)?$", shown, re.MULTILINE):
            pattern = re.escape(line).replace(re.escape("SHA256:..."), "SHA256:.+").replace("KIT", ".+")
            missing += [] if re.search(rf"\$ {pattern}$", run, re.MULTILINE) else [line]
    return missing


def main(out: Path | None = None) -> None:
    """Run the year and print its table.

    Args:
        out: folder of all hosts and of the log; by default one that is deleted.
    """
    rows: list[tuple[str, int, str]] = []
    failed = ""
    with tempfile.TemporaryDirectory() as temporary:
        year = Year((out or Path(temporary)).resolve())
        (logs := year.log).mkdir(parents=True)
        try:
            for number, step in enumerate(STEPS, 1):
                year.log, begun = logs / f"{number:02d}-{step.__name__}.txt", time.monotonic()
                try:
                    step(year)
                except AssertionError as error:
                    failed = str(error)
                name, seconds = step.__name__.replace("_", " "), round(time.monotonic() - begun)
                rows.append((name, seconds, "no" if failed else "ok"))
                if failed:
                    break
            else:
                failed = "\n".join(f"no step ran this line of docs/: {line}" for line in not_run(logs))
        finally:
            year.end()
    show(("step", "seconds", "ok"), [*rows, ("all", sum(row[1] for row in rows), rows[-1][2])])
    if failed:
        sys.exit(failed)


STEPS = (
    make_keys_at_the_sites,
    install_and_join,
    run_in_spring,
    lose_sight_of_a_site,
    renew_a_certificate,
    back_up_and_restore,
    upgrade_a_site,
    add_a_site_and_run_in_autumn,
    revoke_a_site,
    leave,
    clean,
    audit,
)

if __name__ == "__main__":
    command(main)
