"""Commands and options of earlier versions: each is refused with the word that replaces it."""

from __future__ import annotations

from collections.abc import Sequence

from suture.core.errors import ConfigError

COMMANDS = {
    "relate": "plot predictions",
    "latent": "plot features",
    "data plot": "plot labels",
    "data draw": "plot labels",
    "card": "model card",
    "sign": "model sign",
    "verify": "model verify",
    "export-model": "model export",
    "poc deal": "poc data",
    "experiment": "table",
}
"""The present words of a command by its former ones."""

_STRICT = "leave it out: `suture policy WORKSPACE` is strict without it"
OPTIONS = {
    "policy": dict.fromkeys(("--strict", "--refuse-code", "--keep-logs", "--survive"), _STRICT),
    "finetune": {
        "--lr": "set [training] lr in the suture.toml",
        "--batch-size": "set [training] batch_size in the suture.toml",
    },
    "pretrain": {
        "--view": "use --set views.KEY=VALUE",
        **{
            f"--{key.replace('_', '-')}": f"use --set {key}=VALUE"
            for key in ("batch_size", "lr", "momentum", "queue", "temperature")
        },
    },
    "list": {"experiments": "use suture list tables"},
    "demo": {option: f"use suture run demo {option}" for option in ("--seed", "--device", "--workers")},
}
"""What replaces each former option of a command."""


def refuse_former(words: Sequence[str]) -> None:
    """Check that words name no command or option of an earlier version.

    Raises:
        ConfigError: they do; names the present word.
    """
    for name in (" ".join(words[:count]) for count in (1, 2)):
        if name in COMMANDS:
            raise ConfigError(f"suture {name} is now called suture {COMMANDS[name]}")
    former = OPTIONS.get(words[0], {})
    for option in (word.partition("=")[0] for word in words[1:]):
        if option in former:
            raise ConfigError(f"suture {words[0]} no longer has {option}: {former[option]}")
