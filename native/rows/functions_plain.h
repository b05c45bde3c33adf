// Where codes of functions come from their float32 results alone. Included in a namespace (isa.h), before run.h.

template <class T>
static bool function_piece(const RowsCall&, const Piece&, const Factors*, Room&) {
    return false;
}
