"""suture.data.config: what a site's file may say, and what the errors say back."""

from __future__ import annotations

from pathlib import Path

import pytest

from suture.core.errors import ConfigError
from suture.core.labels import MOST_SYNONYMS, canonical, key
from suture.core.privacy import PrivacyConfig
from suture.data.config import (
    SiteConfig,
    find_site_config,
    load_server_config,
    load_site_config,
    parse_data,
    write_site_config,
)
from suture.data.readers import DATASETS
from suture.data.readers.hospital import HospitalConfig

MINIMAL = '[data]\ndataset = "hospital"\nroot = "images"\ntable = "labels.csv"\n'


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "suture.toml"
    path.write_text(MINIMAL)
    return path


def test_relative_paths_and_default_folders_start_at_the_file(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(toml.parent)
    config = load_site_config(Path("suture.toml"))
    assert config.data.root == toml.parent / "images"
    assert config.data.table == toml.parent / "labels.csv"
    assert config.storage.state == toml.parent / "state"
    assert config.storage.cache == toml.parent / "cache"


@pytest.mark.parametrize("source", ['"openi"', '"eicu"', '"mtsamples"', '"hospital"\ntext_column = "report"'])
def test_text_in_a_table_needs_no_root(toml: Path, source: str) -> None:
    toml.write_text(f'[data]\ndataset = {source}\ntable = "notes.csv"\n')
    data = load_site_config(toml).data
    assert data.root == data.table == toml.parent / "notes.csv"
    for other in ('"hospital"', '"mimic_reports"'):
        toml.write_text(f'[data]\ndataset = {other}\ntable = "notes.csv"\n')
        with pytest.raises(ConfigError, match=r"\[data\] root is missing"):
            load_site_config(toml)


def test_an_absolute_path_stays(toml: Path) -> None:
    toml.write_text(MINIMAL + '[storage]\ncache = "/mnt/cache"\n')
    storage = load_site_config(toml).storage
    assert storage.cache == Path("/mnt/cache")
    assert storage.state == toml.parent / "state"


def test_the_defaults_are_the_careful_ones(toml: Path) -> None:
    config = load_site_config(toml)
    assert config.privacy == PrivacyConfig(label_view="own", min_count=5, max_faults=0.05)
    assert (config.training.device, config.training.threads, config.training.amp) == ("cpu", 1, False)
    assert isinstance(config.data, HospitalConfig)
    assert config.data.split == "column"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (MINIMAL + "colour = true\n", ["unknown key [data] colour", "did you mean 'color'?"]),
        (MINIMAL + "[trainning]\nthreads = 2\n", ["unknown key trainning", "did you mean 'training'?"]),
        (MINIMAL.replace("hospital", "hopital"), ["[data] dataset = 'hopital'", "did you mean 'hospital'?"]),
        (MINIMAL + '[privacy]\nlabel_view = "owm"\n', ["[privacy] label_view", "did you mean 'own'?"]),
        (MINIMAL.replace('table = "labels.csv"\n', ""), ["[data] table is missing"]),
        ("[training]\nthreads = 1\n", ["[data] is missing"]),
        (
            MINIMAL + "[training]\nbatch_size = 1\n",
            ["[training] batch_size = 1", "at least 2"],
        ),
        (MINIMAL + "[privacy]\nmax_faults = 1.5\n", ["[privacy] max_faults = 1.5"]),
        (
            MINIMAL + "[privacy]\nround_counts = 11\n",
            ["round_counts = 11 would send 5 as 0; set it to at most 10, or min_count to at least 6"],
        ),
        (
            MINIMAL + "[privacy]\nround_counts = 3\nmin_count = 0\n",
            ["round_counts = 3 would send 1 as 0; set it to at most 2, or min_count to at least 2"],
        ),
        (MINIMAL + "labels = []\n", ["[data] labels"]),
        (MINIMAL + 'split = "official"\n', ["split = 'official' does not apply to dataset 'hospital'"]),
        (MINIMAL.replace("hospital", "nih") + 'split = "column"\n', ["use 'official' or 'patients'"]),
        (
            MINIMAL + 'label_type = "multiclas"\n',
            ["[data] label_type = 'multiclas'", "did you mean 'multiclass'?"],
        ),
        (
            MINIMAL.replace("hospital", "nih") + 'label_type = "multiclass"\n',
            ["[data] label_type is a key of dataset 'hospital', not of 'nih'", "or did you mean 'labels'?"],
        ),
        (
            MINIMAL.replace("hospital", "isic2018") + 'view = "all"\n',
            ["unknown key [data] view of dataset 'isic2018'; known: ancestors, atlas, bits, codes"],
        ),
        (
            MINIMAL.replace("hospital", "mimic") + 'view = "all"\n',
            ["unknown key [data] view of dataset 'mimic'; did you mean 'views'?"],
        ),
        (
            MINIMAL.replace("hospital", "nih") + 'views = "all"\n',
            ["[data] views is a key of dataset 'chexpert', 'mimic', not of 'nih'; remove it"],
        ),
        (
            MINIMAL.replace("hospital", "nih") + 'attribute_column = "tone"\n',
            ["[data] attribute_column is a key of dataset 'hospital', not of 'nih'; remove it"],
        ),
        (MINIMAL + 'split = "colum"\n', ["unknown [data] split = 'colum'; did you mean 'column'?"]),
        (MINIMAL.replace('dataset = "hospital"\n', ""), ["[data] dataset is missing; write it"]),
        (MINIMAL.replace('"hospital"', "3"), ["unknown [data] dataset = '3'; known: chexpert"]),
        (
            MINIMAL.replace("hospital", "hyperkvasir") + 'fold = 1\nsplit = "images"\n',
            ['[data] fold has no effect with split = "images"; remove it, or write split = "folds"'],
        ),
        (
            MINIMAL.replace("hospital", "isic2018") + 'split = "patients"\n',
            ["use 'lesions' or 'images'"],
        ),
        ("[data]\nroot = \n", ["not valid TOML", "line 2"]),
        ("data = 3\n", ["[data]"]),
    ],
)
def test_every_fault_names_the_file_the_key_and_the_remedy(toml: Path, text: str, words: list[str]) -> None:
    toml.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_site_config(toml)
    for word in [str(toml), *words]:
        assert word in str(caught.value)


def test_two_faults_are_reported_at_once(toml: Path) -> None:
    toml.write_text(MINIMAL + "colour = true\n[training]\nthreads = 0\n")
    with pytest.raises(ConfigError, match=r"(?s)colour.*threads"):
        load_site_config(toml)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"suture\.toml: No such file"):
        load_site_config(tmp_path / "suture.toml")


def test_a_file_that_is_not_text_is_named(toml: Path) -> None:
    toml.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_site_config(toml)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    config = SiteConfig(
        data=HospitalConfig(
            root=Path("/data/images.tar"),
            table=Path("/data/labels.csv"),
            labels=("Mass", "Nodule"),
            synonyms={"lump": "Mass"},
        ),
        privacy=PrivacyConfig(label_view="all"),
    )
    write_site_config(tmp_path / "suture.toml", config)
    read = load_site_config(tmp_path / "suture.toml")
    assert read.data == config.data
    assert read.privacy == config.privacy
    assert read.storage.cache == tmp_path / "cache"
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["suture.toml"]


def test_a_server_needs_no_data_but_may_say_where_it_keeps_experiments(tmp_path: Path, toml: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text('[storage]\nstate = "runs"\n')
    found = load_server_config(path)
    assert found.held_out is None
    assert found.storage.state == tmp_path / "runs"
    write_site_config(tmp_path / "copy.toml", found)
    assert load_server_config(tmp_path / "copy.toml") == found
    whole = load_server_config(toml)
    assert whole.held_out == load_site_config(toml)
    assert whole.storage == load_site_config(toml).storage


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[storage]\nstat = "x"\n', "did you mean 'state'"),
        ('[training]\ndevice = "cpu"\n', r"\[data\] is missing"),
        ("[held_out]\n", "unknown key"),
    ],
)
def test_what_is_wrong_in_a_servers_file_is_told(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_server_config(path)


def test_a_site_is_found_in_its_workspace(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "suture.toml").touch()
    assert find_site_config("alpha", tmp_path) == tmp_path / "suture.toml"
    (tmp_path / "local/suture.toml").touch()
    assert find_site_config("alpha", tmp_path) == tmp_path / "local/suture.toml"


def test_the_sites_of_a_simulation_go_before_the_workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "suture.toml").touch()
    monkeypatch.setenv("SUTURE_SITES", str(tmp_path / "sites"))
    with pytest.raises(ConfigError, match=r"sites/alpha/suture\.toml"):
        find_site_config("alpha", tmp_path)
    (tmp_path / "sites/alpha").mkdir(parents=True)
    (tmp_path / "sites/alpha/suture.toml").touch()
    assert find_site_config("alpha", tmp_path) == tmp_path / "sites/alpha/suture.toml"


@pytest.mark.parametrize("with_workspace", [True, False])
def test_a_site_without_a_file_is_told_where_one_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_workspace: bool
) -> None:
    monkeypatch.delenv("SUTURE_SITES", raising=False)
    with pytest.raises(ConfigError) as caught:
        find_site_config("alpha", tmp_path if with_workspace else None)
    expected = ["local/suture.toml", f"{tmp_path}/suture.toml"] if with_workspace else ["SUTURE_SITES"]
    assert all(word in str(caught.value) for word in ["'alpha'", *expected])


def test_each_data_set_is_registered_under_the_word_of_its_configuration() -> None:
    assert {"hospital", "nih", "eicu"} <= set(DATASETS)
    for word, entry in DATASETS.items():
        assert entry.config.model_fields["dataset"].default == word
        assert set(entry.config.model_fields) - {"dataset"} <= _documented(entry.config)


def _documented(kind: type) -> set[str]:
    """The attributes that the docstrings of a class and its bases describe."""
    lines = [line for base in kind.__mro__ for line in (base.__doc__ or "").splitlines()]
    return {line.strip().partition(":")[0] for line in lines if line.startswith("        ")}


@pytest.mark.parametrize("word", DATASETS)
def test_a_configuration_of_every_data_set_is_written_and_read_back(word: str, toml: Path) -> None:
    root = "table.csv" if word in ("openi", "eicu", "mtsamples") else "images"
    own = {
        "omop": 'measurements = "m.csv"\nclasses = { "Mass" = 11 }\nvalues = { "" = "unknown" }\n',
        "fhir": 'observations = ["a.ndjson", "b.json"]\nclasses = { "Mass" = "http://x|11" }\n',
    }
    text = f'[data]\ndataset = "{word}"\nroot = "{root}"\ntable = "table.csv"\n{own.get(word, "")}'
    toml.write_text(text)
    config = load_site_config(toml)
    assert type(config.data) is DATASETS[word].config
    write_site_config(toml, config)
    assert load_site_config(toml) == config
    bare = config.data.model_copy(update={"labels": ("Mass",)})
    assert type(bare) is DATASETS[word].config
    assert bare.labels == ("Mass",)


def test_the_data_of_another_file_are_explained_alike() -> None:
    values = {"dataset": "nih", "root": "images", "table": "table.csv"}
    assert parse_data(values, "tests.nih").root == Path("images")
    with pytest.raises(ConfigError, match=r"^tests\.nih: \[data\] fold is a key of dataset 'hyperkvasir'"):
        parse_data(values | {"fold": 1}, "tests.nih")


def test_a_hospital_may_be_multiclass(toml: Path) -> None:
    toml.write_text(MINIMAL + 'label_type = "multiclass"\n')
    config = load_site_config(toml)
    assert isinstance(config.data, HospitalConfig)
    assert config.data.label_type == "multiclass"
    write_site_config(toml, config)
    assert load_site_config(toml).data == config.data


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a = " + "[" * 100_000, "nested more than 32 levels deep"),
        (MINIMAL + "seed = 0x" + "f" * 5_000, "an integer of more than 64 bits"),
        (MINIMAL + "seed = " + "9" * 5_000, "not valid TOML"),
        (MINIMAL.replace("images", "~nobody-of-that-name/images"), r"\[data\] root = .*home directory"),
        (MINIMAL.replace("images", "a\\u0000b"), r"\[data\] root = .*NUL"),
        (MINIMAL + 'split = "' + "y" * 70_000 + '"', r"unknown \[data\] split"),
        ("".join(f"x{i} = 1\n" for i in range(5_000)) + MINIMAL, r"and 4990 more"),
    ],
    ids=["deep", "long", "very long", "no home", "NUL", "much text", "many faults"],
)
def test_a_file_of_anything_is_one_short_error(text: str, says: str, toml: Path) -> None:
    toml.write_text(text)
    for read in (load_site_config, load_server_config):
        with pytest.raises(ConfigError, match=says) as caught:
            read(toml)
        assert "suture.toml" in str(caught.value)
        assert len(str(caught.value)) < 4_000


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
    with pytest.raises(ConfigError, match=r"synonyms.* at most 10000 items"):
        load_site_config(toml)


@pytest.mark.parametrize(
    "text",
    [
        "[training]\nthreads = true\n",
        "[training]\nlr = true\n",
        "[privacy]\nmin_count = true\n",
        "[privacy]\nclip = true\n",
    ],
)
def test_true_is_no_number(text: str, toml: Path) -> None:
    toml.write_text(MINIMAL + text)
    with pytest.raises(
        ConfigError, match=r"\] (threads|lr|min_count|clip) = true: must be a (whole )?number"
    ):
        load_site_config(toml)


def test_nor_of_a_data_set(toml: Path) -> None:
    toml.write_text(MINIMAL + "split = 'patients'\nseed = false\n")
    with pytest.raises(ConfigError, match=r"\[data\] seed = false: must be a whole number"):
        load_site_config(toml)
    values = {"dataset": "hospital", "root": "images", "table": "l.csv", "split": "patients", "seed": True}
    with pytest.raises(ConfigError, match=r"\[data\] seed = true: must be a whole number"):
        parse_data(values, "tests")
