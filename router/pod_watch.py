"""Which pods match a selector, now and from now on.

    LIST --all pods, and their version--> WATCH from that version --events, bookmarks: a newer version--+
     ^                                      ^    |                                                      |
     +------- expired (410), after a pause -|----+--- the server's time limit --> at once               |
                                            +-------- a failure --> after a pause, doubled and spread --+

A list puts right what a gap hid: a pod that went meanwhile is not in it. While the API server is away nothing is said about pods, so
the nodes that are known stay: it is the control plane that is in trouble, not they. The router is not ended by any answer of the API
server: a role that is missing today may be there tomorrow.

Kubernetes' client is synchronous, so this runs in a thread and hands what it read to the event loop. The client does credentials,
their renewal, and TLS. Replies are read here, as far as they matter: its own watch makes objects of whole pods, and treats an
expired watch differently from version to version. The protocol, bookmarks and 410 included:
https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes
"""

import asyncio
import importlib
import logging
import os
import random
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from common.errors import StartupError

CONNECT_TIMEOUT_S = 5.0
LIST_TIMEOUT_S = 30.0
WATCH_S = (240, 300)  # the server ends a watch after this long, each at a time of its own; client-go's are 300 to 600, some proxies cut at 300
READ_MARGIN_S = 15.0  # with nothing said for so long beyond that, the connection is taken for lost
KEEPALIVE_S = (10, 5, 3)  # idle time, interval, number of probes: a dead connection is found out in 25 s
MIN_WATCH_S = 1.0  # a watch that ends sooner without an event is a failure, or a broken proxy would be asked without a pause
BACKOFF_S = (0.5, 30.0)  # the first pause, the longest
MAX_MESSAGE_CHARACTERS = 300  # of a refusal, in the log

log = logging.getLogger(__name__)


class Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    annotations: dict[str, str] | None = None


class Status(msgspec.Struct):
    phase: str | None = None
    pod_ip: str | None = msgspec.field(default=None, name="podIP")


class Pod(msgspec.Struct):
    """What matters of one."""

    metadata: Metadata = msgspec.field(default_factory=Metadata)
    status: Status = msgspec.field(default_factory=Status)


class PodList(msgspec.Struct):
    metadata: Metadata
    items: list[Pod] | None = None


class Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class Refusal(msgspec.Struct):
    """Kubernetes' object Status, which is its form of an error."""

    code: int = 0
    message: str = ""


class Expired(Exception):
    """What came after our version is forgotten there (410): only a list helps."""


class Trouble(Exception):
    """No list or no watch, for a reason that may pass."""


class PodListener(Protocol):
    """Called in the event loop, in the order of what happened."""

    def listed(self, pods: list[Pod]) -> None: ...
    def changed(self, pod: Pod) -> None: ...
    def deleted(self, pod: Pod) -> None: ...


@dataclass(slots=True, eq=False)
class PodWatch:
    """Follows the pods of one selector for as long as run() runs, in a thread. `api`: the client's CoreV1Api."""

    api: Any
    loop: asyncio.AbstractEventLoop
    listener: PodListener
    leg: Literal["prefill", "decode"]
    namespace: str
    selector: str
    backoff_s: tuple[float, float] = BACKOFF_S
    watch_s: tuple[int, int] = WATCH_S
    read_margin_s: float = READ_MARGIN_S
    trouble: str | None = None  # why the pods cannot be followed, when that is more than a moment; as it was logged
    _version: str | None = None  # None: a list is needed
    _reply: Any = None  # the one that is being read
    _num_failures: int = 0  # in a row
    _stopping: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Until stop(). Raises RuntimeError when the event loop is closed."""
        while not self._stopping.is_set():
            try:
                self._version = self._version or self._list()
                self._watch(self._version)
                self._num_failures = 0
            except Expired:
                self._version = None
                self._pause(None)
            except Trouble as trouble:
                self._pause(str(trouble))

    def stop(self) -> None:
        """From another thread: run() ends soon."""
        self._stopping.set()
        self._stop_reading()

    def _list(self) -> str:
        """Tell what there is; the version to watch from."""
        try:
            with self._get(_request_timeout=(CONNECT_TIMEOUT_S, LIST_TIMEOUT_S)) as reply:
                pods = msgspec.json.decode(reply.read(), type=PodList)
        except _connection_failures() as error:
            raise self._trouble(error) from error
        self.loop.call_soon_threadsafe(self.listener.listed, pods.items or [])
        return pods.metadata.resource_version

    def _watch(self, version: str) -> None:
        """Tell what happens, until the server ends the watch."""
        seconds, began_s, heard = random.randint(*self.watch_s), time.monotonic(), False
        try:
            with self._get(watch=True, resource_version=version, allow_watch_bookmarks=True, timeout_seconds=seconds,
                           _request_timeout=(CONNECT_TIMEOUT_S, seconds + self.read_margin_s)) as reply:  # fmt: skip
                for line in reply:
                    self._take(msgspec.json.decode(line, type=Event))
                    heard = True
        except _connection_failures() as error:
            raise self._trouble(error) from error
        if not heard and time.monotonic() - began_s < MIN_WATCH_S:
            raise Trouble("the API server, or a proxy before it, ends every watch at once")

    def _take(self, event: Event) -> None:
        if event.type == "ERROR":
            raise _refused(msgspec.json.decode(event.object, type=Refusal))
        pod = msgspec.json.decode(event.object, type=Pod)
        if event.type != "BOOKMARK":  # which has a version, and no pod
            self.loop.call_soon_threadsafe(self.listener.deleted if event.type == "DELETED" else self.listener.changed, pod)
        self._version = pod.metadata.resource_version or self._version
        self._num_failures = 0

    def _get(self, **arguments: Any) -> Any:
        """A reply of 200 that is still to be read. Raises Expired and Trouble."""
        exceptions = importlib.import_module("kubernetes.client.exceptions")
        try:
            reply = self.api.list_namespaced_pod(self.namespace, label_selector=self.selector, _preload_content=False, **arguments)
        except exceptions.ApiException as error:  # some versions raise for what is not 200, some leave it to their caller
            if not error.status:
                raise self._trouble(error.reason) from error  # TLS
            raise _refused(_refusal(error.status, error.body or error.reason)) from error
        if reply.status != 200:
            with reply:
                raise _refused(_refusal(reply.status, reply.read()))
        if self.trouble is not None:
            log.warning("%s pods are followed again", self.leg)
            self.trouble = None
        self._reply = reply
        if self._stopping.is_set():
            self._stop_reading()
        return reply

    def _stop_reading(self) -> None:
        if (reply := self._reply) is not None:
            with suppress(ValueError, OSError, RuntimeError):  # it has been read to its end
                reply.shutdown()

    def _trouble(self, error: object) -> Trouble:
        if isinstance(error, msgspec.DecodeError):
            return Trouble(f"what the API server said cannot be read ({error})")
        return Trouble(f"no connection to the API server at {self.api.api_client.configuration.host} ({error})")

    def _pause(self, trouble: str | None) -> None:
        """One failure is everyday: servers restart, proxies cut connections. What lasts longer is said once, until it is over."""
        if self._stopping.is_set():
            return
        first_s, longest_s = self.backoff_s
        pause_s = random.uniform(0.5, 1.0) * min(first_s * 2 ** min(self._num_failures, 16), longest_s)
        self._num_failures += 1
        if self._num_failures > 1 and trouble not in (None, self.trouble):
            log.warning("%s pods cannot be followed: %s; the known nodes stay, the next try is within %g s", self.leg, trouble, longest_s)
            self.trouble = trouble
        self._stopping.wait(pause_s)


def connect() -> Any:
    """The client's CoreV1Api, as the pod's service account or, outside a cluster, as the kubeconfig says. Raises StartupError."""
    try:
        client, config = importlib.import_module("kubernetes.client"), importlib.import_module("kubernetes.config")
    except ImportError:
        raise StartupError("--service-discovery needs the Kubernetes client; run `pip install 'pdserve[kubernetes]'`") from None
    settings = client.Configuration()
    try:
        try:
            config.load_incluster_config(client_configuration=settings)
        except config.ConfigException:
            config.load_kube_config(config_file=os.environ.get("KUBECONFIG"), client_configuration=settings)
    except (config.ConfigException, OSError) as error:
        raise StartupError(f"--service-discovery finds neither a service account nor a kubeconfig to ask Kubernetes with: {error}") from None
    settings.retries = False  # PodWatch has its own
    settings.socket_options = _keepalive()
    return client.CoreV1Api(client.ApiClient(settings))


def _keepalive() -> list[tuple[int, int, int]]:
    idle_s, interval_s, num_probes = KEEPALIVE_S
    tcp, options = socket.IPPROTO_TCP, [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    if hasattr(socket, "TCP_KEEPIDLE"):  # not everywhere
        options += [(tcp, socket.TCP_KEEPIDLE, idle_s), (tcp, socket.TCP_KEEPINTVL, interval_s), (tcp, socket.TCP_KEEPCNT, num_probes)]
    return options


def _connection_failures() -> tuple[type[Exception], ...]:
    """Of a connection, or of what comes over it."""
    return (importlib.import_module("urllib3.exceptions").HTTPError, OSError, msgspec.DecodeError)


def _refusal(code: int, body: bytes | str) -> Refusal:
    text = body.decode(errors="replace") if isinstance(body, bytes) else str(body)
    try:
        return Refusal(code, msgspec.json.decode(text, type=Refusal).message or text)
    except msgspec.DecodeError:  # of a proxy
        return Refusal(code, text)


def _refused(refusal: Refusal) -> Expired | Trouble:
    if refusal.code == 410:
        return Expired()
    hints = {401: "; it does not know the credentials of this router", 403: "; the role it needs is in deploy/kubernetes/router-rbac.yaml"}
    return Trouble(f"the API server answers {refusal.code}, {refusal.message[:MAX_MESSAGE_CHARACTERS]!r}{hints.get(refusal.code, '')}")
