"""suture.data.config: what the file of a site or of the server may say, and what the errors name."""

from __future__ import annotations

from pathlib import Path

import pytest

from suture.core.errors import ConfigError
from suture.core.labels import MOST_SYNONYMS, canonical, key
from suture.core.privacy import PrivacyConfig
from suture.data.config import (
    find_server_config,
    find_site_config,
    load_server_config,
    load_site_config,
    parse_data,
    write_site_config,
)
from suture.data.readers import DATASETS
from suture.data.readers.hospital import HospitalConfig
from world import refused

MINIMAL = '[data]\ndataset = "hospital"\nroot = "images"\ntable = "labels.csv"\n'


def of(dataset: str) -> str:
    """The minimal file of another data set."""
    return MINIMAL.replace("hospital", dataset)


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "suture.toml"
    path.write_text(MINIMAL)
    return path


def test_relative_paths_start_at_the_file_and_the_defaults_are_careful(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(toml.parent)
    config = load_site_config(Path("suture.toml"))
    assert isinstance(config.data, HospitalConfig)
    assert (config.data.root, config.data.table) == (toml.parent / "images", toml.parent / "labels.csv")
    assert (config.storage.state, config.storage.cache) == (toml.parent / "state", toml.parent / "cache")
    assert config.privacy == PrivacyConfig(label_view="own", min_count=5, max_faults=0.05)
    assert (config.training.device, config.training.threads, config.training.amp) == ("cpu", 1, False)
    assert config.data.split == "column"
    toml.write_text(MINIMAL + '[storage]\ncache = "/mnt/cache"\n')
    storage = load_site_config(toml).storage
    assert (storage.cache, storage.state) == (Path("/mnt/cache"), toml.parent / "state")


@pytest.mark.parametrize("source", ['"openi"', '"eicu"', '"mtsamples"', '"hospital"\ntext_column = "report"'])
def test_text_in_a_table_needs_no_root(toml: Path, source: str) -> None:
    toml.write_text(f'[data]\ndataset = {source}\ntable = "notes.csv"\n')
    data = load_site_config(toml).data
    assert data.root == data.table == toml.parent / "notes.csv"
    for other in ('"hospital"', '"mimic_reports"'):
        toml.write_text(f'[data]\ndataset = {other}\ntable = "notes.csv"\n')
        with refused("[data] root", by=ConfigError):
            load_site_config(toml)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (MINIMAL + "colour = true\n", ["[data] colour", "'color'"]),
        (MINIMAL + "colour = true\n[training]\nthreads = 0\n", ["colour", "threads"]),
        (MINIMAL + "[trainning]\nthreads = 2\n", ["trainning", "'training'"]),
        (of("hopital"), ["[data] dataset = 'hopital'", "'hospital'"]),
        (MINIMAL + '[privacy]\nlabel_view = "owm"\n', ["[privacy] label_view", "'own'"]),
        (MINIMAL.replace('table = "labels.csv"\n', ""), ["[data] table"]),
        ("[training]\nthreads = 1\n", ["[data]"]),
        (MINIMAL + "[training]\nbatch_size = 1\n", ["[training] batch_size = 1", "2"]),
        (MINIMAL + "[training]\nthreads = true\n", ["[training] threads = true"]),
        (MINIMAL + "[privacy]\nclip = true\n", ["[privacy] clip = true"]),
        (MINIMAL + "split = 'patients'\nseed = false\n", ["[data] seed = false"]),
        (MINIMAL + "[privacy]\nmax_faults = 1.5\n", ["[privacy] max_faults = 1.5"]),
        # 11 would send 5 as 0, and 3 would send 1 as 0.
        (MINIMAL + "[privacy]\nround_counts = 11\n", ["= 11", " 5 ", " 10", " 6"]),
        (MINIMAL + "[privacy]\nround_counts = 3\nmin_count = 0\n", ["= 3", " 1 ", " 2"]),
        (MINIMAL + "labels = []\n", ["[data] labels"]),
        (MINIMAL + 'split = "official"\n', ["split = 'official'", "'hospital'"]),
        (of("nih") + 'split = "column"\n', ["'official'", "'patients'"]),
        (of("nih") + 'label_type = "multiclass"\n', ["[data] label_type", "'hospital'", "'nih'", "'labels'"]),
        (of("isic2018") + 'view = "all"\n', ["[data] view", "'isic2018'", "ancestors, atlas, bits, codes"]),
        (of("mimic") + 'view = "all"\n', ["[data] view", "'mimic'", "'views'"]),
        (of("nih") + 'views = "all"\n', ["[data] views", "'chexpert', 'mimic'", "'nih'"]),
        (MINIMAL + 'split = "colum"\n', ["[data] split = 'colum'", "'column'"]),
        (MINIMAL + 'uncertain = "zeros"\n', ["[data] uncertain", '"hospital"']),
        (MINIMAL.replace('dataset = "hospital"\n', ""), ["[data] dataset"]),
        (MINIMAL.replace('"hospital"', "3"), ["[data] dataset = '3'", "chexpert"]),
        (of("hyperkvasir") + 'fold = 1\nsplit = "images"\n', ["[data] fold", '"images"', '"folds"']),
        ("[data]\nroot = \n", ["line 2"]),
        ("data = 3\n", ["[data]"]),
        ("a = " + "[" * 100_000, ["32 levels"]),
        (MINIMAL + "seed = 0x" + "f" * 5_000, ["64 bits"]),
        (MINIMAL + "seed = " + "9" * 5_000, []),
        (MINIMAL.replace("images", "~nobody-of-that-name/images"), ["[data] root"]),
        (MINIMAL.replace("images", "a\\u0000b"), ["[data] root"]),
        (MINIMAL + 'split = "' + "y" * 70_000 + '"', ["[data] split"]),
        ("".join(f"x{i} = 1\n" for i in range(5_000)) + MINIMAL, ["4990"]),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_every_fault_is_a_short_error_that_names_the_file_and_the_key(
    toml: Path, text: str, named: list[str]
) -> None:
    toml.write_text(text)
    for read in (load_site_config, load_server_config):
        with pytest.raises(ConfigError) as caught:
            read(toml)
        said = str(caught.value)
        assert [name for name in (str(toml), *named) if name not in said] == []
        assert len(said) < 4_000


@pytest.mark.parametrize(("content", "named"), [(None, "suture.toml"), (b"\xff\xfe\x00", "UTF-8")])
def test_a_file_that_is_missing_or_no_text_is_named(toml: Path, content: bytes | None, named: str) -> None:
    toml.unlink()
    if content:
        toml.write_bytes(content)
    with refused(toml, named, by=ConfigError):
        load_site_config(toml)


def test_a_server_needs_no_data_but_may_say_where_it_keeps_experiments(tmp_path: Path, toml: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text('[storage]\nstate = "runs"\n')
    found = load_server_config(path)
    assert (found.held_out, found.storage.state) == (None, tmp_path / "runs")
    write_site_config(tmp_path / "copy.toml", found)
    assert load_server_config(tmp_path / "copy.toml") == found
    whole = load_server_config(toml)
    assert whole.held_out == load_site_config(toml)
    assert whole.storage == load_site_config(toml).storage
    for text, named in (('[storage]\nstat = "x"\n', "'state'"), ("[held_out]\n", "held_out")):
        path.write_text(text)
        with refused(path, named, by=ConfigError):
            load_server_config(path)


def test_without_a_file_of_its_own_a_server_keeps_experiments_in_its_workspace(tmp_path: Path) -> None:
    assert find_server_config(tmp_path).storage.state == tmp_path / "suture"
    (tmp_path / "local").mkdir()
    path = tmp_path / "local" / "suture.toml"
    path.write_text('[storage]\nstate = "../runs"\n')
    found = find_server_config(tmp_path)
    assert (found.held_out, found.storage.state.resolve()) == (None, tmp_path / "runs")
    path.write_text('[storage]\nstat = "../runs"\n')
    with refused("'state'", by=ConfigError):
        find_server_config(tmp_path)


def test_a_site_is_found_in_its_workspace_but_one_of_a_simulation_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused("'alpha'", "SUTURE_SITES", by=ConfigError):
        find_site_config("alpha", None)
    with refused("'alpha'", "local/suture.toml", f"{tmp_path}/suture.toml", by=ConfigError):
        find_site_config("alpha", tmp_path)
    for place in ("suture.toml", "local/suture.toml"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).touch()
        assert find_site_config("alpha", tmp_path) == tmp_path / place
    monkeypatch.setenv("SUTURE_SITES", str(tmp_path / "sites"))
    with refused("sites/alpha/suture.toml", by=ConfigError):
        find_site_config("alpha", tmp_path)
    (tmp_path / "sites/alpha").mkdir(parents=True)
    (tmp_path / "sites/alpha/suture.toml").touch()
    assert find_site_config("alpha", tmp_path) == tmp_path / "sites/alpha/suture.toml"


def _documented(kind: type) -> set[str]:
    """The attributes that the docstrings of a class and its bases describe."""
    lines = [line for base in kind.__mro__ for line in (base.__doc__ or "").splitlines()]
    return {line.strip().partition(":")[0] for line in lines if line.startswith("        ")}


@pytest.mark.parametrize("word", DATASETS)
def test_a_configuration_of_every_data_set_is_documented_written_and_read_back(word: str, toml: Path) -> None:
    root = "table.csv" if word in ("openi", "eicu", "mtsamples") else "images"
    own = {
        "hospital": 'label_type = "multiclass"\nlabels = ["Mass", "Nodule"]\nsynonyms = { lump = "Mass" }\n',
        "omop": 'measurements = "m.csv"\nclasses = { "Mass" = 11 }\nvalues = { "" = "unknown" }\n',
        "fhir": 'observations = ["a.ndjson", "b.json"]\nclasses = { "Mass" = "http://x|11" }\n',
    }
    toml.write_text(f'[data]\ndataset = "{word}"\nroot = "{root}"\ntable = "table.csv"\n{own.get(word, "")}')
    config = load_site_config(toml)
    assert type(config.data) is DATASETS[word].config
    assert set(type(config.data).model_fields) - {"dataset"} <= _documented(type(config.data))
    assert config.data.dataset == word
    write_site_config(toml, config)
    assert load_site_config(toml) == config
    assert [path.name for path in toml.parent.iterdir() if path.is_file()] == ["suture.toml"]


def test_the_data_of_another_file_are_explained_alike() -> None:
    values = {"dataset": "nih", "root": "images", "table": "table.csv"}
    assert parse_data(values, "tests.nih").root == Path("images")
    with refused("tests.nih", "[data] fold", "'hyperkvasir'", by=ConfigError):
        parse_data(values | {"fold": 1}, "tests.nih")
    with refused("tests.nih", "[data] seed = true", by=ConfigError):
        parse_data(values | {"split": "patients", "seed": True}, "tests.nih")


@pytest.mark.complete
def test_the_keys_of_synonyms_are_made_once_for_all_names_of_a_table(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of findings asks for thousands of names."""
    lines = [f'"code {i}" = "Finding {i}"' for i in range(MOST_SYNONYMS)]
    toml.write_text("\n".join([MINIMAL, "[data.synonyms]", *lines]))
    synonyms = load_site_config(toml).data.synonyms
    made: list[str] = []
    monkeypatch.setattr("suture.core.labels.key", lambda name: made.append(name) or key(name))
    assert [canonical(f"CODE {i}", synonyms) for i in range(300)] == [f"Finding {i}" for i in range(300)]
    assert MOST_SYNONYMS <= len(made) < 2 * MOST_SYNONYMS
    toml.write_text("\n".join([MINIMAL, "[data.synonyms]", *lines, '"one more" = "Mass"']))
    with refused("synonyms", "10000", by=ConfigError):
        load_site_config(toml)
