// What a kernel of this repository needs of CUDA, on one thread of the host: clusters of blocks one after the other (those of more
// than one block may have no static shared memory), a cluster's threads as fibers that take turns wherever they wait for each
// other; who waits at a barrier or for its warp has none until it can go on. host_cuda.py turns each asm statement into a call of
// ptx::<opcode>, outputs first. A launch returns what went wrong, or null. Copies into shared memory are done as late as they may
// be: those of a thread when it waits for them, those of tensors in any order, some turns later or when nobody can go on. Races of threads go unnoticed, and of global memory, which is the process's, only the alignment is
// checked. What no kernel changes lies in host_cuda.cpp.
#pragma once
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static

struct Place { int x, y, z; };
inline Place threadIdx, blockIdx, blockDim, gridDim;
struct __align__(8) float2 { float x, y; };
struct __align__(8) uint2 { unsigned x, y; };
struct __align__(16) float4 { float x, y, z, w; };
struct __align__(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float rsqrtf(float v) { return 1.0f / sqrtf(v); }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float __uint_as_float(unsigned v) { float f; memcpy(&f, &v, 4); return f; }
inline unsigned __float_as_uint(float f) { unsigned v; memcpy(&v, &f, 4); return v; }
template <typename T> T __ldcg(const T* p) { return *p; }
template <typename T> void __stcg(T* p, T v) { *p = v; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned pick) {
    const uint64_t both = (uint64_t)b << 32 | a;
    unsigned out = 0;
    for (int i = 0; i < 4; ++i) out |= (unsigned)(both >> 8 * (pick >> 4 * i & 7) & 255) << 8 * i;
    return out;
}

namespace host {
constexpr size_t STACK = 256 * 1024, STRIDE = STACK + 4096 + 320;  // the same depth of two stacks falls into two sets of a cache
struct Copy { unsigned to; const void* from; int bytes, group; };
struct Meeting { int came = 0, round = 0; uint32_t words[2][32][8]; };
struct Fiber { ucontext_t context; jmp_buf place; bool begun; int group; std::vector<Copy> copies; };
// What a thread waits for, if anything: that a meeting's round ends, or an mbarrier's phase.
struct Wait {
    const Meeting* meeting;
    const unsigned char* phase;
    int round, parity;
    bool done;
    bool idle() const { return done || (meeting && meeting->round == round) || (phase && *phase == parity); }
};
constexpr int MOST_BLOCKS = 8;     // of a cluster
constexpr size_t LIMIT = 228 * 1024;
alignas(1024) inline char memory[MOST_BLOCKS][LIMIT];
inline char* shared = memory[0];   // of the block whose thread runs, and where addresses in shared memory count from
inline std::vector<Fiber> fibers;  // of all blocks of a cluster, for all clusters of a launch
inline std::vector<Wait> waits;    // of each fiber
inline int per_block, first_block, cluster;  // threads of a block; the first block; blocks
inline char* stacks;
inline int size;                   // of the dynamic shared memory
inline ucontext_t scheduler;
inline int current, alive, alive_of[MOST_BLOCKS], turns;
inline int rank() { return current / per_block; }  // of the block in its cluster
struct TensorCopy { char* shared; unsigned to; const unsigned long long* map; unsigned barrier; long long column, row; };
inline std::vector<TensorCopy> under_way;
inline unsigned chance;
inline Meeting block[MOST_BLOCKS], named[MOST_BLOCKS], of_cluster;  // of __syncthreads, bar.sync and barrier.cluster
inline int counts[MOST_BLOCKS][3];                                  // of __syncthreads_count
inline std::vector<Meeting> warps;

inline const char* failure;
[[noreturn]] void fail(const char* why);  // leaves all threads where they are
void yield();
int meet(Meeting& at, int expected);
struct Words { uint32_t w[8]; };
uint32_t (*exchanged(const Words& own))[8];  // what all lanes of the warp gave; all have to come
inline void (*body)();
void run_blocks(int blocks, int threads, size_t shared_bytes, int together);
template <typename... A, size_t... I>
void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
    static std::tuple<void (*)(A...), void**> given;
    given = {kernel, args};
    body = [] { std::get<0>(given)(*static_cast<std::remove_reference_t<A>*>(std::get<1>(given)[I])...); };
}
template <typename... A>
const char* launch(void (*kernel)(A...), int blocks, int y, int threads, size_t shared_bytes, int cluster, void** args) {
    if (shared_bytes > LIMIT) return "more shared memory than there is";
    if (cluster > MOST_BLOCKS || blocks % cluster) return "blocks that make no whole clusters";
    call(kernel, args, std::index_sequence_for<A...>());
    failure = nullptr;
    gridDim = {blocks, y, 1}, blockDim = {threads, 1, 1};
    for (blockIdx.y = 0; blockIdx.y < y && !failure; ++blockIdx.y) run_blocks(blocks, threads, shared_bytes, cluster);
    return failure;
}
}  // namespace host

inline void __syncthreads() { host::meet(host::block[host::rank()], host::alive_of[host::rank()]); }
inline int __syncthreads_count(int mine) {
    const int round = host::block[host::rank()].round;
    int* const counts = host::counts[host::rank()];
    counts[round % 3] += mine != 0;
    __syncthreads();
    counts[(round + 2) % 3] = 0;  // all have read the last round's; nobody counts there before all have come to the next
    return counts[round % 3];
}
inline void __nanosleep(unsigned) { host::yield(); }
template <typename T> T atomicAdd(T* at, T more) { const T before = *at; *at += more; return before; }
template <typename T> T __shfl_sync(unsigned, T v, int lane) {
    host::Words own{};
    memcpy(own.w, &v, sizeof v);
    memcpy(&v, host::exchanged(own)[lane & 31], sizeof v);
    return v;
}
template <typename T> T __shfl_xor_sync(unsigned mask, T v, int flip) { return __shfl_sync(mask, v, host::current % 32 ^ flip); }
inline unsigned __ballot_sync(unsigned, int is) {
    host::Words own{};
    own.w[0] = is != 0;
    const auto lanes = host::exchanged(own);
    unsigned all = 0;
    for (int i = 0; i < 32; ++i) all |= lanes[i][0] << i;
    return all;
}
inline void __syncwarp() { host::exchanged({}); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
// Static variables of a block lie near, on either side.
template <typename T> unsigned long long __cvta_generic_to_shared(const T* p) { return (const char*)p - host::shared; }

namespace ptx {
inline unsigned bf16_of(float f) {
    const unsigned v = __float_as_uint(f);
    return f != f ? 0x7fffu : (v + 0x7fffu + (v >> 16 & 1)) >> 16;
}
inline float tf32(unsigned v) { return __uint_as_float(v & 0xffffe000u); }  // as the tensor cores cut it
inline float bf16(unsigned v, int half) { return __uint_as_float(half ? v & 0xffff0000u : v << 16); }

// Where an address of dynamic shared memory lies; all of it has to be the block's.
inline char* within(unsigned at, size_t bytes, size_t alignment = 0) {
    if (at % (alignment ? alignment : bytes)) host::fail("an address in shared memory that is not aligned");
    if (at + bytes > (size_t)host::size) host::fail("shared memory beyond what the launch asked for");
    return host::shared + at;
}
inline void aligned(const void* p, size_t bytes) {
    if ((uintptr_t)p % bytes) host::fail("an address that is not aligned to what is read or written there");
}

#define NOTHING(name) template <typename... A> void name(A...) {}
NOTHING(griddepcontrol_launch_dependents)
NOTHING(griddepcontrol_wait)
NOTHING(fence_mbarrier_init_release_cluster)
NOTHING(fence_proxy_async_shared)
NOTHING(wgmma_fence_sync_aligned)
NOTHING(wgmma_commit_group_sync_aligned)
NOTHING(wgmma_wait_group_sync_aligned)
NOTHING(prefetch_global_L2)
NOTHING(cp_async_bulk_prefetch_tensor_2d_L2_global_tile)
NOTHING(cp_async_bulk_commit_group)
NOTHING(cp_async_bulk_wait_group)
inline host::Fiber& own() { return host::fibers[host::current]; }
void cp_async_cg_shared_global(unsigned to, const void* from, int bytes = 16);
void cp_async_ca_shared_global(unsigned to, const void* from, int bytes);
void cp_async_wait_group(int pending);
inline void cp_async_commit_group() { ++own().group; }
inline void cp_async_wait_all() {
    cp_async_commit_group();
    cp_async_wait_group(0);
}
template <typename... W> void load(const char* from, W&... words) {
    ((memcpy(&words, from, 4), from += 4), ...);
}
inline void ld_global_nc_u8(unsigned& w, const char* p) { w = (unsigned char)*p; }
inline void ld_global_nc_u16(unsigned short& w, const char* p) { memcpy(&w, p, 2); }
inline void ld_global_nc_u32(unsigned& w, const char* p) { load(p, w); }
inline void ld_global_nc_v2_u32(unsigned& a, unsigned& b, const char* p) { aligned(p, 8), load(p, a, b); }
inline void ld_global_nc_v4_u32(unsigned& a, unsigned& b, unsigned& c, unsigned& d, const char* p) {
    aligned(p, 16), load(p, a, b, c, d);
}
inline void ld_global_nc_v2_u64(unsigned long long& a, unsigned long long& b, const unsigned long long* p) {
    aligned(p, 16), a = p[0], b = p[1];
}
template <typename P> void st_global_v4_b32(P* at, unsigned a, unsigned b, unsigned c, unsigned d) {
    const unsigned words[] = {a, b, c, d};
    aligned(at, 16), memcpy(at, words, 16);
}
template <typename W, typename P> void ld_relaxed_gpu_global_u64(W& w, P at) { memcpy(&w, at, 8); host::yield(); }
template <typename P, typename W> void st_relaxed_gpu_global_u64(P at, W w) { memcpy((void*)at, &w, 8); }
template <typename W, typename P> void ld_relaxed_gpu_global_v2_u64(W& a, W& b, P at) {
    memcpy(&a, at, 8);
    memcpy(&b, (const char*)at + 8, 8);
    host::yield();
}
inline void st_release_sys_global_s32(int* at, int v) { *at = v; }
inline void st_release_gpu_global_s32(int* at, int v) { *at = v; }
inline void ld_acquire_sys_global_s32(int& v, const int* at) { v = *at; host::yield(); }
inline void ld_acquire_gpu_global_s32(int& v, const int* at) { v = *at; host::yield(); }
inline void atom_add_acq_rel_gpu_global_s32(int& before, int* at) { before = (*at)++; }
inline void dp4a_s32_s32(int& sum, unsigned a, int b) {
    for (int i = 0; i < 32; i += 8) sum += (signed char)(a >> i) * (signed char)(b >> i);
}
inline void cvt_f32_f16(float& f, unsigned short h) { _Float16 v; memcpy(&v, &h, 2); f = (float)v; }
template <typename H> void cvt_rn_bf16_f32(H& h, float v) { h = (H)bf16_of(v); }
inline void cvt_rn_bf16x2_f32(unsigned& w, float high, float low) { w = bf16_of(high) << 16 | bf16_of(low); }
inline void ex2_approx_ftz_f32(float& z, float v) { z = exp2f(v); }
inline void rcp_approx_ftz_f32(float& z, float v) { z = 1.0f / v; }
inline void tanh_approx_f32(float& t, float v) { t = __uint_as_float(__float_as_uint(tanhf(v)) & 0xfffff000u); }  // off by 2^-11
inline void fma_rn_bf16x2(unsigned& d, unsigned a, unsigned b, unsigned c) {
    d = bf16_of(bf16(a, 1) * bf16(b, 1) + bf16(c, 1)) << 16 | bf16_of(bf16(a, 0) * bf16(b, 0) + bf16(c, 0));
}
template <typename... A> void unsupported(A&&...) { host::fail("an instruction that host_cuda.h lacks"); }

inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned address) {
    host::Words own{};
    own.w[0] = address;
    const auto rows = host::exchanged(own);
    unsigned* out[] = {&a, &b, &c, &d};
    const int lane = host::current % 32;
    for (int i = 0; i < 4; ++i) memcpy(out[i], within(rows[i * 8 + lane / 4][0], 16) + lane % 4 * 4, 4);
}
// c[16, 8] += a[16, K] b[K, 8], laid out over the lanes by PTX's tables; PER: numbers in a word of K.
template <int PER, typename Value>
void mma(float* c[4], const unsigned a[4], const unsigned b[2], Value value) {
    host::Words own{};
    memcpy(own.w, a, 16);
    memcpy(own.w + 4, b, 8);
    const auto all = host::exchanged(own);
    const int lane = host::current % 32;
    double rows[2][8 * PER], columns[2][8 * PER];  // of the lane's numbers
    for (int half = 0; half < 2; ++half)
        for (int k = 0; k < 8 * PER; ++k) {
            const int word = k / PER;
            rows[half][k] = value(all[lane / 4 * 4 + word % 4][half + word / 4 * 2], k % PER);
            columns[half][k] = value(all[(lane % 4 * 2 + half) * 4 + word % 4][4 + word / 4], k % PER);
        }
    for (int i = 0; i < 4; ++i) {
        double sum = *c[i];
        for (int k = 0; k < 8 * PER; ++k) sum += rows[i / 2][k] * columns[i % 2][k];
        *c[i] = (float)sum;
    }
}
#define MMA(name, per, value)                                                                                                    \
    inline void name(float& c0, float& c1, float& c2, float& c3, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, \
                     unsigned b1) {                                                                                              \
        float* c[] = {&c0, &c1, &c2, &c3};                                                                                       \
        const unsigned a[] = {a0, a1, a2, a3}, b[] = {b0, b1};                                                                   \
        mma<per>(c, a, b, value);                                                                                                \
    }
MMA(mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32, 1, [](unsigned v, int) { return tf32(v); })
MMA(mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32, 2, bf16)

inline void mul_rn_bf16x2(unsigned& z, unsigned a, unsigned b) {
    z = bf16_of(bf16(a, 1) * bf16(b, 1)) << 16 | bf16_of(bf16(a, 0) * bf16(b, 0));
}
inline void cvt_rna_tf32_f32(unsigned& z, float v) {
    z = v != v ? 0x7fffffffu : (__float_as_uint(v) + 0x1000u) & 0xffffe000u;
}

NOTHING(barrier_cluster_arrive_release_aligned)
inline void barrier_cluster_wait_acquire_aligned() {
    host::meet(host::of_cluster, host::alive);
}
inline void mapa_shared(unsigned& other, unsigned at, int rank) { other = at | (rank + 1) << 20; }
inline char* in_cluster(unsigned at, int bytes) {  // an address by mapa
    within(at & 0xfffff, bytes);
    return host::memory[(at >> 20) - 1] + (at & 0xfffff);
}
inline void ld_shared(float& x, float& y, unsigned at) {  // ::cluster
    memcpy(&x, in_cluster(at, 8), 4), memcpy(&y, in_cluster(at, 8) + 4, 4);
}

inline void bar_sync(int threads) { host::meet(host::named[host::rank()], threads); }

struct Barrier { unsigned char expected, pending, phase, unused; int bytes; };  // an mbarrier
inline Barrier& barrier(unsigned at, char* shared = host::shared) { return *reinterpret_cast<Barrier*>(shared + (int)at); }
inline void settle(Barrier& b) {
    if (b.pending || b.bytes) return;
    b.phase ^= 1;
    b.pending = b.expected;
}
inline void mbarrier_init_shared(unsigned at, int count) { barrier(at) = {(unsigned char)count, (unsigned char)count, 0, 0, 0}; }
inline void arrive(Barrier& b) {
    if (b.pending-- == 0) host::fail("an arrival too many at a barrier");
    settle(b);
}
inline void mbarrier_arrive_shared(unsigned at) { arrive(barrier(at)); }
inline void mbarrier_arrive_release_cluster_shared(unsigned at) { arrive(*reinterpret_cast<Barrier*>(in_cluster(at, 8))); }
inline void mbarrier_arrive_expect_tx_shared(unsigned at, int bytes) {
    barrier(at).bytes += bytes;
    mbarrier_arrive_shared(at);
}
inline void mbarrier_try_wait_parity_shared(unsigned at, int parity) {
    while (barrier(at).phase == parity) {
        host::waits[host::current].phase = &barrier(at).phase, host::waits[host::current].parity = parity;
        host::yield();
    }
}
inline unsigned swizzled(unsigned at) { return at ^ (at >> 7 & 7) << 4; }
// To the same address in all blocks whose ranks are given, a copy each.
void begin_copies(
    unsigned to, const void* map, unsigned at, long long column, long long row, size_t bytes, int alignment, unsigned ranks);
inline unsigned own_rank() { return 1u << host::rank(); }
// A tile of rows of 128 bytes; zeros beyond the matrix. map: see host_cuda.py, tensor_map.
inline void cp_async_bulk_tensor_2d_shared(unsigned to, const void* map, unsigned at, int column, int row) {
    begin_copies(to, map, at, column, row, static_cast<const unsigned long long*>(map)[4] * 128, 1024, own_rank());
}
// The reverse, at once; what lies beyond the matrix is not written.
void cp_async_bulk_tensor_2d_global_shared(const void* map, unsigned from, int column, int row);
// Consecutive bytes, a copy of a tensor without a map.
inline void cp_async_bulk_shared(unsigned to, const void* from, int bytes, unsigned at, unsigned ranks = own_rank()) {
    aligned(from, 16);
    if (bytes % 16 || bytes == 0) host::fail("a copy of bytes that are no multiple of 16");
    begin_copies(to, from, at, bytes, -1, bytes, 16, ranks);
}
// d[64, N] += a b^T over 32 bytes of K, for the warpgroup of the thread. given: d, then descriptors of a and b; or d, four
// registers, a descriptor, and whether d counts (1 if it is not given).
template <int PER, typename Value, typename... A> void wgmma(Value value, A&... given) {
    constexpr int N = 2 * (std::is_same_v<A, float> + ...);
    float* d[N / 2];
    unsigned long long rest[6] = {0, 0, 0, 0, 0, 1};
    int floats = 0, others = 0;
    const auto sort = [&](auto& v) {
        if constexpr (std::is_same_v<decltype(v), float&>) d[floats++] = &v;
        else rest[others++] = v;
    };
    (sort(given), ...);
    const int lane = host::current % 32, first = host::current % host::per_block / 32 % 4 * 16 + lane / 4;
    const bool registers = others > 2;
    host::Words own{};
    for (int i = 0; i < 4; ++i) own.w[i] = (unsigned)rest[i];
    const auto lanes = registers ? host::exchanged(own) : nullptr;
    const auto word = [&](unsigned long long descriptor, int row, int k) {
        unsigned w;
        const auto bytes = [&](int bit) { return (unsigned)(descriptor >> bit & 0x3fff) * 16; };
        const bool rows_of_128 = descriptor >> 62 == 1;  // and swizzled; else matrices of 8 rows of 16 bytes
        const unsigned plain = bytes(0) + row / 8 * bytes(32) + k / 4 * bytes(16) + row % 8 * 16 + k % 4 * 4;
        memcpy(&w, host::shared + (rows_of_128 ? swizzled(bytes(0) + row * 128 + k * 4) : plain), 4);
        return w;
    };
    double rows[2][8 * PER];  // of the lane's numbers
    for (int half = 0; half < 2; ++half)
        for (int k = 0; k < 8; ++k) {
            const int row = first + half * 8;
            const unsigned a = registers ? lanes[row % 8 * 4 + k % 4][half + k / 4 * 2] : word(rest[0], row, k);
            for (int part = 0; part < PER; ++part) rows[half][k * PER + part] = value(a, part);
        }
    for (int i = 0; i < N / 2; i += 4)
        for (int j = 0; j < 2; ++j) {
            double column[8 * PER];
            for (int k = 0; k < 8 * PER; k += PER) {
                const unsigned b = word(rest[registers ? 4 : 1], i / 4 * 8 + lane % 4 * 2 + j, k / PER);
                for (int part = 0; part < PER; ++part) column[k + part] = value(b, part);
            }
            for (int half = 0; half < 2; ++half) {
                float& to = *d[i + half * 2 + j];
                double sum = registers && !rest[5] ? 0.0 : to;
                for (int k = 0; k < 8 * PER; ++k) sum += rows[half][k] * column[k];
                to = (float)sum;
            }
        }
}
#define WGMMA(name, per, value) \
    template <typename... A> void name(A&&... given) { wgmma<per>(value, given...); }
WGMMA(wgmma_mma_async_sync_aligned_m64k8_f32_tf32_tf32, 1, [](unsigned v, int) { return tf32(v); })
WGMMA(wgmma_mma_async_sync_aligned_m64k16_f32_bf16_bf16, 2, bf16)
}  // namespace ptx
