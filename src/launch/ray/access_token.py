# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""The token of a running Ray cluster, which whoever joins it must send.

`ray.init` sends a token by itself only to a cluster that it finds by itself (`auto`). To a cluster with an
address it would send none, and be refused for 20 seconds without a reason.
"""

import os
from pathlib import Path

from ray._private.authentication.authentication_token_setup import (
    AUTH_MODE_ENV_VAR,
    maybe_enable_token_auth_if_token_available,
)
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]  # compiled
from ray.exceptions import AuthenticationError

from cairn.run.errors import UsageError

TOKEN, TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


def join_with_token(address: str) -> None:
    """See that the cluster at `address` lets this process in, with this user's token if it asks for one.

    A cluster that asks for none gets none: its processes would not send it back, and Ray would refuse them.

    Raises:
        UsageError: it wants a token, and there is none here, or another one; the message names where tokens
            come from.
        OSError: there is no cluster (`auto`).
    """
    if address.startswith("ray://"):
        return
    control_server = canonicalize_bootstrap_address_or_die(address)
    if _lets_in(control_server):
        return
    mode = os.environ.get(AUTH_MODE_ENV_VAR)
    found = mode is None and maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    if found and _lets_in(control_server):
        return
    if mode not in (None, "token"):
        problem = f"{AUTH_MODE_ENV_VAR}={mode} forbids to send one: unset it"
    elif found or mode == "token":
        problem = f"it is not the one in {_source()}"
    else:
        problem = "there is none here"
    raise UsageError(
        f"--ray.address {address}: this Ray cluster is joined with a token, and {problem}. "
        "`ray get-auth-token` prints it on the cluster's head node; it belongs into ~/.ray/auth_token on "
        f"every node, or into a file that {TOKEN_PATH} names, or into {TOKEN}"
    )


def _lets_in(control_server: str) -> bool:
    try:
        return bool(GcsClient(address=control_server).cluster_id)
    except AuthenticationError:
        return False


def _source() -> str:
    """Where Ray takes the token from."""
    if os.environ.get(TOKEN):
        return TOKEN
    return os.environ.get(TOKEN_PATH) or str(Path.home() / ".ray" / "auth_token")
