"""One site lies in the steps of secure aggregation: it is named, and costs an attempt or two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from masked import BOTH, FOUR, SAME, accepted, furthest, plain, secured
from parties import METHOD, history, honest, run

from between import Between
from hypothesis_profiles import examples
from noted import noted
from suture.core.errors import FederationError
from suture.federation.loop import federate
from suture.federation.server.server import Server
from suture.federation.site.site import Site
from suture.privacy import masking
from suture.protocol.messages import Abstain, Labels, Masking, MaskKeys, TaskData, Update
from suture.protocol.packing import Packed, pack, unpack
from world import refused

Lie = Callable[[Site, Any], Any]
"""Of the site that lies, and what it would have said."""


def signed(liar: Site, keys: MaskKeys) -> Masking:
    part = liar.masks._part
    assert part
    signature = part._identity.sign(part.attempt.signed_bytes(liar.name, replace(keys, signature=""))).hex()
    part.keys = replace(keys, signature=signature)
    return Masking("keys", keys=part.keys)


def lying(federation: Any, lies: Mapping[str, Lie], who: str = "delta") -> tuple[Server, int]:
    """A run in which a site lies in some steps of every attempt; the server, and the number of attempts."""
    sites, server, asked = federation.sites("out"), federation.server("out"), set()

    def tell(site: str, task: TaskData, answer: Packed) -> Packed:
        if task.mask is None:
            return answer
        asked.add((task.round, task.mask.attempt))
        step = unpack(answer)
        lie = lies.get(task.mask.step) if site == who and not isinstance(step, Abstain) else None
        return pack(lie(sites[site], step)) if lie else answer

    federate(server, Between(sites, tell))
    return server, len(asked)


ZEROS = "00" * 208


def of_keys(**fields: Any) -> Lie:
    return lambda _, step: replace(step, keys=replace(step.keys, **fields))


def of_signed_keys(**fields: Any) -> Lie:
    return lambda site, step: signed(site, replace(step.keys, **fields))


LIES: dict[str, tuple[str, Lie, int]] = {
    "a signature of nothing": ("keys", of_keys(signature="00" * 64), 1),
    "a certificate of nobody": ("keys", of_keys(certificate="no certificate"), 1),
    "a key of low order": ("keys", of_signed_keys(mask="00" * 32), 1),
    "a list of strangers": ("keys", of_signed_keys(among=("delta", "x", "y")), 1),
    "a list of a thousand": (
        "keys",
        of_signed_keys(among=("alpha", "beta", "delta", *(f"x{i}" for i in range(900)))),
        1,
    ),
    "the number of a class that it was not asked for": ("keys", of_signed_keys(rows=(1, 2)), 1),
    "shares for some": ("shares", lambda _, s: replace(s, sealed=dict(list(s.sealed.items())[:2])), 1),
    "sealed noise": ("shares", lambda _, s: replace(s, sealed=dict.fromkeys(s.sealed, ZEROS)), 2),
    "sealed noise for others": (
        "shares",
        lambda _, s: replace(s, sealed={to: t if to == "delta" else ZEROS for to, t in s.sealed.items()}),
        2,
    ),
    "another signature": ("survivors", lambda _, s: replace(s, signature="ab" * 64), 1),
    "another's shares": (
        "reveal",
        lambda _, s: replace(s, seeds=dict.fromkeys(s.seeds, next(iter(s.seeds.values())))),
        1,
    ),
    "shares of nobody": ("reveal", lambda _, s: replace(s, seeds=s.seeds | {"nobody": "00"}), 1),
    # It has said to hold them.
    "no shares of others": ("reveal", lambda _, s: replace(s, seeds={"delta": s.seeds["delta"]}), 1),
}
"""The step, the lie, and the attempts of its first round."""


@pytest.mark.complete
@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_named_and_costs_one_attempt_at_most(name: str, tiny: Any) -> None:
    at, lie, attempts = LIES[name]
    federation = secured(tiny(METHOD, FOUR, rounds=2, selection="last", min_sites=3))
    server, asked = lying(federation, {at: lie})
    lines = history(server)
    assert [line["round"] for line in lines if line["status"] == "committed"] == [1, 2]
    assert asked == attempts + 1
    told = [str(line["sites"].get("delta", {}).get("reason")) for line in lines]
    assert any(reason not in ("None", "") for reason in told) or any(
        "delta" in note for note in noted(server)
    )


def without(*sites: str) -> Lie:
    """It says that it holds no shares of some, or reveals none."""

    def lie(_: Site, step: Masking) -> Masking:
        unopened = sites if step.step == "survivors" else ()
        return replace(step, unopened=unopened, seeds={s: t for s, t in step.seeds.items() if s not in sites})

    return lie


@pytest.mark.complete
def test_a_dispute_stops_no_sum_while_a_share_is_to_spare(tiny: Any) -> None:
    """Of three, one that says it holds no share of another, or hides it, does not stop it."""
    three = dict.fromkeys(["alpha", "beta", "gamma"], BOTH)
    federation = secured(tiny(METHOD, three, rounds=1, selection="last"))
    server, asked = lying(federation, dict.fromkeys(("survivors", "reveal"), without("alpha")), "gamma")
    assert (accepted(server), asked) == (["abg"], 1)
    assert furthest(run(plain(federation), "plain"), server) < 1e-6


@pytest.mark.complete
def test_who_denies_shares_of_several_is_left_out(tiny: Any) -> None:
    """Of one dispute nothing can be told."""
    federation, denied = secured(tiny(METHOD, FOUR, rounds=3, selection="last", min_sites=3)), []

    def deny(site: Site, step: Masking) -> Masking:
        if step.step == "survivors":
            denied.append("beta" if denied else "alpha")
        return without(denied[-1])(site, step)  # type: ignore[no-any-return]

    server, _ = lying(federation, {"survivors": deny, "reveal": deny})
    assert accepted(server) == ["abdg", "abdg", "abg"]
    assert history(server)[-1]["sites"]["delta"]["status"] == "rejected"
    assert any("delta or alpha" in note for note in noted(server))


@pytest.mark.complete
@pytest.mark.parametrize("liars", [2, 3])
def test_as_many_liars_as_colluders_do_not_have_an_honest_site_left_out(liars: int, tiny: Any) -> None:
    """Each says that alpha has sealed no share for it."""
    names = ["alpha", *(f"site-{i}" for i in range(7))]
    schedule = {"rounds": 2, "selection": "last", "min_sites": 5}
    federation = secured(tiny(METHOD, dict.fromkeys(names, ("Mass",)), **schedule), 2)

    def deny(site: str, task: TaskData, answer: Packed) -> Packed:
        step = unpack(answer)
        if (
            site not in names[-liars:]
            or not isinstance(step, Masking)
            or step.step not in ("survivors", "reveal")
        ):
            return answer
        return pack(without("alpha")(None, step))  # type: ignore[arg-type]

    server = run(federation, "out", deny)
    statuses = [line["sites"]["alpha"]["status"] for line in history(server) if line["status"] == "committed"]
    assert statuses == ["accepted" if liars == 2 else "rejected"] * 2


def test_whose_shares_are_enough_is_not_left_out_for_another(tiny: Any) -> None:
    """delta seals noise, so that its seed is lost, and denies the share of alpha, which four others hold."""
    federation = secured(tiny(METHOD, SAME | {"eta": ("Mass",)}, rounds=1, selection="last", min_sites=3))
    lies = {
        "shares": lambda _, step: replace(step, sealed=dict.fromkeys(step.sealed, ZEROS)),
        "survivors": lambda _, step: replace(step, unopened=("alpha",)),
    }
    assert accepted(lying(federation, lies)[0]) == ["", "abeg"]


def test_shares_of_no_secret_are_found_when_they_are_revealed(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too late for the round: a sum was revealed to, and another one without the liar would be its update."""
    federation = secured(tiny(METHOD, FOUR, rounds=1, selection="last", min_sites=3, max_failed_rounds=2))
    sites, server = federation.sites("out"), federation.server("out")
    step, split = sites["delta"].masks.step, masking.split

    def wrong(*args: Any) -> Masking:
        with monkeypatch.context() as patch:
            patch.setattr(masking, "split", lambda secret, n, t: split(secret[::-1], n, t))
            return step(*args)

    monkeypatch.setattr(sites["delta"].masks, "step", wrong)
    with refused("delta", by=FederationError):
        federate(server, Between(sites, honest))
    assert any("delta" in note for note in noted(server))


# An update that is none


def noise(part: str, rows: int) -> Lie:
    """Of the shared tensors, of all rows, or of the last one."""
    draw = torch.Generator().manual_seed(0)

    def lie(_: Site, update: Update) -> Update:
        drawn = {
            name: torch.randint(-(2**62), 2**62, tensor.shape, generator=draw)
            for name, tensor in getattr(update, part).items()
        }
        if rows == 1:
            drawn = {name: torch.cat([getattr(update, part)[name][:1], t[1:]]) for name, t in drawn.items()}
        return replace(update, **{part: drawn})

    return lie


ONE_MORE = FOUR | {"alpha": ("Mass",), "delta": BOTH}
NO_UPDATES: list[tuple[dict[str, Labels], Lie, str]] = [
    (FOUR, lambda _, u: replace(u, shared={n: t.float() for n, t in u.shared.items()}), "delta: "),
    (FOUR, noise("shared", 2), "shared tensors one of alpha, beta, delta, gamma"),
    (FOUR, noise("head", 2), "row of Mass one of alpha, beta, delta, gamma"),
    (ONE_MORE, noise("head", 1), "row of Nodule one of beta, delta, gamma"),
]


@pytest.mark.complete
@pytest.mark.parametrize(("sites", "lie", "named"), NO_UPDATES, ids=["floats", "shared", "rows", "row"])
def test_an_update_that_is_none_ends_the_run_and_keeps_the_model(
    sites: dict[str, Labels], lie: Lie, named: str, tiny: Any
) -> None:
    """Whose noise it was is one of those that send this part: the masks hide which."""
    federation = secured(tiny(METHOD, sites, rounds=1, selection="last", max_failed_rounds=1))
    with refused(named, by=FederationError):
        lying(federation, {"update": lie})
    assert federation.server("out").states.rounds() == [0]


# Any message of one site


TEXTS = st.text("0123456789abcdef", max_size=300).map(lambda text: text[: len(text) // 2 * 2])

WRONG = {
    "certificate": st.sampled_from(["", "00" * 32, "ab" * 32, "-----BEGIN CERTIFICATE-----"]),
    "signature": TEXTS,
    "cipher": st.sampled_from(["00" * 32, "ff" * 32, "01" + "00" * 31]),
    "seed": st.just("00" * 32),
    "rows": st.lists(st.integers(0, 2**56 - 1), max_size=3).map(tuple),
    "among": st.lists(st.sampled_from([*FOUR, "x"]), max_size=5).map(tuple),
    "sealed": st.dictionaries(st.sampled_from([*FOUR, "x"]), TEXTS, max_size=5),
    "unopened": st.lists(st.sampled_from([*FOUR, "x"]), max_size=5).map(tuple),
    "seeds": st.dictionaries(st.sampled_from([*FOUR, "x"]), TEXTS, max_size=5),
    "secrets": st.dictionaries(st.sampled_from([*FOUR, "x"]), TEXTS, max_size=5),
}


@pytest.mark.complete
@examples(8, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_message_of_one_site_is_taken_or_refused_by_its_name(tiny: Any, data: st.DataObject) -> None:
    """Wrong fields, and messages of another step or attempt: the run ends, or names the site."""
    federation = secured(tiny(METHOD, FOUR, rounds=1, selection="last", min_sites=3, max_failed_rounds=2))
    earlier: list[Packed] = data.draw(st.just([]))

    def hostile(site: str, task: TaskData, answer: Packed) -> Packed:
        step = unpack(answer)
        if site != "delta" or not isinstance(step, Masking):
            return answer
        earlier.append(answer)
        if data.draw(st.integers(0, 3)) == 0:
            return data.draw(st.sampled_from(earlier))
        key = data.draw(st.sampled_from(sorted(WRONG)))
        value = data.draw(WRONG[key])
        if step.keys and hasattr(step.keys, key):
            return pack(replace(step, keys=replace(step.keys, **{key: value})))
        return pack(replace(step, **{key: value})) if hasattr(step, key) else answer

    out = f"out-{len(list(federation.folder.glob('*')))}"
    server = federation.server(out)
    said = "delta"
    try:
        federate(server, Between(federation.sites(out), hostile))
    except FederationError as error:
        said = str(error)
    assert "delta" in said
    assert server.round == (said == "delta")
