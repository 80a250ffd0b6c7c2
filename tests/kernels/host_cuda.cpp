// The part of host_cuda.h that is the same for every kernel: threads as fibers, their meetings, copies. Compiled once.
#include "host_cuda.h"

namespace host {
void deliver();
[[noreturn]] void fail(const char* why) {  // leaves all threads where they are
    failure = why;
    setcontext(&scheduler);
    abort();
}
// Never returns: the thread `current` goes on where it left its place, as swapcontext would have it, which calls the kernel twice.
[[noreturn]] void go_on() {
    Fiber& fiber = fibers[current];
    threadIdx.x = current % per_block, blockIdx.x = first_block + rank(), shared = memory[rank()];
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    setcontext(&fiber.context);
    abort();
}
void end_if_all_came(Meeting& at, int expected) {
    if (at.came && at.came >= expected) at.came = 0, ++at.round;
}
// The next thread that can go on becomes `current`; this one if it is the only one.
void pick() {
    const int self = current, all = (int)waits.size();
    for (;;) {
        for (int i = 0; i < all; ++i) {
            if (++current == all) current = 0;
            if (!waits[current].idle()) return;
        }
        if (under_way.empty()) fail("threads that wait for each other for ever");
        current = self;
        deliver();
    }
}
void yield() {
    if (++turns > 5000000 * cluster) fail("threads that wait for each other for ever");
    chance = chance * 1664525u + 1013904223u;
    if (!under_way.empty() && chance >> (blockIdx.x % 3 ? 26 : 19) == 0) deliver();  // one turn in 64, or in 8,192
    const int self = current;
    pick();
    if (current != self && _setjmp(fibers[self].place) == 0) go_on();
    waits[self] = {};
}
int living(int warp) {
    int n = 0;
    for (int i = warp * 32; i < warp * 32 + 32 && i < (int)waits.size(); ++i) n += !waits[i].done;
    return n;
}
// All of `expected` threads, all living ones of a block or warp. Returns the round, by which exchanged words lie in one of two
// places.
int meet(Meeting& at, int expected) {
    const int round = at.round;
    ++at.came;
    end_if_all_came(at, expected);
    if (at.round == round) {
        waits[current].meeting = &at, waits[current].round = round;
        yield();
    }
    return round & 1;
}
// What all lanes of the warp gave; all have to come.
uint32_t (*exchanged(const Words& own))[8] {
    Meeting& at = warps[current / 32];
    memcpy(at.words[at.round & 1][current % 32], own.w, sizeof own.w);
    return at.words[meet(at, living(current / 32))];
}

void fiber() {
    for (;;) {  // a block's thread each time
        body();
        const int self = current, block_rank = rank();
        waits[self].done = true;
        --alive, --alive_of[block_rank];
        end_if_all_came(warps[self / 32], living(self / 32));  // those that wait for the living have one less to wait for
        end_if_all_came(block[block_rank], alive_of[block_rank]);
        end_if_all_came(of_cluster, alive);
        if (_setjmp(fibers[self].place)) continue;
        if (alive == 0) setcontext(&scheduler);
        pick();
        go_on();
    }
}
void run_cluster(int first, int threads) {
    const int blocks = cluster, all = blocks * threads;
    for (int b = 0; b < blocks; ++b) {
        memset(memory[b], 0xff, size);  // NaN: what nobody wrote must not count
        block[b] = named[b] = {}, alive_of[b] = threads;
    }
    of_cluster = {};
    first_block = first, per_block = threads;
    for (Fiber& fiber : fibers) fiber.group = 0, fiber.copies.clear();
    waits.assign(all, {});
    warps.assign((all + 31) / 32, {});
    memset(counts, 0, sizeof counts);
    alive = all, current = turns = 0;
    if (getcontext(&scheduler) == 0 && alive == all && !failure) go_on();
    if (!under_way.empty() && !failure) failure = "a block that ends before its copies have come";
    under_way.clear();
}
void run_blocks(int blocks, int threads, size_t shared_bytes, int together) {
    size = (int)shared_bytes, cluster = together;
    stacks = new char[cluster * threads * STRIDE];  // not initialised: pages that no thread reaches are never there
    fibers.assign(cluster * threads, {});
    for (size_t i = 0; i < fibers.size(); ++i) {
        getcontext(&fibers[i].context);
        fibers[i].context.uc_stack = {stacks + i * STRIDE, 0, STACK};
        fibers[i].context.uc_link = nullptr;
        makecontext(&fibers[i].context, fiber, 0);
    }
    for (int b = 0; b < blocks && !failure; b += cluster) run_cluster(b, threads);
    delete[] stacks;
}
}  // namespace host

namespace ptx {
void cp_async_cg_shared_global(unsigned to, const void* from, int bytes) {
    if (bytes) aligned(from, 16);
    memset(within(to, 16), 0xff, 16);
    own().copies.push_back({to, from, bytes, own().group});
}
void cp_async_ca_shared_global(unsigned to, const void* from, int bytes) {
    memset(within(to, bytes), 0xff, bytes);
    own().copies.push_back({to, from, -bytes, own().group});  // nothing is put behind these bytes
}
void cp_async_wait_group(int pending) {
    auto& copies = own().copies;
    size_t done = 0;
    for (; done < copies.size() && copies[done].group < own().group - pending; ++done) {
        const host::Copy& c = copies[done];
        if (c.bytes >= 0) memset(host::shared + c.to, 0, 16);
        memcpy(host::shared + c.to, c.from, abs(c.bytes));
    }
    copies.erase(copies.begin(), copies.begin() + done);
}
// To the same address in all blocks whose ranks are given, a copy each.
void begin_copies(
    unsigned to, const void* map, unsigned at, long long column, long long row, size_t bytes, int alignment, unsigned ranks) {
    within(to, bytes, alignment);
    for (int r = 0; r < host::cluster; ++r) {
        if (!(ranks >> r & 1)) continue;
        memset(host::memory[r] + to, 0xff, bytes);
        host::under_way.push_back({host::memory[r], to, static_cast<const unsigned long long*>(map), at, column, row});
    }
}
// The reverse, at once; what lies beyond the matrix is not written.
void cp_async_bulk_tensor_2d_global_shared(const void* map, unsigned from, int column, int row) {
    const unsigned long long* m = static_cast<const unsigned long long*>(map);
    within(from, m[4] * 128, 1024);
    for (long long r = 0; r < (long long)m[4]; ++r)
        for (int byte = 0; byte < 128; ++byte) {
            const long long to = row + r, offset = column * (long long)m[5] + byte;
            if (to < (long long)m[1] && offset < (long long)m[2])
                reinterpret_cast<char*>(m[0])[to * m[3] + offset] = host::shared[swizzled(from + r * 128 + byte)];
        }
}
}  // namespace ptx
void host::deliver() {  // one of the copies that are under way: in some blocks the last, and slowly, in others the first, or any
    const size_t n = under_way.size(), order[] = {n - 1, 0, chance / 7 % n}, i = order[blockIdx.x % 3];
    const TensorCopy c = under_way[i];
    under_way.erase(under_way.begin() + i);
    const unsigned long long* m = c.map;
    const bool bytes = c.row == -1;
    if (bytes) memcpy(c.shared + c.to, m, c.column);
    for (long long r = 0; !bytes && r < (long long)m[4]; ++r)
        for (int byte = 0; byte < 128; ++byte) {
            const long long from = c.row + r, offset = c.column * (long long)m[5] + byte;
            const bool there = from < (long long)m[1] && offset < (long long)m[2];
            c.shared[ptx::swizzled(c.to + r * 128 + byte)] = there ? reinterpret_cast<const char*>(m[0])[from * m[3] + offset] : 0;
        }
    ptx::Barrier& barrier = ptx::barrier(c.barrier, c.shared);
    barrier.bytes -= bytes ? c.column : m[4] * 128;
    ptx::settle(barrier);
}
