// Convolutions in portable C++.
#include <atomic>
#include <cstring>
#include <type_traits>

#include "convolution/convolution.h"

#include "common/isa.h"

namespace hop {
namespace portable {

#include "gemm/engine_portable.h"
#include "common/transpose.h"
#include "convolution/image.h"
#include "convolution/weight.h"
#include "convolution/finish.h"
#include "convolution/finish_plain.h"
#include "convolution/depthwise.h"
#include "convolution/depthwise_plain.h"
#include "convolution/rows.h"
#include "convolution/run.h"

int convolution(Convolution& c) { return Convolving<Portable<Int8>, false>(c).run(); }

}  // namespace portable
}  // namespace hop
