// Loops of noise_plain.h become vectors here too. Included in a namespace (isa.h).
#include "quantize/noise_plain.h"
