"""Who may make a control connection, when the cluster has a key: ZMQ CURVE with two key pairs that every node derives from it.

P is CURVE's server, D its client. A client must know the server's public key, which travels nowhere, and prove that it has the cluster's one
client key, which P's gate checks; a server must prove that it has the server key. So neither side is a node without the cluster key, nothing on the
wire can be read or changed, and what was recorded cannot be played again: every connection has keys of its own. A socket with a key speaks
nothing else: no NULL mechanism, no ZMTP before 3.0.

It costs a handshake of two round trips a link, and per message some microseconds. KV pages do not pass here and are not encrypted.

Sources: rfc.zeromq.org 26 (CurveZMQ) and 27 (ZAP, how a server asks its process about a client).
"""

import hmac
from contextlib import suppress
from typing import NamedTuple

import zmq
from zmq.utils import z85

from common.cluster_key import ClusterKey
from common.errors import StartupError

ZAP_ADDRESS = "inproc://zeromq.zap.01"  # fixed by ZAP; one a context
ZAP_DOMAIN = b"pdserve"  # a socket with a domain lets nobody in unasked
MAX_OVERHEAD_NBYTES = 64  # of an encrypted frame: command name, nonce, flags, tag: 33
MAX_REQUESTS_A_STEP = 256


class KeyPair(NamedTuple):
    """In Z85, as ZMQ's options take them."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return "KeyPair(...)"


def server_keys(key: ClusterKey) -> KeyPair:
    return _key_pair(key, b"control server")


def client_keys(key: ClusterKey) -> KeyPair:
    return _key_pair(key, b"control client")


def _key_pair(key: ClusterKey, purpose: bytes) -> KeyPair:
    if not zmq.has("curve"):
        raise StartupError("--cluster-key-file needs a pyzmq with CURVE; its wheels have it: pip install --force-reinstall pyzmq")
    secret = z85.encode(key.derive(purpose))
    return KeyPair(zmq.curve_public(secret), secret)


class Caller:
    """What a client's sockets need. Raises StartupError when this ZMQ has no CURVE."""

    def __init__(self, key: ClusterKey) -> None:
        self._server, self._own = server_keys(key).public, client_keys(key)

    def secure(self, client: "zmq.Socket[bytes]") -> None:
        """Before connect()."""
        client.set(zmq.CURVE_SERVERKEY, self._server)
        client.set(zmq.CURVE_PUBLICKEY, self._own.public)
        client.set(zmq.CURVE_SECRETKEY, self._own.secret)


class Gate:
    """Lets the cluster's client key into one server, and no other. Raises StartupError when this ZMQ has no CURVE."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", key: ClusterKey) -> None:
        self._server_key = server_keys(key).secret
        self._client_key = z85.decode(client_keys(key).public)
        self.socket = context.socket(zmq.REP)  # to be polled for reading, then answer()
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind(ZAP_ADDRESS)

    def secure(self, server: "zmq.Socket[bytes]") -> None:
        """Before bind(). The server is closed before the gate."""
        server.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        server.set(zmq.CURVE_SERVER, 1)
        server.set(zmq.CURVE_SECRETKEY, self._server_key)

    def answer(self) -> list[str]:
        """Decide on the handshakes that wait; the numeric addresses of those that were refused."""
        refused = []
        with suppress(zmq.Again):
            for _ in range(MAX_REQUESTS_A_STEP):
                version, request, _domain, address, _identity, mechanism, *credentials = self.socket.recv_multipart(zmq.NOBLOCK)
                known = mechanism == b"CURVE" and hmac.compare_digest(b"".join(credentials), self._client_key)
                verdict = (b"200", b"OK") if known else (b"400", b"not this cluster's key")
                self.socket.send_multipart([version, request, *verdict, b"", b""], zmq.NOBLOCK)
                if not known:
                    refused.append(address.decode(errors="replace"))
        return refused

    def close(self) -> None:
        self.socket.close()
