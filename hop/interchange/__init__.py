"""Read other tools' files as quantized tensors with bit-identical values, and write such files."""

from hop.interchange.checkpoints import Checkpoint as Checkpoint
from hop.interchange.checkpoints import open_checkpoint as open_checkpoint
from hop.interchange.compressed_writing import save_compressed_tensors as save_compressed_tensors
from hop.interchange.gguf import GGUFFile as GGUFFile
from hop.interchange.gguf import load_gguf as load_gguf
from hop.interchange.gguf import open_gguf as open_gguf
from hop.interchange.gguf_writing import gguf_quantizer as gguf_quantizer
from hop.interchange.gguf_writing import save_gguf as save_gguf

__all__ = [
    "gguf_quantizer",
    "load_gguf",
    "open_checkpoint",
    "open_gguf",
    "save_compressed_tensors",
    "save_gguf",
]
