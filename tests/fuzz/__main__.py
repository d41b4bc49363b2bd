"""`python tests/fuzz [TARGET ...] --cases N --start SEED` prints one of each kind of finding, and counts."""

from __future__ import annotations

import argparse
import time
from collections import Counter

import torch
from targets import TARGETS

from fuzz import fuzz


def main() -> int:
    """Run the targets one after the other; return the number of findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--cases", type=int, default=1_000_000, help="of each target")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    total = 0
    for name in args.targets or TARGETS:
        kinds: Counter[tuple[str, str]] = Counter()
        began = time.monotonic()
        for found in fuzz(TARGETS[name], range(args.start, args.start + args.cases)):
            kind = found.error.partition(":")[0], found.where
            if not kinds[kind]:
                print(found, flush=True)
            kinds[kind] += 1
        seconds = time.monotonic() - began
        total += kinds.total()
        print(
            f"{name}: {args.cases} cases from seed {args.start}, {kinds.total()} findings, {seconds:.0f} s",
            flush=True,
        )
        for (error, where), count in kinds.most_common():
            print(f"    {count:7} {error} in {where}", flush=True)
    return total


if __name__ == "__main__":
    raise SystemExit(min(main(), 1))
