// Included in a namespace (isa.h).

// Call before tile instructions, after writing their operands: GCC does not know that these instructions read memory,
// and could drop or delay the writes.
inline void written() { asm volatile("" ::: "memory"); }

// The tile registers of this thread: 0 to 3 for sums, 4 and 5 for lhs, 6 and 7 for rhs.
class Registers {
public:
    Registers(int rows, int quads) {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        for (int i = 0; i < 8; ++i) {
            config.rows[i] = static_cast<uint8_t>(i < 6 ? rows : quads);
            config.bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? quads * 4 : 64);
        }
        written();
        _tile_loadconfig(&config);
    }
    ~Registers() { _tile_release(); }
    Registers(const Registers&) = delete;
};
