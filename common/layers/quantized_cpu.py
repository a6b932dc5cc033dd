"""Linear layers on weights in blocks (quantized.py), on CPU, at any number of rows.

A weight is kept in panels of 16 outputs, and a panel in its blocks of 32 inputs, in the order in which they are read. A block's 512 weights
are made bfloat16 in sixteen registers, each 16 outputs x 2 neighbouring inputs, which is exact: they are small integers. There they serve
all rows: a row's 32 inputs are multiplied with them in pairs (AVX512-BF16: x0 w0 + x1 w1 added to each of 16 float32 sums), and the block's
scale comes in once, by one multiply-add. So one row reads 8.5 or 5 bits a weight where bfloat16 reads 16, many rows share the
widening, and there is no second, plain copy of the weight for them. A row's sum is taken in the same order however many rows there are.

int8 widens by two conversions. int4 takes no arithmetic at all: a nibble of a 16-bit word, brought to its low end by a shift, is looked up
in a table of sixteen bfloat16, which stands in one register twice, so that the fifth bit, the next nibble's, makes no difference.

Rows go in tiles, whose sums stay in the first cache while a panel is passed through. Figures, also for torch's own kernels
(_weight_int8pack_mm, _weight_int4pack_mm_for_cpu), which fall behind bfloat16 from four and from sixteen rows on: bench/quantization.py. From
64 rows on bfloat16 in oneDNN's order is up to a fifth faster. Without AVX512-BF16 the same code widens to float32, and from eight rows on is
slower than bfloat16. AMX, which oneDNN has for bfloat16, is not used here, and has not been measured.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types

from common.layers.arrays import Array, as_array
from common.layers.quantized import BLOCK, Blocks, quantised
from common.layers.vectors import PAIRS as BFLOAT16_PAIRS
from common.layers.vectors import cgutils, inner, intrinsic, kernel, narrow, widen

PANEL = 16  # outputs: float32 lanes of a register
PAIRS = BLOCK // 2
ROW_TILE = 64  # 4 KiB of sums, 4 KiB of inputs; with 16 rows 256 and more were slower, 32 to 128 were alike
QUANTISED_AT_ONCE = 1 << 22  # weights: bounds what quantising takes beside the weight itself to some 100 MB
WORK_A_THREAD = 1 << 22  # multiplications: 0.1 ms of one row in int4; handing over to a thread and back takes 20 us
BITS = 4, 8
Q_NBYTES = {4: PANEL * BLOCK // 2, 8: PANEL * BLOCK}  # of a panel's block
SCALES = {4: 2 * PANEL, 8: PANEL}  # scale, and low, of its outputs


class _BFloat(ir.types.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


I8, I16, I32, I64, F16, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.HalfType(), ir.FloatType()
SUMS, WORDS = ir.VectorType(F32, PANEL), ir.VectorType(I32, PANEL)  # one a output: a float32; a pair of bfloat16
HALVES, BFLOATS = ir.VectorType(I16, 2 * PANEL), ir.VectorType(_BFloat(), 2 * PANEL)


# ---- instructions ------------------------------------------------------------------------------------------------------------------


def _same(vector: Any, value: int) -> Any:
    return ir.Constant(vector, [value] * vector.count)


def _call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    function_type = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)


def _load(builder: Any, data: Any, index: Any, vector: Any) -> Any:
    return builder.load(builder.bitcast(builder.gep(data, [index]), vector.as_pointer()), align=1)


def _splat(builder: Any, value: Any, vector: Any) -> Any:
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), _same(ir.VectorType(I32, vector.count), 0))


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, f"llvm.fmuladd.v{PANEL}f32", SUMS, [a, b, c])


def _add_pairs(builder: Any, sums: Any, w: Any, x: Any, native: bool) -> Any:
    """sums + w0 x0 + w1 x1, for w and x of pairs."""
    if native:
        return _call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", SUMS, [sums, builder.bitcast(w, BFLOATS), builder.bitcast(x, BFLOATS)])
    upper, sixteen = _same(WORDS, -(1 << 16)), _same(WORDS, 16)
    for a, b in ((builder.and_(w, upper), builder.and_(x, upper)), (builder.shl(w, sixteen), builder.shl(x, sixteen))):
        sums = _multiply_add(builder, builder.bitcast(a, SUMS), builder.bitcast(b, SUMS), sums)
    return sums


def _bfloat16_bits(builder: Any, exact: Any) -> Any:
    """float32 numbers that bfloat16 holds exactly, as its bits."""
    words = ir.VectorType(I32, exact.type.count)
    return builder.trunc(builder.lshr(builder.bitcast(exact, words), _same(words, 16)), ir.VectorType(I16, exact.type.count))


def _widened_int8(builder: Any, q: Any, q_begin: Any, native: bool) -> list[Any]:
    """A block's weights, PAIRS registers of pairs."""
    pairs = []
    for pair in range(PAIRS):
        stored = _load(builder, q, builder.add(q_begin, I64(2 * PANEL * pair)), ir.VectorType(I8, 2 * PANEL))
        lanes = [ir.Constant(ir.VectorType(I32, PANEL), list(range(begin, begin + PANEL))) for begin in (0, PANEL)]
        low, high = (
            builder.sitofp(builder.sext(builder.shuffle_vector(stored, ir.Constant(stored.type, ir.Undefined), half), WORDS), SUMS) for half in lanes
        )
        if native:
            both = _call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", BFLOATS, [high, low])
        else:
            order = ir.Constant(ir.VectorType(I32, 2 * PANEL), list(range(2 * PANEL)))
            both = builder.shuffle_vector(_bfloat16_bits(builder, low), _bfloat16_bits(builder, high), order)
        pairs.append(builder.bitcast(both, WORDS))
    return pairs


def _widened_int4(builder: Any, q: Any, q_begin: Any, native: bool) -> list[Any]:
    """The same of nibbles: a register of 16-bit words holds four registers of pairs."""
    table = ir.Constant(HALVES, [int(np.float32(step % 16).view(np.uint32)) >> 16 for step in range(2 * PANEL)])
    pairs = []
    for begin in range(0, PAIRS, 4):
        words = _load(builder, q, builder.add(q_begin, I64(PANEL * begin)), HALVES)
        for nibble in range(4):
            step = builder.lshr(words, _same(HALVES, 4 * nibble))
            if native:
                both = _call(builder, "llvm.x86.avx512.permvar.hi.512", HALVES, [table, step])
            else:
                both = _bfloat16_bits(builder, builder.uitofp(builder.and_(step, _same(HALVES, 15)), ir.VectorType(F32, 2 * PANEL)))
            pairs.append(builder.bitcast(both, WORDS))
    return pairs


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _add_block(
    context: Any, bits: Any, native: Any, q: Any, q_begin: Any, scales: Any, scales_begin: Any, x: Any, x_begin: Any, x_sums: Any,
    x_sums_begin: Any, num_rows: Any, sums: Any,
) -> Any:  # fmt: skip
    """sums [num_rows, PANEL] += x [num_rows, BLOCK] times one block of a panel; x_sums [num_rows]: the sum of each row of x (int4)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = {n: context.make_array(signature.args[n])(context, builder, args[n]).data for n in (2, 4, 6, 8, 11)}
        q_, scales_, x_, x_sums_, sums_ = data.values()
        q_begin, scales_begin, x_begin, x_sums_begin, num_rows = (args[n] for n in (3, 5, 7, 9, 10))
        is_native, has_low = bool(native.literal_value), bits.literal_value == 4
        w = (_widened_int4 if has_low else _widened_int8)(builder, q_, q_begin, is_native)
        halves = ir.VectorType(F16, PANEL)
        scale = builder.fpext(_load(builder, scales_, scales_begin, halves), SUMS)
        low = builder.fpext(_load(builder, scales_, builder.add(scales_begin, I64(PANEL)), halves), SUMS) if has_low else None
        with cgutils.for_range(builder, num_rows, intp=I64) as loop:
            row = builder.bitcast(builder.gep(x_, [builder.add(x_begin, builder.mul(loop.index, I64(BLOCK)))]), I32.as_pointer())
            chains = [ir.Constant(SUMS, None)] * 4  # independent: one would wait for each of its sixteen additions
            for pair in range(PAIRS):
                inputs = _splat(builder, builder.load(builder.gep(row, [I64(pair)]), align=2), WORDS)
                chains[pair % 4] = _add_pairs(builder, chains[pair % 4], w[pair], inputs, is_native)
            products = builder.fadd(builder.fadd(chains[0], chains[1]), builder.fadd(chains[2], chains[3]))
            place = builder.bitcast(builder.gep(sums_, [builder.mul(loop.index, I64(PANEL))]), SUMS.as_pointer())
            total = _multiply_add(builder, products, scale, builder.load(place, align=4))
            if low is not None:
                x_sum = _splat(builder, builder.load(builder.gep(x_sums_, [builder.add(x_sums_begin, loop.index)])), SUMS)
                total = _multiply_add(builder, x_sum, low, total)
            builder.store(total, place, align=4)
        return context.get_dummy_value()

    size = types.intp
    return types.void(bits, native, q, size, scales, size, x, size, x_sums, size, size, sums), generate


@intrinsic  # type: ignore[untyped-decorator]
def _float16(context: Any, bits: Any) -> Any:
    """The bits of a float16 as float32."""
    return types.float32(types.uint16), lambda context, builder, signature, args: builder.fpext(builder.bitcast(args[0], F16), F32)


# ---- kernels -------------------------------------------------------------------------------------------------------------------------


def multiply_kernel(bits: int, native: bool = BFLOAT16_PAIRS) -> Any:
    """The kernel for int4 or int8. native: by AVX512-BF16; False: on any machine."""
    q_nbytes, num_scales = Q_NBYTES[bits], SCALES[bits]

    @kernel
    def multiply(x: Any, q: Any, scales: Any, bias: Any, out: Any, first_panel: int, end_panel: int) -> None:
        """x [M, K] times panels first_panel.. of the weight, plus bias [N] or empty -> those columns of out [M, N]. x, bias, out: bfloat16."""
        num_rows, num_in = x.shape
        num_out, num_blocks = out.shape[1], num_in // BLOCK
        by_block = x.reshape(-1)  # [block, row, BLOCK]: of one row as it is, of more brought into this order, in which it is read
        if num_rows > 1:
            by_block = np.empty(num_rows * num_in, np.uint16)
            for row in range(num_rows):
                for block in range(num_blocks):
                    for i in range(BLOCK):
                        by_block[(block * num_rows + row) * BLOCK + i] = x[row, block * BLOCK + i]
        x_sums = np.empty(num_rows * num_blocks, np.float32)
        if bits == 4:
            for begin in range(num_rows * num_blocks):
                x_sum = np.float32(0.0)
                for i in range(BLOCK):
                    x_sum += widen(by_block[begin * BLOCK + i])
                x_sums[begin] = x_sum
        sums = np.empty(ROW_TILE * PANEL, np.float32)
        for panel in range(first_panel, end_panel):
            width = min(PANEL, num_out - panel * PANEL)
            for first_row in range(0, num_rows, ROW_TILE):
                tile_rows = min(ROW_TILE, num_rows - first_row)
                sums[: tile_rows * PANEL] = np.float32(0.0)
                for block in range(num_blocks):
                    at = panel * num_blocks + block
                    row = block * num_rows + first_row
                    _add_block(bits, native, q, at * q_nbytes, scales, at * num_scales, by_block, row * BLOCK, x_sums, row, tile_rows, sums)
                for row in range(tile_rows):
                    for i in range(width):
                        column, total = panel * PANEL + i, sums[row * PANEL + i]
                        if len(bias) > 0:
                            total += widen(bias[column])
                        out[first_row + row, column] = narrow(total, out[first_row + row, column])

    return multiply


@inner
def _weight(bits: int, q: Any, block_begin: int, i: int, lane: int) -> Any:
    """Weight of input i of a block and output `lane` of its panel, before its scale."""
    element = lane * 2 + i % 2  # within a register of pairs
    if bits == 8:
        return np.float32(np.int8(q[block_begin + i // 2 * 2 * PANEL + element]))
    byte = q[block_begin + i // 8 * 4 * PANEL + element * 2 + i // 2 % 4 // 2]
    return np.float32((byte >> (4 * (i // 2 % 2))) & 15)


def rows_kernel(bits: int) -> Any:
    """The kernel that gives rows of an int4 or int8 weight."""
    q_nbytes, num_scales = Q_NBYTES[bits], SCALES[bits]

    @kernel
    def rows(ids: Any, q: Any, scales: Any, out: Any) -> None:
        """Rows ids [T] of the weight [N, K], rounded to bfloat16 -> out [T, K]."""
        num_rows, num_in = out.shape
        for t in range(num_rows):
            panel, lane = ids[t] // PANEL, ids[t] % PANEL
            for block in range(num_in // BLOCK):
                at = panel * (num_in // BLOCK) + block
                scale = _float16(scales[at * num_scales + lane])
                low = _float16(scales[at * num_scales + PANEL + lane]) if bits == 4 else np.float32(0.0)
                for i in range(BLOCK):
                    value = _weight(bits, q, at * q_nbytes, i, lane) * scale + low
                    out[t, block * BLOCK + i] = narrow(value, out[t, block * BLOCK + i])

    return rows


MULTIPLY = {bits: multiply_kernel(bits) for bits in BITS}
ROWS = {bits: rows_kernel(bits) for bits in BITS}
NO_BIAS = np.empty(0, np.uint16)


# ---- the weight ----------------------------------------------------------------------------------------------------------------------


class BlockWeight:
    """A WeightForm on Blocks, packed. Takes a weight [N, K], K a multiple of BLOCK; bias bfloat16 [N] or None."""

    gives_rows = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, bits: int, pool: ThreadPoolExecutor | None, num_threads: int) -> None:
        self.num_out, self.num_in = weight.shape
        self.num_panels = -(-self.num_out // PANEL)
        num_blocks = self.num_panels * (self.num_in // BLOCK)
        # torch's memory begins at a cache line, numpy's does not
        self._q: Array = torch.empty(num_blocks * Q_NBYTES[bits], dtype=torch.uint8).numpy()
        self._scales: Array = torch.empty(num_blocks * SCALES[bits], dtype=torch.uint16).numpy()
        self._fill(weight, bits)
        self.nbytes = self._q.nbytes + self._scales.nbytes
        self._bias = NO_BIAS if bias is None else as_array(bias)
        self._multiply, self._rows = MULTIPLY[bits], ROWS[bits]
        self._pool, self._num_threads = pool, num_threads

    def _fill(self, weight: torch.Tensor, bits: int) -> None:
        """Quantise a run of panels at a time."""
        step = max(1, QUANTISED_AT_ONCE // (PANEL * self.num_in))
        a_panel = self.num_in // BLOCK
        for first in range(0, self.num_panels, step):
            rows = weight[first * PANEL : (first + step) * PANEL]
            q, scales = packed(quantised(rows, bits))
            self._q[first * a_panel * Q_NBYTES[bits] :][: len(q)] = q
            self._scales[first * a_panel * SCALES[bits] :][: len(scales)] = scales

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(len(x), self.num_out, dtype=torch.bfloat16)
        arguments = (as_array(x), self._q, self._scales, self._bias, as_array(y))
        parts = min(self._num_threads, len(x) * self.num_in * self.num_out // WORK_A_THREAD, self.num_panels)
        if self._pool is None or parts < 2:
            self._multiply(*arguments, 0, self.num_panels)
            return y
        ends = [self.num_panels * part // parts for part in range(parts + 1)]
        others = [self._pool.submit(partial(self._multiply, *arguments, begin, end)) for begin, end in pairwise(ends[1:])]
        self._multiply(*arguments, 0, ends[1])
        for other in others:
            other.result()
        return y

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(ids), self.num_in, dtype=torch.bfloat16)
        self._rows(as_array(ids), self._q, self._scales, as_array(out))
        return out


def packed(blocks: Blocks) -> tuple[Array, Array]:
    """Blocks [N, K] in the kernels' order: q uint8, scales uint16 (float16 bits), both flat; N filled up with zeros to whole panels."""
    panels = _panels(blocks.q)
    q = panels.reshape(*panels.shape[:2], -1, PAIRS, 2).permute(0, 2, 3, 1, 4)  # panel, block, pair, output, input of the pair
    if blocks.low is None:
        stored, parts = q.contiguous().view(torch.uint8), [blocks.scale]
    else:
        a, b, c, d = (q[:, :, nibble::4] for nibble in range(4))  # the pairs of a word, its lowest nibble first
        stored, parts = torch.stack((a | b << 4, c | d << 4), 5), [blocks.scale, blocks.low]
    scales = torch.stack([_panels(part).transpose(1, 2) for part in parts], 2).contiguous()
    return stored.flatten().numpy(), scales.view(torch.uint16).flatten().numpy()


def _panels(rows: torch.Tensor) -> torch.Tensor:
    """[N, ...] -> [panel, PANEL, ...], zeros in the place of rows that are not there."""
    return torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % PANEL)).reshape(-1, PANEL, rows.shape[1])


class BlockQuantizer:
    """Quantizer to blocks of `bits` bits, for bfloat16 on CPU. num_threads: the most one multiplication takes.

    The head always has eight: its errors go straight into the logits, and into the embeddings where it is tied to them. GGUF files
    of four bits do the same (token_embd and output are Q8_0 or Q6_K).
    """

    def __init__(self, bits: int, num_threads: int, pool: ThreadPoolExecutor | None = None) -> None:
        self._bits, self._num_threads = bits, num_threads
        self._pool = ThreadPoolExecutor(num_threads - 1, "linear") if num_threads > 1 and pool is None else pool

    @property
    def head(self) -> "BlockQuantizer":
        return self if self._bits == 8 else BlockQuantizer(8, self._num_threads, self._pool)

    def quantise(self, weight: torch.Tensor, bias: torch.Tensor | None, row_scale: torch.Tensor | None) -> BlockWeight | None:
        if weight.shape[1] % BLOCK:
            return None
        return BlockWeight(weight, bias, self._bits, self._pool, self._num_threads)
