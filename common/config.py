"""Every setting of a process, as frozen dataclasses; the command line is generated from them (pdserve.py).

A field's metadata holds what `--help` prints: help text (with the reason for the default), unit, bounds and choices. Flags are
named as SGLang's or vLLM's where the meaning is the same. Torch-free: text processes and the router read it too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

T = TypeVar("T")

Role = Literal["prefill", "decode"]
Device = Literal["cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16"]
KVDType = Literal["auto", "float32", "bfloat16"]
Quantization = Literal["auto", "none", "int8", "int4", "fp8"]
AttentionName = Literal["auto", "torch", "numba", "triton", "flashinfer"]
PolicyName = Literal["cost", "cache_aware", "least_load", "power_of_two", "round_robin", "random"]
LogLevel = Literal["debug", "info", "warning", "error"]

MAX_PORT = 65535
MAX_PEER_TIMEOUT_S = 86400.0  # as Hello has it (kvtransfer/protocol.py)
MAX_TOKENS = 1 << 40  # beyond any pool: larger numbers are slips
MAX_SWAP_GIB = float(1 << 20)
PAGE_SIZES = tuple(1 << n for n in range(11))  # powers of two: positions split into page and offset by bits; 1024 is a sequence's worth


def flag(default: T, help: str, *, unit: str | None = None, name: str | None = None, choices: Sequence[object] | None = None,
         least: float | None = None, most: float | None = None) -> T:
    """A dataclass field with what the command line needs. `name`: flag name if not the field's; `least`, `most`: bounds of a
    number, both allowed. Typed as its default."""
    return field(default=default, metadata={"help": help, "unit": unit, "name": name, "choices": choices, "least": least, "most": most})


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Settings of every process that serves HTTP."""

    host: str = flag("127.0.0.1", "address to bind; loopback unless told otherwise")
    log_level: LogLevel = flag("info", "least severe level that is logged; info has one line a start, a stop and a failed request")
    max_body_bytes: int = flag(4 << 20, "larger request bodies are answered 413; 4 MiB holds a 1M-token prompt as text", unit="bytes", least=1)
    request_timeout_s: float = flag(600.0, "longest life of a request: its deadline when it brings none or a later one (header x-request-deadline, absolute unix seconds); ten minutes hold a long answer on a slow machine", unit="s", name="request-timeout", least=0.1)
    shutdown_timeout_s: float = flag(5.0, "how long running requests may go on after SIGTERM before they are failed with 503; 5 s end within the 10 s that supervisors grant", unit="s", name="shutdown-timeout", least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig(HttpConfig):
    """Settings of a prefill or decode node. Both nodes of a pair must agree on model, dtype, page size and context length."""

    role: Role = "decode"  # set by the sub-command
    port: int = flag(8200, "HTTP port; 0: any free one, reported when ready. Each process has its own default, so that all run on one machine", least=0, most=MAX_PORT)
    model: str = flag("demo", "directory of safetensors, hub id, .gguf file, or `demo` (the embedded SmolLM2-135M-Instruct)")
    served_model_name: str | None = flag(None, "name clients use in `model`; default: the value of --model as given")
    device: Device = flag("cpu", "where the model runs; cpu works everywhere, cuda has never been run")
    dtype: DType = flag("auto", "weights and activations; auto: the checkpoint's, float16 becoming bfloat16")
    kv_cache_dtype: KVDType = flag("auto", "KV pages; auto: as --dtype. Must be the same on both nodes of a pair")
    quantization: Quantization = flag("auto", "weights in fewer bits: int8, int4 on CPU, fp8 on CUDA; none: in --dtype. auto: as the checkpoint has them, in float8 where the GPU multiplies it; and int4 on a decode node on CPU for a .gguf in Q4_0 or Q4_1, which is as exact as bfloat16 and reads a third of the bytes a step. The nodes of a pair may differ")
    attention_backend: AttentionName = flag("auto", "auto: numba on CPU (reads KV pages in place), triton on CUDA. torch is the plain form that the others are tested against")
    page_size: int = flag(16, "KV page; smaller shares more prefix, larger means fewer descriptors", unit="tokens", choices=PAGE_SIZES)
    context_length: int | None = flag(None, "longest prompt + output together; default: the model's own limit, smaller saves page-table memory", unit="tokens", least=2)
    max_running_requests: int = flag(64, "rows of the decode batch, requests that hold pages; more wait in the queue. Bounds how slow one decode step gets", least=1, most=4096)
    max_queued_requests: int = flag(1024, "requests waiting beyond the running ones; more are answered 503 with Retry-After, since they would only wait for their deadline", least=0)
    max_total_tokens: int | None = flag(None, "size of the KV pool; default: from --mem-fraction-static", unit="tokens", least=1, most=MAX_TOKENS)
    mem_fraction_static: float = flag(0.25, "share of free memory for weights and KV pool when --max-total-tokens is not given; low on CPU, where nodes share one memory", unit="fraction", least=0.01, most=0.99)
    chunked_prefill_size: int | None = flag(None, "most prompt tokens in one extend batch; bounds how long decode steps wait behind it. Default: 512 on CPU, 8192 on CUDA, enough to keep either busy", unit="tokens", least=1)
    max_decode_delay_steps: int = flag(4, "extend batches in a row before running requests get a decode step; prefill goes first, decode never starves", unit="batches", least=1)
    disable_overlap_schedule: bool = flag(False, "plan a step only when the one before it was processed; default: plan it while the device works. The answers are the same")
    disable_cuda_graph: bool = flag(False, "launch the kernels of each decode step one by one; default: capture a graph for each batch size at start")
    cuda_graph_max_bs: int | None = flag(None, "largest decode batch that is captured as a CUDA graph; default: --max-running-requests", unit="rows", least=1)
    disable_radix_cache: bool = flag(False, "do not keep finished prompts and answers for reuse; default: keep them, it costs only pages nobody else wants")
    preemption_mode: Literal["auto", "recompute", "swap"] = flag("auto", "what becomes of the KV of a request that is retracted for want of pages: swap keeps a copy in host memory, recompute runs its tokens again; auto: what costs less")
    swap_space: float = flag(1.0, "host memory for the KV of retracted requests; beyond it they are recomputed", unit="GiB", least=0, most=MAX_SWAP_GIB)
    threads: int = flag(1, "compute threads of the scheduler process; 1 fits a core a node; matrix products and the attention of prompts use more", unit="threads", least=1, most=1024)
    transfer_backend: Literal["auto", "nixl", "mooncake", "shm", "tcp"] = flag("auto", "how KV pages travel from prefill to decode node; auto: the best that both nodes have, shm on one host, nixl or mooncake where there is RDMA, else tcp, which needs nothing installed")
    transfer_lanes: int = flag(1, "streams (tcp), copying threads (shm) or worker threads (nixl) a peer, one fills 10 Gbit/s; mooncake takes it for its streams when it is above 1", least=1, most=8)
    transfer_port: int = flag(0, "port that tcp, or mooncake's handshake, listens on for other nodes; under auto mooncake takes the next one. 0: any free one", least=0, most=MAX_PORT - 1)
    transfer_ib_device: str | None = flag(None, "RDMA devices for nixl and mooncake, such as mlx5_0,mlx5_1; default: the library's choice")
    mooncake_protocol: Literal["auto", "tcp", "rdma"] = flag("auto", "what mooncake moves pages over; auto: rdma where there is a device")
    kv_transfer_digest: bool = flag(False, "compare a checksum of every KV page that arrived with the sender's; a request whose pages differ is recomputed or failed. Off: RDMA and TCP have checksums of their own, and this reads every page twice")
    bootstrap_port: int = flag(8998, "port of a prefill node's control endpoint, where decode nodes make their offers; 8998 is SGLang's. 0: any free one", least=0, most=MAX_PORT)
    advertise_host: str | None = flag(None, "address at which peers reach this node's transfer endpoint; default: --host, or the address of the route to the peer when that is 0.0.0.0")
    peer_timeout_s: float = flag(3.0, "a peer silent for this long is lost: its requests end, its pages are fenced. Six heartbeats; a killed process is noticed at once", unit="s", name="peer-timeout", least=0.1, most=MAX_PEER_TIMEOUT_S)
    cluster_key_file: str | None = flag(None, "file with the cluster's key, the same on every node, readable by its owner only: `(umask 077; openssl rand -hex 32 > FILE)`. Control connections between nodes are authenticated and encrypted with it (CURVE), nodes without it are refused; KV pages are not encrypted")
    allow_unauthenticated: bool = flag(False, "bind an address other than loopback without --cluster-key-file; everybody who reaches it can then make offers and write KV pages")
    kv_events_port: int | None = flag(None, "port on which stored and removed KV pages are published for routers (ZMQ, messages as SGLang's and vLLM's), on --host; whoever reaches it can read prompts. 0: any free one; default: nothing is published", least=0, most=MAX_PORT)
    otlp_traces_endpoint: str | None = flag(None, "URL that spans are sent to (OTLP over HTTP), such as http://collector:4318/v1/traces; needs the otel extra")
    offer_timeout_s: float = flag(30.0, "how long a prefill node keeps a decode node's offer whose request has not come; both legs of a request are sent at once", unit="s", name="offer-timeout", least=0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(HttpConfig):
    """Settings of the router."""

    port: int = flag(8000, "HTTP port; 0: any free one, reported when ready. Each process has its own default, so that all run on one machine", least=0, most=MAX_PORT)
    prefill: tuple[str, ...] = flag((), "URL of a prefill node, or URL,BOOTSTRAP_PORT (default 8998); repeatable")
    decode: tuple[str, ...] = flag((), "URL of a decode node; repeatable")
    engine: Literal["auto", "pdserve", "sglang", "vllm"] = flag("auto", "what the nodes run; auto: asked of each node (/server_info, /version). Nodes of different engines never pair")
    kv_connector: Literal["auto", "nixl", "mooncake"] = flag("auto", "KV connector of vLLM nodes, which decides how the two legs are told of each other; auto: nixl")
    policy: PolicyName = flag("cost", "how nodes are picked: cost (prefill: least to compute there, queue and prompt, by measured rate and what its cache holds; decode: most room), cache_aware (longest known prefix unless load is uneven), least_load, power_of_two, round_robin, random")
    prefill_policy: PolicyName | None = flag(None, "policy for prefill nodes; default: --policy")
    decode_policy: PolicyName | None = flag(None, "policy for decode nodes; default: --policy (cache_aware there is cost)")
    prefix_index_size: int = flag(1 << 16, "blocks of prompts that are remembered with the nodes that computed them, oldest forgotten first; a prompt of 4 KiB has 16, one of 64 KiB has 40, and a million blocks take 150 MB", unit="blocks", least=1024, most=1 << 26)
    kv_events: bool = flag(False, "know what nodes cache from their own KV events instead of from what was sent to them; needs --tokenizer-path, and nodes that publish (--kv-events-port; of vLLM and SGLang on 5557). With `up` the nodes do, and the tokenizer is theirs")
    tokenizer_path: str | None = flag(None, "directory with the model's tokenizer and chat template, for --kv-events")
    disaggregation: Literal["require", "prefer", "never"] = flag("require", "where prompts are computed: require: always on a prefill node, 503 without one; prefer: on the decode node when little of the prompt is uncached there or no prefill node is usable; never: always on the decode node. The answer says which")
    min_uncached_tokens: int = flag(64, "with prefer: prompts with fewer uncached tokens are computed on the decode node; 0: only when there is no prefill node", unit="tokens", least=0, most=MAX_TOKENS)
    max_retries: int = flag(1, "other pairs tried before the first byte of an answer; each with a new room", least=0, most=16)
    max_concurrent_requests: int = flag(4096, "requests under way at once, each with three sockets and its body in memory; more wait in the queue. Four decode nodes' rows and queues", least=1)
    queue_size: int = flag(100, "requests that wait for their turn, by `priority`; more are answered 429 with Retry-After", least=0, most=1 << 20)
    queue_timeout_s: float = flag(30.0, "longest wait in the queue; then 503 with Retry-After", unit="s", name="queue-timeout", least=0)
    rate_limit: float = flag(0.0, "requests a second that are taken altogether, with bursts of one second's worth; more are answered 429 with Retry-After. 0: no limit", unit="requests/s", name="rate-limit-requests-per-second", least=0)
    ttft_slo_s: float | None = flag(None, "requests whose first token is predicted later than this are refused at once, with 429 and Retry-After; default: none is refused", unit="s", name="ttft-slo", least=0.001)
    health_check_interval_s: float = flag(1.0, "pause between probes of a node's /ready: how soon a restarted node serves again", unit="s", name="health-check-interval", least=0.05, most=60)
    connect_timeout_s: float = flag(2.0, "a node that does not accept within this is treated as gone", unit="s", name="connect-timeout", least=0.01)
    cb_failure_threshold: int = flag(5, "failures of a node in a row after which it is left alone for --cb-timeout-duration, though its probes succeed; the last node of its kind never is", least=1)
    cb_timeout_s: float = flag(2.0, "how long such a node is left alone before one request tries it", unit="s", name="cb-timeout-duration", least=0.05, most=3600)
    service_discovery: bool = flag(False, "find nodes among Kubernetes pods by label; needs the kubernetes extra")
    service_discovery_namespace: str | None = flag(None, "namespace of the pods; default: the router's own")
    service_discovery_port: int = flag(8000, "HTTP port of discovered pods, where their annotation pdserve.io/port has none", least=1, most=MAX_PORT)
    prefill_selector: str | None = flag(None, "label selector of prefill pods, such as app=llm,role=prefill")
    decode_selector: str | None = flag(None, "label selector of decode pods")
    admin_port: int | None = flag(None, "port of the admin surface (/workers), bound on --admin-host; default: on --port, and only with --admin-api-key-file", least=0, most=MAX_PORT)
    admin_host: str = flag("127.0.0.1", "address of --admin-port")
    admin_api_key_file: str | None = flag(None, "file with the key that the admin surface takes as a bearer token")
    api_key_file: str | None = flag(None, "TOML file of API keys, their names and limits, read again when it changes; default: everybody may ask")
    node_api_key_file: str | None = flag(None, "file with the key sent to nodes as a bearer token; default: the client's Authorization is passed on")
    cors_allowed_origins: str | None = flag(None, "origins that browsers may ask from, separated by commas, or *; default: none")
    ssl_keyfile: str | None = flag(None, "private key (PEM) for HTTPS")
    ssl_certfile: str | None = flag(None, "certificate chain (PEM) for HTTPS")
    ssl_keyfile_password: str | None = flag(None, "password of --ssl-keyfile")
    ssl_ca_certs: str | None = flag(None, "certificates (PEM) that clients' own must be signed by; default: clients need none")
    head_timeout_s: float = flag(10.0, "time for a client to send a request's head; slower ones are cut off", unit="s", name="head-timeout", least=0.05)
    body_timeout_s: float = flag(30.0, "time for a client to send a request's body; slower ones are answered 408", unit="s", name="body-timeout", least=0.05)
    workers: int = flag(1, "router processes that share the port; none depends on another", least=1, most=64)
    otlp_traces_endpoint: str | None = flag(None, "URL that spans are sent to (OTLP over HTTP), such as http://collector:4318/v1/traces; needs the otel extra")


@dataclass(frozen=True, slots=True)
class NodeAddresses:
    """ipc addresses inside a node's private run directory (mode 0700, removed on exit)."""

    run_dir: Path

    @property
    def scheduler(self) -> str:
        return f"ipc://{self.run_dir}/scheduler"

    @property
    def detokenizer(self) -> str:
        return f"ipc://{self.run_dir}/detokenizer"

    @property
    def tokenizer(self) -> str:
        return f"ipc://{self.run_dir}/tokenizer"


def encode_child_payload(config: NodeConfig, addresses: NodeAddresses) -> bytes:
    """What a node's parent hands to its children on start (common/launch.py)."""
    return msgspec.json.encode({"config": config, "run_dir": str(addresses.run_dir)})


def decode_child_payload(payload: bytes) -> tuple[NodeConfig, NodeAddresses]:
    raw = msgspec.json.decode(payload)
    return msgspec.convert(raw["config"], NodeConfig), NodeAddresses(Path(raw["run_dir"]))


JsonObject = dict[str, Any]
