"""Quantized tensors on several processes: DTensor, FSDP2 and collectives."""
