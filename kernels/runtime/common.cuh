// Types and warp primitives that the kernels share. No CUDA headers are included, so that NVRTC needs no toolkit on the host.
#pragma once

typedef unsigned short bf16;  // raw bits
typedef unsigned short f16;   // raw bits
struct fp8 { unsigned char bits; };  // e4m3, sm_89 on; whoever reads or writes one knows its scale

__device__ __forceinline__ float load_value(const float* p) { return *p; }
__device__ __forceinline__ float load_value(const bf16* p) { return __uint_as_float((unsigned)(*p) << 16); }
__device__ __forceinline__ float half_to_float(f16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

__device__ __forceinline__ void store_value(float* p, float v) { *p = v; }
__device__ __forceinline__ void store_value(bf16* p, float v) {
    bf16 h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(v));
    *p = h;
}

__device__ __forceinline__ unsigned short pack_fp8(float low, float high) {  // beyond 448 it stays there; NaN stays NaN
    unsigned short h;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(h) : "f"(high), "f"(low));
    return h;
}
__device__ __forceinline__ void widen_fp8(unsigned short h, float v[2]) {
    unsigned w;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(w) : "h"(h));
    v[0] = half_to_float((f16)w);
    v[1] = half_to_float((f16)(w >> 16));
}
__device__ __forceinline__ float load_value(const fp8* p) {
    float v[2];
    widen_fp8(p->bits, v);
    return v[0];
}
__device__ __forceinline__ void store_value(fp8* p, float v) { p->bits = (unsigned char)pack_fp8(v, 0.0f); }

// Four consecutive values as they lie in memory, and widened; the address is aligned to all of them.
template <typename T> struct Four;
template <> struct Four<float> { float4 raw; };
template <> struct Four<bf16> { uint2 raw; };
template <> struct Four<fp8> { unsigned raw; };
template <typename T> __device__ __forceinline__ Four<T> four(const T* p) { return *reinterpret_cast<const Four<T>*>(p); }
__device__ __forceinline__ void widen4(const Four<float>& q, float v[4]) {
    v[0] = q.raw.x; v[1] = q.raw.y; v[2] = q.raw.z; v[3] = q.raw.w;
}
__device__ __forceinline__ void widen4(const Four<bf16>& q, float v[4]) {
    v[0] = __uint_as_float(q.raw.x << 16); v[1] = __uint_as_float(q.raw.x & 0xffff0000u);
    v[2] = __uint_as_float(q.raw.y << 16); v[3] = __uint_as_float(q.raw.y & 0xffff0000u);
}
__device__ __forceinline__ void widen4(const Four<fp8>& q, float v[4]) {
    widen_fp8((unsigned short)q.raw, v);
    widen_fp8((unsigned short)(q.raw >> 16), v + 2);
}
template <typename T> __device__ __forceinline__ void load4(const T* p, float v[4]) { widen4(four(p), v); }
__device__ __forceinline__ void store4(float* p, const float v[4]) {
    *reinterpret_cast<float4*>(p) = make_float4(v[0], v[1], v[2], v[3]);
}
__device__ __forceinline__ void store4(bf16* p, const float v[4]) {
    bf16 h[4];
    for (int k = 0; k < 4; ++k) store_value(h + k, v[k]);
    *reinterpret_cast<uint2*>(p) = make_uint2(h[0] | (unsigned)h[1] << 16, h[2] | (unsigned)h[3] << 16);
}
__device__ __forceinline__ void store4(fp8* p, const float v[4]) {
    *reinterpret_cast<unsigned*>(p) = pack_fp8(v[0], v[1]) | (unsigned)pack_fp8(v[2], v[3]) << 16;
}
__device__ __forceinline__ void store8(bf16* p, const float v[8]) {
    unsigned w[4];
    for (int k = 0; k < 4; ++k) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w[k]) : "f"(v[2 * k + 1]), "f"(v[2 * k]));
    *reinterpret_cast<uint4*>(p) = make_uint4(w[0], w[1], w[2], w[3]);
}

// Words of a lane's state, int32 on the device: state.py says what each is.
enum StateWord { TRUE_ROWS = 0, GENERATION = 1, READY_ROWS = 2, BATCH_NUMBER = 3, READY_BLOCKS = 4, CONTEXTS = 5 };

// Programmatic dependent launch: the next kernel may start and do what needs nothing of this one; and this one waits until all
// kernels before it are done and their writes are visible. Every kernel calls both, first the one, then, before it touches
// memory that others write, the other: so a kernel that is done implies that all before it are.
__device__ __forceinline__ void let_dependents_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_dependencies() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Starts copying a word into shared memory; 16 bytes past the L1 to an address there.
template <typename T>
__device__ __forceinline__ void copy_word(T* to, const T* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from),
                 "n"(sizeof(T)) : "memory");
}
__device__ __forceinline__ void copy16(unsigned to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Adds to a counter of the device: what this thread, and those it met at a barrier before, wrote is visible to whoever reads the
// new count, and the other way round.
__device__ __forceinline__ int count_up(int* counter) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// Tells the host that the scores of some rows are there, 2 to 3 us before the driver sees the end of the graph (H200): done is
// pinned, a word for every 8 rows, and gets the batch's number. Called after a barrier behind the writes of those
// scores, by one thread a word. No word is shared by blocks, so that none waits for another.
#define ROWS_A_WORD 8
__device__ __forceinline__ void announce(int* done, int word, int batch) {
    asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(done + word), "r"(batch) : "memory");
}

// Sum over a full warp; every lane gets it. The order is fixed, so a row's result does not change from run to run.
__device__ __forceinline__ float warp_sum(float v) {
    for (int step = 16; step > 0; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);
    return v;
}
