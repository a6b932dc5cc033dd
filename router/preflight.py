"""What can be said of a router's settings before anything is started: `pdserve up` asks before it loads models for minutes."""

from common.config import RouterConfig
from common.errors import StartupError
from common.secret_file import read_bearer_token
from router.admin_http import admin_check
from router.cors import Cors
from router.keys import Keys
from router.tls import server_context


def check_router(config: RouterConfig) -> None:
    """Raises StartupError for files that cannot be used, for an admin surface that would be open to all, and for flags that do nothing."""
    for name, needs, useless in (
        ("--prefill-selector", "--service-discovery", config.prefill_selector is not None and not config.service_discovery),
        ("--decode-selector", "--service-discovery", config.decode_selector is not None and not config.service_discovery),
        ("--tokenizer-path", "--kv-events", config.tokenizer_path is not None and not config.kv_events),
    ):
        if useless:
            raise StartupError(f"{name} does nothing without {needs}; give both, or neither")
    if config.cors_allowed_origins is not None:
        Cors(config.cors_allowed_origins)
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
