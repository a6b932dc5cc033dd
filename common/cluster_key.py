"""The cluster's key: one secret in a file on every node, by which nodes know each other (R12).

Whoever has the file is a node of the cluster; there is nothing else to distribute. Nodes without --cluster-key-file bind loopback, unless
--allow-unauthenticated says that everybody who reaches them may be a node too. The control connections are authenticated and encrypted with
what is derived from the key (kvtransfer/curve.py). KV pages are not encrypted: what gives access to a node's pages travels inside the control
connections, but the pages themselves cross the network as they are.

A file that others may read is refused, by PostgreSQL's rule for server keys (its documentation, "Secure TCP/IP Connections with SSL"): the owner
alone, as ssh has it, or also the group when root owns the file, which is how a container that does not run as root gets its secrets.
"""

import hashlib
import ipaddress
import os
import re
import socket
import stat
from dataclasses import dataclass, field

from common.config import NodeConfig
from common.errors import StartupError

KEY_NBYTES = 32
HEX_DIGITS = re.compile(rf"[0-9a-fA-F]{{{2 * KEY_NBYTES}}}")
NO_KEY_ID = "none"
MAX_FILE_NBYTES = 4096  # a key with blanks around it; what is larger is no key file


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """`secret`: KEY_NBYTES random bytes, never used itself and never shown."""

    secret: bytes = field(repr=False)

    def derive(self, purpose: bytes) -> bytes:
        """The 32 secret bytes for one purpose (at most 16 bytes), equal on all nodes. Keyed BLAKE2b (RFC 7693), personalised: a hash
        is enough, without stretching, because the secret is random."""
        return hashlib.blake2b(key=self.secret, person=purpose, digest_size=32).digest()

    @property
    def id(self) -> str:
        """8 hex digits for anybody to see: equal on nodes with one key, by chance on 1 pair of 4 billion others. They tell nothing about
        the key or what else is derived from it: the way back is a search through all keys."""
        return self.derive(b"pdserve key id")[:4].hex()


def key_id(key: ClusterKey | None) -> str:
    """What a node shows of its key, by which a router knows nodes that will refuse each other; NO_KEY_ID for a node without one."""
    return NO_KEY_ID if key is None else key.id


def cluster_key(config: NodeConfig) -> ClusterKey | None:
    """The key of --cluster-key-file, None without one. Raises StartupError for a file that holds no key or that others may read, and for a
    node without a key that binds more than loopback and was not allowed to."""
    if config.cluster_key_file is not None:
        return _read(config.cluster_key_file)
    if not config.allow_unauthenticated and not is_loopback(config.host):
        raise StartupError(
            f"--host {config.host} is open to other machines, and without a key everybody there could make offers and write KV pages; give "
            "every node the same --cluster-key-file (made with `openssl rand -hex 32`), or --allow-unauthenticated where the network is trusted"
        )
    return None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what is bound there. A name is what it resolves to; one that does not resolve is none."""
    try:
        addresses = [ipaddress.ip_address(found[4][0]) for found in socket.getaddrinfo(host or "0.0.0.0", None, type=socket.SOCK_STREAM)]
    except (OSError, ValueError):
        return False
    return all((getattr(address, "ipv4_mapped", None) or address).is_loopback for address in addresses)


def _read(path: str) -> ClusterKey:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # not to wait for the writer of a pipe
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            content = file.read(MAX_FILE_NBYTES + 1) if stat.S_ISREG(status.st_mode) else None
    except (OSError, ValueError) as error:
        raise _refused(path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if content is None:
        raise _refused(path, "is not a regular file")
    if _others_may_read(status.st_mode, status.st_uid):
        raise StartupError(
            f"--cluster-key-file {path} is open to other users (mode {stat.S_IMODE(status.st_mode):04o}): `chmod 600 {path}`; "
            "of a Kubernetes secret, set defaultMode: 0400 (0440 with an fsGroup)"
        )
    text = content.decode("ascii", errors="replace").strip()
    if not HEX_DIGITS.fullmatch(text):
        held = "is empty" if not text else f"holds {len(text)} characters" if len(text) != 2 * KEY_NBYTES else "holds other characters"
        raise _refused(path, f"{held}, not the {2 * KEY_NBYTES} hex digits of a key")
    return ClusterKey(bytes.fromhex(text))


def _others_may_read(mode: int, owner: int) -> bool:
    return bool(mode & (0o037 if owner == 0 else 0o077))


def _refused(path: str, reason: str) -> StartupError:
    return StartupError(f"--cluster-key-file {path} {reason}; make one with `(umask 077; openssl rand -hex 32 > FILE)` and copy it to every node")
