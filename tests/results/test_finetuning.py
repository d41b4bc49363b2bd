"""Fine-tuning on a learning task: how the data are split, what repeats, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from suture.core.errors import ConfigError, DataError
from suture.core.labels import LabelSet
from suture.core.validation import parse
from suture.data.batch import Samples
from suture.models import ModelSpec, build
from suture_results.finetuning import FineTuning, Tuned, finetune, random_split, summarise

SPEC = ModelSpec("lstm", vocabulary=("sick", "well", "and", "so", "on"))
HOW = FineTuning(runs=2, epochs=2, batch_size=16, lr=0.02)


def documents(n: int = 60, per_patient: int = 2, positive: float = 0.5) -> Samples:
    """Documents of three words; the middle one gives the label away, which all of a patient share."""
    patients = [i // per_patient for i in range(n)]
    y = torch.tensor([[float(p % round(1 / positive) == 0)] for p in patients])
    tokens = torch.randint(3, 6, (n, 3), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    tokens[:, 1] = 2 - y[:, 0].int()  # word 1 is "sick", 2 "well"; 0 pads
    names = tuple(map(str, range(n)))
    return Samples({"tokens": tokens, "length": torch.full((n,), 3)}, y, tuple(map(str, patients)), names)


def enumerated(samples: Samples) -> list[tuple[str, str]]:
    """Name and patient of each document."""
    return list(zip(samples.names, samples.patients, strict=True))


@pytest.mark.parametrize("positive", [0.5, 0.25])
def test_patients_stay_whole_and_either_kind_is_as_frequent_in_both_parts(positive: float) -> None:
    train, test = random_split(documents(80, positive=positive), FineTuning(test=0.2), 1, "x")
    assert not set(train.patients) & set(test.patients)
    assert sorted([*train.names, *test.names]) == sorted(map(str, range(80)))
    assert (len(train), len(test)) == (64, 16)
    assert train.y.mean().item() == test.y.mean().item() == positive


def test_few_examples_are_as_many_of_either_kind_and_all_others_test() -> None:
    whole, few = (random_split(documents(), replace(HOW, examples=n), 3, "x") for n in (None, 8))
    assert not set(few[0].patients) & set(few[1].patients)
    unused = {*documents().patients} - {*few[0].patients}
    assert sorted(few[1].names) == sorted(n for n, p in enumerated(documents()) if p in unused)
    assert set(whole[1].names) < set(few[1].names)
    assert (len(few[0]), few[0].y.sum().item()) == (8, 4)
    assert set(few[0].names) < set(whole[0].names)
    enough, _ = random_split(documents(), replace(HOW, examples=1000), 3, "x")
    assert enough.names == whole[0].names
    assert random_split(documents(), HOW, 4, "x")[1].names != whole[1].names


@pytest.mark.parametrize("samples", [documents(8), documents(6, 1).rows(torch.tensor([1, 3, 5]))])
def test_too_few_examples_are_refused(samples: Samples) -> None:
    with pytest.raises(DataError, match=r"Edema has too few examples .*: \d positive and \d negative"):
        random_split(samples, HOW, 1, "Edema")


def tuned(how: FineTuning, seed: int = 1, begun: int = 5) -> list[Tuned]:
    begin = build(SPEC, LabelSet(("x",)), begun, pretrained=False).state_dict()
    return [figures for _, figures in finetune("x", SPEC, begin, documents(), how, seed)]


def test_a_seed_gives_the_same_figures_again_and_learns() -> None:
    first = tuned(HOW)
    assert tuned(HOW) == first
    assert [len(run.auroc) for run in first] == [2, 2]
    assert all(run.auroc[-1] == 1 and (run.precision, run.recall, run.f1) == (1, 1, 1) for run in first)


def test_where_a_model_comes_from_changes_its_figures_and_not_the_data() -> None:
    slow = replace(HOW, lr=1e-5, epochs=1, test=0.3)
    assert tuned(slow, seed=2) != tuned(slow)
    runs = [tuned(slow), tuned(slow, begun=6), tuned(replace(slow, start="fresh"))]
    assert len({str([run.auroc for run in found]) for found in runs}) == 3
    assert len({str([(run.train, run.test) for run in found]) for found in runs}) == 1
    assert tuned(replace(slow, start="fresh"), begun=6) == runs[2]  # what is there is not looked at


def test_the_model_of_each_run_is_handed_over() -> None:
    before = torch.random.get_rng_state()
    first, second = (model.head.bias[0].item() for model, _ in finetune("x", SPEC, {}, documents(), HOW, 1))
    assert first != second
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_summary_by_hand() -> None:
    runs = [Tuned((0.5, a), 0.5, 1.0, a, 90, 10, 4) for a in (0.7, 0.8, 0.9)]
    found = summarise(runs)
    assert found["mean"] == pytest.approx({"auroc": 0.8, "precision": 0.5, "recall": 1.0, "f1": 0.8})
    assert found["sd"] == pytest.approx({"auroc": 0.1, "precision": 0, "recall": 0, "f1": 0.1})
    assert found["runs"][2]["auroc"] == (0.5, 0.9)
    assert summarise(runs[:1])["sd"]["auroc"] is None


@pytest.mark.parametrize(
    "wrong", [{"runs": 0}, {"test": 1.0}, {"start": "modle"}, {"examples": 3}, {"rnus": 2}]
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="finetuning: "):
        parse(FineTuning, wrong, "finetuning")
