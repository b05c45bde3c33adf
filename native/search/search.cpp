#include "search/search.h"

#define HOP_CODE "search/code.h"
#include "common/levels.h"

void hop::search_scales(const Search& s, int threads) { HOP_BY_LEVEL(search(s, threads)); }
