// What CUDA C++ has and C++ has not, as far as the kernels use it. A fiber stands for each lane: it runs until it waits
// for others or touches what they may touch too, and any lane may be the next. Warps, thread blocks and clusters are
// groups of lanes with a barrier each.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <ucontext.h>

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

struct float4 {
    float x, y, z, w;
};

struct Index {
    unsigned x;
};

struct Block;
struct Cluster;

constexpr int STACK_BYTES = 1 << 17;

struct Lane {
    Index in_block, of_block;
    Block* block;
    Cluster* cluster;
    std::vector<std::vector<std::function<void()>>> copies = std::vector<std::vector<std::function<void()>>>(1);
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
    ucontext_t context;
};

static Lane* current;  // the lane that runs
#define threadIdx current->in_block
#define blockIdx current->of_block

static std::vector<Lane*> ready;  // those that could
static ucontext_t scheduler;
static uint32_t turns;

static uint32_t any_number() {  // a pseudorandom one
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return state >> 33;
}

static void let_others() { swapcontext(&current->context, &scheduler); }

static void yield() {
    ready.push_back(current);
    let_others();
}

// Lanes go on until none is left; any of those that can is the next.
static void run_all() {
    for (; !ready.empty(); ++turns) {
        std::swap(ready[any_number() % ready.size()], ready.back());
        current = ready.back();
        ready.pop_back();
        swapcontext(&scheduler, &current->context);
    }
}

class Barrier {
    const int lanes;
    std::vector<Lane*> waiting;

  public:
    explicit Barrier(int lanes) : lanes(lanes) {}

    void arrive_and_wait() {
        waiting.push_back(current);
        if (int(waiting.size()) == lanes) {
            ready.insert(ready.end(), waiting.begin(), waiting.end());
            waiting.clear();
        }
        let_others();
    }
};

struct Warp {
    Barrier barrier{32};
    uint32_t registers[32][6];  // what the lanes show each other
};

// Shared memory begins as garbage: neither zeros, nor the pattern of an unwritten word, nor a sensible number. What
// lies behind it must still be garbage at the end.
constexpr unsigned char GARBAGE = 0x7E;
constexpr int GUARD = 4096;

struct Block {
    Barrier barrier;
    std::deque<Warp> warps;
    const int shared_bytes;
    unsigned char* const memory;

    Block(int threads, int shared_bytes)
        : barrier(threads), warps(threads / 32), shared_bytes(shared_bytes),
          memory(static_cast<unsigned char*>(std::aligned_alloc(16, shared_bytes + GUARD))) {
        std::fill_n(memory, shared_bytes + GUARD, GARBAGE);
    }

    ~Block() { std::free(memory); }

    bool overran() const {
        const unsigned char* end = memory + shared_bytes;
        return std::any_of(end, end + GUARD, [](unsigned char byte) { return byte != GARBAGE; });
    }
};

struct Cluster {
    Barrier barrier;
    std::vector<Block*> blocks;

    explicit Cluster(int lanes) : barrier(lanes) {}
};

static unsigned lane() { return threadIdx.x % 32; }
static Warp& warp() { return current->block->warps[threadIdx.x / 32]; }

static float __uint_as_float(uint32_t v) {
    float f;
    std::memcpy(&f, &v, 4);
    return f;
}

static uint32_t __float_as_uint(float v) {
    uint32_t u;
    std::memcpy(&u, &v, 4);
    return u;
}

static float __fdividef(float a, float b) { return a / b; }
static float exponential(float v) { return std::exp(v); }
#define __expf exponential  // the C library has a __expf of its own

static void __syncthreads() { current->block->barrier.arrive_and_wait(); }

static void __syncwarp() { warp().barrier.arrive_and_wait(); }

static void __nanosleep(unsigned ns) {
    for (unsigned turn = 0; turn <= ns / 256; ++turn) yield();
}

static size_t __cvta_generic_to_shared(const void* p) {
    return static_cast<const unsigned char*>(p) - current->block->memory;
}

// Every lane shows a value; `look` says what this lane makes of all of them.
template <typename Look>
static uint32_t exchange(uint32_t value, Look look) {
    warp().registers[lane()][0] = value;
    warp().barrier.arrive_and_wait();
    const uint32_t result = look(warp().registers);
    warp().barrier.arrive_and_wait();
    return result;
}

static uint32_t __shfl_sync(uint32_t, uint32_t value, int source) {
    return exchange(value, [=](auto& all) { return all[source % 32][0]; });
}

static uint32_t __shfl_down_sync(uint32_t, uint32_t value, int by) {
    const unsigned source = lane() + by < 32 ? lane() + by : lane();
    return exchange(value, [=](auto& all) { return all[source][0]; });
}

static int __any_sync(uint32_t, int value) {
    return exchange(value != 0, [](auto& all) {
        return std::any_of(all, all + 32, [](auto& one) { return one[0] != 0; });
    });
}
