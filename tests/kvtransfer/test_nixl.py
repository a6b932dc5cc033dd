"""What is particular to the nixl backend; the contract itself is test_conformance.py's."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from transfer_harness import Node, ProcessVictim

from common.errors import StartupError
from kvtransfer import nixl, nixl_library, nixl_peer
from kvtransfer.backend import PeerId, Region, Ticket, TransferError
from kvtransfer.host_process import this_process
from kvtransfer.nixl import NixlBackend
from kvtransfer.nixl_library import NixlAgent, backend_params, load_library, net_devices, set_environment
from kvtransfer.nixl_peer import GIVE_UP_S, GRANT_TIMEOUT_S, MAX_PARTS_IN_FLIGHT, Grant, Message, NixlDescription, Part, Peer
from kvtransfer.settings import TransferOptions

REPOSITORY = Path(__file__).parents[2]


# ---- the library -------------------------------------------------------------------------------------------------------------


def test_a_missing_library_is_one_sentence_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_library, "VARIANTS", ("nixl_of_nobody", "nixl_of_no_one"))
    with pytest.raises(StartupError, match=r"nixl: NIXL is not installed: pip install nixl-cu12 \(CUDA 13: nixl-cu13\)"):
        NixlBackend(TransferOptions())


@pytest.mark.parametrize(
    ("variant", "body", "sentence"),
    [
        ("nixl_a", "raise ImportError('libcudart.so.13: cannot open shared object file')", "cannot be loaded: libcudart.so.13: cannot open"),
        ("nixl_b", "import a_module_that_is_not_there", "is broken: No module named 'a_module_that_is_not_there'"),
    ],
)
def test_a_library_that_cannot_be_loaded_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variant: str, body: str, sentence: str
) -> None:
    package = tmp_path / variant
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_bindings.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(nixl_library, "VARIANTS", ("nixl_of_nobody", variant))
    with pytest.raises(StartupError, match=f"transfer backend nixl: {variant} {sentence}"):
        load_library()


def test_the_users_environment_stays_and_the_rest_gets_our_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*nixl_library.ENVIRONMENT, "UCX_NET_DEVICES"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("UCX_KEEPALIVE_INTERVAL", "7s")
    set_environment(TransferOptions(host="0.0.0.0"))
    assert os.environ["UCX_KEEPALIVE_INTERVAL"] == "7s"
    assert os.environ["UCX_LOG_FILE"] == "stderr"
    assert "UCX_NET_DEVICES" not in os.environ
    set_environment(TransferOptions(ib_device="mlx5_0,mlx5_1:2"))
    assert os.environ["UCX_NET_DEVICES"] == "mlx5_0:1,mlx5_1:2"
    set_environment(TransferOptions(ib_device="mlx5_7"))
    assert os.environ["UCX_NET_DEVICES"] == "mlx5_0:1,mlx5_1:2"


def test_a_node_on_loopback_listens_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "")
    monkeypatch.delenv("UCX_NET_DEVICES")
    set_environment(TransferOptions(host="127.0.0.1"))
    assert os.environ["UCX_NET_DEVICES"] == "lo"


def test_options_become_parameters() -> None:
    assert net_devices("mlx5_0") == "mlx5_0:1"
    assert net_devices("mlx5_0, mlx5_3:2") == "mlx5_0:1,mlx5_3:2"
    assert backend_params(TransferOptions()) == {}
    assert backend_params(TransferOptions(lanes=3))["num_threads"] == "3"


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    return subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, env=environment)


def test_a_process_with_an_agent_ends_with_its_own_code() -> None:
    """Two libnl in one process crashed at its end."""
    ended = run_python(
        "import sys; from kvtransfer.nixl import NixlBackend; from kvtransfer.settings import TransferOptions;"
        "backend = NixlBackend(TransferOptions()); sys.exit(5)"
    )
    assert (ended.returncode, ended.stdout) == (5, ""), ended.stderr


def test_a_device_that_does_not_exist_is_named_in_one_sentence() -> None:
    """The device reached UCX: it is UCX that does not find it, and says so on stderr alone."""
    ended = run_python(
        "import sys; from common.errors import StartupError; from kvtransfer.nixl import NixlBackend;"
        "from kvtransfer.settings import TransferOptions\n"
        "try: NixlBackend(TransferOptions(ib_device='no_such_card'))\n"
        "except StartupError as error: print(error); sys.exit(2)"
    )
    assert ended.returncode == 2, ended.stderr
    assert len(ended.stdout.splitlines()) == 1
    assert "UCX does not start" in ended.stdout
    assert "UCX_NET_DEVICES=no_such_card:1, UCX_TLS=(unset)" in ended.stdout
    assert "'no_such_card:1' is not available" in ended.stderr


def test_a_gpus_memory_is_named_as_such_and_refused_where_there_is_none() -> None:
    agent = NixlAgent(TransferOptions())
    library = load_library()
    assert agent._place("cpu") == (library.DRAM_SEG, 0)
    assert agent._place("cuda:3") == (library.VRAM_SEG, 3)
    memory = np.zeros((4, 4096), np.uint8)
    with pytest.raises(StartupError, match="cannot register 16384 bytes of cuda:0 memory"):
        agent.register(Region(memory.ctypes.data, 4, 4096, "cuda:0", memory))
    agent.close()


# ---- two nodes ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def node() -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(lanes: int = 1) -> Node:
        made.append(Node(f"node-{len(made)}", NixlBackend(TransferOptions(lanes=lanes)), 512, 4096))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def victim() -> Iterator[ProcessVictim]:
    made = ProcessVictim("nixl", "victim", 512, 4096)
    yield made
    made.stop()


def test_the_description_has_no_keys(node: Callable[..., Node]) -> None:
    here = node()
    described = msgspec.json.decode(here.description, type=NixlDescription)
    keys = here.backend._agent.memory_keys()
    assert len(keys) > len(described.agent)
    assert keys not in described.contact
    assert described.process == this_process()


def test_several_lanes_share_a_large_request(node: Callable[..., Node]) -> None:
    here, there = node(lanes=2), node(lanes=2)
    here.fill(1)
    here.meet(there)
    there.meet(here)
    order = np.random.default_rng(2).permutation(512)
    assert here.wait(here.post("WRITE", there.peer, range(512), order)) == [None]
    assert (there.pool[order] == here.pool).all()


def test_a_large_post_goes_in_bounded_parts(node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "MAX_PART_NBYTES", 10 * 4096)
    here, there = node(), node()
    sizes = []
    post = here.backend._agent.post
    monkeypatch.setattr(here.backend._agent, "post", lambda op, agent, local, *rest: sizes.append(len(local)) or post(op, agent, local, *rest))
    here.fill(1)
    here.meet(there)
    there.meet(here)
    assert here.wait(here.post("WRITE", there.peer, range(95), range(95))) == [None]
    assert sizes == [10] * 9 + [5]
    assert (there.pool[:95] == here.pool[:95]).all()


def test_a_living_peers_fence_passes_when_it_says_so(node: Callable[..., Node], victim: ProcessVictim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "SAME_HOST_FENCE_S", 60.0)
    here = node()
    here.meet(victim)
    victim.meet(here)
    assert here.wait(here.post("WRITE", victim.peer, [0], [0])) == [None]
    here.part(victim.peer)


def test_a_stopped_peer_keeps_its_fence_closed_while_it_lives(
    node: Callable[..., Node], victim: ProcessVictim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "SAME_HOST_FENCE_S", 0.05)
    here = node()
    here.meet(victim)
    victim.meet(here)
    assert here.wait(here.post("WRITE", victim.peer, [0], [0])) == [None]
    victim.freeze()
    fence = here.backend.disconnect(victim.peer)
    until_s = time.monotonic() + 10 * nixl.SAME_HOST_FENCE_S  # what is shown is that time alone does not open it
    while time.monotonic() < until_s:
        assert not fence.passed()
        time.sleep(0.01)
    victim.kill()
    nixl_wait(fence.passed)


def nixl_wait(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


# ---- one peer, by its messages -----------------------------------------------------------------------------------------------


class FakeAgent:
    """NixlAgent's calls, noted; requests end as `outcomes` says."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sent: list[bytes] = []
        self.loaded: list[bytes] = []
        self.outcomes: dict[int, bool | TransferError] = {}
        self.released: list[int] = []
        self.unreachable = False
        self._next_request = 0

    def load(self, blob: bytes) -> None:
        self.loaded.append(blob)

    def forget(self, agent: str) -> None:
        self.loaded.clear()

    def notify(self, agent: str, message: bytes) -> None:
        if self.unreachable:
            raise TransferError("NIXL: NIXL_ERR_REMOTE_DISCONNECT")
        self.sent.append(message)

    def memory_keys(self) -> bytes:
        return b"keys of " + self.name.encode()

    def post(self, *arguments: object) -> int:
        self._next_request += 1
        self.outcomes[self._next_request] = False
        return self._next_request

    def is_done(self, request: int) -> bool:
        outcome = self.outcomes[request]
        if isinstance(outcome, TransferError):
            raise outcome
        return outcome

    def release(self, request: int) -> None:
        self.released.append(request)


class Side:
    """One end of a pair, without a library."""

    def __init__(self, name: str, secret: bytes, other: str, other_secret: bytes) -> None:
        self.agent = FakeAgent(name)
        self.ended: dict[Ticket, TransferError | None] = {}
        process = msgspec.structs.replace(this_process(), boot_id="another host")
        theirs = NixlDescription(
            num_pages=8,
            page_nbytes=64,
            agent=other,
            contact=b"contact of " + other.encode(),
            secret=other_secret,
            base=0,
            device="cpu",
            process=process,
        )
        self.peer = Peer(self.agent, secret, theirs, self._part_done)  # type: ignore[arg-type]

    def _part_done(self, ticket: Ticket, error: TransferError | None) -> None:
        assert ticket not in self.ended
        self.ended[ticket] = error

    def submit(self, ticket: int) -> None:
        self.peer.submit(Part("WRITE", Ticket(ticket), np.zeros(1, np.int32), np.zeros(1, np.int32)))

    def hear_from(self, other: "Side", now_s: float) -> list[tuple[str, int]]:
        """What `other` has said since."""
        messages, other.agent.sent = other.agent.sent, []
        heard = [self.peer.hear(message, now_s) for message in messages]
        return [(message.kind, message.grant) for message in heard if message is not None]


@pytest.fixture
def writer() -> Side:
    side = Side("w", b"secret of w", "r", b"secret of r")
    side.peer.connected_as = PeerId("r")
    return side


@pytest.fixture
def receiver() -> Side:
    return Side("r", b"secret of r", "w", b"secret of w")


def granted(writer: Side, receiver: Side, number: int = 1, now_s: float = 0.0) -> None:
    receiver.peer.given, receiver.peer.has_told = Grant(number), False
    receiver.peer.step(now_s)
    writer.hear_from(receiver, now_s)


def test_nothing_is_posted_before_the_grant(writer: Side, receiver: Side) -> None:
    writer.submit(1)
    writer.peer.step(0.0)
    assert writer.agent.outcomes == {}
    assert receiver.hear_from(writer, 0.0) == [("ASK", 0)]
    granted(writer, receiver)
    writer.peer.step(0.0)
    assert writer.agent.loaded == [b"contact of r", b"keys of r"]
    writer.agent.outcomes[1] = True
    writer.peer.step(0.1)
    assert writer.ended == {1: None}
    assert writer.agent.released == [1]


def test_without_a_grant_the_queue_fails_in_time_and_asks_again(writer: Side, receiver: Side) -> None:
    writer.submit(1)
    writer.peer.step(0.0)
    writer.peer.step(0.9 * GRANT_TIMEOUT_S)
    assert writer.ended == {}
    writer.peer.step(GRANT_TIMEOUT_S)
    assert "has not accepted this node" in str(writer.ended[Ticket(1)])
    writer.peer.step(GRANT_TIMEOUT_S)
    assert receiver.hear_from(writer, 0.0) == [("ASK", 0), ("ASK", 0)]


def test_a_peer_has_so_many_requests_at_a_time(writer: Side, receiver: Side) -> None:
    granted(writer, receiver)
    for ticket in range(10):
        writer.submit(ticket)
    writer.peer.step(0.0)
    assert len(writer.agent.outcomes) == MAX_PARTS_IN_FLIGHT


def test_strangers_and_echoes_are_not_heard(writer: Side, receiver: Side) -> None:
    stranger = Side("r", b"a guess", "w", b"secret of w")
    stranger.peer.given = Grant(1)
    stranger.peer.step(0.0)
    assert writer.hear_from(stranger, 0.0) == []
    writer.peer.step(0.0)
    assert writer.agent.sent
    assert writer.hear_from(writer, 0.0) == []
    assert writer.peer.hear(b"", 0.0) is None
    assert writer.agent.loaded == [b"contact of r"]


def test_a_revoked_grant_drains_then_says_over(writer: Side, receiver: Side) -> None:
    granted(writer, receiver)
    for ticket in range(MAX_PARTS_IN_FLIGHT + 1):
        writer.submit(ticket)
    writer.peer.step(0.0)
    writer.agent.sent.clear()
    receiver.peer.part_with(1.0)
    assert writer.hear_from(receiver, 1.0) == [("REVOKE", 1)]
    writer.peer.step(1.0)
    assert receiver.hear_from(writer, 1.0) == []
    for request in writer.agent.outcomes:
        writer.agent.outcomes[request] = True
    writer.peer.step(2.0)
    assert receiver.hear_from(writer, 2.0) == [("OVER", 1)]
    assert "has disconnected this node" in str(writer.ended[Ticket(MAX_PARTS_IN_FLIGHT)])
    assert [writer.ended[Ticket(ticket)] for ticket in range(MAX_PARTS_IN_FLIGHT)] == [None] * MAX_PARTS_IN_FLIGHT


def test_a_grant_that_was_overtaken_by_its_revocation_is_ignored(writer: Side, receiver: Side) -> None:
    receiver.peer.given = Grant(1)
    receiver.peer.step(0.0)
    (grant,) = receiver.agent.sent
    receiver.agent.sent = []
    receiver.peer.part_with(0.0)
    assert writer.hear_from(receiver, 0.0) == [("REVOKE", 1)]
    writer.peer.hear(grant, 0.0)
    writer.submit(1)
    writer.peer.step(0.0)
    assert writer.agent.outcomes == {}
    granted(writer, receiver, number=2)
    writer.peer.step(0.0)
    assert len(writer.agent.outcomes) == 1


def test_a_grant_from_before_the_disconnect_is_not_taken_again(writer: Side, receiver: Side) -> None:
    """It is told twice, and its second copy arrives when the pair meets again: the revocation that follows must not hit the new meeting."""
    receiver.peer.given = Grant(1)
    receiver.peer.step(0.0)
    (grant,) = receiver.agent.sent
    writer.hear_from(receiver, 0.0)
    writer.peer.part_with(0.0)
    writer.agent.sent.clear()
    writer.peer.connected_as = PeerId("r")
    writer.submit(1)
    writer.peer.step(1.0)
    assert receiver.hear_from(writer, 1.0) == [("ASK", 1)]
    writer.peer.hear(grant, 1.0)
    receiver.peer.part_with(1.0)
    writer.hear_from(receiver, 1.0)
    writer.peer.step(1.0)
    assert (writer.agent.outcomes, writer.ended) == ({}, {})
    granted(writer, receiver, number=2, now_s=1.0)
    writer.peer.step(1.0)
    assert len(writer.agent.outcomes) == 1


def test_disconnect_completes_tickets_at_once_and_awaits_their_requests(writer: Side, receiver: Side) -> None:
    granted(writer, receiver)
    writer.submit(1)
    writer.peer.step(0.0)
    writer.agent.sent.clear()
    writer.peer.part_with(0.0)
    assert "disconnected from r" in str(writer.ended[Ticket(1)])
    assert (writer.agent.released, writer.peer.has_outstanding) == ([], True)
    writer.agent.outcomes[1] = True
    writer.peer.step(0.0)
    assert (writer.agent.released, writer.peer.has_outstanding) == ([1], False)
    assert receiver.hear_from(writer, 0.0) == [("OVER", 1)]
    assert writer.agent.loaded == [], "nobody wants the connection any more"


def test_a_peer_that_has_left_is_told_nothing(receiver: Side) -> None:
    receiver.peer.given = Grant(1)
    receiver.peer.step(0.0)
    receiver.peer.given.over = True
    receiver.agent.sent.clear()
    receiver.peer.part_with(0.0)
    assert receiver.agent.sent == []


def test_a_request_that_never_ends_is_given_up_and_nothing_is_promised(writer: Side, receiver: Side) -> None:
    granted(writer, receiver)
    writer.submit(1)
    writer.peer.step(0.0)
    writer.agent.sent.clear()
    writer.peer.part_with(0.0)
    writer.peer.step(0.9 * GIVE_UP_S)
    assert writer.agent.released == []
    writer.peer.step(GIVE_UP_S)
    assert writer.agent.released == [1]
    assert receiver.hear_from(writer, 0.0) == []


def test_a_failed_request_is_reported_late_and_makes_a_new_connection(writer: Side, receiver: Side) -> None:
    granted(writer, receiver)
    writer.submit(1)
    writer.submit(2)
    writer.peer.step(0.0)
    writer.agent.outcomes |= {1: TransferError("NIXL: NIXL_ERR_REMOTE_DISCONNECT"), 2: True}
    writer.peer.step(0.0)
    writer.submit(3)
    writer.peer.step(0.9 * nixl_peer.ERROR_HOLD_S)
    assert writer.ended == {2: None}
    now_s = nixl_peer.ERROR_HOLD_S
    writer.peer.step(now_s)
    assert "peer r: NIXL: NIXL_ERR_REMOTE_DISCONNECT" in str(writer.ended[Ticket(1)])
    now_s += nixl_peer.RECONNECT_MIN_S
    writer.peer.step(now_s)
    assert receiver.hear_from(writer, now_s) == [("ASK", 0)]
    granted(writer, receiver, now_s=now_s)
    writer.peer.step(now_s)
    assert sorted(writer.agent.outcomes) == [1, 2, 3], "what was not posted yet goes over the new connection"
    writer.agent.outcomes[3] = True
    writer.peer.step(now_s)
    writer.peer.part_with(now_s)
    assert receiver.hear_from(writer, now_s) == [], "after a failure nobody can say that nothing lands any more"


def test_an_unreachable_peer_is_called_less_and_less_often(writer: Side) -> None:
    writer.agent.unreachable = True
    calls = []
    now_s = 0.0
    while now_s < 60.0:
        writer.peer.step(now_s)
        if writer.agent.loaded:
            calls.append(now_s)
        writer.peer.step(now_s)
        now_s += 0.25
    pauses = np.diff(calls)
    assert (pauses[1:] >= pauses[:-1]).all()
    assert pauses[0] == pytest.approx(nixl_peer.RECONNECT_MIN_S, abs=0.25)
    assert pauses[-1] == pytest.approx(nixl_peer.RECONNECT_MAX_S, abs=0.25)


def test_messages_survive_their_encoding() -> None:
    message = Message("GRANT", 7, b"\0keys")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Message) == message
