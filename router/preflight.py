"""What can be said of a router's settings before anything is started: `pdserve up` asks before it loads models for minutes."""

from common.config import RouterConfig
from common.errors import StartupError
from common.secret_file import read_bearer_token
from router.admin_http import admin_check
from router.keys import Keys
from router.tls import server_context


def check_router(config: RouterConfig) -> None:
    """Raises StartupError for files that cannot be used, and for an admin surface that would be open to all."""
    Keys(config)
    server_context(config)
    admin_check(config)
    node_key(config)


def node_key(config: RouterConfig) -> str | None:
    """What nodes get to see as a bearer token. Raises StartupError."""
    if config.node_api_key_file is None:
        return None
    try:
        return read_bearer_token(config.node_api_key_file)
    except ValueError as error:
        raise StartupError(f"--node-api-key-file {config.node_api_key_file} {error}") from None
