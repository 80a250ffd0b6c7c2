// What a chain of dependent kernels cannot do without, each as small as it can be: a word a thread, a block a multiprocessor.
__device__ __forceinline__ void begin() {  // programmatic dependent launch, as common.cuh has it
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Reads what other blocks of the kernel before it wrote.
extern "C" __global__ void step(const int* from, int* to) {
    begin();
    const unsigned n = gridDim.x * blockDim.x, i = blockIdx.x * blockDim.x + threadIdx.x;
    to[i] = __ldcg(from + (i + n / 2) % n);
}

// Reads a number over the bus, and what it says of a table.
extern "C" __global__ void fetch(const int* ids, const int* table, int* to) {
    begin();
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    to[i] = __ldcg(table + ids[i]);
}

// Tells the host, as a head does.
extern "C" __global__ void tell(int* word, int* count) {
    begin();
    const int n = *count + 1;
    *count = n;
    asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(word), "r"(n) : "memory");
}
