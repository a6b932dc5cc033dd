"""Files that hold a secret: read whole, and refused when others may read them.

The rule is PostgreSQL's for server keys (its documentation, "Secure TCP/IP Connections with SSL"): the owner alone, as ssh has it, or also the
group when root owns the file, which is how a container that does not run as root gets its secrets.
"""

import os
import re
import stat

MAX_TOKEN_FILE_NBYTES = 4096
TOKEN = re.compile("[!-~]+")


def read_secret_file(path: str, max_nbytes: int) -> bytes:
    """Raises ValueError with what follows "FILE ...": it cannot be read, is no regular file, is too large, or is open to others."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # not to wait for the writer of a pipe
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            content = file.read(max_nbytes + 1) if stat.S_ISREG(status.st_mode) else None
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if content is None:
        raise ValueError("is not a regular file")
    if others_may_read(status.st_mode, status.st_uid):
        raise ValueError(
            f"is open to other users (mode {stat.S_IMODE(status.st_mode):04o}): `chmod 600 {path}`; "
            "of a Kubernetes secret, set defaultMode: 0400 (0440 with an fsGroup)"
        )
    if len(content) > max_nbytes:
        raise ValueError(f"has more than {max_nbytes} bytes")
    return content


def read_bearer_token(path: str) -> str:
    """The one token in a file, blanks around it left out. Raises ValueError as read_secret_file does, and for a file without one."""
    token = read_secret_file(path, MAX_TOKEN_FILE_NBYTES).decode("ascii", errors="replace").strip()
    if not TOKEN.fullmatch(token):
        raise ValueError("does not hold one token of printable ASCII characters without blanks")
    return token


def others_may_read(mode: int, owner: int) -> bool:
    return bool(mode & (0o037 if owner == 0 else 0o077))
