"""What each operator means, in numpy: exact int64 for integers, float64 for floats. Written from the definitions, and
independent of ATen."""

import itertools

import numpy as np


def mm(a, b):
    return a @ b


def addmm(c, a, b, beta=1, alpha=1):
    return beta * c + alpha * (a @ b)


def linear(x, w, b=None):
    y = np.tensordot(x, w, axes=([-1], [1]))
    return y if b is None else y + b


def add(a, b, alpha=1):
    return a + alpha * b


def sub(a, b, alpha=1):
    return a - alpha * b


def div(a, b):
    """Integers divide in float32 and are truncated towards zero."""
    if np.asarray(a).dtype == np.int64 and np.asarray(b).dtype == np.int64:
        return np.trunc(np.float32(a) / np.float32(b)).astype(np.int64)
    return a / b


def total(x, dim=None, keepdim=False):
    return x.sum(axis=None if not dim else tuple(np.atleast_1d(dim)), keepdims=keepdim)


def mean(x, dim=None, keepdim=False):
    count = x.size if not dim else np.prod([x.shape[d] for d in np.atleast_1d(dim)])
    s = total(x, dim, keepdim)
    return np.trunc(s / count).astype(np.int64) if x.dtype == np.int64 else s / count


def clamp(x, low=None, high=None):
    return np.clip(x, -np.inf if low is None else low, np.inf if high is None else high).astype(x.dtype)


def embedding(weight, indices):
    return weight[indices]


def convolution(x, w, b, stride, padding, dilation, transposed, output_padding, groups):
    """Each element of the kernel scatters (transposed) or gathers once."""
    n, kernel, spatial = x.shape[0], w.shape[2:], x.shape[2:]
    per = x.shape[1] // groups
    full: list[int] = []
    if transposed:
        out_channels = w.shape[1] * groups
        full = [
            (s - 1) * st + d * (k - 1) + 1 + o
            for s, st, d, k, o in zip(spatial, stride, dilation, kernel, output_padding, strict=True)
        ]
        y = np.zeros((n, out_channels, *full), dtype=x.dtype)
    else:
        out_channels = w.shape[0]
        x = np.pad(x, [(0, 0), (0, 0), *[(p, p) for p in padding]])
        out = [
            (s - d * (k - 1) - 1) // st + 1 for s, st, d, k in zip(x.shape[2:], stride, dilation, kernel, strict=True)
        ]
        y = np.zeros((n, out_channels, *out), dtype=x.dtype)
    steps = x.shape[2:] if transposed else y.shape[2:]
    for g, offset in itertools.product(range(groups), np.ndindex(*kernel)):
        window = tuple(
            slice(o * d, o * d + (t - 1) * st + 1, st)
            for o, d, t, st in zip(offset, dilation, steps, stride, strict=True)
        )
        ins = slice(g * per, (g + 1) * per)
        outs = slice(g * out_channels // groups, (g + 1) * out_channels // groups)
        if transposed:
            y[(slice(None), outs, *window)] += np.einsum("nc...,co->no...", x[:, ins], w[(ins, slice(None), *offset)])
        else:
            y[:, outs] += np.einsum("nc...,oc->no...", x[(slice(None), ins, *window)], w[(outs, slice(None), *offset)])
    if transposed:
        y = y[(slice(None), slice(None), *(slice(p, f - p) for p, f in zip(padding, full, strict=True)))]
    return y if b is None else y + b.reshape(-1, *[1] * len(kernel))


def conv(x, w, b=None, stride=(1,), padding=(0,), dilation=(1,), groups=1):
    rank = w.ndim - 2
    lists = [tuple(v) * rank if len(v) == 1 else tuple(v) for v in (stride, padding, dilation)]
    return convolution(x, w, b, *lists, False, (0,) * rank, groups)


def conv_transpose(x, w, b=None, stride=(1,), padding=(0,), output_padding=(0,), groups=1, dilation=(1,)):
    rank = w.ndim - 2
    lists = [tuple(v) * rank if len(v) == 1 else tuple(v) for v in (stride, padding, dilation, output_padding)]
    return convolution(x, w, b, lists[0], lists[1], lists[2], True, lists[3], groups)


def avg_pool2d(x, kernel, stride=(), padding=(0, 0)):
    """Zeros of the padding count; integers are divided towards zero."""
    stride = stride or kernel
    x = np.pad(x, [(0, 0)] * (x.ndim - 2) + [(p, p) for p in padding])
    out = [(s - k) // st + 1 for s, k, st in zip(x.shape[-2:], kernel, stride, strict=True)]
    y = np.zeros((*x.shape[:-2], *out), dtype=x.dtype)
    for i, j in np.ndindex(*kernel):
        y += x[..., i : i + (out[0] - 1) * stride[0] + 1 : stride[0], j : j + (out[1] - 1) * stride[1] + 1 : stride[1]]
    y = y / (kernel[0] * kernel[1])
    return np.trunc(y).astype(np.int64) if x.dtype == np.int64 else y


def cumsum(x, dim):
    return np.cumsum(x, axis=dim)
