#include "common/rounding.h"
#include HOP_HEADER(groups/lanes)
#include "groups/weight.h"
#include "groups/run.h"
