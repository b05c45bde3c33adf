#include "common/rounding.h"
#include HOP_HEADER(groups/lanes)
#include "groups/order.h"
#include HOP_HEADER(groups/integers)
#include "groups/weight.h"
#include "groups/codes_of_rows.h"
#include "groups/integers.h"
