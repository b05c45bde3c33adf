"""Why rows miss their targets, by letter, for the levels of CPU on which it was found."""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from benchmarks.timing import Row


@dataclass(frozen=True)
class Reason:
    """What keeps some rows from their targets.

    Args:
        rows: patterns of their group, case and peer, in each of which * stands for anything.
        why: sentences.
        levels: of CPU.
    """

    rows: tuple[tuple[str, str, str], ...]
    why: str
    levels: tuple[str, ...] = ("amx",)

    def holds(self, level: str, row: Row) -> bool:
        names = (row.group, row.case, row.peer)
        return level in self.levels and any(all(map(fnmatchcase, names, patterns)) for patterns in self.rows)


_VNNI = ("avx512_bf16",)

REASONS = {
    "a": Reason(
        (("int8 mm", "128x1024x1024, B row-major", "torch._int_mm"),),
        "The same kernel runs: ours calls `torch._int_mm`. Our call takes 2 µs more in a tight loop, and some more "
        "beside a product that empties the caches: here 6 of 120 µs.",
    ),
    "b": Reason(
        (("scaled", "*, compiled", "the same in eager"),),
        "The same kernel runs. A compiled program adds Dynamo's guards and the unwrapping of quantized tensors by "
        "AOTAutograd: 60 µs in a loop of tiny calls, up to 0.2 ms beside products that empty the caches.",
    ),
    "c": Reason(
        (("int8 linear", "1x4096x4096, *", "onednn.qlinear*"), ("int8 linear", "16x4096x4096, *", "onednn.qlinear*")),
        "Both read each code of the weight once, and at the speed of memory (59 GB/s) that takes 0.28 ms. For one row "
        "the target asks for less. For 16 rows it leaves 0.06 ms to all else: packing rows, zero points, scales and "
        "bias.",
    ),
    "d": Reason(
        (
            ("int8 linear", "128x4096x4096, *", "*"),
            ("int8 linear", "1024x*", "*"),
        ),
        "The target asks for half of the matrix unit's peak or more (47 to 59 %), and a loop of nothing but tile "
        "instructions reaches 50 to 57 % with its operands streaming as they do here. Packing rows, zero points, "
        "scales, and sums on their way to memory and back come on top. With 128 rows a second thread gains less than "
        "oneDNN's: on one thread, measured apart, ours takes 0.78 of oneDNN's time. Why it gains less: not found out.",
    ),
    "e": Reason(
        (("int8 linear", "512x1024x1024, *", "peak"),),
        "A second thread gains hardly anything: one takes 0.48 ms, measured apart, and oneDNN's goes from 0.42 to "
        "0.25 ms. Why: not found out.",
    ),
    "f": Reason(
        (("int8 sums", "*B transposed", "torch._int_mm"), ("int8 sums", "*B row-major", "torch._int_mm")),
        "The same kernel runs: `out_dtype` calls `torch._int_mm` for factors that are not packed, up to a size.",
    ),
    "g": Reason(
        (("int8 sums", "1x4096x4096, *; ours packed", "torch._int_mm"),),
        "The target asks for less than reading the weight takes at the speed of memory: 0.28 ms.",
    ),
    "h": Reason(
        (("int8 sums", "128x*; ours packed", "*"), ("int8 sums", "1024x*; ours packed", "*")),
        "The target asks for 46 to 48 % of the matrix unit's peak; see d. Results of int32 have twice the bytes of "
        "bfloat16: with 128 rows, on one thread, a product to int32 takes 8 % longer.",
    ),
    "i": Reason(
        (
            ("decoded", "fp8 row x row, 1x*", "bfloat16 linear"),
            ("decoded", "bfloat16 x int4 groups, 1x*", "bfloat16 linear"),
        ),
        "Turning codes into numbers, in the vector units. Reading them takes 0.28 ms (fp8) and 0.18 ms (int4 groups) "
        "at the speed of memory, less than half of the time.",
    ),
    "j": Reason(
        (("decoded", "bfloat16 x int4 groups, 1x*", "aten int4pack mm"),),
        "Both read as many bytes, and decode them in the vector units. Why ours takes a tenth longer: not found out.",
    ),
    "k": Reason(
        (("decoded", "fp8 row x row, 128x*", "*linear"), ("decoded", "fp8 row x row, 1024x*", "*linear")),
        "Both multiply numbers of bfloat16 in the matrix unit, at half of its speed on int8. Fewer bytes help little "
        "where many rows share them, and ours decodes the weight as well.",
    ),
    "l": Reason(
        (("decoded", "fp8 1x128 x 128x128, 128x*", "ours*"),),
        "Each block of 128 terms has its own scale: its sums are scaled and added in float32 apart.",
    ),
    "m": Reason(
        (("decoded", "MXFP8, *", "ours*"), ("decoded", "NVFP4, *", "ours*")),
        "Scales of blocks are multiplied in where codes become numbers. With 128 rows that takes a part of the time; "
        "1024 rows share it, and meet the target. With one row, MXFP8 multiplies the sum of each 32 terms by its scale "
        "and reads 3 % more bytes: it misses by a hundredth, which is within the noise.",
    ),
    "n": Reason(
        (("decoded", "8da4w, 128x*", "*linear"),),
        "Each group of 32 terms has its own scale: its sums are scaled and added in float32, in the vector units. For "
        "32 rows, 32 columns and 32 terms that takes 185 cycles, and the product in the matrix unit 125.",
    ),
    "o": Reason(
        (("int8 conv2d", "ResNet-50, batch 8, *", "onednn.qconv2d"),),
        "Both are as fast: a function timed against itself comes out between 0.95 and 1.05.",
    ),
    "p": Reason(
        (("MiniLM", "*, eager", "bfloat16, eager"),),
        "Half of the time goes to what is not quantized: attention, GELU, norms and sums. The products are small, and "
        "quantizing the activations of a layer takes an eighth to a half of the time of its product.",
        ("amx", "avx512_bf16"),
    ),
    "q": Reason(
        (("training", "int8, backward in int8, 512x1024x1024", "bfloat16"),),
        "Quantizing is bounded by memory and by the vector units: it does not shrink as the products do, and these are "
        "small. Each of seven kernels costs 40 to 60 µs in Python and in PyTorch's dispatcher.",
    ),
    "r": Reason(
        (
            ("int8 mm", "128x1024x1024, *", "stock out_dtype"),
            ("linear", "int16 of Q/DQ, *", "stock out_dtype"),
            ("int8 conv2d", "64->64, 3x3, *", "*"),
        ),
        "The target was set with matrix tiles, at 12 TOPS. Dot products of VNNI reach 2 on these two cores.",
        _VNNI,
    ),
    "s": Reason(
        (("fp8 mm", "*", "torch._scaled_mm"),),
        "PyTorch's own takes 3 ms here, and 2 s on the machine that the target was set on. Both decode to float32.",
        _VNNI,
    ),
    "t": Reason(
        (("call", "*, plain tensors", "torch._int_mm"),),
        "PyTorch's call takes 0.9 µs less than on the machine that the target was set on, and what Python adds, 2.6 to "
        "3.1 µs, is not less.",
        _VNNI,
    ),
    "u": Reason(
        (
            ("int8 mm", "1024x*", "torch._int_mm"),
            ("int8 sums", "1024x*", "torch._int_mm"),
            ("int8 linear", "*", "onednn*"),
        ),
        "Both are near the peak of VNNI: of 1024 rows by 4096x4096 ours does 1.95 TOPS, and oneDNN 2.0. Ours takes "
        "eleven and ten rows at once, whose sums go to memory every 1024 terms. What is not packed is brought to tiles "
        "on the clock. 16 rows are multiplied eight at a time, at the rate of more. Products of 512x1024x1024 come "
        "out at 1.03 where threads spin while they wait (OMP_WAIT_POLICY=active); else, in some runs, one of the "
        "two threads comes late, and the ratio is 1.25.",
        _VNNI,
    ),
    "v": Reason(
        (("int8 sums", "1x*", "torch._int_mm"),),
        "The same kernel runs where the weight is not packed. The packed one is held here without the sums of its "
        "columns, which hop.pack keeps: they are found in each call, and the weight is read twice.",
        _VNNI,
    ),
    "w": Reason(
        (("decoded", "fp8 row x row, 1024x*", "bfloat16 linear"),),
        "Both multiply by `vdpbf16ps`; ours decodes the weight and scales the sums as well.",
        _VNNI,
    ),
    "x": Reason(
        (("decoded", "8da4w, 128x*", "*linear"), ("decoded", "bfloat16 x int4 groups, 128x*", "*linear")),
        "Each group of 32 terms has its own scale. Of integers it takes 8 dot products, two multiplies by scales and "
        "one by zero points, of the same two ports: 8/11 of the peak at most. Of bfloat16 it takes 16 multiply-adds "
        "and one by the scale; decoding is a twentieth.",
        _VNNI,
    ),
    "y": Reason(
        (("int8 conv2d", "ResNet-50, *", "onednn*"), ("int8 conv2d", "MobileNetV2, *", "onednn*")),
        "What 3x3 kernels read is copied once for each of their elements, and what the 7x7 one reads is "
        "gathered. Of 7 by 7 pixels the sums of the weight's codes, which are found in each call, take a tenth.",
        _VNNI,
    ),
    "z": Reason(
        (("quantize", "INT8_ROW, eager", "copy"),),
        "The tensor of 8 MB lies in the third cache, where a copy takes half as long as from memory, and quantizing as "
        "long. Of 64 MB, on another CPU of this level, it took 0.84 of a copy's time.",
        _VNNI,
    ),
    "aa": Reason(
        (("layer", "int8, *, 1x*", "torchao*"),),
        "A compiled layer of one row is one function of C++ behind guards; ours is a module, a plan and two operators, "
        "called by Python: 30 µs.",
        _VNNI,
    ),
    "ab": Reason(
        (("layer", "int4 weight, *, 128x*", "torchao*"),),
        "Freezing makes bfloat16 of torchao's weight, before the clock, which takes four times the memory.",
        _VNNI,
    ),
    "ac": Reason(
        (("row", "*", "ATen's function alone"),),
        "Norms and softmax read a row three times: its largest number, its sums in fixed point, which have no order, "
        "and its codes; the first reading waits for memory in both. A softmax takes some 30 instructions for 16 "
        "exponentials that are rounded correctly. GELU looks numbers up where codes do not follow from float32.",
        _VNNI,
    ),
    "ad": Reason(
        (("groups", "1x*", "reading its bytes"),),
        "Decoding, and multiply-adds of float32: codes of 5 and 6 bits are put together from two planes, and each "
        "block has its own scale and minimum.",
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
        (("stock", "*, int16, *", "stock out_dtype"),),
        "Codes of 16 bits are multiplied as pairs of bytes, in four products, by native kernels: plain loops at this "
        "level, where `python -m benchmarks tune` has not compared them with products of int32 yet.",
        ("portable",),
    ),
    "ah": Reason(
        (("stock", "convolution, int32, 256", "stock out_dtype"),),
        "The same operator of PyTorch runs, as in conv2d, which meets the target.",
        ("portable",),
    ),
}  # fmt: skip


def reason(level: str, row: Row) -> str:
    """The letter of why a row of a level misses its target; "" if nobody has said."""
    return next((letter for letter, found in REASONS.items() if found.holds(level, row)), "")
