// Activations by a compile-time kind, with the parameters of one unit. The numbers are those of activation.py.
#pragma once

enum Kinds { AS_IS = 0, RELU_ = 1, SIGMOID_ = 2, TANH_ = 3, GELU = 4, GELU_TANH = 5, PRELU = 6, DICE = 7 };
struct Shape { float alpha, scale, shift; };  // of PRELU and DICE

__device__ __forceinline__ float sigmoid(float v) { return 1.0f / (1.0f + expf(-v)); }

template <int KIND>
__device__ __forceinline__ float activate(float v, const Shape& s) {
    if (KIND == RELU_) return v < 0.0f ? 0.0f : v;  // keeps NaN, as torch does
    if (KIND == SIGMOID_) return sigmoid(v);
    if (KIND == TANH_) return tanhf(v);
    if (KIND == GELU) return 0.5f * v * (1.0f + erff(v * 0.70710678118654752f));
    if (KIND == GELU_TANH) return 0.5f * v * (1.0f + tanhf(0.79788456080286536f * (v + 0.044715f * v * v * v)));
    if (KIND == PRELU) return v < 0.0f ? s.alpha * v : v;
    if (KIND == DICE) {
        const float p = sigmoid(s.scale * v + s.shift);
        return v * (p + s.alpha * (1.0f - p));
    }
    return v;
}

// The same by the tensor cores' digits: tanh by one instruction, off by 2^-11 of its value at most, and sigmoid by tanh. An
// exponential and a division are two, of a unit that a multiprocessor has 16 of.
__device__ __forceinline__ float approximate_tanh(float v) {
    float t;
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(v));
    return t;
}
template <int KIND>
__device__ __forceinline__ float approximate(float v, const Shape& s) {
    if (KIND == SIGMOID_) return fmaf(0.5f, approximate_tanh(0.5f * v), 0.5f);
    if (KIND == TANH_) return approximate_tanh(v);
    if (KIND == GELU_TANH) {
        const float half = 0.5f * v;
        return fmaf(half, approximate_tanh(0.79788456080286536f * (v + 0.044715f * v * v * v)), half);
    }
    if (KIND == DICE) {
        const float p = fmaf(0.5f, approximate_tanh(0.5f * (s.scale * v + s.shift)), 0.5f);
        return v * (p + s.alpha * (1.0f - p));
    }
    return activate<KIND>(v, s);
}

// The parameters of unit n, which lie [alpha, scale, shift][units]; nothing is read where the kind has none.
template <int KIND>
__device__ __forceinline__ Shape shape_of(const float* __restrict__ params, int units, int n) {
    Shape s = {0.0f, 0.0f, 0.0f};
    if (KIND == PRELU || KIND == DICE) s.alpha = params[n];
    if (KIND == DICE) s.scale = params[units + n], s.shift = params[2 * units + n];
    return s;
}
