"""Long-tailed public data in a few images: FLamby's centres with Fed-MAS's lists, HyperKvasir, skin tones."""

from __future__ import annotations

from pathlib import Path

from suture_papers.fedmas.hyperkvasir import FOLDS
from suture_papers.fedmas.hyperkvasir import LABELS as HYPERKVASIR
from suture_papers.skin_lesions.flamby import SPELLINGS, TRUTH
from world import write_image

CENTRES = {0: 192, 1: 160, 2: 128, 4: 16}
COLOUR = (16, 16, 3)


def write_flamby(root: Path, test_images: bool = True) -> Path:
    """FLamby's table and Fed-MAS's lists beside the images of centres 0 to 2; eight classes take turns.

    Two images of each lesion; of every four lesions of a class at a centre the last is for testing.
    """
    whole = ["image," + ",".join(SPELLINGS) + ",UNK,target,center,fold,fold2"]
    lesions = ["image,age_approx,anatom_site_general,lesion_id,sex"]
    (root / "images").mkdir(parents=True)
    for centre, n in CENTRES.items():
        own = [",image_name,dx"]
        for i in range(n):
            image, dx, test = f"ISIC_{centre}{i:06d}", i // 2 % 8, i // 16 % 4 == 3
            cells = ",".join("1.0" if k == dx else "0.0" for k in range(8))
            part = "test" if test else "train"
            whole.append(f"{image},{cells},0.0,{dx},{centre},{part},{part}_{centre}")
            lesions.append(f"{image},55.0,torso,L{centre}-{i // 2},male")
            if not test:
                own.append(f"{len(own) - 1},{image},{dx}")
            if centre != 4 and (test_images or not test):
                write_image(root / "images" / f"{image}.jpg", centre * 1000 + i, COLOUR)
        (root / f"train_flamby_isic_fl_{centre}_1.csv").write_text("\n".join(own) + "\n")
    (root / TRUTH).write_text("\n".join(whole) + "\n")
    (root / "ISIC_2019_Training_Metadata.csv").write_text("\n".join(lesions) + "\n")
    return root


def write_hyperkvasir(root: Path, each: int = 10) -> Path:
    """So many images of each class in the official folders and folds, and again as a segmented one."""
    lines = ["file-name;class-name;split-index"]
    for i in range(each * 23):
        name = HYPERKVASIR.names[i % 23]
        lines.append(f"{i:08d}-4bf5.jpg;{name};{i // 23 % 5}")
        folder = root / "labeled-images" / "upper-gi-tract" / "pathological-findings" / name
        write_image(folder / f"{i:08d}-4bf5.jpg", i, COLOUR)
    write_image(root / "segmented-images" / "images" / "00000000-4bf5.jpg", 0, COLOUR)
    (root / FOLDS).write_text("\n".join(lines) + "\n")
    return root


def write_tones(folder: Path, every: int = 5) -> Path:
    """Every so-manyth lesion is on dark skin; the images of centre 2 have no tone."""
    lines = ["image,skin_tone"]
    for centre in (0, 1):
        for i in range(CENTRES[centre]):
            lines.append(f"ISIC_{centre}{i:06d},{'light' if i // 2 % every else 'dark'}")
    (folder / "tones.csv").write_text("\n".join(lines) + "\n")
    return folder / "tones.csv"
