"""Files of other tools, read as quantized tensors whose numbers are those that the tools themselves read."""

from hop.interchange.gguf import GGUFFile as GGUFFile
from hop.interchange.gguf import load_gguf as load_gguf
from hop.interchange.gguf import open_gguf as open_gguf

__all__ = ["GGUFFile", "load_gguf", "open_gguf"]
