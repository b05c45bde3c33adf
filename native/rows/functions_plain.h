// For levels that quantize functions only from their float32 results. Included in a namespace (isa.h), before run.h.

template <class T>
static bool function_piece(const RowsCall&, const Piece&, const Factors*, Room&) {
    return false;
}
