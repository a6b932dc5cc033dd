"""What is particular to the nixl backend; the contract itself is test_conformance.py's."""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

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


def test_a_library_of_another_version_is_named_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "nixl_c"
    package.mkdir()
    (package / "__init__.py").touch()
    there = load_library()
    lines = [f"{name} = 0" for name in nixl_library.NEEDED[""] if name != "VRAM_SEG"]
    lines += [f"class nixlAgentConfig: {' = '.join(nixl_library.NEEDED['nixlAgentConfig'])} = 0", "class nixlAgent: pass"]
    (package / "_bindings.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(nixl_library, "VARIANTS", ("nixl_c",))
    sentence = r"nixl_c is not of a version .* it lacks VRAM_SEG, nixlAgent\.createBackend, .*; pip install 'nixl-c>=1\.5'"
    with pytest.raises(StartupError, match=sentence):
        NixlBackend(TransferOptions())
    assert nixl_library.missing_names(there) == []


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
        self.refuses = False  # to release and to forget
        self.inbox: list[tuple[str, bytes]] = []
        self._next_request = 0

    def load(self, blob: bytes) -> None:
        self.loaded.append(blob)

    def forget(self, agent: str) -> None:
        self.loaded.clear()
        if self.refuses:
            raise TransferError("NIXL: NIXL_ERR_NOT_FOUND")

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
        if self.refuses:
            raise TransferError("NIXL: NIXL_ERR_REPOST_ACTIVE")

    def register(self, region: Region) -> None:
        pass

    def contact(self) -> bytes:
        return b"contact of " + self.name.encode()

    def messages(self) -> list[tuple[str, bytes]]:
        inbox, self.inbox = self.inbox, []
        return inbox

    def close(self) -> None:
        pass


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
    assert receiver.hear_from(writer, 2.0) == [("OVER", 1), ("ASK", 1)], "it asks, as pages were waiting"
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
    assert (writer.agent.released, len(writer.peer.outstanding)) == ([], 1)
    writer.agent.outcomes[1] = True
    writer.peer.step(0.0)
    assert (writer.agent.released, len(writer.peer.outstanding)) == ([1], 0)
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
    assert receiver.hear_from(writer, now_s) == [("ASK", 1)]
    granted(writer, receiver, number=2, now_s=now_s)
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


def test_a_request_that_is_given_up_completes_its_ticket(writer: Side, receiver: Side) -> None:
    """Also when nobody has disconnected: the grant was revoked, or another request has failed."""
    granted(writer, receiver)
    writer.submit(1)
    writer.peer.step(0.0)
    receiver.peer.part_with(0.0)
    writer.hear_from(receiver, 0.0)
    writer.peer.step(0.9 * GIVE_UP_S)
    assert writer.ended == {}
    writer.peer.step(GIVE_UP_S)
    assert "did not end within 30 s" in str(writer.ended[Ticket(1)])


def test_a_library_that_refuses_to_release_or_forget_holds_nothing_up(writer: Side, receiver: Side) -> None:
    granted(writer, receiver)
    writer.submit(1)
    writer.submit(2)
    writer.peer.step(0.0)
    writer.agent.refuses = True
    writer.agent.outcomes[1] = TransferError("NIXL: NIXL_ERR_BACKEND")
    writer.peer.step(0.0)
    writer.peer.step(GIVE_UP_S)
    assert sorted(writer.ended) == [1, 2]
    assert None not in writer.ended.values()
    writer.peer.step(GIVE_UP_S)
    granted(writer, receiver, number=2, now_s=GIVE_UP_S)
    writer.submit(3)
    writer.peer.step(GIVE_UP_S)
    assert writer.agent.outcomes[3] is False


def test_the_answer_to_a_lost_question_is_asked_for_again(writer: Side, receiver: Side) -> None:
    writer.submit(1)
    writer.peer.step(0.0)
    writer.agent.sent.clear()  # lost
    writer.peer.step(0.9 * nixl_peer.ASK_AGAIN_S)
    assert writer.agent.sent == []
    writer.peer.step(nixl_peer.ASK_AGAIN_S)
    assert receiver.hear_from(writer, 0.0) == [("ASK", 0)]


def test_a_peer_that_was_shut_out_asks_when_there_is_something_to_write(writer: Side, receiver: Side) -> None:
    """Its new grant came while it was still ending the former one, and was dropped."""
    granted(writer, receiver)
    writer.submit(1)
    writer.peer.step(0.0)
    receiver.peer.part_with(0.0)
    writer.hear_from(receiver, 0.0)
    granted(writer, receiver, number=2)
    writer.agent.outcomes[1] = True
    writer.peer.step(0.1)
    writer.agent.sent.clear()
    writer.submit(2)
    writer.peer.step(0.2)
    assert "has disconnected this node" in str(writer.ended[Ticket(2)])
    assert receiver.hear_from(writer, 0.2) == [("ASK", 1)]
    granted(writer, receiver, number=2, now_s=0.2)
    writer.submit(3)
    writer.peer.step(0.2)
    assert len(writer.agent.outcomes) == 2


def test_over_is_said_of_nothing_while_an_earlier_grant_is_in_use(writer: Side, receiver: Side) -> None:
    """The grant that is revoked never came; what is written under the former one would land after the fence."""
    granted(writer, receiver)
    writer.submit(1)
    writer.peer.step(0.0)
    writer.agent.sent.clear()
    receiver.peer.given = Grant(2)
    receiver.peer.part_with(0.0)
    assert writer.hear_from(receiver, 0.0) == [("REVOKE", 2)]
    assert writer.agent.sent == []
    writer.agent.outcomes[1] = True
    writer.peer.step(0.0)
    assert receiver.hear_from(writer, 0.0) == [("OVER", 2)]


def test_what_is_over_is_not_taken_again(writer: Side, receiver: Side) -> None:
    """The connection broke, nothing had failed: OVER was said, and a second copy of the grant comes late."""
    granted(writer, receiver)
    writer.peer.given = Grant(7)
    writer.agent.unreachable = True
    writer.peer.step(0.0)
    writer.agent.unreachable = False
    writer.peer.step(0.0)
    granted(writer, receiver)
    writer.submit(1)
    writer.peer.step(0.0)
    assert writer.agent.outcomes == {}
    granted(writer, receiver, number=2)
    writer.peer.step(0.0)
    assert len(writer.agent.outcomes) == 1


def test_a_peer_that_has_failed_is_remembered_until_nothing_of_it_can_land(writer: Side, receiver: Side) -> None:
    granted(writer, receiver)
    writer.submit(1)
    writer.peer.step(0.0)
    writer.agent.outcomes[1] = TransferError("NIXL: NIXL_ERR_REMOTE_DISCONNECT")
    writer.peer.step(0.0)
    writer.peer.part_with(0.0)
    writer.peer.step(1.0)
    assert not writer.peer.is_moving
    assert not writer.peer.may_be_forgotten(0.9 * nixl_peer.REMEMBER_S)
    assert writer.peer.may_be_forgotten(nixl_peer.REMEMBER_S)
    assert nixl_peer.REMEMBER_S >= nixl.FENCE_DELAY_S


def test_a_new_meeting_has_the_whole_time_for_its_grant(writer: Side) -> None:
    writer.submit(1)
    writer.peer.step(0.0)
    writer.peer.part_with(1.0)
    writer.peer.connected_as = PeerId("r")
    writer.submit(2)
    writer.peer.step(GRANT_TIMEOUT_S)
    assert sorted(writer.ended) == [1]


def test_a_new_meeting_does_not_wait_out_the_pause_of_the_former_one(writer: Side) -> None:
    writer.agent.unreachable = True
    now_s = 0.0
    while now_s < 60.0:
        writer.peer.step(now_s)
        now_s += 0.25
    writer.agent.unreachable = False
    writer.peer.part_with(now_s)
    writer.peer.connected_as = PeerId("r")
    writer.peer.meet(now_s)
    writer.peer.step(now_s + nixl_peer.RECONNECT_MIN_S)
    assert len(writer.agent.sent) == 1


# ---- the backend's thread, turn by turn --------------------------------------------------------------------------------------


class Turns:
    """A backend over a FakeAgent; its thread is not started, its turns are taken here, on a clock of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.agent = FakeAgent("here")
        monkeypatch.setattr(nixl, "NixlAgent", lambda options: self.agent)
        monkeypatch.setattr(nixl, "time", SimpleNamespace(monotonic=lambda: self.now_s, sleep=time.sleep))
        self.now_s = 100.0
        self.pause_s = nixl.IDLE_S
        self.backend = NixlBackend(TransferOptions())
        monkeypatch.setattr(self.backend, "_thread", NoThread())
        memory = np.zeros((8, 64), np.uint8)
        self.backend.register(Region(memory.ctypes.data, 8, 64, "cpu", memory))

    def turn(self, *, woken: bool = False) -> float:
        if not woken:
            self.now_s += self.pause_s
        self.pause_s = self.backend._turn(self.now_s, self.pause_s, woken)
        return self.pause_s

    def pauses(self, duration_s: float) -> list[float]:
        until_s = self.now_s + duration_s
        pauses = []
        while self.now_s < until_s:
            pauses.append(self.turn())
        return pauses

    def describe(self, name: str, **process: object) -> bytes:
        described = msgspec.json.decode(self.backend.describe(), type=NixlDescription)
        where = msgspec.structs.replace(described.process, **({"boot_id": "another host"} | process))
        return msgspec.json.encode(msgspec.structs.replace(described, agent=name, contact=b"contact of " + name.encode(), process=where))


class NoThread:
    def start(self) -> None:
        pass

    def is_alive(self) -> bool:
        return False


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Turns]:
    monkeypatch.setattr(nixl, "CLOSE_TIMEOUT_S", -1.0)
    made = Turns(monkeypatch)
    yield made
    made.backend.close()


def test_waiting_for_a_peer_that_does_not_answer_costs_less_and_less(turns: Turns) -> None:
    turns.backend.connect(PeerId("a"), turns.describe("a"))
    assert turns.turn(woken=True) == nixl.GREET_S
    pauses = turns.pauses(10.0)
    assert (np.diff(pauses) >= 0).all()
    assert (pauses[-1], len(pauses) < 250) == (nixl.IDLE_S, True)
    turns.agent.inbox = [("a", b"anything")]
    assert turns.turn() == nixl.GREET_S


def test_a_fence_that_somebody_holds_for_long_costs_no_more_than_idling(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "is_here", lambda process: False)
    turns.backend.accept(PeerId("a"), turns.describe("a"))
    turns.turn(woken=True)
    fence = turns.backend.disconnect(PeerId("a"))
    assert turns.turn(woken=True) == nixl.GREET_S
    assert turns.pauses(nixl.FENCE_DELAY_S)[-1] == nixl.IDLE_S
    assert len(turns.backend._revocations) == 1
    assert fence.passed()
    turns.turn()
    assert len(turns.backend._revocations) == 0, "a fence that has passed is let go, whoever still holds it"
    assert fence.passed()


def test_a_fence_that_nobody_holds_is_let_go_though_its_peer_could_not_be_told(turns: Turns) -> None:
    """The error that the message ended in held the frames of its callers, and they the fence, until a garbage collection that a node puts off."""
    gc.disable()
    try:
        turns.backend.accept(PeerId("a"), turns.describe("a"))
        turns.turn(woken=True)
        turns.agent.unreachable = True
        fence = turns.backend.disconnect(PeerId("a"))
        assert not fence.passed()
        del fence
        assert len(turns.backend._revocations) == 0
    finally:
        gc.enable()


def test_a_process_that_has_ended_is_not_waited_for(turns: Turns) -> None:
    here = this_process()
    turns.backend.connect(PeerId("a"), turns.describe("a", boot_id=here.boot_id, start_ticks=here.start_ticks - 1))
    turns.turn(woken=True)
    assert turns.turn() == nixl.IDLE_S
    ticket = turns.backend.post("WRITE", PeerId("a"), np.zeros(1, np.int32), np.zeros(1, np.int32))
    turns.turn(woken=True)
    (done,) = turns.backend.poll()
    assert done.ticket == ticket
    assert "its process has ended" in str(done.error)


def test_one_peers_trouble_is_not_the_others_and_ends_no_thread(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        turns.backend.connect(PeerId(name), turns.describe(name))
    with monkeypatch.context() as patch:
        patch.setattr(turns.backend._peers["a"], "step", raise_runtime_error)
        turns.turn(woken=True)
    assert turns.agent.loaded == [b"contact of b"]
    turns.pauses(nixl.FAILED_STEP_PAUSE_S + nixl.IDLE_S)
    assert b"contact of a" in turns.agent.loaded


def test_a_failed_turn_is_followed_by_another(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns.agent, "messages", raise_runtime_error)
    assert turns.turn() == nixl.FAILED_STEP_PAUSE_S
    monkeypatch.setattr(turns.agent, "messages", list)
    assert turns.turn() == nixl.IDLE_S


def raise_runtime_error(*arguments: object) -> None:
    raise RuntimeError("a fault of ours")


def test_a_peers_word_counts_for_its_own_grants_alone(turns: Turns) -> None:
    for name in "ab":
        turns.backend.accept(PeerId(name), turns.describe(name))
    turns.turn(woken=True)
    peer = turns.backend._peers["b"]
    fences = [turns.backend.disconnect(PeerId(name)) for name in "ab"]
    body = msgspec.msgpack.encode(Message("OVER", 2))
    turns.agent.inbox = [("b", peer._mac("b", body) + body)]
    turns.turn(woken=True)
    assert [fence.passed() for fence in fences] == [False, True]


def test_a_grant_of_the_former_meeting_is_known_as_such(turns: Turns) -> None:
    """Its second copy comes late, and its revocation after that."""
    turns.backend.connect(PeerId("a"), turns.describe("a"))
    grant = msgspec.msgpack.encode(Message("GRANT", 3, b"keys"))
    copy = ("a", turns.backend._peers["a"]._mac("a", grant) + grant)
    turns.agent.inbox = [copy]
    turns.turn(woken=True)
    turns.backend.disconnect(PeerId("a"))
    turns.pauses(1.0)
    turns.backend.connect(PeerId("a"), turns.describe("a"))
    turns.agent.inbox = [copy]
    turns.turn(woken=True)
    turns.backend.post("WRITE", PeerId("a"), np.zeros(1, np.int32), np.zeros(1, np.int32))
    turns.turn(woken=True)
    assert turns.agent.outcomes == {}
    turns.backend.disconnect(PeerId("a"))
    turns.pauses(nixl_peer.REMEMBER_S + nixl.IDLE_S)
    assert turns.backend._peers == {}


def test_every_accept_is_told_also_to_a_peer_that_is_remembered(turns: Turns) -> None:
    turns.backend.accept(PeerId("a"), turns.describe("a"))
    turns.turn(woken=True)
    target = turns.backend._peers["a"]
    turns.backend.disconnect(PeerId("a"))
    turns.turn(woken=True)
    assert turns.backend._peers["a"] is target
    turns.agent.sent.clear()
    turns.backend.accept(PeerId("a"), turns.describe("a"))
    turns.turn(woken=True)
    assert [msgspec.msgpack.decode(sent[nixl_peer.MAC_NBYTES :])[:2] for sent in turns.agent.sent] == [["GRANT", 2]]


def test_an_error_of_the_binding_while_posting_is_the_tickets(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = NixlAgent(TransferOptions())
    memory = np.zeros((4, 4096), np.uint8)
    agent.register(Region(memory.ctypes.data, 4, 4096, "cpu", memory))
    monkeypatch.setattr(agent, "_descriptors", raise_runtime_error)
    with pytest.raises(TransferError, match="a fault of ours"):
        agent.post("WRITE", "nobody", np.zeros(1, np.int32), np.zeros(1, np.int32), 0, "cpu")
    agent.close()
