"""Nodes from Kubernetes: the pods that match a label selector, one selector for each role.

A pod is a node while it has an address and is Running. Whether it is ready is not asked of Kubernetes: the router's own probe knows
sooner, from where it matters, and also knows a node that is ready and does not fit. A pod that is to end (deletionTimestamp) is
drained: no new requests, those under way go on for as long as Kubernetes lets it live. One that has ended is removed. One that no
longer matches is retired: it leaves when its last request has ended, and the other selector may have it at once.

Only what was added here is ever changed here. Nodes given by flag or by the admin surface are not; and what an admin did to a pod's
node, drained or removed it, holds until that pod is another one.

How pods are followed, and what happens while the API server is away: pod_watch.py. With several workers or replicas, each router
process follows the pods by itself.
"""

import asyncio
import logging
import threading
from contextlib import suppress
from pathlib import Path

from common.config import MAX_PORT, RouterConfig
from common.errors import StartupError
from router.nodes import Leg, Node, NodeTable
from router.pod_watch import Pod, PodWatch, connect

PORT_ANNOTATION = "pdserve.io/port"
BOOTSTRAP_ANNOTATIONS = ("pdserve.io/bootstrap-port", "sglang.ai/bootstrap-port")  # the second: sglang-router's, pods that have it need no other
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

log = logging.getLogger(__name__)


class PodNodes:
    """The nodes that one role's pods are. Told of pods, in order; in the event loop."""

    def __init__(self, leg: Leg, nodes: NodeTable, default_port: int) -> None:
        self._leg: Leg = leg
        self._nodes = nodes
        self._default_port = default_port
        self.is_listed = asyncio.Event()  # once
        self._known: dict[str, tuple[str, Node]] = {}  # by the pod's uid: the node, and its text as a flag would have it

    def listed(self, pods: list[Pod]) -> None:
        """These are all there are."""
        listed = {pod.metadata.uid for pod in pods}
        for uid in [uid for uid in self._known if uid not in listed]:
            self._forget(uid, gone=False)  # gone or relabelled: a list does not say
        for pod in pods:
            self.changed(pod)
        self.is_listed.set()

    def changed(self, pod: Pod) -> None:
        """It is new, or not as before."""
        uid, ending, text = pod.metadata.uid, pod.metadata.deletion_timestamp is not None, self._text(pod)
        if uid in self._known and self._known[uid][0] != text:
            self._forget(uid, gone=text is None)
        if uid in self._known and ending:
            self._nodes.drain(self._known[uid][1])
        elif uid not in self._known and text is not None and not ending:
            self._add(pod, text)

    def deleted(self, pod: Pod) -> None:
        """It has ended, or no longer matches the selector."""
        self._forget(pod.metadata.uid, gone=pod.metadata.deletion_timestamp is not None)

    def _add(self, pod: Pod, text: str) -> None:
        there = next((node for node in self._nodes.of_url(text) if node.leg == self._leg), None)
        before = [uid for uid, (_, node) in self._known.items() if node is there]
        if there is not None and not before:
            log.debug("pod %s is %s, which is a node without it", pod.metadata.name, there.url)
            return
        for uid in before:  # the pod that had this address is as good as gone, though not yet deleted
            self._forget(uid, gone=True)
        self._known[pod.metadata.uid] = (text, self._nodes.add(self._leg, text))
        log.info("pod %s is %s node %s", pod.metadata.name, self._leg, text)

    def _forget(self, uid: str, *, gone: bool) -> None:
        if (known := self._known.pop(uid, None)) is not None:
            log.info("%s node %s: its pod %s", self._leg, known[1].url, "has ended" if gone else "is not listed here any more")
            (self._nodes.remove if gone else self._nodes.retire)(known[1])

    def _text(self, pod: Pod) -> str | None:
        """URL or URL,BOOTSTRAP_PORT; None while it is no node."""
        address, given = pod.status.pod_ip, pod.metadata.annotations or {}
        if pod.status.phase != "Running" or not address:
            return None
        try:
            port = _port(PORT_ANNOTATION, given[PORT_ANNOTATION]) if PORT_ANNOTATION in given else self._default_port
            bootstrap = [_port(name, given[name]) for name in BOOTSTRAP_ANNOTATIONS if name in given and self._leg == "prefill"]
        except ValueError as error:
            log.warning("pod %s is not used: %s", pod.metadata.name, error)
            return None
        return f"http://{f'[{address}]' if ':' in address else address}:{port}" + (f",{bootstrap[0]}" if bootstrap else "")


class Discovery:
    """Keeps a table of nodes in step with the pods. Made in the event loop; raises StartupError when the client library, its
    credentials, a selector or the namespace is missing."""

    def __init__(self, config: RouterConfig, nodes: NodeTable) -> None:
        selectors: tuple[tuple[Leg, str | None], ...] = (("prefill", config.prefill_selector), ("decode", config.decode_selector))
        if not any(selector for _, selector in selectors):
            raise StartupError("--service-discovery is not told which pods are nodes; give --prefill-selector and --decode-selector")
        namespace = config.service_discovery_namespace or _own_namespace()
        found = {leg: (selector, PodNodes(leg, nodes, config.service_discovery_port)) for leg, selector in selectors if selector is not None}
        self.pods = [pods for _, pods in found.values()]
        self.watches = [
            PodWatch(connect(), asyncio.get_running_loop(), pods, leg, namespace, selector) for leg, (selector, pods) in found.items()
        ]

    @property
    def in_step(self) -> bool:
        """No role's pods have lately been out of sight."""
        return all(watch.trouble is None for watch in self.watches)

    async def settled(self, timeout_s: float) -> bool:
        """Wait until the table has every pod that there was at the start; False when the API server does not say in time."""
        try:
            async with asyncio.timeout(timeout_s):
                for pods in self.pods:
                    await pods.is_listed.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Until cancelled. Threads of its own, not the loop's executor: that would be waited for at exit."""
        ends = []
        for watch in self.watches:
            ends.append(asyncio.get_running_loop().create_future())
            threading.Thread(target=_follow, args=(watch, ends[-1]), name=f"{watch.leg}-pods", daemon=True).start()
        try:
            await asyncio.gather(*ends)
        finally:
            for watch in self.watches:
                watch.stop()


def _follow(watch: PodWatch, end: "asyncio.Future[None]") -> None:
    """A thread's body. A fault in it ends the router: without discovery it would go on with ever fewer nodes."""

    def tell(fault: Exception | None) -> None:
        if not end.done():
            end.set_result(None) if fault is None else end.set_exception(fault)

    fault: Exception | None = None
    try:
        watch.run()
    except Exception as error:
        fault = error
    with suppress(RuntimeError):  # the loop is closed: the process ends
        watch.loop.call_soon_threadsafe(tell, fault)


def _own_namespace() -> str:
    try:
        return NAMESPACE_FILE.read_text().strip()
    except OSError:
        raise StartupError("--service-discovery does not know the namespace, this being no pod; give --service-discovery-namespace") from None


def _port(name: str, text: str) -> int:
    if not (text.isdecimal() and 0 < int(text) <= MAX_PORT):
        raise ValueError(f"its annotation {name} is {text!r}, which is no port")
    return int(text)
