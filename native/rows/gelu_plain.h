// Where codes of gelu come from its float32 results alone. Included in a namespace (isa.h), before run.h.

template <class T>
static bool gelu_piece(const RowsCall&, const Piece&, bool, Room&) {
    return false;
}
