// Compilers vectorize the loops of noise_plain.h for NEON too. Included in a namespace (isa.h).
#include "quantize/noise_plain.h"
