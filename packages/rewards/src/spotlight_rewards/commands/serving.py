"""Options of the commands that listen: where, and who may ask."""

from __future__ import annotations

import os
from typing import Annotated, TypeAlias

import typer

from spotlight_rewards.commands.exit_codes import failure

TOKEN_CHARACTERS_MIN = 16
HostOption: TypeAlias = Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 for other machines.")]
TokenEnvOption: TypeAlias = Annotated[
    str, typer.Option(help="Environment variable with the token; required unless on loopback.")
]


def token_of(host: str, token_env: str) -> str:
    """The token that ``token_env`` holds; empty where none is needed. Exits if it is short, or missing."""
    from spotlight_rewards.endpoints.json_client import LOOPBACK

    token = os.environ.get(token_env, "").strip() if token_env else ""
    if token_env and not token:
        raise failure(
            f"--token-env is {token_env!r}, not set in the environment; expected a token. Export {token_env}."
        )
    if token and len(token) < TOKEN_CHARACTERS_MIN:
        raise failure(
            f"--token-env is {token_env!r}, whose token has {len(token)} characters; expected at least "
            f"{TOKEN_CHARACTERS_MIN}. Make one: export {token_env}=$(openssl rand -hex 16)"
        )
    if not token and host not in LOOPBACK:
        raise failure(
            f"--host is {host!r}, which other machines reach, without a token; expected --token-env with the "
            "name of an environment variable that holds one, or --host 127.0.0.1."
        )
    return token
