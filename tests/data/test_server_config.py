"""Where a server keeps its experiments: what its own file says, or its workspace."""

from __future__ import annotations

from pathlib import Path

import pytest

from suture.core.errors import ConfigError
from suture.data.config import find_server_config


def test_an_absent_file_means_the_workspace_and_a_broken_one_is_an_error(tmp_path: Path) -> None:
    assert find_server_config(tmp_path).storage.state == tmp_path / "suture"
    (tmp_path / "local").mkdir()
    path = tmp_path / "local" / "suture.toml"
    path.write_text('[storage]\nstate = "../runs"\n')
    found = find_server_config(tmp_path)
    assert found.held_out is None
    assert found.storage.state.resolve() == tmp_path / "runs"
    path.write_text('[storage]\nstat = "../runs"\n')
    with pytest.raises(ConfigError, match="did you mean 'state'"):
        find_server_config(tmp_path)
