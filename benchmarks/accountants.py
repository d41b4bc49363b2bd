"""Suture's ε beside an independent accountant: `python benchmarks/accountants.py VENV/bin/python`.

The other is Google's dp-accounting (privacy loss distributions, rounded towards a larger ε), in an
environment of its own, because its requirements do not fit Suture's: `python -m venv VENV; VENV/bin/pip
install dp-accounting==0.6.0`. A random history has one or two kinds of Gaussian steps on Poisson samples of
patients; half of the histories have the noisy number of patients, too, and a quarter updates with noise, of
all patients. Prints the differences of ε: negative where Suture states less than the other, even with
narrower intervals.
"""

from __future__ import annotations

import json
import math
import random
import subprocess

from harness import command, machine

from suture.privacy.differential_privacy import Mechanism, compose

_OTHER = """
import json, sys
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

for text in sys.stdin:
    history, delta, interval = json.loads(text)
    accountant = PLDAccountant(value_discretization_interval=interval)
    for multiplier, rate, steps in history:
        step = dp_event.GaussianDpEvent(multiplier)
        accountant.compose(step if rate == 1 else dp_event.PoissonSampledDpEvent(rate, step), steps)
    print(accountant.get_epsilon(delta), flush=True)
"""

History = tuple[Mechanism, ...]


def history(draw: random.Random) -> History:
    """Return mechanisms as a site may have released them."""
    kinds = [
        Mechanism(
            math.exp(draw.uniform(math.log(0.7), math.log(8))),
            math.exp(draw.uniform(math.log(0.002), math.log(0.5))),
            draw.randint(1, 400),
        )
        for _ in range(draw.choice((1, 1, 2)))
    ]
    if draw.random() < 0.5:
        kinds.append(Mechanism(draw.uniform(5, 40)))
    if draw.random() < 0.25:
        kinds.append(Mechanism(draw.uniform(1, 10), 1.0, draw.randint(1, 5)))
    return tuple(kinds)


def main(other: str, histories: int = 1000, interval: float = 1e-3, largest: float = 20.0) -> None:
    """Print how the two accountants differ.

    Args:
        interval: of the other's privacy losses.
        largest: histories of a larger ε are left out.
    """
    draw, found = random.Random(1), list[tuple[float, float, float, History]]()
    words = [other, "-c", _OTHER]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        while len(found) < histories:
            own, delta = history(draw), 10 ** draw.uniform(-7, -4)
            stated = compose(own, delta)
            if stated is None or stated > largest:
                continue
            theirs, width = math.inf, interval
            while theirs > stated and width > 1e-6:  # it rounds up, the more the wider its intervals are
                process.stdin.write(json.dumps([own, delta, width]) + "\n")
                process.stdin.flush()
                theirs, width = float(process.stdout.readline()), width / 10
            found.append((stated, theirs, delta, own))
        process.stdin.close()
    differences = sorted(stated - theirs for stated, theirs, _, _ in found)
    print(machine())
    print(f"{len(found)} histories, ε {min(f[0] for f in found):.3g} to {max(f[0] for f in found):.3g}")
    low, middle, high = differences[0], differences[len(differences) // 2], differences[-1]
    print(f"Suture's ε less the other's: {low:+.4f} to {high:+.4f}, median {middle:+.4f}")
    for stated, theirs, delta, own in sorted(found, key=lambda f: f[0] - f[1])[:3]:
        print(f"lowest: {stated:.5f} and {theirs:.5f} at δ = {delta:.2g} of {own}")


if __name__ == "__main__":
    command(main, histories=10)
