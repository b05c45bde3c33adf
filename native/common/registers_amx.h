// Included in a namespace (isa.h).

// Before tile instructions, after what they read was written: GCC's do not say that they read memory, so that it might
// leave those writes out, or do them later.
inline void written() { asm volatile("" ::: "memory"); }

// The tile registers of this thread: 0 to 3 sums, 4 and 5 of lhs, 6 and 7 of rhs.
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
