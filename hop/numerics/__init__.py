"""Values: number formats, blocks, scale rules, quantizers, schemes, and their spelling. Nothing here knows of dispatch
or kernels."""
