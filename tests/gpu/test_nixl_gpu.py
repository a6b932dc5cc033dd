"""NIXL between pools of two processes where at least one lies on a GPU: registration by device pointer, bytes, a killed peer.

Needs numpy, msgspec, torch with CUDA and a NIXL for its CUDA version. `-s` shows the speed of the large transfers.
"""

import hashlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtransfer.backend import PeerId, Region
from kvtransfer.nixl import NixlBackend
from kvtransfer.settings import TransferOptions

TIMEOUT_S = 60.0  # the first CUDA context and the first transfer take seconds
PLACES = [("cuda:0", "cuda:0"), ("cpu", "cuda:0"), ("cuda:0", "cpu")]  # writer, receiver


def node(commands: Connection, name: str, device: str, num_pages: int, page_nbytes: int) -> None:
    """A node in a process of its own: answers (method, *arguments) until its pipe is closed."""
    pool = torch.zeros((num_pages, page_nbytes), dtype=torch.uint8, device=device)
    backend = NixlBackend(TransferOptions())
    backend.register(Region(pool.data_ptr(), num_pages, page_nbytes, device, pool))

    def wait(num_tickets: int) -> list[str]:
        errors = []
        deadline_s = time.monotonic() + TIMEOUT_S
        while num_tickets:
            readable, _, _ = select.select([backend.completion_fd()], [], [], max(0.0, deadline_s - time.monotonic()))
            assert readable, f"{num_tickets} tickets did not complete in {TIMEOUT_S} s"
            done = backend.poll()
            num_tickets -= len(done)
            errors += [str(each.error) for each in done if each.error is not None]
        return errors

    class Commands:
        def describe(self) -> bytes:
            return backend.describe()

        def meet(self, peer: str, description: bytes) -> None:
            backend.accept(PeerId(peer), description)
            backend.connect(PeerId(peer), description)

        def write_after_kernel(self, peer: str, seed: int, local: list[int], remote: list[int]) -> tuple[list[str], str, float]:
            """The pool is filled by kernels of a stream of its own, and written once their event has happened: (errors, digest, seconds)."""
            contents = torch.from_numpy(np.random.default_rng(seed).integers(0, 128, (num_pages, page_nbytes), dtype=np.uint8))
            if device == "cpu":
                pool.copy_(contents).mul_(2).add_(1)
            else:
                staged = contents.to(device)
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    torch.mul(staged, 2, out=pool).add_(1)
                    happened = torch.cuda.Event()
                    happened.record()
                happened.synchronize()
            started_s = time.perf_counter()
            backend.post("WRITE", PeerId(peer), np.array(local, np.int32), np.array(remote, np.int32))
            errors = wait(1)
            took_s = time.perf_counter() - started_s
            return errors, self.digest(local), took_s

        def post_many(self, peer: str, times: int) -> int:
            pages = np.arange(num_pages, dtype=np.int32)
            for _ in range(times):
                backend.post("WRITE", PeerId(peer), pages, pages)
            return times

        def wait(self, num_tickets: int) -> list[str]:
            return wait(num_tickets)

        def disconnect(self, peer: str) -> None:
            fence = backend.disconnect(PeerId(peer))
            deadline_s = time.monotonic() + TIMEOUT_S
            while not fence.passed():
                assert time.monotonic() < deadline_s
                time.sleep(0.05)

        def digest(self, pages: list[int]) -> str:
            return hashlib.sha256(pool[torch.tensor(pages, device=device)].cpu().numpy().tobytes()).hexdigest()

    answers = Commands()
    commands.send(name)
    while True:
        try:
            method, *arguments = commands.recv()
        except EOFError:
            break
        commands.send(getattr(answers, method)(*arguments))
    backend.close()


class Child:
    """This file, run as a script in a process of its own."""

    def __init__(self, name: str, device: str, num_pages: int, page_nbytes: int) -> None:
        self.name = name
        self._pipe, theirs = Pipe()
        argv = [sys.executable, __file__, str(theirs.fileno()), name, device, str(num_pages), str(page_nbytes)]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        self.process = subprocess.Popen(argv, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self._answer()

    def ask(self, method: str, *arguments: object) -> object:
        self._pipe.send((method, *arguments))
        return self._answer()

    def _answer(self) -> object:
        assert self._pipe.poll(2 * TIMEOUT_S), f"{self.name} does not answer"
        return self._pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self._pipe.close()
        try:
            self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    made: list[Child] = []

    def make(device: str, num_pages: int, page_nbytes: int) -> Child:
        made.append(Child(f"node-{len(made)}", device, num_pages, page_nbytes))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def meet(one: Child, other: Child) -> None:
    for here, there in ((one, other), (other, one)):
        here.ask("meet", there.name, there.ask("describe"))


@pytest.mark.parametrize(("writer_device", "receiver_device"), PLACES)
def test_pages_written_after_an_event_arrive_whole(child: Callable[..., Child], writer_device: str, receiver_device: str) -> None:
    num_pages, page_nbytes = 8192, 16_384
    writer, receiver = child(writer_device, num_pages, page_nbytes), child(receiver_device, num_pages, page_nbytes)
    meet(writer, receiver)
    rng = np.random.default_rng(3)
    local, remote = (rng.permutation(num_pages)[:6000].tolist() for _ in range(2))
    others = sorted({*range(num_pages)} - {*remote})
    untouched = receiver.ask("digest", others)
    errors, written, _ = writer.ask("write_after_kernel", receiver.name, 1, local, remote)
    assert errors == []
    assert receiver.ask("digest", remote) == written
    assert receiver.ask("digest", others) == untouched


@pytest.mark.parametrize("layout", ["contiguous", "scattered"])
@pytest.mark.parametrize(("writer_device", "receiver_device"), PLACES)
def test_large_pages(child: Callable[..., Child], writer_device: str, receiver_device: str, layout: str) -> None:
    num_pages, page_nbytes = 1024, 360_448
    writer, receiver = child(writer_device, num_pages, page_nbytes), child(receiver_device, num_pages, page_nbytes)
    meet(writer, receiver)
    rng = np.random.default_rng(4)
    local, remote = ([*range(num_pages)] if layout == "contiguous" else rng.permutation(num_pages).tolist() for _ in range(2))
    for seed in range(3):
        errors, written, seconds = writer.ask("write_after_kernel", receiver.name, seed, local, remote)
        assert errors == []
        assert receiver.ask("digest", remote) == written
        print(f"{writer_device} -> {receiver_device}, {layout} (the first is cold): {num_pages * page_nbytes / seconds / 1e9:.1f} GB/s")


@pytest.mark.parametrize("receiver_device", ["cuda:0", "cpu"])
def test_a_killed_peer_fails_its_tickets_and_no_others(child: Callable[..., Child], receiver_device: str) -> None:
    num_pages, page_nbytes = 1024, 360_448
    writer = child("cuda:0", num_pages, page_nbytes)
    victim, other = child(receiver_device, num_pages, page_nbytes), child("cuda:0", num_pages, page_nbytes)
    meet(writer, victim)
    meet(writer, other)
    pages = [*range(num_pages)]
    errors, written, _ = writer.ask("write_after_kernel", victim.name, 1, pages, pages)
    assert (errors, victim.ask("digest", pages)) == ([], written)
    posted = writer.ask("post_many", victim.name, 100)
    victim.kill()
    assert writer.ask("wait", posted) != []
    writer.ask("disconnect", victim.name)
    errors, written, _ = writer.ask("write_after_kernel", other.name, 2, pages, pages)
    assert (errors, other.ask("digest", pages)) == ([], written)


if __name__ == "__main__":
    node(Connection(int(sys.argv[1])), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
