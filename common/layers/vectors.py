"""What numba lacks for kernels on models: bfloat16 elements, a cheap 2^x, and loops written in vectors.

Arrays of a model are float32, or uint16 holding bfloat16 bit patterns. Arithmetic is in float32; a result is stored rounded to
nearest, ties to even, and a NaN stays a NaN: the sampler finds a broken row by its non-finite logits. So kernels may reorder sums
but not assume finite numbers.

score(), accumulate() and multiply() are the products of attention over a tile of positions, in LLVM's vectors of LANES float32, which
LLVM splits for a machine that has shorter ones. numba knows no vector type, so each is one intrinsic that generates its loops. A loop
over a head_dim known only at run time, vectorised by LLVM itself, pays more for its ends and its sums across lanes than for the
multiplications. `heads` is a literal 1 to 4: as many sums then live in registers. Arrays are contiguous and indices trusted.

Where the processor multiplies pairs of bfloat16 (AVX512-BF16: a0 b0 + a1 b1 to each of 16 float32 sums, products exact), factors that
are both bfloat16 stay so: PAIRS. That is a quarter of the instructions, and nothing has to be widened first.
"""

from collections.abc import Callable
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import numba.core.cgutils
import numba.core.registry
import numba.extending
import numpy as np
from llvmlite import ir
from numba import types

njit: Any = numba.njit  # numba gives its decorators types that fit only Python callers
intrinsic: Any = numba.extending.intrinsic
cgutils: Any = numba.core.cgutils
I16, I32, F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()
TILE = 64  # positions
LANES = 16
UNROLL = 4  # positions scored together: they share the loads of q, and their sums across lanes are taken in one
BLOCK = 4 * LANES  # elements of V per pass over a tile: each pass reads the weights again
STRIP = 4  # query rows whose sums stay in registers together
READ, SECOND_CACHE, DATA = 0, 2, 1  # arguments of llvm.prefetch; into the first cache, which has fewer lines in flight, nothing was gained
VECTOR, FOUR, WORDS = ir.VectorType(F32, LANES), ir.VectorType(F32, UNROLL), ir.VectorType(I32, LANES)
PAIRS = "+avx512bf16" in str(numba.core.registry.cpu_target.target_context.codegen().magic_tuple())  # what numba compiles for
# Polynomial of 2^f on [-0.5, 0.5], least relative error for degree 5: 2.4e-7 evaluated in float32
C0, C1, C2, C3, C4, C5 = (
    np.float32(c)
    for c in (1.0000001192092896, 0.6931469440460205, 0.24022120237350464, 0.05550713464617729, 0.009675540961325169, 0.0013276460813358426)
)
T1, T2, T3, T4, T5 = (  # of (tanh(x) / x - 1) / x^2 by x^2, for |x| <= TANH_BEND: relative error of tanh 4.4e-9
    np.float32(c) for c in (-0.33333282, 0.13331442, -0.05373972, 0.02063909, -0.00570499)
)
TANH_BEND = np.float32(0.625)
TWO_LOG2_E = np.float32(2.8853900817779268)
LEAST_EXPONENT = np.float32(-126.0)  # of a normal float32
# No nnan and ninf among the flags: non-finite values must come out again
OPTIONS = {"nogil": True, "fastmath": {"reassoc", "contract", "nsz", "arcp"}, "error_model": "numpy"}
_DIGEST = sha256(Path(__file__).read_bytes()).hexdigest()[:8]


if PAIRS:
    llvmlite.binding.initialize_native_asmparser()  # for the instruction in _add_pairs


def kernel(function: Callable[..., None]) -> Any:
    """Compile at the first call and keep that on disk; where no directory can be written, compile anew in each process.

    numba renews what it kept when the function's own file changes. The digest in the name renews it when this file does.
    """
    function.__qualname__ += f"_{_DIGEST}"
    try:
        return njit(**OPTIONS, cache=True)(function)
    except RuntimeError:  # numba found no place for a cache
        return njit(**OPTIONS)(function)


def inner(function: Callable[..., Any]) -> Any:
    """What kernels call: compiled into them and kept as part of them."""
    return njit(**OPTIONS)(function)


@intrinsic  # type: ignore[untyped-decorator]
def widen(context: Any, x: Any) -> Any:
    """A stored element as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if x == types.float32:
            return args[0]
        return builder.bitcast(builder.shl(builder.zext(args[0], I32), I32(16)), F32)

    return types.float32(x), generate


def _narrowed(builder: Any, bits: Any, constant: Callable[[int], Any]) -> Any:
    """The bits of float32, one or a vector -> of bfloat16, in the lower half."""
    upper = builder.lshr(bits, constant(16))
    rounded = builder.lshr(builder.add(bits, builder.add(constant(0x7FFF), builder.and_(upper, constant(1)))), constant(16))
    is_nan = builder.icmp_unsigned(">", builder.and_(bits, constant(0x7FFFFFFF)), constant(0x7F800000))
    quiet = builder.or_(upper, constant(0x40))  # rounding could carry a NaN's bits over to an infinity or to zero
    return builder.select(is_nan, quiet, rounded)


@intrinsic  # type: ignore[untyped-decorator]
def narrow(context: Any, x: Any, stored: Any) -> Any:
    """float32 as an element of the type of `stored`; to bfloat16 rounded to nearest, ties to even, NaN kept."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if stored == types.float32:
            return args[0]
        return builder.trunc(_narrowed(builder, builder.bitcast(args[0], I32), I32), I16)

    return stored(types.float32, stored), generate


@intrinsic  # type: ignore[untyped-decorator]
def _from_bits(context: Any, bits: Any) -> Any:
    """int32 -> the float32 of these bits."""
    return types.float32(types.int32), lambda context, builder, signature, args: builder.bitcast(args[0], F32)


@intrinsic  # type: ignore[untyped-decorator]
def _round(context: Any, x: Any) -> Any:
    """float32 -> nearest int32; of a NaN, anything."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fptosi(builder.call(builder.module.declare_intrinsic("llvm.rint", [F32]), args), I32)

    return types.int32(types.float32), generate


@njit(**OPTIONS, inline="always")  # type: ignore[untyped-decorator]
def exp2(x: Any) -> Any:
    """2^x, NaN for NaN; beyond the normal float32 the nearest of them."""
    x = LEAST_EXPONENT if x < LEAST_EXPONENT else x
    x = -LEAST_EXPONENT if x > -LEAST_EXPONENT else x
    whole = _round(x)
    f = x - np.float32(whole)
    fraction = C0 + f * (C1 + f * (C2 + f * (C3 + f * (C4 + f * C5))))
    return fraction * _from_bits(np.int32((whole + np.int32(127)) << np.int32(23)))


@njit(**OPTIONS, inline="always")  # type: ignore[untyped-decorator]
def tanh(x: Any) -> Any:
    """To a few units in the last place, NaN for NaN: a polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel."""
    square = x * x
    near = x + x * square * (T1 + square * (T2 + square * (T3 + square * (T4 + square * T5))))
    far = np.float32(1.0) - np.float32(2.0) / (exp2(x * TWO_LOG2_E) + np.float32(1.0))
    return near if abs(x) <= TANH_BEND else far


@intrinsic  # type: ignore[untyped-decorator]
def zero_factor(context: Any, a: Any, b: Any) -> Any:
    """0 in the type that elements of arrays `a` have when they are multiplied with those of `b`: bfloat16 for PAIRS, else float32."""
    result = types.uint16 if PAIRS and a.dtype == b.dtype == types.uint16 else types.float32
    return result(a, b), lambda context, builder, signature, args: ir.Constant(context.get_value_type(result), 0)


@intrinsic  # type: ignore[untyped-decorator]
def convert(context: Any, x: Any, stored: Any) -> Any:
    """An element as one of the type of `stored`; of its own type, bit by bit as it is."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if x == stored:
            return args[0]
        if stored == types.float32:
            return builder.bitcast(builder.shl(builder.zext(args[0], I32), I32(16)), F32)
        return builder.trunc(_narrowed(builder, builder.bitcast(args[0], I32), I32), I16)

    return stored(x, stored), generate


class _Memory:
    """An array argument of an intrinsic: vectors and elements at a flat index. in_words: 32 bits are one element."""

    def __init__(self, context: Any, builder: Any, array_type: Any, value: Any, in_words: bool = False) -> None:
        assert array_type.layout == "C", f"{array_type} is not contiguous"
        self._builder, self._nbytes = builder, array_type.dtype.bitwidth // 8
        self._element = I32 if in_words else context.get_data_type(array_type.dtype)
        data = context.make_array(array_type)(context, builder, value).data
        self._data = builder.bitcast(data, I32.as_pointer()) if in_words else data

    def _at(self, index: Any) -> Any:
        return self._builder.gep(self._data, [index])

    def element(self, index: Any) -> Any:
        return self._builder.load(self._at(index), align=self._nbytes)

    def prefetch(self, index: Any) -> None:
        """Ask for the element's cache line, to arrive in the second cache."""
        byte = ir.IntType(8).as_pointer()
        function = cgutils.get_or_insert_function(self._builder.module, ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32]), "llvm.prefetch.p0")
        self._builder.call(function, [self._builder.bitcast(self._at(index), byte), I32(READ), I32(SECOND_CACHE), I32(DATA)])

    def set_element(self, index: Any, value: Any) -> None:
        self._builder.store(value, self._at(index))

    def vector(self, index: Any) -> Any:
        """LANES elements as float32."""
        stored = ir.VectorType(self._element, LANES)
        loaded = self._builder.load(self._builder.bitcast(self._at(index), stored.as_pointer()), align=self._nbytes)
        if self._element == F32:
            return loaded
        wide = ir.VectorType(I32, LANES)
        return self._builder.bitcast(self._builder.shl(self._builder.zext(loaded, wide), ir.Constant(wide, [16] * LANES)), VECTOR)

    def words(self, index: Any, count: int = LANES) -> Any:
        """count times 32 bits as they are; beyond count, zeros."""
        source = self._builder.bitcast(self._at(index), ir.VectorType(I32, count).as_pointer())
        loaded = self._builder.load(source, align=self._nbytes)
        return loaded if count == LANES else _shuffle(self._builder, loaded, ir.Constant(loaded.type, None), list(range(LANES)))

    def set_narrowed(self, index: Any, value: Any) -> None:
        """LANES float32, rounded as narrow() does."""
        builder = self._builder
        if self._element != F32:
            value = _narrowed(builder, builder.bitcast(value, WORDS), lambda bits: ir.Constant(WORDS, [bits] * LANES))
            value = builder.trunc(value, ir.VectorType(I16, LANES))
        self.set_vector(index, value)

    def set_vector(self, index: Any, value: Any) -> None:
        self._builder.store(value, self._builder.bitcast(self._at(index), value.type.as_pointer()), align=self._nbytes)


def _splat(builder: Any, value: Any, vector: Any) -> Any:
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count))


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def _add_product(builder: Any, a: Any, b: Any, to: Any) -> None:
    """*to += a * b"""
    multiply_add = cgutils.get_or_insert_function(builder.module, ir.FunctionType(VECTOR, [VECTOR] * 3), f"llvm.fmuladd.v{LANES}f32")
    builder.store(builder.call(multiply_add, [a, b, builder.load(to)]), to)


def _add_pairs(builder: Any, a: Any, b: Any, to: Any) -> None:
    """*to += a * b, of words that are two bfloat16 each. Written as an instruction: its name as an LLVM intrinsic takes types that llvmlite lacks."""
    instruction = ir.InlineAsm(ir.FunctionType(VECTOR, [VECTOR, WORDS, WORDS]), "vdpbf16ps $3, $2, $0", "=v,0,v,v", side_effect=False)
    builder.store(builder.call(instruction, [builder.load(to), a, b]), to)


def _sums_of_four(builder: Any, vectors: list[Any]) -> Any:
    """The sum across each of four vectors. Neighbours are added within quarters, which is cheap, until a quarter holds all four."""

    def add_neighbours(a: Any, b: Any) -> Any:
        even = [quarter + lane + source for quarter in range(0, LANES, 4) for source in (0, LANES) for lane in (0, 2)]
        return builder.fadd(_shuffle(builder, a, b, even), _shuffle(builder, a, b, [lane + 1 for lane in even]))

    a, b, c, d = vectors
    sums = add_neighbours(add_neighbours(a, b), add_neighbours(c, d))
    for half in (LANES // 2, LANES // 4):
        sums = builder.fadd(*(_shuffle(builder, sums, sums, list(range(begin, begin + half))) for begin in (0, half)))
    return sums


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(context: Any, memory: Any, index: Any) -> Any:
    """memory[index] is wanted soon."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _Memory(context, builder, memory, args[0]).prefetch(args[1])
        return context.get_dummy_value()

    return types.void(memory, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def turn(context: Any, x: Any, begin: Any, half: Any, cos: Any, sin: Any, angles: Any, out: Any, out_begin: Any) -> Any:
    """Elements j and half + j of x[begin:], turned by angle j of cos[angles:], sin[angles:], -> out[out_begin:]. half: whole vectors."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x_, cos_, sin_, out_ = (_Memory(context, builder, signature.args[n], args[n]) for n in (0, 3, 4, 6))
        begin, half, angles, out_begin = args[1], args[2], args[5], args[7]
        I64 = half.type
        with cgutils.for_range_slice(builder, I64(0), half, I64(LANES), I64) as (j, _):
            low = x_.vector(builder.add(begin, j))
            high = x_.vector(builder.add(builder.add(begin, half), j))
            c, s = (table.vector(builder.add(angles, j)) for table in (cos_, sin_))
            at = builder.add(out_begin, j)
            out_.set_narrowed(at, builder.fsub(builder.fmul(low, c), builder.fmul(high, s)))
            out_.set_narrowed(builder.add(at, half), builder.fadd(builder.fmul(high, c), builder.fmul(low, s)))
        return context.get_dummy_value()

    return types.void(x, types.intp, types.intp, cos, sin, types.intp, out, types.intp), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def score(context: Any, heads: Any, q: Any, width: Any, memory: Any, rows: Any, count: Any, scores: Any, largest: Any, next_rows: Any) -> Any:
    """q [heads, width] times the K rows memory[rows[i] : + width], i < count (rounded up to fours) -> scores [heads, TILE];
    largest [heads] rises to the largest of them. A NaN is never the largest. next_rows: K rows wanted soon.
    q: float32, or bfloat16 where memory is and PAIRS."""
    in_pairs = q.dtype == types.uint16

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        q_, memory_, rows_, scores_, largest_, next_ = (_Memory(context, builder, signature.args[n], args[n]) for n in (1, 3, 4, 6, 7, 8))
        width, count, I64 = args[2], args[5], args[2].type
        four, numbers = I64(UNROLL), range(heads.literal_value)
        sums = [[cgutils.alloca_once(builder, VECTOR) for _ in range(UNROLL)] for _ in numbers]
        maxima = [cgutils.alloca_once_value(builder, _splat(builder, largest_.element(I64(g)), FOUR)) for g in numbers]

        def prefetch(following: list[Any], i: Any) -> None:
            for coming in following:
                memory_.prefetch(builder.add(coming, i))

        def load(factors: _Memory, at: Any, num_words: int) -> Any:
            return factors.words(at, num_words) if in_pairs else factors.vector(at)

        def add_products(keys: list[Any], i: Any, num_words: int) -> None:
            k = [load(memory_, builder.add(key, i), num_words) for key in keys]
            for g in numbers:
                q_vector = load(q_, builder.add(builder.mul(width, I64(g)), i), num_words)
                for j in range(UNROLL):
                    (_add_pairs if in_pairs else _add_product)(builder, q_vector, k[j], sums[g][j])

        with cgutils.for_range_slice(builder, I64(0), count, four, I64) as (position, _):
            keys = [rows_.element(builder.add(position, I64(j))) for j in range(UNROLL)]
            following = [next_.element(builder.add(position, I64(j))) for j in range(UNROLL)]
            for sum_ in chain(*sums):
                builder.store(ir.Constant(VECTOR, None), sum_)
            step = I64(2 * LANES if in_pairs else LANES)
            whole = builder.mul(builder.udiv(width, step), step)
            with cgutils.for_range_slice(builder, I64(0), whole, step, I64) as (i, _):
                prefetch(following, i)
                add_products(keys, i, LANES)
            if in_pairs:
                with builder.if_then(builder.icmp_unsigned("<", whole, width)):
                    prefetch(following, whole)
                    add_products(keys, whole, LANES // 2)
            for g in numbers:
                found = _sums_of_four(builder, [builder.load(sum_) for sum_ in sums[g]])
                scores_.set_vector(builder.add(position, I64(g * TILE)), found)
                builder.store(_larger(builder, found, builder.load(maxima[g])), maxima[g])
        for g in numbers:
            four_maxima = builder.load(maxima[g])
            a, b, c, d = (builder.extract_element(four_maxima, I32(j)) for j in range(UNROLL))
            largest_.set_element(I64(g), _larger(builder, _larger(builder, a, b), _larger(builder, c, d)))
        return context.get_dummy_value()

    return types.void(heads, q, types.intp, memory, rows, types.intp, scores, largest, next_rows), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def accumulate(
    context: Any, heads: Any, weights: Any, memory: Any, rows: Any, count: Any, v_begin: Any, width: Any, decay: Any, acc: Any, next_rows: Any
) -> Any:
    """acc [heads, width] = acc * decay [heads] + weights [heads, TILE] times the V rows memory[rows[i] + v_begin : + width], i < count.
    Of next_rows, V is wanted soon."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weights_, memory_, rows_, decay_, acc_ = (_Memory(context, builder, signature.args[n], args[n]) for n in (1, 2, 3, 7, 8))
        next_, count, v_begin, width = _Memory(context, builder, signature.args[9], args[9]), args[4], args[5], args[6]
        I64, numbers = width.type, range(heads.literal_value)

        def fold(begin: Any, num_vectors: int) -> None:
            sums = [[cgutils.alloca_once(builder, VECTOR) for _ in range(num_vectors)] for _ in numbers]
            places = [[builder.add(builder.mul(width, I64(g)), builder.add(begin, I64(n * LANES))) for n in range(num_vectors)] for g in numbers]
            for g in numbers:
                decay_vector = _splat(builder, decay_.element(I64(g)), VECTOR)
                for place, sum_ in zip(places[g], sums[g], strict=True):
                    builder.store(builder.fmul(acc_.vector(place), decay_vector), sum_)
            with cgutils.for_range(builder, count, intp=I64) as loop:
                value = builder.add(builder.add(rows_.element(loop.index), v_begin), begin)
                v = [memory_.vector(builder.add(value, I64(n * LANES))) for n in range(num_vectors)]
                coming = builder.add(builder.add(next_.element(loop.index), v_begin), begin)
                for n in range(0, num_vectors, 2 if memory.dtype == types.uint16 else 1):  # a line each
                    memory_.prefetch(builder.add(coming, I64(n * LANES)))
                for g in numbers:
                    weight = _splat(builder, weights_.element(builder.add(loop.index, I64(g * TILE))), VECTOR)
                    for n in range(num_vectors):
                        _add_product(builder, weight, v[n], sums[g][n])
            for g in numbers:
                for place, sum_ in zip(places[g], sums[g], strict=True):
                    acc_.set_vector(place, builder.load(sum_))

        whole = builder.mul(builder.udiv(width, I64(BLOCK)), I64(BLOCK))
        with cgutils.for_range_slice(builder, I64(0), whole, I64(BLOCK), I64) as (begin, _):
            fold(begin, BLOCK // LANES)
        with cgutils.for_range_slice(builder, whole, width, I64(LANES), I64) as (begin, _):
            fold(begin, 1)
        return context.get_dummy_value()

    return types.void(heads, weights, memory, rows, types.intp, types.intp, types.intp, decay, acc, next_rows), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def multiply(context: Any, kept: Any, vectors: Any, a: Any, a_begin: Any, a_width: Any, b: Any, b_begin: Any, b_width: Any, count: Any,
             decay: Any, out: Any, out_begin: Any) -> Any:  # fmt: skip
    """For STRIP rows r and `vectors` * LANES columns c, with i < count:
    out[out_begin + r * b_width + c] = (that * decay[r] if kept, else 0) + sum of a[a_begin + r * a_width + i] * b[b_begin + i * b_width + c].

    a, b: float32; or bfloat16 of which each two are one factor, counted as one by every number here, where PAIRS. kept, vectors: literals."""
    in_pairs = a.dtype == types.uint16

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a_, b_ = (_Memory(context, builder, signature.args[n], args[n], in_words=True) for n in (2, 5))
        decay_, out_ = (_Memory(context, builder, signature.args[n], args[n]) for n in (9, 10))
        a_begin, a_width, b_begin, b_width, count, out_begin = (args[n] for n in (3, 4, 6, 7, 8, 11))
        I64, rows, columns = count.type, range(STRIP), range(vectors.literal_value)
        sums = [[cgutils.alloca_once(builder, VECTOR) for _ in columns] for _ in rows]
        places = [[builder.add(builder.add(out_begin, builder.mul(b_width, I64(r))), I64(n * LANES)) for n in columns] for r in rows]
        for r in rows:
            for n in columns:
                start = ir.Constant(VECTOR, None)
                if kept.literal_value:
                    start = builder.fmul(out_.vector(places[r][n]), _splat(builder, decay_.element(I64(r)), VECTOR))
                builder.store(start, sums[r][n])
        with cgutils.for_range(builder, count, intp=I64) as loop:
            b_at = builder.add(b_begin, builder.mul(loop.index, b_width))
            b_words = [b_.words(builder.add(b_at, I64(n * LANES))) for n in columns]
            for r in rows:
                a_words = _splat(builder, a_.element(builder.add(builder.add(a_begin, builder.mul(a_width, I64(r))), loop.index)), WORDS)
                for n in columns:
                    if in_pairs:
                        _add_pairs(builder, a_words, b_words[n], sums[r][n])
                    else:
                        _add_product(builder, builder.bitcast(a_words, VECTOR), builder.bitcast(b_words[n], VECTOR), sums[r][n])
        for r in rows:
            for n in columns:
                out_.set_vector(places[r][n], builder.load(sums[r][n]))
        return context.get_dummy_value()

    return types.void(kept, vectors, a, types.intp, types.intp, b, types.intp, types.intp, types.intp, decay, out, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def transpose(context: Any, memory: Any, places: Any, first: Any, column: Any, out: Any, out_begin: Any, out_width: Any) -> Any:
    """Factors column ... column + LANES of the LANES rows memory[places[first + n]:] become columns: out[out_begin + i * out_width + n]."""
    in_pairs = out.dtype == types.uint16

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        memory_, places_ = (_Memory(context, builder, signature.args[n], args[n]) for n in (0, 1))
        out_ = _Memory(context, builder, signature.args[4], args[4], in_words=in_pairs)
        first, column, out_begin, out_width = (args[n] for n in (2, 3, 5, 6))
        I64 = first.type
        elements = builder.mul(column, I64(2 if in_pairs else 1))
        vectors = []
        for n in range(LANES):
            at = builder.add(places_.element(builder.add(first, I64(n))), elements)
            vectors.append(memory_.words(at) if in_pairs else memory_.vector(at))
        for step in (1, 2, 4, 8):  # exchange the off-diagonal blocks of `step` x `step`
            for n in (n for n in range(LANES) if not n & step):
                upper, lower = vectors[n], vectors[n + step]
                vectors[n] = _shuffle(builder, upper, lower, [lane - step + LANES if lane & step else lane for lane in range(LANES)])
                vectors[n + step] = _shuffle(builder, upper, lower, [lane + LANES if lane & step else lane + step for lane in range(LANES)])
        for i, vector in enumerate(vectors):
            out_.set_vector(builder.add(out_begin, builder.mul(out_width, I64(i))), vector)
        return context.get_dummy_value()

    return types.void(memory, places, types.intp, types.intp, out, types.intp, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def join(context: Any, memory: Any, upper: Any, lower: Any, out: Any, out_begin: Any) -> Any:
    """LANES elements from memory[upper:], in pairs those with as many from memory[lower:], as factors to out[out_begin:]."""
    in_pairs = out.dtype == types.uint16

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        memory_ = _Memory(context, builder, signature.args[0], args[0])
        out_ = _Memory(context, builder, signature.args[3], args[3], in_words=in_pairs)
        vector = memory_.vector(args[1])
        if in_pairs:
            high, low = (builder.bitcast(part, WORDS) for part in (memory_.vector(args[2]), vector))
            vector = builder.or_(high, builder.lshr(low, ir.Constant(WORDS, [16] * LANES)))
        out_.set_vector(args[4], vector)
        return context.get_dummy_value()

    return types.void(memory, types.intp, types.intp, out, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def largest_of(context: Any, x: Any, begin: Any, end: Any) -> Any:
    """The largest of float32 x[begin:end], flat; a NaN is never it. -inf: none. LLVM vectorises no maximum that minds NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x_, (_, begin, end) = _Memory(context, builder, signature.args[0], args[0]), args
        I64 = begin.type
        whole = builder.add(begin, builder.and_(builder.sub(end, begin), I64(-LANES)))
        maxima = cgutils.alloca_once_value(builder, ir.Constant(VECTOR, [float("-inf")] * LANES))
        with cgutils.for_range_slice(builder, begin, whole, I64(LANES), I64) as (i, _):
            builder.store(_larger(builder, x_.vector(i), builder.load(maxima)), maxima)
        vector = builder.load(maxima)
        for half in (8, 4, 2, 1):
            vector = _larger(builder, *(_shuffle(builder, vector, vector, list(range(first, first + half))) for first in (0, half)))
        largest = cgutils.alloca_once_value(builder, builder.extract_element(vector, I32(0)))
        with cgutils.for_range_slice(builder, whole, end, I64(1), I64) as (i, _):
            builder.store(_larger(builder, x_.element(i), builder.load(largest)), largest)
        return builder.load(largest)

    return types.float32(x, types.intp, types.intp), generate
