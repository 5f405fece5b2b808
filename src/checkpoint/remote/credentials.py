"""Credentials for S3 from the usual places; they are neither logged nor stored."""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from obstore.store import S3Credential


def s3_credentials() -> dict[str, Any]:
    """Options for obstore's S3 store: region, and who signs.

    obstore itself reads keys in the environment, web identities, and the services of ECS and EC2. Profiles of
    ~/.aws come from awscrt's default chain.
    """
    environment = os.environ
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1"
    options: dict[str, Any] = {"region": region}
    files = (
        environment.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        environment.get("AWS_CONFIG_FILE", "~/.aws/config"),
    )
    by_profile = "AWS_PROFILE" in environment or any(os.path.exists(os.path.expanduser(f)) for f in files)
    if "AWS_ACCESS_KEY_ID" not in environment and by_profile:
        options["credential_provider"] = _by_default_chain
    return options


def _by_default_chain() -> "S3Credential":
    auth: Any = importlib.import_module("awscrt.auth")  # it has no types
    found = auth.AwsCredentialsProvider.new_default_chain().get_credentials().result(30)
    return {
        "access_key_id": found.access_key_id,
        "secret_access_key": found.secret_access_key,
        "token": found.session_token,
        "expires_at": found.expiration,
    }
