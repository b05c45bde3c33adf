"""Describe integer convolutions for hop_native::convolution."""

from typing import NamedTuple


class Geometry(NamedTuple):
    """The sizes of a convolution: x (N, C, *S), weight (O, C / groups, *kernel), and lists with one entry per dimension
    of S.
    """

    x: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]  # before the first element
    padding_after: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    channels_last: bool  # of the result

    @property
    def output(self) -> tuple[int, ...]:
        """The shape of the result; sizes are below 1 if the kernel is larger than the input."""
        sizes = zip(
            self.x[2:], self.weight[2:], self.stride, self.padding, self.padding_after, self.dilation, strict=True
        )
        spatial = ((n + before + after - d * (k - 1) - 1) // s + 1 for n, k, s, before, after, d in sizes)
        return (self.x[0], self.weight[0], *spatial)

    def words(self) -> str:
        """Describe everything except the sizes of the input."""
        lists = {
            "kernel": self.weight[2:],
            "stride": self.stride,
            "before": self.padding,
            "after": self.padding_after,
            "dilation": self.dilation,
        }
        words = [f"{name}={','.join(map(str, sizes))}" for name, sizes in lists.items()]
        return " ".join([*words, f"groups={self.groups}", *["channels_last"] * self.channels_last])
