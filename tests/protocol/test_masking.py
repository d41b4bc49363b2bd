"""Secure aggregation: sums equal the plain ones, and a server that lies learns no update."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

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
from suture.protocol.messages import Masking

ATTEMPT = Attempt("trial", 3, "ab" * 32)
SITES = ("a", "b", "c", "d")
ROWS = {0: SITES, 1: ("a", "b", "c"), 2: ("d",)}
"""The sites that send each row: of row 2 too few to hide it."""

WIDTH = 5


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
            site: {key: torch.from_numpy(draw.normal(size=WIDTH)) for key in ("", *rows[site])}
            for site in self.sites
        }
        model = dict.fromkeys(owners, b"row")
        self.received = {site: Received(b"model", model) for site in self.sites}

    def update(self, site: str) -> Masked:
        fixed = {k: in_fixed_point(v, 1.0, len(self.sites), str(k)) for k, v in self.numbers[site].items()}
        return Masked(fixed.pop(""), {int(row): values for row, values in fixed.items()})

    def share(self, present: Collection[str] | None = None) -> None:
        """Pass on the sealed shares of the sites that are present."""
        present = present or self.sites
        self.sealed = {site: self.parts[site].shares(self.roster) for site in present}
        for site in present:
            self.parts[site].receive({by: of[site] for by, of in self.sealed.items() if by != site})

    def mask(self, *sites: str) -> dict[str, Masked]:
        return {site: self.parts[site].mask(self.update(site), self.received[site]) for site in sites}

    def reveal(self, survivors: Collection[str], askers: Collection[str] | None = None) -> dict[str, Masking]:
        signed = {site: self.parts[site].sign(sorted(survivors)) for site in askers or survivors}
        return {site: self.parts[site].reveal(signed) for site in askers or survivors}

    def plain(self, survivors: Collection[str]) -> dict[object, torch.Tensor]:
        keys = {key for site in survivors for key in self.numbers[site]}
        return {
            key: sum_of(self.numbers[s][key] for s in survivors if key in self.numbers[s]) for key in keys
        }

    def sum(self, survivors: Collection[str]) -> Masked:
        hidden = self.mask(*survivors)
        return self.unmask(hidden, self.reveal(survivors))

    def unmask(self, hidden: Mapping[str, Masked], revealed: Mapping[str, Masking]) -> Masked:
        unopened = {site: self.parts[site].unopened for site in revealed}
        shares, _ = sorted_out(self.sealed, unopened, list(hidden), revealed)
        return unmask_sum(self.attempt, self.roster, self.sealed, hidden.items(), shares, self.received)


def sum_of(tensors: object) -> torch.Tensor:
    return torch.stack(list(tensors)).sum(0)  # type: ignore[call-overload]


@pytest.mark.complete
@given(st.data())
def test_sums_are_the_plain_ones(data: st.DataObject) -> None:
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
    of_row = {row: len(of & set(present)) for row, of in owners.items()}
    left = {row: len(of & set(survivors)) for row, of in owners.items()}
    if len(survivors) < least or any(0 < left[row] < 3 <= of_row[row] for row in owners):
        federation.mask(*survivors)
        with pytest.raises(MaskingRefused):
            federation.reveal(survivors)
        return
    total = federation.sum(survivors)
    plain = federation.plain(survivors)
    assert (from_fixed_point(total.shared) - plain[""]).abs().max() < 1e-6
    assert total.rows.keys() == {row for row in owners if of_row[row] >= 3 and left[row]}
    for row, values in total.rows.items():
        assert (from_fixed_point(values) - plain[row]).abs().max() < 1e-6


def test_one_of_four_drops_out() -> None:
    federation = Federation()
    federation.share()
    federation.mask("d")  # its masked update does not arrive
    total = federation.sum("abc")
    plain = federation.plain("abc")
    assert (from_fixed_point(total.shared) - plain[""]).abs().max() < 1e-8
    assert total.rows.keys() == {0, 1}
    assert (from_fixed_point(total.rows[1]) - plain[1]).abs().max() < 1e-8


def test_a_masked_update_is_uniform() -> None:
    """Every byte of masked zeros is as likely as another: chi-square of 255 degrees, six deviations."""
    federation = Federation()
    federation.share()
    zeros = Masked(np.zeros(2**15, np.uint64), {0: np.zeros(2**15, np.uint64), 1: np.zeros(8, np.uint64)})
    hidden = federation.parts["a"].mask(zeros, federation.received["a"])
    for values in (hidden.shared, hidden.rows[0]):
        for byte in range(8):
            counts = np.bincount((values >> np.uint64(8 * byte)).astype(np.uint8), minlength=256)
            expected = values.size / 256
            assert ((counts - expected) ** 2 / expected).sum() < 255 + 6 * (2 * 255) ** 0.5
    assert np.abs(np.corrcoef(hidden.shared.astype(float), hidden.rows[0].astype(float))[0, 1]) < 0.05


def test_a_row_that_few_sites_send_stays_at_the_site() -> None:
    federation = Federation()
    federation.share()
    assert federation.parts["d"].rows == [0]
    assert federation.mask("d")["d"].rows.keys() == {0}


def test_the_fixed_point_is_rounded_to_the_nearest() -> None:
    half = 2.0 ** -(FRACTION + 1)
    values = torch.tensor([1.0, -1.0, 1.1 * half, 0.9 * half, -3.0], dtype=torch.float64)
    fixed = in_fixed_point(values, 1.0, 3, "w").view(np.int64)
    assert fixed.tolist() == [2**FRACTION, -(2**FRACTION), 1, 0, -3 * 2**FRACTION]


@pytest.mark.parametrize("value", [3e9, -3e9, float("nan"), float("inf")])
def test_what_is_out_of_range_is_refused_by_the_name_of_its_tensor(value: float) -> None:
    """2^33 / 3 is 2.86e9; a weight counts."""
    with pytest.raises(MaskingRefused, match=r"conv\.weight.*lower the learning rate"):
        in_fixed_point(torch.tensor([0.0, value]), 1.0, 3, "conv.weight")
    with pytest.raises(MaskingRefused, match=r"weight 1e\+10"):
        in_fixed_point(torch.tensor([1.0]), 1e10, 3, "conv.weight")


def test_sums_at_the_edge_of_the_range_do_not_overflow() -> None:
    edge = 2.0**33 / 3 - 2
    total = sum(in_fixed_point(torch.tensor([edge], dtype=torch.float64), 1.0, 3, "w") for _ in range(3))
    assert from_fixed_point(np.asarray(total)).item() == pytest.approx(3 * edge)


# What a server that lies asks for


def test_it_gets_of_no_site_both_secrets() -> None:
    federation = Federation()
    federation.share()
    federation.mask(*SITES)
    for revealed in federation.reveal("abc", "abc").values():
        assert not revealed.seeds.keys() & revealed.secrets.keys()
        assert revealed.seeds.keys() | revealed.secrets.keys() == set(SITES)


def test_it_gets_no_second_list_of_survivors() -> None:
    federation = Federation()
    federation.share()
    federation.mask(*SITES)
    federation.reveal("abc", "abc")
    for site in "abc":
        with pytest.raises(MaskingRefused, match="second list"):
            federation.parts[site].sign(SITES)
    with pytest.raises(MaskingRefused, match="before the survivors"):
        federation.parts["d"].reveal({})


def test_it_cannot_tell_two_groups_two_lists() -> None:
    """Two of four are told that d survives, two that it does not: neither list gets three signatures."""
    federation = Federation()
    federation.share()
    federation.mask(*SITES)
    three = {site: federation.parts[site].sign("abc") for site in "ab"}
    four = {site: federation.parts[site].sign(SITES) for site in "cd"}
    for signed, askers in ((three, "ab"), (four, "cd"), (three | {"c": four["c"]}, "ab")):
        for site in askers:
            with pytest.raises(MaskingRefused, match=r"too few|not by its key"):
                federation.parts[site].reveal(signed)


def test_it_cannot_make_a_vote_of_one_site_two() -> None:
    federation = Federation()
    federation.share()
    federation.mask(*SITES)
    own = {site: federation.parts[site].sign("abc") for site in "ab"}
    with pytest.raises(MaskingRefused, match="d has signed"):
        federation.parts["a"].reveal(own | {"d": own["b"]})
    with pytest.raises(MaskingRefused, match="too few"):
        federation.parts["a"].reveal(own)


def test_it_gets_no_list_that_is_too_short() -> None:
    federation = Federation()
    federation.share()
    federation.mask(*SITES)
    for two in ("ab", "aabb", "abbbb"):
        with pytest.raises(MaskingRefused, match="2 survivors are too few"):
            federation.parts["a"].sign(two)
    for three in ("abd", "aaabd"):  # a and b are left of the three sites of row 1
        with pytest.raises(MaskingRefused, match="class number 1 only 2"):
            federation.parts["d"].sign(three)
    with pytest.raises(MaskingRefused, match="lacks this one"):
        federation.parts["d"].sign("abc")


def test_it_gets_one_update_in_an_attempt() -> None:
    federation = Federation()
    federation.share()
    first = federation.mask("a")["a"]
    again = federation.mask("a")["a"]
    assert (first.shared == again.shared).all()
    other = federation.update("a")
    other.shared[0] += np.uint64(1)
    with pytest.raises(MaskingRefused, match="another update"):
        federation.parts["a"].mask(other, federation.received["a"])
    with pytest.raises(MaskingRefused, match="another update"):
        federation.parts["a"].mask(federation.update("a"), Received(b"other", {0: b"row", 1: b"row"}))


def test_keys_of_an_older_attempt_are_of_no_use() -> None:
    old, new = Federation(attempt=replace(ATTEMPT, number="cd" * 32)), Federation()
    with pytest.raises(MaskingRefused, match="signature of b"):
        new.parts["a"].shares(new.roster | {"b": old.roster["b"]})
    # Under the same number the signature fits: but b has sealed its shares under other keys.
    again = Federation()
    mixed = again.roster | {"a": new.roster["a"]}
    new.parts["a"].shares(mixed)
    replayed = {site: again.parts[site].shares(again.roster)["a"] for site in "bcd"}
    new.parts["a"].receive(replayed)
    assert new.parts["a"]._shares.keys() == {"a"}


def test_no_key_is_that_of_another_attempt_or_experiment() -> None:
    """The same sites, the same round and even the same number of the attempt."""
    several = [Federation() for _ in range(3)]
    for federation in several:
        federation.share()
    of_all = [f.roster[site] for f in several for site in SITES]
    keys = [key for one in of_all for key in (one.cipher, one.mask, one.seed)]
    shares = [text for f in several for of in f.sealed.values() for text in of.values()]
    masked = [f.mask("a")["a"].shared.tobytes() for f in several]
    for values in (keys, shares, masked):
        assert len(set(values)) == len(values)


def test_a_swapped_key_is_noticed() -> None:
    federation, other = Federation(), Federation()
    for field in ("mask", "cipher", "seed"):
        swapped = replace(federation.roster["b"], **{field: getattr(other.roster["b"], field)})
        with pytest.raises(MaskingRefused, match="signature of b"):
            federation.parts["a"].shares(federation.roster | {"b": swapped})
    with pytest.raises(MaskingRefused, match="other keys of this site"):
        federation.parts["a"].shares(federation.roster | {"a": other.roster["a"]})
    with pytest.raises(MaskingRefused, match="other keys of this site"):
        federation.parts["a"].shares({site: federation.roster[site] for site in "bcd"})


def test_more_rows_than_a_site_has_signed_are_noticed() -> None:
    federation = Federation()
    claimed = replace(federation.roster["d"], rows=(0, 1, 2))
    with pytest.raises(MaskingRefused, match="signature of d"):
        federation.parts["a"].shares(federation.roster | {"d": claimed})


def test_a_list_with_repetitions_is_one_site() -> None:
    """A site that has signed the same row three times does not make its row one of three sites."""
    federation = Federation({0: SITES, 1: ("a", "b"), 2: ("d",)})
    federation.parts["a"] = Participant("a", ATTEMPT, [0, 1, 1, 1], Identity())
    federation.roster["a"] = federation.parts["a"].keys
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
        federation.parts[site] = Participant(site, ATTEMPT, own, Identity(), (), of_row)
        federation.roster[site] = federation.parts[site].keys
    federation.share()
    assert {site for site, part in federation.parts.items() if part.continues} == set(went_on)


def test_a_list_leaves_no_state_to_few_sites() -> None:
    """a, b and c go on from one state, d and e begin afresh: without d they may, without c not."""
    federation = Federation({0: "abcde"})
    for site in "abc":
        federation.parts[site] = Participant(site, ATTEMPT, [0], Identity(), (), {0: 64 * "a"})
        federation.roster[site] = federation.parts[site].keys
    federation.share()
    federation.mask(*"abcde")
    assert federation.parts["e"].sign("abce")
    with pytest.raises(MaskingRefused, match="went on from the state of a"):
        federation.parts["d"].sign("abde")


def test_shares_of_another_are_not_taken() -> None:
    for wrong in (
        lambda sealed: sealed["b"]["c"],  # for another
        lambda sealed: sealed["c"]["a"],  # by another
        lambda sealed: sealed["b"]["a"][:-2] + ("00" if sealed["b"]["a"][-2:] != "00" else "01"),
        lambda sealed: sealed["c"]["a"][:128] + sealed["b"]["a"][128:],  # under other commitments
        lambda sealed: sealed["b"]["b"],  # commitments alone
        lambda _: "",
    ):
        federation = Federation()
        sealed = {site: federation.parts[site].shares(federation.roster) for site in SITES}
        part = federation.parts["a"]
        right = {site: sealed[site]["a"] for site in "bcd"}
        part.receive(right | {"b": wrong(sealed)})
        assert part._shares.keys() == {"a", "c", "d"}
        assert part.present == list(SITES)


def test_shares_are_of_the_sites_of_an_attempt_and_once() -> None:
    federation = Federation()
    sealed = {site: federation.parts[site].shares(federation.roster) for site in SITES}
    part = federation.parts["a"]
    right = {site: sealed[site]["a"] for site in "bcd"}
    for strange in ("a", "e"):
        with pytest.raises(MaskingRefused, match="sites that have no keys"):
            part.receive(right | {strange: right["b"]})
    with pytest.raises(MaskingRefused, match="too few"):
        part.receive({"b": right["b"]})
    part.receive(right)
    with pytest.raises(MaskingRefused, match="other sites in one attempt"):
        part.receive({site: right[site] for site in "bc"})


def test_two_lists_of_keys_in_one_attempt_are_refused() -> None:
    federation = Federation()
    part = federation.parts["a"]
    first = part.shares(federation.roster)
    assert part.shares(federation.roster) == first
    with pytest.raises(MaskingRefused, match="two lists"):
        part.shares({site: federation.roster[site] for site in "abc"})


def test_a_model_of_its_own_for_one_site_gives_no_sum() -> None:
    federation = Federation()
    federation.received["b"] = Received(b"another", dict.fromkeys(ROWS, b"row"))
    federation.share()
    total = federation.sum(SITES)
    assert (from_fixed_point(total.shared) - federation.plain(SITES)[""]).abs().min() > 1


# What a site that lies sends


def test_wrong_shares_are_told_from_right_ones_by_the_commitments() -> None:
    """With d gone three shares are needed, and three sites are left; with d there is one to spare."""
    federation = Federation()
    federation.share()
    hidden = federation.mask("a", "b", "c")
    revealed = federation.reveal("abc")
    for wrong in (
        replace(revealed["a"], seeds=revealed["b"].seeds),
        replace(revealed["a"], secrets=revealed["b"].secrets),
        replace(revealed["a"], secrets={"d": ""}),
        replace(revealed["a"], seeds={"b": revealed["a"].seeds["b"]}),
        replace(revealed["a"], seeds=revealed["a"].seeds | {"d": "00"}),
    ):
        assert sorted_out(federation.sealed, {}, "abc", revealed | {"a": wrong})[1].keys() == {"a"}
    hidden_share = {"a": replace(revealed["a"], seeds={s: revealed["a"].seeds[s] for s in "ac"})}
    assert sorted_out(federation.sealed, {}, "abc", revealed | hidden_share)[1]
    assert not sorted_out(federation.sealed, {"a": {"b"}}, "abc", revealed | hidden_share)[1]
    with pytest.raises(MaskingRefused, match="2 of 3 shares of a secret of"):
        federation.unmask(hidden, revealed | {"a": replace(revealed["a"], seeds=revealed["b"].seeds)})
    with pytest.raises(MaskingRefused, match="2 of 3 shares"):
        federation.unmask(hidden, {site: revealed[site] for site in "ab"})
    federation = Federation()
    federation.share()
    hidden, revealed = federation.mask(*SITES), federation.reveal(SITES)
    total = federation.unmask(hidden, revealed | {"a": replace(revealed["a"], seeds=revealed["b"].seeds)})
    assert (from_fixed_point(total.shared) - federation.plain(SITES)[""]).abs().max() < 1e-8


@pytest.mark.parametrize("gone", [True, False])
def test_a_site_that_deals_wrong_shares_is_named(gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It commits to shares of no secret: each of the others passes on what it was dealt."""
    federation = Federation()
    right = federation.parts["d"].shares
    with monkeypatch.context() as patch:
        patch.setattr(masking, "split", lambda _, parties, __: [bytes([7 + x] * 66) for x in range(parties)])
        right(federation.roster)
    federation.share()
    survivors = "abc" if gone else SITES
    hidden, revealed = federation.mask(*survivors), federation.reveal(survivors)
    with pytest.raises(SiteLies, match="d has sent shares that do not match its secrets") as caught:
        federation.unmask(hidden, revealed)
    assert caught.value.lies.keys() == {"d"}


def test_a_share_that_does_not_open_is_stated_and_stops_no_sum() -> None:
    federation = Federation()
    federation.sealed = {site: federation.parts[site].shares(federation.roster) for site in SITES}
    for site in SITES:
        sealed = {by: of[site] for by, of in federation.sealed.items() if by != site}
        federation.parts[site].receive(sealed | ({"b": "00" * 200} if site == "a" else {}))
    hidden, revealed = federation.mask(*SITES), federation.reveal(SITES)
    assert [federation.parts[site].unopened for site in SITES] == [("b",), (), (), ()]
    total = federation.unmask(hidden, revealed)
    assert (from_fixed_point(total.shared) - federation.plain(SITES)[""]).abs().max() < 1e-8


def test_two_sites_with_one_key_are_refused() -> None:
    """One party would be two of the three that hide an update."""
    federation, one = Federation(), Identity()
    for site in "bd":
        federation.parts[site] = Participant(site, ATTEMPT, [0], one)
        federation.roster[site] = federation.parts[site].keys
    with pytest.raises(SiteLies, match="b has the same key as d; d has the same key as b"):
        federation.parts["a"].shares(federation.roster)


def test_a_key_of_low_order_is_refused() -> None:
    """With it the secret of two sites would be zeros; a colluding site can sign it."""
    federation = Federation()
    part = federation.parts["b"]
    weak = replace(part.keys, mask="00" * 32, cipher="00" * 32, signature="")
    signature = Identity()
    weak = replace(weak, certificate=signature.certificate)
    weak = replace(weak, signature=signature.sign(ATTEMPT.signed_bytes("b", weak)).hex())
    with pytest.raises(MaskingRefused, match="key of b cannot be used"):
        federation.parts["a"].shares(federation.roster | {"b": weak})


def test_a_copied_key_takes_no_mask_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """c takes off what it shares with b, and would add the same for d, a colluder that has copied b's key."""
    federation, keys, add = Federation({0: SITES}), [], masking._add
    copied = replace(federation.roster["d"], mask=federation.roster["b"].mask)
    copied = replace(
        copied, signature=federation.parts["d"]._identity.sign(ATTEMPT.signed_bytes("d", copied)).hex()
    )
    federation.parts["d"].keys = federation.roster["d"] = copied
    federation.share()

    def note(total: Masked, key: bytes, rows: Sequence[int], sign: int) -> None:
        keys.append(key)
        add(total, key, rows, sign)

    monkeypatch.setattr(masking, "_add", note)
    federation.mask("c")
    assert len(set(keys)) == len(keys) == 4


def test_a_sealed_message_has_two_shares() -> None:
    """A longer one would be a number that no site could pass on, and an error at each when it reveals."""
    federation = Federation()
    sealed = {site: federation.parts[site].shares(federation.roster) for site in SITES}
    part = federation.parts["b"]
    for text in (b"\xff" * 200, b"", b"\xff" * 66):
        commitments = masking._commit(text[:66]) + masking._commit(text[66:])
        cipher, bound = part._channel("a", "b"), part._digest + commitments
        sealed["b"]["a"] = (commitments + bytes(12) + cipher.encrypt(bytes(12), text, bound)).hex()
        assert federation.parts["a"]._open("b", sealed["b"]["a"]) is None


@pytest.mark.parametrize(
    ("sites", "colluders", "t"), [(3, 0, 2), (4, 0, 3), (4, 1, 3), (10, 0, 6), (10, 3, 7)]
)
def test_two_lists_never_get_enough_votes(sites: int, colluders: int, t: int) -> None:
    """Each honest site votes once, and the colluders twice: 2 t is more than all votes."""
    assert replace(ATTEMPT, colluders=colluders).threshold(sites) == t
    assert 2 * t > (sites - colluders) + 2 * colluders


def test_colluders_raise_the_number_of_sites_that_a_sum_needs() -> None:
    federation = Federation(attempt=replace(ATTEMPT, colluders=1))
    federation.share()
    assert federation.parts["a"].rows == [0]  # row 1 has three sites, and a sum needs four
    federation.mask(*SITES)
    with pytest.raises(MaskingRefused, match="3 survivors are too few"):
        federation.parts["a"].sign("abc")
