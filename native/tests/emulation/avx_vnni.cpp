// Emulates vpdpbusd of AVX-VNNI on CPUs without it, so that tests can run the kernels of level avx_vnni. Such a CPU
// raises SIGILL; the handler performs the instruction on the registers in the signal frame. The native library finds
// hop_emulates_avx_vnni in a process that was started with this file as a library,
//
//     c++ -O2 -shared -fPIC native/tests/emulation/avx_vnni.cpp -o avx_vnni.so
//     LD_PRELOAD=$PWD/avx_vnni.so HOP_NATIVE=avx_vnni python ...
//
// or that was linked with it. Nothing else enables a level that the CPU lacks.
#if defined(__linux__) && defined(__x86_64__)
#include <signal.h>
#include <ucontext.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

std::atomic<int64_t> emulated{0};

// The XSAVE area of a signal frame, as in asm/sigcontext.h: 512 bytes of FXSAVE, whose last bytes describe the frame,
// and a header. The layout is uncompacted: the upper halves of the YMM registers are at offset 576.
constexpr size_t kXmm = 160, kDescription = 464, kHeader = 512, kHigh = 576;
constexpr uint32_t kMagic = 0x46505853;                  // FP_XSTATE_MAGIC1
constexpr uint64_t kSseState = 2, kAvxState = 4;         // bits of XCR0; components missing in the header are 0

struct Ymm {
    uint8_t bytes[32];
};

class Registers {
public:
    explicit Registers(ucontext_t* context)
        : general_(context->uc_mcontext.gregs), area_(reinterpret_cast<uint8_t*>(context->uc_mcontext.fpregs)) {
        uint32_t magic = 0;
        uint64_t saved = 0;
        if (area_) std::memcpy(&magic, area_ + kDescription, 4), std::memcpy(&saved, area_ + kDescription + 8, 8);
        if (magic != kMagic || (saved & kAvxState) == 0) std::abort();  // the kernel has not saved the registers
        clear(kSseState, kXmm, 256);
        clear(kAvxState, kHigh, 256);
    }

    Ymm ymm(int i) const {
        Ymm y;
        std::memcpy(y.bytes, area_ + kXmm + 16 * i, 16);
        std::memcpy(y.bytes + 16, area_ + kHigh + 16 * i, 16);
        return y;
    }
    void set_ymm(int i, const Ymm& y) {
        std::memcpy(area_ + kXmm + 16 * i, y.bytes, 16);
        std::memcpy(area_ + kHigh + 16 * i, y.bytes + 16, 16);
    }
    uint64_t general(int i) const {
        constexpr int order[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                   REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
        return static_cast<uint64_t>(general_[order[i]]);
    }
    const uint8_t* next() const { return reinterpret_cast<const uint8_t*>(general_[REG_RIP]); }
    void set_next(const uint8_t* at) { general_[REG_RIP] = reinterpret_cast<greg_t>(at); }

private:
    // Zeros registers that the header declares zero, and marks them as saved.
    void clear(uint64_t state, size_t at, size_t bytes) {
        uint64_t saved;
        std::memcpy(&saved, area_ + kHeader, 8);
        if (saved & state) return;
        std::memset(area_ + at, 0, bytes);
        saved |= state;
        std::memcpy(area_ + kHeader, &saved, 8);
    }

    greg_t* general_;
    uint8_t* area_;
};

int32_t number(const uint8_t* at) {
    int32_t x;
    std::memcpy(&x, at, 4);
    return x;
}

// Returns the memory operand of an instruction, from its ModRM byte at `at`; sets `at` to the address after it.
const uint8_t* address(const Registers& r, const uint8_t*& at, int index_bit, int base_bit) {
    const int mod = *at >> 6, rm = *at & 7;
    ++at;
    uint64_t sum = 0;
    bool is_relative = false, has_base = true;
    int base = rm | base_bit;
    if (rm == 4) {
        const int sib = *at++, index = (sib >> 3 & 7) | index_bit;
        if (index != 4) sum = r.general(index) << (sib >> 6);
        base = (sib & 7) | base_bit;
        has_base = (sib & 7) != 5 || mod != 0;
    } else if (rm == 5 && mod == 0) {
        is_relative = true, has_base = false;
    }
    if (has_base) sum += r.general(base);
    if (mod == 1) {
        sum += static_cast<uint64_t>(static_cast<int64_t>(static_cast<int8_t>(*at++)));
    } else if (mod == 2 || !has_base) {
        sum += static_cast<uint64_t>(static_cast<int64_t>(number(at)));
        at += 4;
    }
    if (is_relative) sum += reinterpret_cast<uint64_t>(at);
    return reinterpret_cast<const uint8_t*>(sum);
}

Ymm dots(Ymm sums, const Ymm& unsigned_factor, const Ymm& signed_factor) {
    for (int i = 0; i < 32; i += 4) {
        auto sum = static_cast<uint32_t>(number(sums.bytes + i));
        for (int k = i; k < i + 4; ++k) sum += static_cast<uint32_t>(unsigned_factor.bytes[k] * static_cast<int8_t>(signed_factor.bytes[k]));
        std::memcpy(sums.bytes + i, &sum, 4);
    }
    return sums;
}

enum class Done { nothing, broadcast, dots };

// Performs vpdpbusd, VEX.128/256.66.0F38.W0 50 /r. Also vpbroadcastd, the same with 58, which often occurs between two
// of them: the CPU has it, but each signal takes microseconds.
Done perform(Registers& r) {
    const uint8_t* at = r.next();
    if (at[0] != 0xc4 || (at[1] & 31) != 2 || (at[2] & 0x83) != 1) return Done::nothing;
    const bool is_broadcast = at[3] == 0x58;
    if (!is_broadcast && at[3] != 0x50) return Done::nothing;
    const size_t bytes = at[2] & 4 ? 32 : 16;
    const int second = ~at[2] >> 3 & 15, reg_bit = ~at[1] >> 4 & 8, index_bit = ~at[1] >> 3 & 8, base_bit = ~at[1] >> 2 & 8;
    at += 4;
    const int to = (*at >> 3 & 7) | reg_bit;
    Ymm y{}, result{};
    if (*at >> 6 == 3) y = r.ymm((*at & 7) | base_bit), ++at;
    else std::memcpy(y.bytes, address(r, at, index_bit, base_bit), is_broadcast ? 4 : bytes);
    if (is_broadcast) {
        for (int i = 0; i < 32; i += 4) std::memcpy(result.bytes + i, y.bytes, 4);
    } else {
        result = dots(r.ymm(to), r.ymm(second), y);
    }
    std::memset(result.bytes + bytes, 0, 32 - bytes);
    r.set_ymm(to, result);
    r.set_next(at);
    return is_broadcast ? Done::broadcast : Done::dots;
}

void handle(int, siginfo_t*, void* context) {
    Registers registers(static_cast<ucontext_t*>(context));
    int64_t found = 0;
    for (Done done; (done = perform(registers)) != Done::nothing;) found += done == Done::dots;
    if (!found) signal(SIGILL, SIG_DFL);  // the instruction raises the signal again
    emulated.fetch_add(found, std::memory_order_relaxed);
}

bool install() {
    struct sigaction action {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    return sigaction(SIGILL, &action, nullptr) == 0;
}

}  // namespace

// Called by the native library when it detects the CPU. Later handlers, such as faulthandler's, must not replace this one.
extern "C" __attribute__((visibility("default"))) int hop_emulates_avx_vnni() { return install(); }

// The number of vpdpbusd emulated so far.
extern "C" __attribute__((visibility("default"))) int64_t hop_emulated_instructions() { return emulated; }
#endif
