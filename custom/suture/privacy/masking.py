"""Secure aggregation: the server learns sums of the sites' updates, and no update.

    Bonawitz et al. Practical Secure Aggregation for Privacy-Preserving Machine Learning. CCS 2017.

Site i sends, modulo 2^64, for the shared tensors and for each class's row that it sends

    y_i = x_i + PRG(b_i) + sum_{j > i} PRG(s_ij) - sum_{j < i} PRG(s_ij)

x_i is its weighted update in fixed point, b_i its seed and s_ij the secret of the keys of i and j. Both the
seed and the site's key are shared among the sites. When the sites whose y has arrived are known, the
survivors, at least t sites reveal their shares of the survivors' seeds and of the keys of those that have
dropped out: then all masks can be taken off the sum of the survivors. A sum has a row of a class only from
sites that both send this row.

What keeps a server that lies from more than that:

- Keys are made for one attempt and signed. A site seals its shares for the others under a digest of all keys,
  so no key of another attempt, or that only some have seen, is of any use.
- A site reveals once, for one list of survivors that at least t sites have signed. With t above half of the
  sites and those that may collude together, there is at most one such list: of no site both secrets are
  known.
- A round that is repeated is so among the sites of the first attempt, whose number then counts for t, and a
  site reveals for one sum a round, from one model and state. So two sums of a round have a site in common
  that has revealed for both, and are of the same sites and updates: their difference is nothing.
- A site does not sign a list that leaves fewer than `fewest` sites of a row, or in all.
- Masks depend on the digest of the model that both sites have received: a server that sends a site a model
  of its own gets a sum that it cannot unmask (Pasquini et al. CCS 2022). So does one whose plan for some
  sites is another, as with a learning rate of nearly nothing: keys are signed for one plan.
- A site trains the classes that `fewest` sites of this attempt train, and no other; it goes on from moments
  of these classes that as many have from the same rows, models and sums (`continuing`), or begins afresh.

What follows. Of a sum that can be unmasked, let T be the shared tensors, phase and fixed tensors, and R_c the
row of class c. Honest survivors have the same T, and those that train c the same R_c: else a mask between
two of them stays in the sum. So the update of each is f(T, {R_c and moments of c: c that it trains}, its
data) with the same f, and of each c at least three honest sites have the R_c and the history of moments.
Where the loss is a sum over classes, each of which moves the shared tensors through its own row, what a
server lets move little or nothing it lets so by classes: the sites whose shared tensors move are those that
train some class, none of them or three and more. That does not follow of a softmax over a site's own
classes, where rows that are equal move nothing: there all sites must have the same ones.

What does not follow is anything of the data. A server may choose T and R_c so that only images of one site,
or only positives of a class that one site has, move anything; or so that a sum shows single images (Fowl et
al. ICLR 2022, Boenisch et al. EuroS&P 2023). Nor does anything follow of two rounds, of nearly the same model
and not the same sites. Noise (`epsilon`) is what bounds both.

Fixed point: `FRACTION` bits behind the point, rounded to the nearest; a site's number times its weight must
be below 2^33 / the number of sites, so that no sum overflows.

Shamir's secret sharing: any `threshold` of the shares give the secret, fewer say nothing of it.

    Shamir. How to Share a Secret. Communications of the ACM 22 (11), 1979.

The secret is the value at 0 of a random polynomial over the integers modulo a prime, and a share its value at
1, 2, ... Of the packages that do this, pycryptodome's alone is widely kept: it shares 16 bytes at a time and
would be a second cryptographic library, for the few lines of arithmetic below. `cryptography` and FLARE have
none. Randomness is the system's.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray
from torch import Tensor

from suture.core.errors import SutureError
from suture.protocol.messages import Masking, MaskKeys, Roster

PRIME = 2**521 - 1
"""A Mersenne prime, above every secret of 64 bytes."""

SHARE = 66
"""Bytes of a share."""


def split(secret: bytes, parties: int, threshold: int) -> list[bytes]:
    """Return the shares of a secret of at most 64 bytes, of the parties 1, 2, ... in turn."""
    polynomial = [int.from_bytes(secret), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    shares = []
    for x in range(1, parties + 1):
        value = 0
        for coefficient in reversed(polynomial):
            value = (value * x + coefficient) % PRIME
        shares.append(value.to_bytes(SHARE))
    return shares


def combine(shares: Mapping[int, bytes], length: int) -> bytes | None:
    """Return the secret of so many bytes from `threshold` shares; None where they are not of one secret.

    Args:
        shares: by the numbers of the parties. Wrong or too few ones give any secret, or None.
    """
    secret = 0
    for x, share in shares.items():
        above, below = 1, 1
        for other in shares.keys() - {x}:
            above, below = above * other % PRIME, below * (other - x) % PRIME
        secret += int.from_bytes(share) * above * pow(below, -1, PRIME)
    secret %= PRIME
    return secret.to_bytes(length) if secret < 256**length else None


Ring = NDArray[np.uint64]

Shares = Mapping[str, Mapping[str, bytes]]
"""Shares of the secrets of sites, each by the sites that have revealed one."""

FRACTION = 30
"""Bits behind the point."""

_NONCE, _SECRET, _COMMITTED = 12, 32, 64
"""Bytes of a nonce, of a key or seed, and of the commitments to two shares."""


class MaskingRefused(SutureError):
    """A step of secure aggregation that a site does not take, or an attempt that cannot be completed."""


class SiteLies(MaskingRefused):
    """A site has sent what no site that runs this program sends.

    Args:
        lies: the sites, and what each has done.
    """

    def __init__(self, lies: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{site} {why}" for site, why in sorted(lies.items())))
        self.lies = lies


class UpdateTooLarge(MaskingRefused):
    """A site's own update is beyond the bounds that the server cannot check. The server sees this name."""

    def __init__(self, why: str) -> None:
        lr = "method.local.lr of the job, or lr under [training] in suture.toml"
        super().__init__(
            f"{why}; lower the learning rate ({lr}), or remove [secure_aggregation] from the job"
        )


class Identity:
    """Signs the keys of a site by a key that its process has made, where there are no startup kits.

    Such signatures prove nothing: `check` believes every key.

    Attributes:
        certificate: by which others know the site.
    """

    def __init__(self) -> None:
        self._own = Ed25519PrivateKey.generate()
        self.certificate = self._own.public_key().public_bytes_raw().hex()

    def sign(self, message: bytes) -> bytes:
        """Return the site's signature of a message."""
        return self._own.sign(message)

    def check(self, site: str, certificate: str, signature: bytes, message: bytes) -> bytes:
        """Check that a certificate is the site's, and the signature by its key; return the public key.

        Raises:
            MaskingRefused: it is not.
        """
        try:
            public = bytes.fromhex(certificate)
            Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
        except (ValueError, InvalidSignature):
            raise MaskingRefused(f"the signature of {site} is not by its key") from None
        return public


@dataclass(frozen=True)
class Attempt:
    """One attempt to add up the updates of a round.

    Attributes:
        number: random digits, another one for each attempt.
        colluders: number of sites that may tell the server all that they know.
        plan: by which the site trains; see `Plan.digest`.
    """

    experiment: str
    round: int
    number: str
    colluders: int = 0
    plan: str = ""

    @property
    def fewest(self) -> int:
        """Number of sites that a sum needs: to one that is no colluder it still hides the other two."""
        return 3 + self.colluders

    def threshold(self, sites: int) -> int:
        """Return t: more than half of the sites and colluders together, so that no two lists get t votes."""
        return (sites + self.colluders) // 2 + 1

    def votes(self, roster: Roster) -> int:
        """Return t for these keys: of the most sites among which one of them has masked its update before."""
        return self.threshold(max([len(roster), *(len(keys.among) for keys in roster.values())]))

    def text(self, what: str, content: object) -> bytes:
        """Return what is signed or bound of this attempt."""
        return json.dumps(["suture masking", what, asdict(self), content], sort_keys=True).encode()

    def digest(self, roster: Roster) -> bytes:
        """Return the digest of all keys of the attempt."""
        return hashlib.sha256(self.text("roster", {s: asdict(k) for s, k in roster.items()})).digest()

    def signed_bytes(self, site: str, keys: MaskKeys) -> bytes:
        """Return what a site signs of its keys."""
        return self.text("keys", [site, asdict(replace(keys, signature=""))])

    def agreement(self, digest: bytes, present: Sequence[str], survivors: Sequence[str]) -> bytes:
        """Return what sites sign of the list of sites whose masked updates have arrived.

        Args:
            digest: of all keys.
        """
        return self.text("survivors", [digest.hex(), list(present), list(survivors)])

    def unusable(self, roster: Roster, identity: Identity) -> dict[str, str]:
        """Return what is wrong with keys of sites: whose are not signed by it, or cannot be used."""
        reasons, owners, probe = dict[str, str](), dict[bytes, str](), X25519PrivateKey.generate()
        for site, keys in roster.items():
            try:
                signature = bytes.fromhex(keys.signature)
                key = identity.check(site, keys.certificate, signature, self.signed_bytes(site, keys))
                for public in (keys.cipher, keys.mask):
                    _agree(probe, public, site)
            except MaskingRefused as error:
                reasons[site] = f"has sent keys that cannot be used: {error}"
                continue
            if (other := owners.setdefault(key, site)) != site:
                reasons |= {s: f"has the same key as {o}" for s, o in ((site, other), (other, site))}
        return reasons


@dataclass(frozen=True)
class Masked:
    """Numbers of the ring, or digests, of the shared tensors and of each row by the number of its class."""

    shared: Ring
    rows: Mapping[int, Ring]


@dataclass(frozen=True)
class Received:
    """Digests of the shared tensors that a site has received, and of each row by the number of its class."""

    shared: bytes
    rows: Mapping[int, bytes]


def rows_of(attempt: Attempt, roster: Roster, present: Collection[str]) -> dict[str, list[int]]:
    """Return the rows that each site masks: those of which enough sites that are present send one."""
    senders = count(roster, present)
    return {
        site: sorted(row for row in set(roster[site].rows) if senders[row] >= attempt.fewest)
        for site in present
    }


def count(roster: Roster, sites: Iterable[str]) -> dict[int, int]:
    """Return the number of these sites that send each row."""
    found: dict[int, int] = {}
    for site in sites:
        for row in set(roster[site].rows):  # a list with repetitions counts once
            found[row] = found.get(row, 0) + 1
    return found


class Participant:
    """A site's part in one attempt. It lives in memory alone: a process that is killed begins another one.

    Args:
        site: its name.
        rows: numbers of the classes whose rows it sends.
        among: the sites among which it has masked the update before.
        learned: the history of each class that it has learned; see `MaskKeys`.

    Attributes:
        present: the sites whose shares were passed on, and this one.
        received: on which the masked update depends; see `Participant.mask`.
    """

    received: Received

    def __init__(
        self,
        site: str,
        attempt: Attempt,
        rows: Sequence[int],
        identity: Identity,
        among: Sequence[str] = (),
        learned: Mapping[int, str] | None = None,
    ) -> None:
        self.site, self.attempt, self._identity = site, attempt, identity
        self._cipher, self._key = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self._seed = secrets.token_bytes(_SECRET)
        public = [key.public_key().public_bytes_raw().hex() for key in (self._cipher, self._key)]
        seed = hashlib.sha256(self._seed).hexdigest()
        self.learned = learned or {}
        states = tuple(self.learned), tuple(self.learned.values())
        said = tuple(sorted(rows)), identity.certificate, tuple(among), *states
        keys = MaskKeys(public[0], public[1], seed, *said)
        self.keys = replace(keys, signature=identity.sign(attempt.signed_bytes(site, keys)).hex())
        self._roster: Roster = {}
        self.present: list[str] = []
        self._shares: dict[str, tuple[bytes, bytes]] = {}  # of the keys and the seeds of sites
        self._sealed: dict[str, str] = {}
        self._update = b""
        self._survivors: tuple[str, ...] = ()
        self._digest = b""

    def shares(self, roster: Roster) -> dict[str, str]:
        """Take the keys of all sites; return the shares of the own secrets, sealed for each other site.

        Before each stand the commitments to both, by which the server tells later who has lied of them; for
        the own shares these alone.

        Raises:
            MaskingRefused: a key is not signed by its site, the own one is another, or there are too few.
        """
        if self._roster and roster != self._roster:
            raise MaskingRefused("the server has sent two lists of keys in one attempt")
        if roster.get(self.site) != self.keys:
            raise MaskingRefused("the server has sent other keys of this site than it has made")
        self._enough(len(roster), "sites")
        if wrong := self.attempt.unusable(roster, self._identity):
            raise SiteLies(wrong)
        for site, keys in roster.items():
            if keys.among and (strange := roster.keys() - set(keys.among)):
                raise MaskingRefused(
                    f"{site} has masked its update of this round among others than {min(strange)}, which can "
                    "take part from the next round on"
                )
        if not self._roster:
            self._roster, self._digest = dict(roster), self.attempt.digest(roster)
            sites, threshold = sorted(roster), self.attempt.votes(roster)
            # Of each site the others reveal one of the two: the seed of one that has answered, the key of one
            # that dropped out. With both, its update could be read.
            of_key = split(self._key.private_bytes_raw(), len(sites), threshold)
            of_seed = split(self._seed, len(sites), threshold)
            both = dict(zip(sites, zip(of_key, of_seed, strict=True), strict=True))
            self._shares[self.site] = both[self.site]
            self._sealed = {site: self._seal(site, pair) for site, pair in both.items()}
        return self._sealed

    def _channel(self, peer: str, sender: str) -> ChaCha20Poly1305:
        """Return the cipher of messages between the site and a peer; one key for each direction."""
        secret = _agree(self._cipher, self._roster[peer].cipher, peer)
        return ChaCha20Poly1305(_derive(secret, b"channel" + self._digest + sender.encode()))

    def _seal(self, peer: str, shares: tuple[bytes, bytes]) -> str:
        commitments, nonce = b"".join(map(_commit, shares)), secrets.token_bytes(_NONCE)
        if peer == self.site:
            return commitments.hex()
        channel, bound = self._channel(peer, self.site), self._digest + commitments
        return (commitments + nonce + channel.encrypt(nonce, b"".join(shares), bound)).hex()

    def _open(self, peer: str, message: str) -> tuple[bytes, bytes] | None:
        """Return the shares that a peer has sealed; None where they are not what it has committed to."""
        data = bytes.fromhex(message)
        commitments, nonce, text = data[:_COMMITTED], data[_COMMITTED:][:_NONCE], data[_COMMITTED + _NONCE :]
        try:
            opened = self._channel(peer, peer).decrypt(nonce, text, self._digest + commitments)
        except (ValueError, InvalidTag):
            return None
        shares = opened[:SHARE], opened[SHARE:]
        right = len(opened) == 2 * SHARE and b"".join(map(_commit, shares)) == commitments
        return shares if right else None

    def receive(self, sealed: Mapping[str, str]) -> None:
        """Take the shares of the other sites; those that have sent none are not part of the attempt.

        One that cannot be opened is not held; the site says so before anything is revealed.

        Raises:
            MaskingRefused: there are too few, other ones than before, or of sites without keys.
        """
        if not sealed.keys() <= self._roster.keys() - {self.site}:
            raise MaskingRefused("the server has sent shares of sites that have no keys in this attempt")
        present = sorted([self.site, *sealed])
        if self.present not in ([], present):
            raise MaskingRefused("the server has sent shares of other sites in one attempt")
        self._enough(len(present), "sites with shares")
        if not self.present:
            opened = {peer: self._open(peer, message) for peer, message in sealed.items()}
            self._shares |= {peer: shares for peer, shares in opened.items() if shares}
            self.present = present

    @property
    def roster(self) -> Roster:
        """The keys of all sites of the attempt."""
        return self._roster

    @property
    def rows(self) -> list[int]:
        """The rows that the site masks; it sends zeros in place of the others."""
        return rows_of(self.attempt, self._roster, self.present)[self.site]

    @property
    def continues(self) -> bool:
        """Whether the site may train on from its own state; see `continuing`."""
        return self.site in continuing(self.attempt, self._roster, self.present, self.present)

    @property
    def unopened(self) -> tuple[str, ...]:
        """The sites of whose secrets it holds no share."""
        return tuple(site for site in self.present if site not in self._shares)

    def mask(self, update: Masked, received: Received) -> Masked:
        """Return an update with its masks.

        Raises:
            MaskingRefused: no shares were passed on before, or another update was masked, which would reveal
                the difference.
        """
        if not self.present:
            raise MaskingRefused("the server asks for an update before it has passed on any shares")
        digest = _digest(update, received, self.rows)
        if self._update not in (b"", digest):
            raise MaskingRefused("the server asks for another update in the same attempt")
        self._update, self.received = digest, received
        rows = rows_of(self.attempt, self._roster, self.present)
        hidden = Masked(update.shared.copy(), {row: update.rows[row].copy() for row in self.rows})
        _add(hidden, _derive(self._seed, b"self"), self.rows, off=False)
        for peer in self.present:
            if peer != self.site:
                common = sorted(set(rows[peer]) & set(self.rows))
                secret = _agree(self._key, self._roster[peer].mask, peer)
                key = _pair_key(secret, (self.site, peer), self._digest, received, common)
                _add(hidden, key, common, off=self.site > peer)
        return hidden

    def sign(self, survivors: Sequence[str]) -> str:
        """Return the signature of the list of sites whose masked updates have arrived.

        Raises:
            MaskingRefused: it is a second list, or leaves too few sites in all, of a row or of a state.
        """
        listed = tuple(sorted(set(survivors)))
        if not self._update or self.site not in listed or not set(listed) <= set(self.present):
            raise MaskingRefused("the list of survivors has a site that is not present, or lacks this one")
        if self._survivors not in ((), listed):
            raise MaskingRefused("the server asks for a second list of survivors in one attempt")
        self._enough(len(listed), "survivors")
        if why := too_few_left(self.attempt, self._roster, self.present, listed):
            raise MaskingRefused(why)
        self._survivors = listed
        return self._identity.sign(self._agreement()).hex()

    def _agreement(self) -> bytes:
        return self.attempt.agreement(self._digest, self.present, self._survivors)

    @property
    def survivors(self) -> tuple[str, ...]:
        """The list that the site has signed."""
        return self._survivors

    def reveal(self, signatures: Mapping[str, str]) -> Masking:
        """Return the shares that unmask the sum: of each site's seed or of its key, never of both.

        Raises:
            MaskingRefused: too few sites have signed the list that this site has signed.
        """
        if not self._survivors:
            raise MaskingRefused("the server asks for shares before the survivors are agreed")
        for site, signature in signatures.items():
            if site not in self._survivors:
                raise MaskingRefused(f"{site} has signed and is no survivor")
            keys, signed = self._roster[site], self._agreement()
            self._identity.check(site, keys.certificate, bytes.fromhex(signature), signed)
        if len(signatures) < self.attempt.votes(self._roster):
            raise MaskingRefused("too few sites have signed the list of survivors")
        gone = set(self.present) - set(self._survivors)
        secrets_, seeds = (
            {site: self._shares[site][part].hex() for site in some if site in self._shares}
            for part, some in enumerate((gone, self._survivors))
        )
        return Masking("reveal", seeds=seeds, secrets=secrets_)

    def _enough(self, number: int, what: str) -> None:
        least = self.attempt.fewest
        if self._roster:
            least = max(least, self.attempt.votes(self._roster))
        if number < least:
            raise MaskingRefused(f"{number} {what} are too few to hide an update; it takes {least}")


def continuing(attempt: Attempt, roster: Roster, present: Collection[str], left: Collection[str]) -> set[str]:
    """Return the sites, of those that are left, that may train on from what they have trained before.

    Moments move a site's tensors even where the received model has no gradient. So of each class of a site
    enough others go on that have learned it from the same rows and in the same sums; the rest begin afresh,
    and so does a site whose classes of this attempt are others than those that it has learned.
    """
    rows = rows_of(attempt, roster, present)
    learned = {s: set(zip(roster[s].learned, roster[s].histories, strict=False)) for s in left}
    on = {site for site, of in learned.items() if of and sorted(row for row, _ in of) == rows[site]}
    while True:
        alike = Counter(one for site in on for one in learned[site])
        alone = {site for site in on if any(alike[one] < attempt.fewest for one in learned[site])}
        if not alone:
            return on
        on -= alone


def too_few_left(
    attempt: Attempt, roster: Roster, present: Collection[str], survivors: Collection[str]
) -> str:
    """Return why the sum of these survivors would hide too little, of a row or a state; empty if it hides."""
    masked, left, fewest = count(roster, present), count(roster, survivors), attempt.fewest
    for row, number in sorted(left.items()):
        if masked[row] >= fewest > number:
            return f"of the sites that train class number {row} only {number} are left; a sum needs {fewest}"
    went_on = continuing(attempt, roster, present, present) & set(survivors)
    if alone := went_on - continuing(attempt, roster, present, survivors):
        return f"of the sites that went on from the state of {min(alone)} too few are left"
    return ""


def sorted_out(
    sealed: Mapping[str, Mapping[str, str]],
    unopened: Mapping[str, Collection[str]],
    survivors: Collection[str],
    revealed: Mapping[str, Masking],
) -> tuple[Shares, dict[str, str]]:
    """Compare revealed shares with the commitments to them; return the right ones, and who has lied of what.

    Args:
        sealed: what each site that is present has sealed for each; see `Participant.shares`.
        unopened: the sites of whose secrets each site has said that it holds no share.
    """
    lies, right = dict[str, str](), {site: dict[str, bytes]() for site in sealed}
    surviving = set(survivors)
    for by, step in revealed.items():
        asked = sealed.keys() - set(unopened.get(by, ()))
        if step.seeds.keys() != asked & surviving or step.secrets.keys() != asked - surviving:
            lies[by] = "has revealed shares of other sites than it was asked for"
        for site, text in {**step.seeds, **step.secrets}.items():
            committed = sealed[site][by][64 if site in surviving else 0 :][:64] if site in sealed else None
            if committed == _commit(share := bytes.fromhex(text)).hex():
                right[site][by] = share
            elif committed:
                lies[by] = f"has revealed another share of a secret of {site} than it was dealt"
    return right, lies


def unmask_sum(
    attempt: Attempt,
    roster: Roster,
    present: Collection[str],
    updates: Iterable[tuple[str, Masked]],
    shares: Shares,
    received: Mapping[str, Received],
) -> Masked:
    """Return the sum of the survivors' updates, at the server.

    Args:
        present: the sites whose shares were passed on.
        updates: of the survivors; one is read at a time.
        shares: see `sorted_out`.
        received: what each survivor was sent.

    Raises:
        MaskingRefused: too few shares are there.
        SiteLies: a site has dealt shares that are not of its key or seed.
    """
    numbers = {site: index for index, site in enumerate(sorted(roster), 1)}
    needed, digest = attempt.votes(roster), attempt.digest(roster)
    rows = rows_of(attempt, roster, present)

    def recovered(site: str) -> bytes:
        few = {numbers[by]: share for by, share in list(shares[site].items())[:needed]}
        if len(few) < needed:
            raise MaskingRefused(f"{len(few)} of {needed} shares of a secret of {site} are there")
        return combine(few, _SECRET) or bytes(_SECRET)

    wrong = "has sent shares that do not match its secrets"
    total, survivors = Masked(np.zeros(0, np.uint64), {}), list[str]()
    sums: dict[int, Ring] = {}
    for site, update in updates:
        seed = recovered(site)
        if hashlib.sha256(seed).hexdigest() != roster[site].seed:
            raise SiteLies({site: wrong})
        if not survivors:
            total = Masked(np.zeros_like(update.shared), sums)
        survivors.append(site)
        np.add(total.shared, update.shared, out=total.shared)
        for row in rows[site]:
            sums[row] = sums[row] + update.rows[row] if row in sums else update.rows[row].copy()
        _add(total, _derive(seed, b"self"), rows[site], off=True)
    for gone in sorted(set(present) - set(survivors)):
        key = X25519PrivateKey.from_private_bytes(recovered(gone))
        if key.public_key().public_bytes_raw().hex() != roster[gone].mask:
            raise SiteLies({gone: wrong})
        for site in survivors:
            common = sorted(set(rows[gone]) & set(rows[site]))
            secret = _agree(key, roster[site].mask, site)
            mask = _pair_key(secret, (gone, site), digest, received[site], common)
            _add(total, mask, common, off=site < gone)
    return total


def _pair_key(
    secret: bytes, pair: tuple[str, str], digest: bytes, received: Received, common: Sequence[int]
) -> bytes:
    """Return the key of the mask of two sites, of the shared tensors and the rows that both send.

    Args:
        secret: that their keys have agreed on.
        pair: their names: a colluder that has copied the key of another shall not take off its mask.
        digest: of all keys of the attempt.
        received: of either site: where they have received different models, masks do not cancel.
    """
    model = hashlib.sha256(received.shared + b"".join(received.rows[row] for row in common)).digest()
    return _derive(secret, b"pair" + digest + model + " ".join(sorted(pair)).encode())


def _add(total: Masked, key: bytes, rows: Sequence[int], *, off: bool) -> None:
    """Add the mask of a key to the shared tensors and some rows, or take it off, in their place."""
    parts = [total.shared, *(total.rows[row] for row in rows)]
    mask, start = _stream(key, sum(part.size for part in parts)), 0
    for part in parts:
        change = mask[start : start + part.size]
        (np.subtract if off else np.add)(part, change, out=part)
        start += part.size


def _commit(share: bytes) -> bytes:
    """Return the commitment to a share, which has more random bits than its digest."""
    return hashlib.sha256(b"suture masking share" + share).digest()


def _agree(own: X25519PrivateKey, peer: str, site: str) -> bytes:
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(peer)))
    except ValueError:  # a point of low order, which would make the secret known
        raise MaskingRefused(f"the key of {site} cannot be used") from None


def _derive(secret: bytes, info: bytes) -> bytes:
    return HKDF(SHA256(), _SECRET, salt=None, info=b"suture masking " + info).derive(secret)


def _stream(key: bytes, length: int) -> Ring:
    """Return uniform numbers from a key that is used once: the keystream of ChaCha20."""
    encryptor = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(encryptor.update(bytes(8 * length)), dtype="<u8").astype(np.uint64, copy=False)


def _digest(update: Masked, received: Received, rows: Sequence[int]) -> bytes:
    parts = [update.shared.tobytes(), *(update.rows[row].tobytes() for row in rows)]
    parts += [received.shared, *(received.rows[row] for row in rows)]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


def in_fixed_point(values: Tensor, weight: float, sites: int, name: str) -> Ring:
    """Return numbers times a weight in fixed point, rounded to the nearest, as numbers of the ring.

    Args:
        sites: whose numbers may be added.
        name: of the tensor, for the message.

    Raises:
        UpdateTooLarge: one is too large, or not finite.
    """
    weighted, limit = values.detach().reshape(-1).double() * weight, 2.0 ** (63 - FRACTION) / sites
    largest = float(weighted.abs().max()) if weighted.numel() else 0.0
    if not largest < limit - 1:
        raise UpdateTooLarge(
            f"{name} has {largest / weight:.3g}, times the site's weight {weight:g} outside the range of "
            f"secure aggregation, {limit:.3g} with {sites} sites"
        )
    fixed: Ring = torch.round(weighted * 2.0**FRACTION).long().numpy().view(np.uint64)
    return fixed


def from_fixed_point(total: Ring) -> Tensor:
    """Return a sum of numbers of the ring as float64."""
    return torch.from_numpy(total.view(np.int64).astype(np.float64) / 2.0**FRACTION)
