"""Files of every reader that are damaged or hostile: each is read, or there is a ValueError that names the file;
nothing else is raised, and nothing is allocated on a file's word."""

import tracemalloc
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch.utils._python_dispatch import TorchDispatchMode

import hop
from hop.interchange import open_checkpoint, open_gguf
from tests.interchange.mutations import GGUF, MADE, made, mutated
from tests.support.files import InFolder

pytest.importorskip("safetensors", reason="safetensors is missing")


class Largest(TorchDispatchMode):
    """The bytes of the largest memory that an operator gives."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, list | tuple) else [out]:
            if type(x) is torch.Tensor:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


class TestMutations(InFolder):
    def read(self, kind: str) -> int:
        """How many tensors there are, each of which is read and dequantized."""
        found = open_gguf(self.folder / GGUF) if kind == "gguf" else open_checkpoint(self.folder)
        for name in found:
            tensor = found[name]
            if isinstance(tensor, hop.QuantizedTensor):
                assert hop.dequantize(tensor).shape == tensor.shape
            if kind != "gguf":
                found.permutation(name)  # type: ignore[union-attr]
        return len(found)

    def mutated(self, kind: str, seeds: range) -> None:
        files = made(kind, self.folder)
        whole, read = sum(map(len, files.values())), 0
        with Largest():  # what is imported on the way is no file's doing
            assert self.read(kind) > 1
        for seed in seeds:
            changed = mutated(files, seed)
            for name, content in changed.items():
                (self.folder / name).write_bytes(content)
            largest = Largest()
            tracemalloc.start()
            try:
                with largest:
                    self.read(kind)
                read += 1
            except ValueError as error:
                assert str(self.folder) in str(error), (seed, error)
            except BaseException as error:
                raise AssertionError(f"{kind}: mutation {seed}: {error!r}") from error
            finally:
                _, peak = tracemalloc.get_traced_memory()
                tracemalloc.stop()
            size = sum(map(len, changed.values()))
            assert peak < 2_000_000 + 200 * size and largest.bytes < 1_000_000 + 64 * (size + whole), (seed, peak)
        assert len(seeds) // 50 < read < len(seeds), read

    @parameterized.expand([(kind,) for kind in MADE])
    @pytest.mark.quick(7)
    def test_some(self, kind):
        self.mutated(kind, range(100))

    @parameterized.expand([(f"{kind}_{part}", kind, part) for kind in MADE for part in range(5)])
    @pytest.mark.exhaustive
    def test_many(self, _name, kind, part):
        self.mutated(kind, range(1000 * part, 1000 * (part + 1)))
