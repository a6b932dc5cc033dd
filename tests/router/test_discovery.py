"""Kubernetes' own client against an API server that misbehaves: what the table of nodes makes of it."""

import asyncio
import json
import logging
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import yaml
from kube_api import KubeApi, kube_api
from mock_node import mock_nodes
from router_harness import CHAT, until

from common.config import RouterConfig
from common.errors import StartupError
from common.launch import Child, python_argv
from router import discovery
from router.discovery import Discovery
from router.nodes import NodeTable

CONFIG = RouterConfig(
    service_discovery=True, service_discovery_namespace="inference", prefill_selector="app=llm,role=p", decode_selector="app=llm,role=d"
)
P, D = {"app": "llm", "role": "p"}, {"app": "llm", "role": "d"}


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Writes one for a server, with a token, and makes it this process's."""

    def write(server: str) -> None:
        path = tmp_path / "kubeconfig"
        path.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": server}}],
            "users": [{"name": "u", "user": {"token": "sesame"}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }))  # fmt: skip
        monkeypatch.setenv("KUBECONFIG", str(path))

    for name in ("KUBERNETES_SERVICE_HOST", "http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return write


@pytest.fixture
async def api(kubeconfig: Callable[[str], None]) -> AsyncIterator[KubeApi]:
    async with kube_api() as served:
        kubeconfig(served.url)
        yield served


@asynccontextmanager
async def discovered(config: RouterConfig = CONFIG) -> AsyncIterator[NodeTable]:
    nodes = NodeTable.of(config)
    found = Discovery(config, nodes)
    for watch in found.watches:
        watch.backoff_s = (0.01, 0.05)
    running = asyncio.ensure_future(found.run())
    try:
        yield nodes
    finally:
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(lambda: not any(thread.name.endswith("-pods") for thread in threading.enumerate()), "the threads' end", 10)


def urls(nodes: NodeTable) -> tuple[list[str], list[str]]:
    """What may be picked, of each leg."""
    return [node.url for node in nodes.prefill if not node.draining], [node.url for node in nodes.decode if not node.draining]


async def until_urls(nodes: NodeTable, prefill: list[str], decode: list[str]) -> None:
    await until(lambda: urls(nodes) == (prefill, decode), f"{prefill} and {decode}, it is {urls(nodes)}", 10)


async def until_watched(api: KubeApi, num_watches: int) -> None:
    """So many watches have been asked for, and both are open."""
    await until(lambda: len(api.watches) >= num_watches and api.num_watching == 2, f"{num_watches} watches", 10)


async def test_running_pods_with_an_address_are_nodes_of_the_role_they_are_labelled_with(api: KubeApi) -> None:
    await api.put("p", ip="10.0.0.1", annotations={"pdserve.io/port": "8100", "pdserve.io/bootstrap-port": "8998"}, **P)
    await api.put("pending", ip=None, phase="Pending", **P)
    await api.put("initialising", ip="10.0.0.7", phase="Pending", **P)
    await api.put("other", ip="10.0.0.8", app="llm")
    await api.put("d6", ip="fd00::2", **D)
    async with discovered() as nodes:
        await until_urls(nodes, ["http://10.0.0.1:8100"], ["http://[fd00::2]:8000"])
        assert nodes.prefill[0].configured_bootstrap_port == 8998
        await until_watched(api, 2)
        await api.put("pending", ip="10.0.0.2", annotations={"sglang.ai/bootstrap-port": "9000"}, **P)
        await until_urls(nodes, ["http://10.0.0.1:8100", "http://10.0.0.2:8000"], ["http://[fd00::2]:8000"])
        assert nodes.prefill[1].configured_bootstrap_port == 9000
    assert api.headers["authorization"].lower() == "bearer sesame"


async def test_a_pod_that_is_to_end_is_drained_and_goes_when_it_has_ended(api: KubeApi) -> None:
    await api.put("d", ip="10.0.0.1", **D)
    async with discovered() as nodes:
        await until_urls(nodes, [], ["http://10.0.0.1:8000"])
        await until_watched(api, 2)
        await api.put("d", ip="10.0.0.1", ending=True, **D)
        await until(lambda: nodes.decode[0].draining, "drained")
        await api.delete("d")
        await until(lambda: not nodes.decode, "removed")


@pytest.mark.parametrize("gone", [{"phase": "Failed"}, {"phase": "Succeeded"}, {"ip": None}])
async def test_a_pod_without_a_process_or_an_address_is_no_node(api: KubeApi, gone: dict[str, str]) -> None:
    await api.put("d", ip="10.0.0.1", **D)
    async with discovered() as nodes:
        await until_urls(nodes, [], ["http://10.0.0.1:8000"])
        await until_watched(api, 2)
        await api.put("d", **{"ip": "10.0.0.1", **gone}, **D)
        await until(lambda: not nodes.decode, "removed")


async def test_a_relabelled_pod_moves_and_its_requests_end_where_they_are(api: KubeApi) -> None:
    await api.put("x", ip="10.0.0.1", **P)
    async with discovered() as nodes:
        await until_urls(nodes, ["http://10.0.0.1:8000"], [])
        await until_watched(api, 2)
        busy = nodes.prefill[0]
        busy.num_in_flight = 1
        await api.put("x", ip="10.0.0.1", **D)
        await until_urls(nodes, [], ["http://10.0.0.1:8000"])
        assert nodes.prefill == (busy,)
        assert busy.draining
        assert busy.leaving  # the prober removes it when its last request has ended


async def test_another_port_is_another_node(api: KubeApi) -> None:
    await api.put("d", ip="10.0.0.1", **D)
    async with discovered() as nodes:
        await until_urls(nodes, [], ["http://10.0.0.1:8000"])
        await until_watched(api, 2)
        await api.put("d", ip="10.0.0.1", annotations={"pdserve.io/port": "8201"}, **D)
        await until_urls(nodes, [], ["http://10.0.0.1:8201"])


async def test_a_new_pod_takes_over_the_address_of_one_that_is_not_deleted_yet(api: KubeApi) -> None:
    await api.put("old", ip="10.0.0.1", **D)
    async with discovered() as nodes:
        await until_urls(nodes, [], ["http://10.0.0.1:8000"])
        await until_watched(api, 2)
        before = nodes.decode[0]
        await api.put("old", ip="10.0.0.1", ending=True, **D)
        await api.put("new", ip="10.0.0.1", **D)
        await until(lambda: nodes.decode[0] is not before, "the new pod's node")
        assert urls(nodes) == ([], ["http://10.0.0.1:8000"])
        await api.delete("old")
        await api.put("last", ip="10.0.0.3", **D)
        await until_urls(nodes, [], ["http://10.0.0.1:8000", "http://10.0.0.3:8000"])


async def test_a_bad_annotation_is_a_sentence_and_other_pods_are_not_hit(api: KubeApi, caplog: pytest.LogCaptureFixture) -> None:
    await api.put("bad", ip="10.0.0.1", annotations={"pdserve.io/port": "http"}, **P)
    await api.put("good", ip="10.0.0.2", **P)
    async with discovered() as nodes:
        await until_urls(nodes, ["http://10.0.0.2:8000"], [])
    assert "pod bad is not used: its annotation pdserve.io/port is 'http', which is no port" in caplog.text


async def test_nodes_that_others_gave_are_left_alone(api: KubeApi) -> None:
    await api.put("same", ip="10.0.0.1", **D)
    await api.put("drained", ip="10.0.0.2", **D)
    async with discovered(RouterConfig(**{**_fields(CONFIG), "decode": ("http://10.0.0.1:8000", "http://10.0.0.9:1")})) as nodes:
        await until(lambda: len(nodes.decode) == 3, "the other pod")
        await until_watched(api, 2)
        nodes.drain(nodes.decode[2])  # by an admin
        await api.delete("same")
        await api.put("drained", ip="10.0.0.2", annotations={"a": "b"}, **D)
        await api.put("last", ip="10.0.0.3", **D)
        await until(lambda: len(nodes.decode) == 4, "the last pod")
        assert urls(nodes)[1] == ["http://10.0.0.1:8000", "http://10.0.0.9:1", "http://10.0.0.3:8000"]


async def test_a_watch_goes_on_from_where_it_was_cut_off(api: KubeApi) -> None:
    async with discovered() as nodes:
        await until_watched(api, 2)
        for round_number in range(3):
            api.cut()
            await api.put(f"d{round_number}", ip=f"10.0.0.{round_number}", **D)
            await until(lambda: len(nodes.decode) == round_number + 1, "the pod", 10)  # noqa: B023
            await until_watched(api, 4 + 2 * round_number)
        assert len(api.lists) == 2  # one of each role: nothing was listed twice


async def test_a_watch_that_ends_in_order_goes_on_at_once_from_the_last_bookmark(api: KubeApi) -> None:
    async with discovered() as nodes:
        await until_watched(api, 2)
        await api.bookmark()
        await api.put("d", ip="10.0.0.1", **D)
        await until_urls(nodes, [], ["http://10.0.0.1:8000"])
        await api.end_watches()
        await until_watched(api, 4)
        versions = {query["labelSelector"]: query["resourceVersion"] for query in api.watches[2:]}
        assert versions == {"app=llm,role=d": "102", "app=llm,role=p": "101"}
        assert all(240 <= int(query["timeoutSeconds"]) <= 300 for query in api.watches)


async def test_after_410_a_list_puts_right_what_was_missed(api: KubeApi) -> None:
    await api.put("gone", ip="10.0.0.1", **D)
    await api.put("stays", ip="10.0.0.2", **D)
    async with discovered() as nodes:
        await until_urls(nodes, [], ["http://10.0.0.1:8000", "http://10.0.0.2:8000"])
        await until_watched(api, 2)
        stays = nodes.decode[1]
        api.refusal = (503, "not now")
        api.cut()
        await api.delete("gone")
        await api.put("came", ip="10.0.0.3", **D)
        api.expire()
        api.refusal = None
        await until_urls(nodes, [], ["http://10.0.0.2:8000", "http://10.0.0.3:8000"])
        assert nodes.decode[0] is stays
        await until(lambda: len(api.lists) == 4, "a second list of each role")


async def test_410_as_the_status_of_the_answer_is_understood_too(api: KubeApi) -> None:
    async with discovered() as nodes:
        await until_watched(api, 2)
        num_lists = len(api.lists)
        api.refusal = (410, "Expired")
        api.cut()
        await until(lambda: len(api.lists) > num_lists, "another list", 10)
        api.refusal = None
        await api.put("d", ip="10.0.0.1", **D)
        await until_urls(nodes, [], ["http://10.0.0.1:8000"])


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (403, "answers 403, 'pods is forbidden'; the role it needs is in deploy/kubernetes/router-rbac.yaml"),
        (401, "answers 401, 'pods is forbidden'; it does not know the credentials of this router"),
        (400, "answers 400, 'pods is forbidden';"),
    ],
)
async def test_a_refusal_is_said_once_and_is_over_when_it_is(api: KubeApi, caplog: pytest.LogCaptureFixture, status: int, says: str) -> None:
    api.refusal = (status, "pods is forbidden")
    await api.put("d", ip="10.0.0.1", **D)
    with caplog.at_level(logging.INFO):
        async with discovered() as nodes:
            await until(lambda: len(api.lists) >= 10, "tried again", 10)
            api.refusal = None
            await until_urls(nodes, [], ["http://10.0.0.1:8000"])
            await until_watched(api, 2)
    assert caplog.text.count("decode pods cannot be followed: the API server " + says) == 1
    assert caplog.text.count("decode pods are followed again") == 1


async def test_known_nodes_stay_while_the_api_server_is_away(api: KubeApi, caplog: pytest.LogCaptureFixture) -> None:
    await api.put("d", ip="10.0.0.1", **D)
    async with discovered() as nodes:
        await until_urls(nodes, [], ["http://10.0.0.1:8000"])
        await api.stop()
        await until(lambda: "decode pods cannot be followed: no connection to the API server at http://127.0.0.1" in caplog.text, "said", 10)
        assert urls(nodes) == ([], ["http://10.0.0.1:8000"])
        await api.start()
        await api.put("p", ip="10.0.0.2", **P)
        await until_urls(nodes, ["http://10.0.0.2:8000"], ["http://10.0.0.1:8000"])


async def test_trouble_with_tls_is_a_sentence(api: KubeApi, kubeconfig: Callable[[str], None], caplog: pytest.LogCaptureFixture) -> None:
    kubeconfig(api.url.replace("http:", "https:"))  # which is none
    async with discovered():
        await until(lambda: "no connection to the API server at https://127.0.0.1" in caplog.text, "said", 10)
    assert "SSL" in caplog.text


async def test_no_api_server_at_the_start_is_no_end(kubeconfig: Callable[[str], None], caplog: pytest.LogCaptureFixture) -> None:
    async with kube_api() as late:
        await late.stop()
        kubeconfig(late.url)
        async with discovered() as nodes:
            await until(lambda: "prefill pods cannot be followed" in caplog.text, "said", 10)
            await late.start()
            await late.put("p", ip="10.0.0.2", **P)
            await until_urls(nodes, ["http://10.0.0.2:8000"], [])


async def test_what_is_no_json_is_trouble_and_no_fault(api: KubeApi, caplog: pytest.LogCaptureFixture) -> None:
    api.garbage = b"<html>a proxy's page</html>"
    async with discovered() as nodes:
        await until(lambda: "what the API server said cannot be read" in caplog.text, "said", 10)
        api.garbage = None
        await api.put("p", ip="10.0.0.2", **P)
        await until_urls(nodes, ["http://10.0.0.2:8000"], [])


async def test_a_server_that_ends_every_watch_at_once_is_asked_with_pauses(api: KubeApi, caplog: pytest.LogCaptureFixture) -> None:
    api.end_at_once = True
    async with discovered() as nodes:
        await until(lambda: "ends every watch at once" in caplog.text, "said", 10)
        api.end_at_once = False
        await api.put("p", ip="10.0.0.2", **P)
        await until_urls(nodes, ["http://10.0.0.2:8000"], [])


async def test_a_fault_of_ours_ends_the_task_and_is_not_lost_in_a_thread(api: KubeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = NodeTable.of(CONFIG)
    found = Discovery(CONFIG, nodes)

    def broken(*_: object, **__: object) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(found.watches[0].api, "list_namespaced_pod", broken)
    async with asyncio.timeout(10):
        with pytest.raises(LookupError, match="a bug"):
            await found.run()


async def test_settled_is_when_every_selector_has_been_listed(api: KubeApi) -> None:
    await api.put("p", ip="10.0.0.1", **P)
    api.refusal = (503, "not yet")
    nodes = NodeTable.of(CONFIG)
    found = Discovery(CONFIG, nodes)
    running = asyncio.ensure_future(found.run())
    assert not await found.settled(0.01)
    api.refusal = None
    assert await found.settled(10)
    assert urls(nodes) == (["http://10.0.0.1:8000"], [])
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_one_selector_follows_one_role(api: KubeApi) -> None:
    await api.put("p", ip="10.0.0.1", **P)
    async with discovered(RouterConfig(**{**_fields(CONFIG), "decode_selector": None, "decode": ("http://10.0.0.9:1",)})) as nodes:
        await until_urls(nodes, ["http://10.0.0.1:8000"], ["http://10.0.0.9:1"])
        await until(lambda: len(api.watches) == 1, "one watch")


async def test_no_selector_no_namespace_no_credentials_no_client_are_sentences(
    kubeconfig: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nodes = NodeTable()
    with pytest.raises(StartupError, match="give --prefill-selector and --decode-selector"):
        Discovery(RouterConfig(service_discovery=True), nodes)
    with pytest.raises(StartupError, match="give --service-discovery-namespace"):
        Discovery(RouterConfig(**{**_fields(CONFIG), "service_discovery_namespace": None}), nodes)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(StartupError, match="neither a service account nor a kubeconfig"):
        Discovery(CONFIG, nodes)
    monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    with pytest.raises(StartupError, match=r"pip install 'pdserve\[kubernetes\]'"):
        Discovery(CONFIG, nodes)


async def test_the_namespace_is_the_pods_own(api: KubeApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("inference\n")
    monkeypatch.setattr(discovery, "NAMESPACE_FILE", tmp_path / "namespace")
    await api.put("p", ip="10.0.0.1", **P)
    async with discovered(RouterConfig(**{**_fields(CONFIG), "service_discovery_namespace": None})) as nodes:
        await until_urls(nodes, ["http://10.0.0.1:8000"], [])


@pytest.mark.system
async def test_a_router_without_nodes_serves_with_those_it_finds(api: KubeApi) -> None:
    argv = ["router", "--port", "0", "--health-check-interval", "0.1", "--service-discovery", "--service-discovery-namespace", "inference"]
    selectors = ["--prefill-selector", CONFIG.prefill_selector or "", "--decode-selector", CONFIG.decode_selector or ""]
    child = Child("router", python_argv("pdserve", *argv, *selectors))
    try:
        url = f"http://127.0.0.1:{(await child.wait_ready())['port']}"
        async with mock_nodes() as (prefills, decodes), httpx.AsyncClient(base_url=url, verify=False, trust_env=False) as client:
            assert (await client.get("/ready")).status_code == 503
            assert "pdserve_router_discovery_up 1.0" in (await client.get("/metrics")).text
            await api.put("p", ip="127.0.0.1", annotations={"pdserve.io/port": str(prefills[0].port), "pdserve.io/bootstrap-port": "8998"}, **P)
            await api.put("d", ip="127.0.0.1", annotations={"pdserve.io/port": str(decodes[0].port)}, **D)

            async def is_ready() -> bool:
                return (await client.get("/ready")).status_code == 200

            await until(is_ready, "ready", 20)
            assert (await client.post(CHAT, json={})).status_code == 200
            await api.put("d", ip="127.0.0.1", ending=True, annotations={"pdserve.io/port": str(decodes[0].port)}, **D)

            async def is_drained() -> bool:
                return bool((await client.get("/server_info")).json()["decode"][0]["draining"])

            await until(is_drained, "drained", 10)
            assert (await client.post(CHAT, json={})).status_code == 503
    finally:
        await child.stop(10)


@pytest.mark.system
async def test_a_wrong_flag_is_exit_code_2_before_the_router_is_ready(api: KubeApi) -> None:
    child = Child("router", python_argv("pdserve", "router", "--port", "0", "--service-discovery"))
    with pytest.raises(StartupError, match="give --prefill-selector and --decode-selector"):
        await child.wait_ready()
    assert await child.wait_death() == 2


def test_the_role_allows_what_is_asked_and_no_more() -> None:
    text = (Path(__file__).parents[2] / "deploy" / "kubernetes" / "router-rbac.yaml").read_text()
    account, role, binding = yaml.safe_load_all(text)
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [subject["name"] for subject in binding["subjects"]] == [account["metadata"]["name"]]


def _fields(config: RouterConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in ("service_discovery", "service_discovery_namespace", "prefill_selector", "decode_selector")}
