"""Why rows miss their targets: reasons by letter, each for the CPU levels it was measured on."""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from benchmarks.timing import Row


@dataclass(frozen=True)
class Reason:
    """Why some rows miss their targets.

    Args:
        rows: (group, case, peer) patterns, where * matches anything.
        why: the explanation that the page prints.
        levels: the CPU levels it applies to.
    """

    rows: tuple[tuple[str, str, str], ...]
    why: str
    levels: tuple[str, ...] = ("amx",)

    def holds(self, level: str, row: Row) -> bool:
        names = (row.group, row.case, row.peer)
        return level in self.levels and any(all(map(fnmatchcase, names, patterns)) for patterns in self.rows)


_VNNI = ("avx512_bf16",)
_AVX2 = ("avx2",)
_YMM = ("avx2", "avx_vnni")  # with registers of 256 bits

REASONS = {
    "a": Reason(
        (("int8 mm", "128x1024x1024, B row-major", "torch._int_mm"),),
        "The same kernel runs: ours calls `torch._int_mm`. Python adds 2 µs in a tight loop and about 6 of these 120 "
        "µs after a product that has emptied the caches.",
    ),
    "b": Reason(
        (("scaled", "*, compiled", "the same in eager"),),
        "The same kernel runs. A compiled program adds Dynamo's guards and AOTAutograd's unwrapping of quantized "
        "tensors: 60 µs in a tight loop, up to 0.2 ms between products that empty the caches.",
    ),
    "c": Reason(
        (("int8 linear", "1x4096x4096, *", "onednn.qlinear*"), ("int8 linear", "16x4096x4096, *", "onednn.qlinear*")),
        "Both read the weight once, which takes 0.28 ms at memory speed (59 GB/s). For one row the target is below "
        "that. For 16 rows it leaves 0.06 ms for packing rows, zero points, scales and bias.",
    ),
    "d": Reason(
        (
            ("int8 linear", "128x4096x4096, *", "*"),
            ("int8 linear", "1024x*", "*"),
        ),
        "The target is 47 to 59 % of the matrix unit's peak. A loop of tile instructions alone reaches 50 to 57 % "
        "when its operands stream as they do here; packing, zero points, scales and spilled sums come on top. On one "
        "thread, 128 rows take 0.78 of oneDNN's time; oneDNN gains more from the second thread.",
    ),
    "e": Reason(
        (("int8 linear", "512x1024x1024, *", "peak"),),
        "Ours takes 0.48 ms on one thread and gains little from the second; oneDNN goes from 0.42 to 0.25 ms.",
    ),
    "f": Reason(
        (("int8 sums", "*B transposed", "torch._int_mm"), ("int8 sums", "*B row-major", "torch._int_mm")),
        "The same kernel runs: `out_dtype` calls `torch._int_mm` for small factors that are not packed.",
    ),
    "g": Reason(
        (("int8 sums", "1x4096x4096, *; ours packed", "torch._int_mm"),),
        "The target is below the time to read the weight at memory speed, 0.28 ms.",
    ),
    "h": Reason(
        (("int8 sums", "128x*; ours packed", "*"), ("int8 sums", "1024x*; ours packed", "*")),
        "The target is 46 to 48 % of the matrix unit's peak; see d. int32 results have twice the bytes of bfloat16: "
        "with 128 rows on one thread they cost 8 %.",
    ),
    "i": Reason(
        (
            ("decoded", "fp8 row x row, 1x*", "bfloat16 linear"),
            ("decoded", "bfloat16 x int4 groups, 1x*", "bfloat16 linear"),
        ),
        "Decoding in the vector units takes more than half of the time. Reading the codes takes 0.28 ms (fp8) or "
        "0.18 ms (int4 groups) at memory speed.",
    ),
    "j": Reason(
        (("decoded", "bfloat16 x int4 groups, 1x*", "aten int4pack mm"),),
        "Both read the same bytes and decode them in the vector units; ATen's kernel is 10 % faster.",
    ),
    "k": Reason(
        (("decoded", "fp8 row x row, 128x*", "*linear"), ("decoded", "fp8 row x row, 1024x*", "*linear")),
        "Both multiply bfloat16 in the matrix unit, at half its int8 speed. With many rows the smaller weight saves "
        "little, and ours also decodes it.",
    ),
    "l": Reason(
        (("decoded", "fp8 1x128 x 128x128, 128x*", "ours*"),),
        "Each block of 128 terms has its own scale, so its sums are scaled and added in float32.",
    ),
    "m": Reason(
        (("decoded", "MXFP8, *", "ours*"), ("decoded", "NVFP4, *", "ours*")),
        "Block scales are multiplied in while codes are decoded. 1024 rows share that cost and meet the target; 128 "
        "rows do not. For one row, MXFP8 also scales the sum of every 32 terms and reads 3 % more bytes; it misses "
        "by 0.01, within the noise.",
    ),
    "n": Reason(
        (("decoded", "8da4w, 128x*", "*linear"),),
        "Each group of 32 terms has its own scale, so its sums are scaled and added in float32 in the vector units: "
        "185 cycles for 32 × 32 × 32, where the product takes 125 in the matrix unit.",
    ),
    "o": Reason(
        (("int8 conv2d", "ResNet-50, batch 8, *", "onednn.qconv2d"),),
        "Equal within the noise: a function timed against itself gives 0.95 to 1.05.",
    ),
    "p": Reason(
        (("MiniLM", "*, eager", "bfloat16, eager"),),
        "Half of the time goes to attention, GELU, norms and sums, which stay in floats. The products are small, and "
        "quantizing a layer's activations costs an eighth to a half of its product.",
        ("amx", "avx512_bf16"),
    ),
    "q": Reason(
        (("training", "int8, backward in int8, 512x1024x1024", "bfloat16"),),
        "Quantizing is bound by memory and the vector units, so it weighs more in small products. Each of seven "
        "kernels adds 40 to 60 µs of Python and dispatch.",
    ),
    "r": Reason(
        (
            ("int8 mm", "128x1024x1024, *", "stock out_dtype"),
            ("linear", "int16 of Q/DQ, *", "stock out_dtype"),
            ("int8 conv2d", "64->64, 3x3, *", "*"),
        ),
        "The target was set for matrix tiles (12 TOPS). VNNI reaches 2 TOPS on these two cores.",
        _VNNI,
    ),
    "s": Reason(
        (("fp8 mm", "*", "torch._scaled_mm"),),
        "`torch._scaled_mm` takes 3 ms here and 2 s on the machine the target was set on. Both decode to float32.",
        _VNNI,
    ),
    "t": Reason(
        (("call", "*, plain tensors", "torch._int_mm"),),
        "PyTorch's own call is 0.9 µs faster here than on the machine the target was set on; Python still adds 2.6 "
        "to 3.1 µs.",
        _VNNI,
    ),
    "u": Reason(
        (
            ("int8 mm", "1024x*", "torch._int_mm"),
            ("int8 sums", "1024x*", "torch._int_mm"),
            ("int8 linear", "*", "onednn*"),
        ),
        "Both are near the peak of VNNI: for 1024 rows by 4096x4096 ours reaches 1.95 TOPS, oneDNN 2.0. Ours keeps "
        "ten or eleven rows in registers and stores their sums every 1024 terms; unpacked weights are packed in each "
        "call. For 512x1024x1024 the ratio is 1.03 with OMP_WAIT_POLICY=active; otherwise one thread sometimes wakes "
        "late, and it is 1.25.",
        _VNNI,
    ),
    "v": Reason(
        (("int8 sums", "1x*", "torch._int_mm"),),
        "For unpacked weights the same kernel runs. The packed weight here lacks the column sums that hop.pack "
        "keeps, so each call reads the weight twice.",
        _VNNI,
    ),
    "w": Reason(
        (("decoded", "fp8 row x row, 1024x*", "bfloat16 linear"),),
        "Both multiply by `vdpbf16ps`; ours also decodes the weight and scales the sums.",
        _VNNI,
    ),
    "x": Reason(
        (("decoded", "8da4w, 128x*", "*linear"), ("decoded", "bfloat16 x int4 groups, 128x*", "*linear")),
        "Each group of 32 terms has its own scale. For integers it takes 8 dot products, two multiplications by "
        "scales and one by zero points on the same two ports, so at most 8/11 of the peak. For bfloat16 it takes 16 "
        "multiply-adds and one scale; decoding adds a twentieth.",
        _VNNI,
    ),
    "y": Reason(
        (("int8 conv2d", "ResNet-50, *", "onednn*"), ("int8 conv2d", "MobileNetV2, *", "onednn*")),
        "3x3 kernels copy each input pixel once per kernel element, and the 7x7 one gathers it. At 7 by 7 pixels, "
        "summing the weight's codes in each call takes a tenth.",
        _VNNI,
    ),
    "z": Reason(
        (("quantize", "INT8_ROW, eager", "copy"),),
        "The 8 MB tensor fits in the L3 cache, where a copy takes half as long as from memory while quantizing takes "
        "as long. For 64 MB, on another CPU of this level, the ratio was 0.84.",
        _VNNI,
    ),
    "aa": Reason(
        (("layer", "int8, *, 1x*", "torchao*"),),
        "torchao's compiled layer is one C++ function behind guards. Ours is a module, a plan and two operators "
        "called from Python: 30 µs.",
        _VNNI,
    ),
    "ab": Reason(
        (("layer", "int4 weight, *, 128x*", "torchao*"),),
        "Freezing decodes torchao's weight to bfloat16 before the clock starts, at four times the memory.",
        _VNNI,
    ),
    "ac": Reason(
        (("row", "*", "ATen's function alone"),),
        "Norms and softmax read a row three times: for its maximum, for its fixed-point sums, and for its codes. A "
        "softmax takes about 30 instructions for 16 correctly rounded exponentials. GELU reads a table where float32 "
        "does not decide the code.",
        _VNNI,
    ),
    "ad": Reason(
        (("groups", "1x*", "reading its bytes"),),
        "Decoding and float32 multiply-adds: 5- and 6-bit codes are joined from two planes, and each block has its "
        "own scale and minimum.",
        _VNNI,
    ),
    "ae": Reason(
        (("stock", "conv*, int16, 64", "stock out_dtype"),),
        "Codes of 16 bits are multiplied in float64, after they are copied into rows of patches. PyTorch's loops over "
        "int32 copy nothing, which pays for images as small as this one.",
        ("avx2",),
    ),
    "af": Reason(
        (("stock", "div.*, int32, 1024", "stock out_dtype"), ("stock", "linear, int32, 64", "stock out_dtype")),
        "The same operators of PyTorch run. A pass before a division brings int32 operands to float32, where PyTorch's "
        "converts them as it reads; a call of ours takes some microseconds more.",
        ("avx2",),
    ),
    "ag": Reason(
        (("stock", "*", "stock out_dtype"),),
        "The same operators of PyTorch run. A call of ours takes some microseconds more, and a busy machine adds up to "
        "a fifth to either side.",
        ("portable",),
    ),
    "ah": Reason(
        (
            ("int8 linear", "1x*", "float32 linear"),
            *(("decoded", f"{name}, 1x*", "float32 linear") for name in ("8da4w", "MXFP8", "NVFP4")),
        ),
        "The weights of one row are read from memory, float32's at 12 GB/s by one thread, codes at 3 to 11. So int8 "
        "cannot take less than a quarter of float32's time; decoding and block scales come on top.",
        _AVX2,
    ),
    "ai": Reason(
        (
            ("int8 linear", "512x*", "float32 linear"),
            ("int8 linear", "1024x*", "float32 linear"),
            ("training", "int8, backward in int8, 512*", "float32"),
        ),
        "vpmaddwd multiplies 32 pairs of codes a cycle, where float32 reaches 16, so that half is the limit. Adding "
        "its results and widening codes come on top.",
        _AVX2,
    ),
    "aj": Reason(
        (("decoded", "*, 1024x*", "float32 linear"),),
        "Codes become float32 in the cache and are multiplied as such. Decoding and scales come on top of float32's "
        "time.",
        _YMM,
    ),
    "ak": Reason(
        (("MiniLM", "*", "float32*"),),
        "Products take four fifths of the time, and those of int8 0.6 to 0.7 of float32's with 800 rows (ai). GELU, "
        "norms, residuals and, without int8 attention, softmax stay in floats.",
        _AVX2,
    ),
    "al": Reason(
        (("row", "*", "ATen's function alone"),),
        "Sums in a fixed order, and correctly rounded exponentials, in one pass that also scales and rounds. ATen's "
        "are within an ulp, and their results are not quantized.",
        _YMM,
    ),
    "am": Reason(
        (("function", "erf of *", "ATen's, within an ulp"), ("function", "exp of *", "ATen's, within an ulp")),
        "Correct rounding takes polynomials with two float32 numbers for each value; ATen's is within an ulp.",
        _YMM,
    ),
    "an": Reason(
        (("attention", "int8, 12 heads of 64, 128 by 128", "float32"),),
        "Keys and values are widened to 16 bits for each head, which few queries share, and exponentials are correctly "
        "rounded. 512 queries meet the target.",
        _AVX2,
    ),
    "ao": Reason(
        (("quantize", "MXFP8, eager", "copy"),),
        "Finding the exponents of blocks and the codes takes longer than a copy takes to read and write the elements.",
        _AVX2,
    ),
    "ap": Reason(
        (("optimizers", "first step, *", "its second step"),),
        "Dynamo, Inductor and the C++ compiler, beside other work on two cores; an eager first step creates the states "
        "and imports what they need.",
        _AVX2,
    ),
    "aq": Reason(
        (("training", "int8, backward in float32, 1024*", "torchao fake quantized"),),
        "Two of three products are float32's on both sides.",
        _AVX2,
    ),
    "ar": Reason(
        (("int8 conv2d", "ResNet-50, *", "float32 conv2d"),),
        "Products as in ai, of images that are copied into rows of patches and widened to 16 bits. oneDNN's int8 "
        "convolutions are faster, as their sums saturate at 16 bits.",
        _AVX2,
    ),
    "as": Reason(
        (("groups", "1x*", "reading its bytes"), ("groups", "*", "float32")),
        "Decoding and float32 multiply-adds, of 8 elements an instruction: 5- and 6-bit codes are joined from two "
        "planes, and each block has its own scale and minimum. 128 rows multiply decoded floats.",
        _YMM,
    ),
    "at": Reason(
        (("quantize", "*", "copy"),),
        "The matrix stays in the last-level cache, where copying is 3 to 7 times as fast as finding amax, dividing and "
        "rounding with 8 elements an instruction.",
        ("avx_vnni",),
    ),
    "au": Reason(
        (("optimizers", "AdamW, 8 bits *, bfloat16", "torch, foreach"),),
        "The 4 M parameters and their states stay in the last-level cache, so that fewer bytes of states save little, "
        "and decoding and encoding them come on top.",
        ("avx_vnni",),
    ),
}  # fmt: skip


def reason(level: str, row: Row) -> str:
    """The letter of the reason why a row misses its target at a level, or "" without one."""
    return next((letter for letter, found in REASONS.items() if found.holds(level, row)), "")
