"""Tiny hospitals with a suture.toml, and a study of three of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from world import write_table

LABELS = {"alpha": ("Mass", "Nodule"), "beta": ("Nodule", "Hernia"), "gamma": ("Fibrosis", "Nodule", "Mass")}
EVERY = ("Fibrosis", "Hernia", "Mass", "Nodule")

JOB_TOML = """\
title = "a small study"
rounds = 2
seed = 3
[method]
name = "surgical"
local = { lr = 1e-3, batch_size = 16 }
[model]
name = "cnn"
size = 16
"""


def write_hospital(
    folder: Path, labels: tuple[str, ...], n: int, seed: int, view: str = "all", least: int = 0
) -> Path:
    """A hospital of n small images; a bright band at a place of its own marks each class.

    Args:
        least: its min_count and min_loss.
    """
    rng = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True)
    rows = []
    for i in range(n):
        y = rng.integers(0, 2, len(EVERY))
        image = rng.integers(60, 110, (16, 16))
        for band in np.flatnonzero(y):
            image[4 * band : 4 * band + 3] += 90
        Image.fromarray(image.astype(np.uint8)).save(folder / "images" / f"{i:03d}.png")
        split = ("train", "train", "train", "validation", "test")[i % 5]
        rows.append([f"{i:03d}.png", f"p{i}", split, *(y[EVERY.index(label)] for label in labels)])
    write_table(folder / "labels.csv", [["image", "patient", "split", *labels], *rows])
    config = folder / "suture.toml"
    config.write_text(
        f'[data]\ndataset = "hospital"\nroot = "images"\ntable = "labels.csv"\ntarget = "{labels[0]}"\n'
        f'[privacy]\nlabel_view = "{view}"\nmin_count = {least}\nmin_loss = {least}\n'
    )
    return config


def small_study(folder: Path, images: int = 25, least: int = 0) -> Path:
    """Writes the sites of `LABELS` and a job.toml; returns the folder."""
    for seed, (name, labels) in enumerate(LABELS.items()):
        write_hospital(folder / name, labels, images, seed, least=least)
    (folder / "job.toml").write_text(JOB_TOML)
    return folder
