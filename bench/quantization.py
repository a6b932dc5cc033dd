"""What quantised weights cost in quality and give in speed, beside bfloat16.

    python bench/quantization.py MODEL_DIR [--gguf FILE] [--tokens 2048] [--rows 1 4 8 16 32 64 256] [--rounds 10] [--threads 1]

Quality: the model reads an English text (tests/fixtures/text) in windows that begin anew. Perplexity; how often its most probable next token
is bfloat16's; and the mean relative error of its logits against float32 weights. These are the directory's, or with --gguf those that the
file says exactly, before anything was rounded to bfloat16; then int4 is also measured straight from them.

Speed: all linears of the model in turn, the head included, for some numbers of rows; the forms take turns, so that other load on the machine hits
all alike. Medians, and the median of each turn's ratio to bfloat16. torch's own packed kernels run along on random weights.
"""

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from common.attention.backend import AttentionBatch, AttentionSpec, HeadGeometry, HostLens
from common.config import Quantization
from common.engine.loader import load_weights
from common.layers.ops import NormWeight
from common.layers.quantizer import make_quantizer
from common.layers.rope import RopeTable
from common.layers.torch_ops import TorchOps
from common.models.config import ModelConfig
from common.models.decoder import Decoder
from common.server.tokenizer import Tokenizer

CPU = torch.device("cpu")
TEXT = Path(__file__).parent.parent / "tests/fixtures/text/united_states.txt"
WINDOW = 512  # tokens
INT4_GROUP = 32
QUANTIZATIONS: tuple[Quantization, ...] = ("none", "int8", "int4")


# ---- quality -----------------------------------------------------------------------------------------------------------------------


class CausalAttention:
    """Attention within one sequence that begins here: no pool, no pages. An AttentionBackend that needs no plan()."""

    def __init__(self, config: ModelConfig, num_positions: int) -> None:
        self._heads = HeadGeometry(config.num_heads, config.num_kv_heads, config.head_dim)
        self._rope = RopeTable.build(config, num_positions, CPU)

    def plan(self, batch: AttentionBatch, lens: HostLens) -> None:
        raise NotImplementedError("there is one sequence, and it begins at position 0")

    def forward(self, qkv: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        assert spec.soft_cap is None
        heads, dim = self._heads, self._heads.head_dim
        positions = torch.arange(len(qkv))
        q, k, v = torch.split(qkv.float(), [heads.num_heads * dim, heads.num_kv_heads * dim, heads.num_kv_heads * dim], 1)
        turned = (_normed(x.reshape(len(qkv), -1, dim), norm) for x, norm in ((q, spec.q_norm), (k, spec.k_norm)))
        q, k = (self._rope.rotate(x, positions).transpose(0, 1) for x in turned)
        distance = positions[:, None] - positions
        mask = (distance >= 0) & (distance < (spec.window or len(qkv)))
        attended = F.scaled_dot_product_attention(q, k, v.reshape(len(qkv), -1, dim).transpose(0, 1), mask, enable_gqa=True)
        return attended.transpose(0, 1).reshape(len(qkv), -1).to(qkv.dtype)


def _normed(x: torch.Tensor, norm: NormWeight | None) -> torch.Tensor:
    return x if norm is None else F.rms_norm(x, x.shape[-1:], norm.tensor.float(), norm.eps)


def name_of(form: Quantization) -> str:
    return "bfloat16" if form == "none" else form


def load(model_dir: Path, quantization: Quantization, dtype: torch.dtype, threads: int = 1) -> Decoder:
    config = ModelConfig.from_dir(model_dir)
    model = Decoder(config, TorchOps(), dtype, CPU, make_quantizer(quantization, config, dtype, CPU, threads))
    load_weights(model, model_dir, lambda fraction: None)
    return model


def english(model_dir: Path, num_tokens: int) -> torch.Tensor:
    """The text's first tokens, whole windows of them: int64 [windows, WINDOW]."""
    ids = Tokenizer.from_dir(model_dir).encode(TEXT.read_text(), add_special_tokens=False)
    num_windows = max(1, min(num_tokens, len(ids)) // WINDOW)
    return torch.tensor(ids[: num_windows * WINDOW]).reshape(num_windows, -1)


@torch.inference_mode()
def read(model: Decoder, windows: torch.Tensor) -> list[torch.Tensor]:
    """Logits after every token: float32 [tokens of the window, vocab] of each window."""
    attention = CausalAttention(model.config, windows.shape[1])
    return [model.logits(model(ids, attention)).float() for ids in windows]


@dataclass(frozen=True, slots=True)
class Quality:
    perplexity: float
    agreement: float  # share of positions where the most probable next token is that of `beside`
    logits_error: float  # |logits - exact| / |exact - its mean|, mean over positions


def quality(logits: Sequence[torch.Tensor], windows: torch.Tensor, beside: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> Quality:
    losses = [F.cross_entropy(ours[:-1], ids[1:]) for ours, ids in zip(logits, windows, strict=True)]
    same = [(ours.argmax(1) == theirs.argmax(1)).float().mean() for ours, theirs in zip(logits, beside, strict=True)]
    errors = [((a - b).norm(dim=1) / (b - b.mean(1, keepdim=True)).norm(dim=1)).mean() for a, b in zip(logits, exact, strict=True)]
    return Quality(math.exp(_mean(losses)), _mean(same), _mean(errors))


def _mean(values: Sequence[torch.Tensor]) -> float:
    return statistics.fmean(float(value) for value in values)


def exact_copy(model_dir: Path, gguf: Path, target: Path) -> Path:
    """A checkpoint like model_dir, with the weights of the file as float32."""
    from transformers import AutoModelForCausalLM, GgufConfig

    source = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    for file in model_dir.glob("*.json"):
        (target / file.name).write_bytes(file.read_bytes())
    tied = {"lm_head.weight"} if source.config.tie_word_embeddings else set()
    save_file({name: tensor.clone() for name, tensor in source.state_dict().items() if name not in tied}, target / "model.safetensors")
    return target


def print_quality(model_dir: Path, gguf: Path | None, num_tokens: int) -> None:
    windows = english(model_dir, num_tokens)
    print(f"{windows.numel()} tokens of {TEXT.name} in windows of {WINDOW}")
    print(f"{'weights':28} {'perplexity':>10} {'top-1 as bf16':>14} {'logits error':>13} {'MB of weights':>14}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        exact_dir = model_dir if gguf is None else exact_copy(model_dir, gguf, Path(folder))
        forms: dict[str, tuple[Path, Quantization, torch.dtype]] = {"float32": (exact_dir, "none", torch.float32)}
        forms |= {name_of(form): (model_dir, form, torch.bfloat16) for form in QUANTIZATIONS}
        if gguf is not None:
            forms["int4 of the exact weights"] = (exact_dir, "int4", torch.bfloat16)
        logits, nbytes = {}, {}
        for name, form in forms.items():
            model = load(*form)
            logits[name], nbytes[name] = read(model, windows), model.nbytes
        for name in forms:
            found = quality(logits[name], windows, logits["bfloat16"], logits["float32"])
            print(f"{name:28} {found.perplexity:10.3f} {found.agreement:14.1%} {found.logits_error:13.2%} {nbytes[name] / 1e6:14.1f}", flush=True)


# ---- speed -------------------------------------------------------------------------------------------------------------------------

Layers = list[Callable[[torch.Tensor], torch.Tensor]]  # the linears of a model, in order


def torch_int8(shapes: Sequence[tuple[int, int]]) -> Layers:
    def layer(num_in: int, num_out: int) -> Callable[[torch.Tensor], torch.Tensor]:
        q, scale = torch.randint(-127, 128, (num_out, num_in), dtype=torch.int8), torch.rand(num_out).bfloat16()
        return lambda x: torch._weight_int8pack_mm(x, q, scale)

    return [layer(*shape) for shape in shapes]


def torch_int4(shapes: Sequence[tuple[int, int]]) -> Layers:
    def layer(num_in: int, num_out: int) -> Callable[[torch.Tensor], torch.Tensor]:
        q = torch._convert_weight_to_int4pack_for_cpu(torch.randint(0, 16, (num_out, num_in), dtype=torch.int32), 1)
        scales = torch.rand(num_in // INT4_GROUP, num_out, 2).bfloat16()
        return lambda x: torch._weight_int4pack_mm_for_cpu(x, q, INT4_GROUP, scales)

    return [layer(*shape) for shape in shapes]


@torch.inference_mode()
def print_speed(model_dir: Path, rows: Sequence[int], rounds: int, threads: int) -> None:
    models = {name_of(form): load(model_dir, form, torch.bfloat16, threads) for form in QUANTIZATIONS}
    shapes = [(linear.num_in, linear.num_out) for linear in models["bfloat16"].linears()]
    forms: dict[str, Layers] = {name: list(model.linears()) for name, model in models.items()}
    forms |= {"torch int8": torch_int8(shapes), "torch int4": torch_int4(shapes)}
    print(f"\nall {len(shapes)} linears, {threads} threads: ms, and of bfloat16's")
    print(f"{'rows':>4} " + " ".join(f"{name:>17}" for name in forms), flush=True)
    for num_rows in rows:
        inputs = [torch.randn(num_rows, num_in).bfloat16() for num_in, _ in shapes]
        times_ms: dict[str, list[float]] = {name: [] for name in forms}
        for turn in range(rounds + 1):
            for name, layers in forms.items():
                start_s = time.perf_counter()
                for layer, x in zip(layers, inputs, strict=True):
                    layer(x)
                if turn > 0:  # the first turn fills caches
                    times_ms[name].append((time.perf_counter() - start_s) * 1e3)
        cells = []
        for taken in times_ms.values():
            ratio = statistics.median(ours / plain for ours, plain in zip(taken, times_ms["bfloat16"], strict=True))
            cells.append(f"{statistics.median(taken):10.1f} ({ratio:.2f})")
        print(f"{num_rows:4} " + " ".join(f"{cell:>17}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model_dir", type=Path, help="directory of safetensors")
    parser.add_argument("--gguf", type=Path, help="the .gguf file that the directory was converted from")
    parser.add_argument("--tokens", type=int, default=2048, help="of the text that are read; 0: no quality (default: 2048)")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 8, 16, 32, 64, 256], help="default: 1 4 8 16 32 64 256")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each form (default: 10)")
    parser.add_argument("--threads", type=int, default=1, help="default: 1")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.tokens > 0:
        print_quality(options.model_dir, options.gguf, options.tokens)
    print_speed(options.model_dir, options.rows, options.rounds, options.threads)


if __name__ == "__main__":
    main()
