"""Secure aggregation: sums equal the plain ones, and a server that lies learns no update."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from suture.privacy import masking
from suture.privacy.masking import (
    FRACTION,
    Attempt,
    Identity,
    Masked,
    MaskingRefused,
    Participant,
    Received,
    SiteLies,
    from_fixed_point,
    in_fixed_point,
    sorted_out,
    unmask_sum,
)
from suture.protocol.messages import Masking, MaskKeys
from world import refused

ATTEMPT = Attempt("trial", 3, "ab" * 32)
SITES = ("a", "b", "c", "d")
ROWS = {0: SITES, 1: ("a", "b", "c"), 2: ("d",)}
"""The sites that send each row: of row 2 too few to hide it."""


class Federation:
    """Sites that hold random numbers, and the messages of an attempt between them."""

    def __init__(self, owners: Mapping[int, Collection[str]] = ROWS, attempt: Attempt = ATTEMPT) -> None:
        self.sites = sorted({site for of in owners.values() for site in of})
        self.attempt = attempt
        rows = {site: [row for row, of in owners.items() if site in of] for site in self.sites}
        self.parts = {site: Participant(site, attempt, rows[site], Identity()) for site in self.sites}
        self.roster = {site: part.keys for site, part in self.parts.items()}
        draw = np.random.default_rng(1)
        self.numbers = {
            site: {key: torch.from_numpy(draw.normal(size=5)) for key in ("", *rows[site])}
            for site in self.sites
        }
        model = dict.fromkeys(owners, b"row")
        self.received = {site: Received(b"model", model) for site in self.sites}

    def enter(self, part: Participant) -> None:
        """Let another participant take the place of a site."""
        self.parts[part.site], self.roster[part.site] = part, part.keys

    def update(self, site: str) -> Masked:
        fixed = {k: in_fixed_point(v, 1.0, len(self.sites), str(k)) for k, v in self.numbers[site].items()}
        return Masked(fixed.pop(""), {int(row): values for row, values in fixed.items()})

    def seal(self, present: Collection[str] | None = None) -> None:
        """Let the sites that are present take all keys, and seal their shares."""
        self.sealed = {site: self.parts[site].shares(self.roster) for site in present or self.sites}

    def passed_to(self, site: str) -> dict[str, str]:
        """What the others have sealed for a site."""
        return {by: of[site] for by, of in self.sealed.items() if by != site}

    def share(self, present: Collection[str] | None = None) -> None:
        """Pass on the sealed shares of the sites that are present."""
        self.seal(present)
        for site in self.sealed:
            self.parts[site].receive(self.passed_to(site))

    def mask(self, *sites: str) -> dict[str, Masked]:
        return {site: self.parts[site].mask(self.update(site), self.received[site]) for site in sites}

    def signed(self, survivors: Collection[str], by: Collection[str] = ()) -> dict[str, str]:
        """The signatures of a list, by the sites on it or by some."""
        return {site: self.parts[site].sign(sorted(survivors)) for site in by or survivors}

    def reveal(self, survivors: Collection[str]) -> dict[str, Masking]:
        signed = self.signed(survivors)
        return {site: self.parts[site].reveal(signed) for site in survivors}

    def plain(self, survivors: Collection[str]) -> Masked:
        """The sum that the masks hide."""
        updates = [self.update(site) for site in survivors]
        rows = {row: [u.rows[row] for u in updates if row in u.rows] for u in updates for row in u.rows}
        return Masked(
            reduce(np.add, [u.shared for u in updates]), {row: reduce(np.add, of) for row, of in rows.items()}
        )

    def unmask(self, hidden: Mapping[str, Masked], revealed: Mapping[str, Masking]) -> Masked:
        unopened = {site: self.parts[site].unopened for site in revealed}
        shares, _ = sorted_out(self.sealed, unopened, list(hidden), revealed)
        return unmask_sum(self.attempt, self.roster, self.sealed, hidden.items(), shares, self.received)


def begun(*masked: str, **how: Attempt) -> Federation:
    """A federation whose shares are passed on, and in which some have sent their updates."""
    made = Federation(**how)
    made.share()
    made.mask(*masked)
    return made


def equal(total: Masked, plain: Masked, rows: Collection[int]) -> bool:
    """Whether a sum is the plain one to the last bit, in the shared tensors and in exactly these rows."""
    assert total.rows.keys() == set(rows)
    return (total.shared == plain.shared).all() and all((total.rows[r] == plain.rows[r]).all() for r in rows)


@pytest.mark.complete
@given(st.data())
def test_masks_cancel_for_every_list_that_sites_sign(data: st.DataObject) -> None:
    """For any owners, sites that never take part, drop out after their shares, or after their updates."""
    sites = [f"s{k}" for k in range(data.draw(st.integers(3, 7)))]
    some = st.sets(st.sampled_from(sites), min_size=1)
    owners = {0: set(sites), **{row: data.draw(some) for row in range(1, 5)}}
    federation = Federation(owners)
    least = max(3, ATTEMPT.threshold(len(sites)))
    several = st.sets(st.sampled_from(sites), min_size=least)
    present = sorted(data.draw(several))
    survivors = sorted(set(data.draw(several)) & set(present))
    federation.share(present)
    hidden = federation.mask(*survivors)
    of_row = {row: len(of & set(present)) for row, of in owners.items()}
    left = {row: len(of & set(survivors)) for row, of in owners.items()}
    if len(survivors) < least or any(0 < left[row] < 3 <= of_row[row] for row in owners):
        with refused(by=MaskingRefused):
            federation.reveal(survivors)
        return
    total = federation.unmask(hidden, federation.reveal(survivors))
    assert equal(total, federation.plain(survivors), [r for r in owners if of_row[r] >= 3 and left[r]])


def test_one_of_four_drops_out() -> None:
    """Row 2, of one site, stays at it."""
    federation = begun("d")  # its masked update does not arrive
    assert federation.parts["d"].rows == [0]
    assert federation.mask("d")["d"].rows.keys() == {0}
    total = federation.unmask(federation.mask(*"abc"), federation.reveal("abc"))
    assert equal(total, federation.plain("abc"), {0, 1})


def test_a_masked_update_is_uniform() -> None:
    """Every byte of masked zeros is as likely as another: chi-square of 255 degrees, six deviations."""
    federation = begun()
    zeros = Masked(np.zeros(2**15, np.uint64), {0: np.zeros(2**15, np.uint64), 1: np.zeros(8, np.uint64)})
    hidden = federation.parts["a"].mask(zeros, federation.received["a"])
    for values in (hidden.shared, hidden.rows[0]):
        for byte in range(8):
            counts = np.bincount((values >> np.uint64(8 * byte)).astype(np.uint8), minlength=256)
            expected = values.size / 256
            assert ((counts - expected) ** 2 / expected).sum() < 255 + 6 * (2 * 255) ** 0.5
    assert np.abs(np.corrcoef(hidden.shared.astype(float), hidden.rows[0].astype(float))[0, 1]) < 0.05


def test_the_fixed_point_is_rounded_to_the_nearest_and_overflows_in_no_sum() -> None:
    """2^33 / 3 is 2.86e9; a weight counts."""
    half = 2.0 ** -(FRACTION + 1)
    values = torch.tensor([1.0, -1.0, 1.1 * half, 0.9 * half, -3.0], dtype=torch.float64)
    fixed = in_fixed_point(values, 1.0, 3, "w").view(np.int64)
    assert fixed.tolist() == [2**FRACTION, -(2**FRACTION), 1, 0, -3 * 2**FRACTION]
    edge = 2.0**33 / 3 - 2
    total = sum(in_fixed_point(torch.tensor([edge], dtype=torch.float64), 1.0, 3, "w") for _ in range(3))
    assert from_fixed_point(np.asarray(total)).item() == pytest.approx(3 * edge)
    assert in_fixed_point(torch.empty(0), 1.0, 3, "w").size == 0
    for value, weight in ((3e9, 1), (-3e9, 1), (float("nan"), 1), (float("inf"), 1), (1.0, 1e10)):
        with refused("conv.weight", by=MaskingRefused):
            in_fixed_point(torch.tensor([0.0, value]), weight, 3, "conv.weight")


# What a server that lies asks for


def test_it_gets_of_no_site_both_secrets() -> None:
    for revealed in begun(*SITES).reveal("abc").values():
        assert not revealed.seeds.keys() & revealed.secrets.keys()
        assert revealed.seeds.keys() | revealed.secrets.keys() == set(SITES)


def test_it_gets_no_update_before_it_has_passed_on_shares() -> None:
    with pytest.raises(MaskingRefused):
        Federation().mask("a")


def vote(federation: Federation, votes: Mapping[str, str], to: str = "a") -> object:
    """Two of four are told that d survives, two that it does not; a vote may be said to be another one's."""
    three = federation.signed("abc", "ab") if to == "a" else {}
    four = federation.signed(SITES, "cd")
    return federation.parts[to].reveal({site: (three | four)[by] for site, by in votes.items()})


def other(federation: Federation) -> Masked:
    """The update of a with another number."""
    update = federation.update("a")
    update.rows[1][0] += np.uint64(1)
    return update


def masked(federation: Federation, received: Received) -> object:
    return federation.parts["a"].mask(federation.update("a"), received)


LIES: dict[str, tuple[Callable[[Federation], object], str]] = {
    "a list of two": (lambda f: f.parts["a"].sign("ab"), "2"),
    "a list of one site three times": (lambda f: f.parts["a"].sign("abbbb"), "2"),
    "a list that leaves two of a row": (lambda f: f.parts["d"].sign("abd"), "class number 1"),
    "the same with repetitions": (lambda f: f.parts["d"].sign("aaabd"), "class number 1"),
    "a list without the site": (lambda f: f.parts["d"].sign("abc"), "lacks"),
    "a list with a stranger": (lambda f: f.parts["a"].sign("abce"), "not present"),
    "a second list": (lambda f: f.signed("abc") and f.parts["a"].sign(SITES), "second"),
    "shares before there is a list": (lambda f: f.parts["d"].reveal({}), "survivors"),
    "two votes for three": (lambda f: vote(f, {"a": "a", "b": "b"}), "few"),
    "two votes for four": (lambda f: vote(f, {"c": "c", "d": "d"}, "c"), "few"),
    "a vote for another list": (lambda f: vote(f, {"a": "a", "b": "b", "c": "c"}), "of c"),
    "a vote of one site as that of another": (lambda f: vote(f, {"a": "a", "b": "b", "c": "b"}), "of c"),
    "a vote of one that is gone": (lambda f: vote(f, {"a": "a", "b": "b", "d": "b"}), "d "),
    "another update": (lambda f: f.parts["a"].mask(other(f), f.received["a"]), "another update"),
    "the update for another model": (lambda f: masked(f, Received(b"x", {0: b"row", 1: b"row"})), "another"),
    "the update for another row": (lambda f: masked(f, Received(b"model", {0: b"row", 1: b"x"})), "another"),
    "other keys": (lambda f: f.parts["a"].shares({s: f.roster[s] for s in "abc"}), "two lists"),
    "other shares": (lambda f: f.parts["a"].receive({s: f.sealed[s]["a"] for s in "bc"}), "other sites"),
}


@pytest.mark.parametrize(("lie", "named"), LIES.values(), ids=list(LIES))
def test_once_updates_are_masked_it_gets_nothing_but_the_shares_of_one_list(
    lie: Callable[[Federation], object], named: str
) -> None:
    federation = begun(*SITES)
    assert federation.parts["a"].shares(federation.roster) == federation.sealed["a"]  # the same again
    with refused(named, by=MaskingRefused):
        lie(federation)


def test_keys_of_an_older_attempt_are_of_no_use() -> None:
    old, new, again = Federation(attempt=replace(ATTEMPT, number="cd" * 32)), Federation(), Federation()
    with refused("signature of b", by=MaskingRefused):
        new.parts["a"].shares(new.roster | {"b": old.roster["b"]})
    # Under the same number the signature fits: but b has sealed its shares under other keys.
    mixed = again.roster | {"a": new.roster["a"]}
    new.parts["a"].shares(mixed)
    again.seal()
    new.parts["a"].receive(again.passed_to("a"))
    assert new.parts["a"].unopened == ("b", "c", "d")


def test_no_key_is_that_of_another_attempt_or_experiment() -> None:
    """The same sites, the same round and even the same number of the attempt."""
    several = [begun() for _ in range(3)]
    of_all = [f.roster[site] for f in several for site in SITES]
    keys = [key for one in of_all for key in (one.cipher, one.mask, one.seed)]
    shares = [text for f in several for of in f.sealed.values() for text in of.values()]
    masked = [f.mask("a")["a"].shared.tobytes() for f in several]
    for values in (keys, shares, masked):
        assert len(set(values)) == len(values)


def low_order(federation: Federation) -> MaskKeys:
    """Keys of b with which the secret of two sites would be zeros; a colluding site can sign them."""
    identity = Identity()
    weak = replace(federation.roster["b"], mask="00" * 32, cipher="00" * 32)
    weak = replace(weak, certificate=identity.certificate)
    return replace(weak, signature=identity.sign(ATTEMPT.signed_bytes("b", weak)).hex())


OTHER = Federation()


def changed(site: str, **fields: object) -> Callable[[Federation], dict[str, MaskKeys]]:
    """The keys of all sites, and of one some that it has not signed."""
    return lambda f: f.roster | {site: replace(f.roster[site], **fields)}


ROSTERS: list[tuple[Callable[[Federation], dict[str, MaskKeys]], str]] = [
    *(
        (changed("b", **{key: getattr(OTHER.roster["b"], key)}), "of b")
        for key in ("mask", "cipher", "seed", "certificate")
    ),
    *(
        (changed("d", **{key: value}), "of d")
        for key, value in (
            ("rows", (0, 1, 2)),
            ("among", SITES),
            ("learned", (0,)),
            ("histories", ("0" * 64,)),
        )
    ),
    (lambda f: f.roster | {"a": OTHER.roster["a"]}, "this site"),
    (lambda f: {site: f.roster[site] for site in "bcd"}, "this site"),
    (lambda f: {site: f.roster[site] for site in "ab"}, "2 sites"),
    (lambda f: f.roster | {"b": low_order(f)}, "of b"),
]


@pytest.mark.parametrize(("keys", "named"), ROSTERS)
def test_keys_that_their_site_has_not_signed_or_that_cannot_be_used_are_noticed(
    keys: Callable[[Federation], dict[str, MaskKeys]], named: str
) -> None:
    federation = Federation()
    with refused(named, by=MaskingRefused):
        federation.parts["a"].shares(keys(federation))


def test_a_round_that_is_repeated_is_so_among_the_sites_of_the_first_attempt() -> None:
    """Five masked for it: of three that are left a majority of five is needed, and no sixth comes in."""
    federation = Federation({0: SITES})
    for site in SITES:
        federation.enter(Participant(site, ATTEMPT, [0], Identity(), "abcde"))
    with refused("3 sites", by=MaskingRefused):
        Federation({0: "abc"}, replace(ATTEMPT, colluders=1)).share()
    federation.share()
    federation.mask(*SITES)
    assert federation.parts["a"].sign("abc")
    with refused("few", by=MaskingRefused):  # of five three have to sign
        federation.parts["a"].reveal({site: federation.parts[site].sign("abc") for site in "ab"})
    late = Federation({0: "abcdf"})
    late.enter(Participant("b", ATTEMPT, [0], Identity(), "abcde"))
    with refused("b", "f", by=MaskingRefused):
        late.parts["a"].shares(late.roster)


def test_a_list_with_repetitions_is_one_site() -> None:
    """A site that has signed the same row three times does not make its row one of three sites."""
    federation = Federation({0: SITES, 1: ("a", "b"), 2: ("d",)})
    federation.enter(Participant("a", ATTEMPT, [0, 1, 1, 1], Identity()))
    federation.share()
    assert federation.parts["a"].rows == [0]


BOTH = {key: {0: "a", 1: "a"} for key in "abc"}
"""What sites have learned: the history of each row."""


@pytest.mark.parametrize(
    ("states", "went_on"),
    [
        ({}, ""),
        (BOTH | {"d": {0: "a"}}, "abcd"),
        (BOTH, "abc"),
        (BOTH | {"c": {}, "d": {0: "a"}}, ""),  # a and b alone of row 1: then d would be alone of row 0
        (BOTH | {"d": {0: "b"}}, "abc"),
        (BOTH | {"c": {0: "a", 1: "b"}}, ""),  # from another row, or in other sums
        ({key: {0: "a"} for key in "abcd"}, ""),  # row 1 is new to all but d
    ],
)
def test_sites_go_on_from_a_state_that_enough_have(
    states: Mapping[str, Mapping[int, str]], went_on: str
) -> None:
    federation = Federation()
    for site, learned in states.items():
        own, of_row = [row for row, of in ROWS.items() if site in of], {r: 64 * d for r, d in learned.items()}
        federation.enter(Participant(site, ATTEMPT, own, Identity(), (), of_row))
    federation.share()
    assert {site for site, part in federation.parts.items() if part.continues} == set(went_on)


def test_a_list_leaves_no_state_to_few_sites() -> None:
    """a, b and c go on from one state, d and e begin afresh: without d they may, without c not."""
    federation = Federation({0: "abcde"})
    for site in "abc":
        federation.enter(Participant(site, ATTEMPT, [0], Identity(), (), {0: 64 * "a"}))
    federation.share()
    federation.mask(*"abcde")
    assert federation.parts["e"].sign("abce")
    with refused("state of a", by=MaskingRefused):
        federation.parts["d"].sign("abde")


def sealed_anew(federation: Federation, text: bytes) -> str:
    """A message of b to a with another text than two shares, which a could not pass on when it reveals."""
    part, nonce = federation.parts["b"], bytes(12)
    commitments = masking._commit(text[:66]) + masking._commit(text[66:])
    sealed = part._channel("a", "b").encrypt(nonce, text, part._digest + commitments)
    return (commitments + nonce + sealed).hex()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda f: f.sealed["b"]["c"],  # for another
        lambda f: f.sealed["c"]["a"],  # by another
        lambda f: f.sealed["b"]["a"][:-2] + ("00" if f.sealed["b"]["a"][-2:] != "00" else "01"),
        lambda f: f.sealed["c"]["a"][:128] + f.sealed["b"]["a"][128:],  # under other commitments
        lambda f: f.sealed["b"]["b"],  # commitments alone
        lambda _: "",
        lambda _: "00" * 200,
        *(lambda f, text=text: sealed_anew(f, text) for text in (b"\xff" * 200, b"", b"\xff" * 66)),
    ],
)
def test_a_share_that_does_not_open_is_stated_and_stops_no_sum(wrong: Callable[[Federation], str]) -> None:
    federation = Federation()
    federation.seal()
    for site in SITES:
        of_b = {"b": wrong(federation)} if site == "a" else {}
        federation.parts[site].receive(federation.passed_to(site) | of_b)
    assert [federation.parts[site].unopened for site in SITES] == [("b",), (), (), ()]
    assert federation.parts["a"].present == list(SITES)
    total = federation.unmask(federation.mask(*SITES), federation.reveal(SITES))
    assert equal(total, federation.plain(SITES), {0, 1})


def test_shares_are_of_the_sites_of_an_attempt() -> None:
    federation = Federation()
    federation.seal()
    right = federation.passed_to("a")
    for sealed, named in (
        (right | {"a": right["b"]}, "no keys"),
        (right | {"e": right["b"]}, "no keys"),
        ({"b": right["b"]}, "2 sites"),
    ):
        with refused(named, by=MaskingRefused):
            federation.parts["a"].receive(sealed)


def test_a_model_of_its_own_for_one_site_gives_no_sum() -> None:
    federation = Federation()
    federation.received["b"] = Received(b"another", dict.fromkeys(ROWS, b"row"))
    federation.share()
    total = federation.unmask(federation.mask(*SITES), federation.reveal(SITES))
    away = from_fixed_point(total.shared) - from_fixed_point(federation.plain(SITES).shared)
    assert away.abs().min() > 1


# What a site that lies sends


def test_wrong_shares_are_told_from_right_ones_by_the_commitments() -> None:
    """With d gone three shares are needed, and three sites are left; with d there is one to spare."""
    federation = begun()
    hidden, revealed = federation.mask("a", "b", "c"), federation.reveal("abc")
    own, of_b = revealed["a"], revealed["b"]
    for wrong in (
        replace(own, seeds=of_b.seeds),
        replace(own, secrets=of_b.secrets),
        replace(own, secrets={"d": ""}),
        replace(own, seeds={"b": own.seeds["b"]}),
        replace(own, seeds=own.seeds | {"d": "00"}),
        replace(own, seeds=own.seeds | {"e": "00"}),
    ):
        assert sorted_out(federation.sealed, {}, "abc", revealed | {"a": wrong})[1].keys() == {"a"}
    held_back = revealed | {"a": replace(own, seeds={site: own.seeds[site] for site in "ac"})}
    assert sorted_out(federation.sealed, {}, "abc", held_back)[1]
    assert not sorted_out(federation.sealed, {"a": {"b"}}, "abc", held_back)[1]
    for few in (revealed | {"a": replace(own, seeds=of_b.seeds)}, {"a": own, "b": of_b}):
        with refused("2 of 3", by=MaskingRefused):
            federation.unmask(hidden, few)
    federation = begun()
    hidden, revealed = federation.mask(*SITES), federation.reveal(SITES)
    total = federation.unmask(hidden, revealed | {"a": replace(revealed["a"], seeds=revealed["b"].seeds)})
    assert equal(total, federation.plain(SITES), {0, 1})


@pytest.mark.parametrize("survivors", ["abc", "abcd"])
def test_a_site_that_deals_wrong_shares_is_named(survivors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It commits to shares of no secret: each of the others passes on what it was dealt."""
    federation = Federation()
    with monkeypatch.context() as patch:
        patch.setattr(masking, "split", lambda _, parties, __: [bytes([7 + x] * 66) for x in range(parties)])
        federation.parts["d"].shares(federation.roster)
    federation.share()
    hidden, revealed = federation.mask(*survivors), federation.reveal(survivors)
    with pytest.raises(SiteLies) as caught:
        federation.unmask(hidden, revealed)
    assert caught.value.lies.keys() == {"d"}


def test_two_sites_with_one_key_are_refused() -> None:
    """One party would be two of the three that hide an update."""
    federation, one = Federation(), Identity()
    for site in "bd":
        federation.enter(Participant(site, ATTEMPT, [0], one))
    with pytest.raises(SiteLies) as caught:
        federation.parts["a"].shares(federation.roster)
    assert caught.value.lies.keys() == {"b", "d"}


def test_a_copied_key_takes_no_mask_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """c takes off what it shares with b, and would add the same for d, a colluder that has copied b's key."""
    federation, keys, add = Federation({0: SITES}), [], masking._add
    copied = replace(federation.roster["d"], mask=federation.roster["b"].mask)
    signature = federation.parts["d"]._identity.sign(ATTEMPT.signed_bytes("d", copied)).hex()
    federation.parts["d"].keys = federation.roster["d"] = replace(copied, signature=signature)
    federation.share()

    def note(total: Masked, key: bytes, rows: Sequence[int], *, off: bool) -> None:
        keys.append(key)
        add(total, key, rows, off=off)

    monkeypatch.setattr(masking, "_add", note)
    federation.mask("c")
    assert len(set(keys)) == len(keys) == 4


def test_two_lists_never_get_enough_votes() -> None:
    """Each honest site votes once, and the colluders twice: 2 t is more than all votes, and t the least."""
    by_hand = {(3, 0): 2, (4, 0): 3, (4, 1): 3, (10, 0): 6, (10, 3): 7}
    for sites in range(3, 20):
        for colluders in range(sites):
            t = replace(ATTEMPT, colluders=colluders).threshold(sites)
            assert t == by_hand.get((sites, colluders), t)
            assert 2 * t > (sites - colluders) + 2 * colluders >= 2 * (t - 1)


def test_colluders_raise_the_number_of_sites_that_a_sum_needs() -> None:
    federation = begun(*SITES, attempt=replace(ATTEMPT, colluders=1))
    assert federation.parts["a"].rows == [0]  # row 1 has three sites, and a sum needs four
    with refused("3 survivors", by=MaskingRefused):
        federation.parts["a"].sign("abc")
