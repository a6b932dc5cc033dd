"""HTTPS for clients, from uvicorn's flags: --ssl-keyfile, --ssl-certfile, --ssl-keyfile-password, --ssl-ca-certs."""

import ssl

from common.config import RouterConfig
from common.errors import StartupError


def server_context(config: RouterConfig) -> ssl.SSLContext | None:
    """None: plain HTTP. Raises StartupError for files that do not fit."""
    if config.ssl_certfile is None:
        for flag, value in (("--ssl-keyfile", config.ssl_keyfile), ("--ssl-ca-certs", config.ssl_ca_certs)):
            if value is not None:
                raise StartupError(f"{flag} {value} needs --ssl-certfile too")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # TLS 1.2 and later
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, lambda: config.ssl_keyfile_password or "")  # never asks a terminal
    except (OSError, ssl.SSLError) as error:
        key = f"--ssl-keyfile {config.ssl_keyfile}" if config.ssl_keyfile else "the key in the same file (--ssl-keyfile names another)"
        raise StartupError(f"cannot serve HTTPS with --ssl-certfile {config.ssl_certfile} and {key}: {_cause(error)}") from None
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:
            raise StartupError(f"cannot read --ssl-ca-certs {config.ssl_ca_certs}: {_cause(error)}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _cause(error: OSError) -> str:
    return error.strerror or str(error)
