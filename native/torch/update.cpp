// hop_native::step_ and hop_native::noise.
#include "torch/factor.h"
#include "torch/operators.h"
#include "torch/quantizer.h"

namespace hop::torch {
namespace {

// "1 adam coupled maximize least=0,1017118720;1 float ...;": the rule and its flags; then, after a semicolon for each
// state, its quantizer as in quantizer.h, or nothing for floats. `least` has the bits of hop_state::least for each
// state.
struct StepDescription {
    int32_t rule = HOP_ADAM, flags = 0;
    std::vector<float> least;
    std::vector<std::unique_ptr<QuantizerDescription>> states;

    explicit StepDescription(const std::string& text) {
        constexpr std::string_view rules[] = {"adam", "sgd", "lion"};
        constexpr std::string_view names[] = {"coupled", "nesterov", "maximize", "stochastic"};
        const size_t first = text.find(';');
        Words words(std::string_view(text).substr(0, first));
        if (!words.next()) fail("the description ends before the update rule");
        rule = words.one_of(words.word, rules, 3);
        while (words.next()) {
            if (words.name == "least") least = words.reals(HOP_STATES);
            else flags |= 1 << words.one_of(words.word, names, 4);
        }
        for (size_t at = first; at != text.npos;) {
            const size_t next = text.find(';', at + 1), length = next == text.npos ? next : next - at - 1;
            const std::string own = text.substr(at + 1, length);
            states.push_back(own.empty() ? nullptr : std::make_unique<QuantizerDescription>(own));
            if (states.back() && (!states.back()->flat || states.back()->q.affine)) fail("states need flat blocks with one scale each and no zero point, got '" + own + "'");
            at = next;
        }
        const size_t fewest = rule == HOP_ADAM ? 2 : rule == HOP_LION ? 1 : 0, most = rule == HOP_ADAM ? 3 : 1;
        if (states.size() < fewest || states.size() > most || least.size() != states.size())
            fail("adam has 2 or 3 states, lion 1 and sgd at most 1, each with a part of the description, got '" + text + "'");
    }
};

int32_t float_dtype(const View& x) {
    switch (x.format()) {
        case HOP_FLOAT32: return HOP_F32;
        case HOP_BFLOAT16: return HOP_BF16;
        case HOP_FLOAT16: return HOP_F16;
        default: fail(std::string(x.name) + " must be float32, bfloat16 or float16");
    }
}

void expect_rows(const View& x, int64_t count) {
    if (!x.is_contiguous() || x.numel() != count)
        fail(std::string(x.name) + " must be contiguous, of " + std::to_string(count) + " elements; got shape " + x.shape());
}

// The update of one parameter, without its `numbers`; consumes the buffers of its states from `at` on.
hop_update update_of(const StepDescription& d, const Tensor& p, const Tensor& grad, const std::vector<Tensor>& buffers,
                     size_t& at) {
    hop_update u{};
    const View of_p = view("p", p), of_grad = view("grad", grad);
    u.rule = d.rule, u.flags = d.flags, u.states = static_cast<int32_t>(d.states.size());
    u.p_dtype = float_dtype(of_p), u.grad_dtype = float_dtype(of_grad), u.count = of_p.numel();
    expect_rows(of_p, u.count), expect_rows(of_grad, u.count);
    u.p = const_cast<void*>(of_p.data), u.grad = of_grad.data;
    if ((d.flags & HOP_STOCHASTIC) && u.p_dtype != HOP_BF16) fail("p must be bfloat16 for stochastic rounding");
    const auto next = [&](const char* name) {
        if (at == buffers.size()) fail("buffers has fewer tensors than the states need");
        return view(name, buffers[at++]);
    };
    for (size_t i = 0; i < d.states.size(); ++i) {
        hop_state& s = u.state[i];
        s.least = d.least[i];
        const View codes = next("a state");
        s.data = const_cast<void*>(codes.data);
        if (!d.states[i]) {
            expect_rows(codes, u.count);
            s.dtype = float_dtype(codes);
            continue;
        }
        const QuantizerDescription& q = *d.states[i];
        const View scale = next("the scale of a state");
        s.quantizer = &q.q, s.block = q.block[0], s.scale = static_cast<float*>(const_cast<void*>(scale.data));
        const int64_t bytes = (u.count + q.per_byte() - 1) / q.per_byte();
        expect_rows(codes, bytes);
        expect(codes, Sizes(codes.sizes, codes.sizes + codes.dim), q.stored_codes());
        expect(scale, {(u.count + s.block - 1) / s.block}, HOP_FLOAT32);
        if (!scale.is_contiguous()) fail("the scale of a state must be contiguous");
    }
    return u;
}

}  // namespace

void step_(StableIValue* values, uint64_t count) {
    Stack stack(values, count);
    const std::vector<Tensor> params = stack.tensors(), grads = stack.tensors(), buffers = stack.tensors();
    const std::vector<double> numbers = stack.reals();
    const int64_t seed = stack.integer();
    const Sizes streams = stack.sizes();
    static Parsed<StepDescription> known;
    const auto description = known(stack.text());
    const StepDescription& d = *description;

    const size_t needed = d.rule == HOP_ADAM ? 9 : d.rule == HOP_LION ? 6 : 5;
    if (grads.size() != params.size() || streams.size() != params.size())
        fail("grads and streams must have one entry per parameter");
    if (numbers.size() != needed * params.size())
        fail("numbers must have " + std::to_string(needed) + " entries per parameter, got " + std::to_string(numbers.size()));
    std::vector<hop_update> updates;  // all are checked before anything changes
    size_t at = 0;
    for (size_t i = 0; i < params.size(); ++i) {
        hop_update u = update_of(d, params[i], grads[i], buffers, at);
        for (size_t k = 0; k < needed; ++k) u.numbers[k] = static_cast<float>(numbers[needed * i + k]);
        if (streams[i] < 0 || streams[i] > UINT32_MAX) fail("stream must be from 0 to 2^32 - 1");
        u.seed = static_cast<uint64_t>(seed), u.stream = static_cast<uint32_t>(streams[i]);
        updates.push_back(u);
    }
    if (at != buffers.size()) fail("buffers has more tensors than the states need");
    for (const hop_update& u : updates)
        if (u.count && hop_step(&u, threads()) != HOP_OK) fail("the kernels do not support these blocks of states");
}

void noise(StableIValue* values, uint64_t count) {
    Stack stack(values, count);
    const Tensor seed = stack.tensor();
    const Sizes shape = stack.sizes();
    const int64_t stream = stack.integer(), bits = stack.integer();
    const View own = view("seed", seed);
    if (own.numel() != 1 || own.dtype != aoti_torch_dtype_int64()) fail("seed must be one int64");
    if (stream < 0 || stream > UINT32_MAX) fail("stream must be from 0 to 2^32 - 1");
    if (bits != 8 && bits != 24) fail("bits must be 8 or 24");
    const int64_t size = elements(shape);
    Tensor made = empty(shape, dtype_of(bits == 8 ? HOP_UINT8 : HOP_INT32));
    if (size)
        hop_noise(static_cast<const int64_t*>(own.data), static_cast<uint32_t>(stream), size,
                  static_cast<int32_t>(bits), data_of(made), threads());
    stack.give(std::move(made));
}

}  // namespace hop::torch
