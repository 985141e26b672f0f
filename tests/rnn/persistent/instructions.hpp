// The instructions that the kernels write in assembly, and the launch. Stands behind the kernel's source, whose
// types it uses.

// Words that several lanes may touch: before each, others may have their turn.
static u32 load_word(const void* address) {
    if (any_number() % 8 == 0) yield();
    u32 word;
    std::memcpy(&word, address, 4);
    return word;
}

static void store_word(void* address, u32 word) {
    if (any_number() % 8 == 0) yield();
    std::memcpy(address, &word, 4);
}

// Whether memory was touched at an address that the hardware refuses.
static bool misaligned = false;

static void check_alignment(const void* address, int bytes) {
    if (reinterpret_cast<uintptr_t>(address) % bytes) misaligned = true;
}

// 16 bytes arrive word by word: the hardware promises no more.
static void load_words(piece& p, const void* address) {
    check_alignment(address, 16);
    const u32* words = static_cast<const u32*>(address);
    p = {load_word(words), load_word(words + 1), load_word(words + 2), load_word(words + 3)};
}

static void store_words(void* address, const piece& p) {
    u32* words = static_cast<u32*>(address);
    store_word(words, p.x);
    store_word(words + 1, p.y);
    store_word(words + 2, p.z);
    store_word(words + 3, p.w);
}

// An address in a cluster's shared memory: the block's rank and the place in its memory.
static unsigned char* in_cluster(u32 address) {
    return current->cluster->blocks[address >> 24]->memory + (address & 0xFFFFFF);
}

float widen(element v) {
#if ELEMENT == 0
    return __uint_as_float(u32(v) << 16);
#elif ELEMENT == 1
    _Float16 half;
    std::memcpy(&half, &v, 2);
    return half;
#else
    return v;
#endif
}

element narrow(float v) {
#if ELEMENT == 0
    if (v != v) return 0x7FFF;  // the NaN of the hardware's conversions
    const u32 bits = __float_as_uint(v);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
#elif ELEMENT == 1
    if (v != v) return 0x7FFF;
    const _Float16 half = v;
    element bits;
    std::memcpy(&bits, &half, 2);
    return bits;
#else
    return v == v ? v : __uint_as_float(0x7FC00000u);
#endif
}

float tanh_approximate(float v) { return std::tanh(v); }

// TF32 keeps 10 bits of the mantissa. Not rounded where it is the precision of the result: then a result differs
// from the reference by roundings of float32 only, and the test can be sharp.
u32 to_tf32(u32 v) { return STRICT ? v + 0x1000 & ~0x1FFFu : v; }

void load_shared_device(piece& p, const void* address, bool wanted) {
    if (wanted) load_words(p, address);
}

// Copies run when they are waited for, not before: what is read too early is not there. In every other block they
// run at once: what is still to be read from the place is gone.
static void copy(std::function<void()> run) {
    if (blockIdx.x % 2) run();
    else current->copies.back().push_back(run);
}

void copy_early(u32 to, const void* address, bool wanted) {
    copy([=] {
        piece p = {0, 0, 0, 0};
        load_shared_device(p, address, wanted);
        store_words(current->block->memory + to, p);
    });
}

void copy_word(u32 to, const void* address) {
    check_alignment(address, 4);
    copy([=] {
        u32 word;
        std::memcpy(&word, address, 4);
        store_word(current->block->memory + to, word);
    });
}

void group_copies() { current->copies.emplace_back(); }

template <int LAST>
void await_copies() {
    auto& copies = current->copies;
    const auto end = copies.begin() + std::max<int>(int(copies.size()) - 1 - LAST, 0);
    for (auto group = copies.begin(); group != end; ++group)
        for (auto& copy : *group) copy();
    copies.erase(copies.begin(), end);
}

void store_shared_device(void* address, u32 word) { store_word(address, word); }

element load_early(const element* address) { return *address; }

float load_early_float(const float* address) { return *address; }

element load_element(u32 address) {
    element v;
    std::memcpy(&v, current->block->memory + address, sizeof v);
    return v;
}

float load_float(u32 address) {
    float v;
    std::memcpy(&v, current->block->memory + address, 4);
    return v;
}

int afresh(int v) { return v; }

const element* as_given(const element* address) { return address; }

u32 clocks() {
    yield();
    return turns;
}

u32 remote_address(u32 mine, u32 owner) { return owner << 24 | mine; }

void store_remote(u32 address, float v) { store_word(in_cluster(address), __float_as_uint(v)); }

void store_remote_piece(u32 address, const piece& p) { store_words(in_cluster(address), p); }

void load_mail(piece& p, u32 address, bool wanted) {
    if (wanted) load_words(p, current->block->memory + address);
}

void clear_mail(u32 address, bool wanted) {
    if (wanted) store_words(current->block->memory + address, {UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN});
}

u32 split_rank() { return blockIdx.x % SPLIT; }

void cluster_barrier() { current->cluster->barrier.arrive_and_wait(); }

// d += a b, with the fragments where the PTX ISA has them for mma.m16n8k16 (m16n8k8 for TF32): rows of a and columns
// of b are 8 words deep; lane 4 r + q has words q and q + 4 of a's rows r and r + 8 and of b's column r.
void mma(float (&d)[4], const piece& a, u32 b0, u32 b1) {
    auto& all = warp().registers;
    const u32 mine[6] = {a.x, a.y, a.z, a.w, b0, b1};
    std::copy(mine, mine + 6, all[lane()]);
    warp().barrier.arrive_and_wait();
    constexpr int in_word = 4 / sizeof(element);
    auto value = [](u32 word, int part) {
        return ELEMENT == 2 ? __uint_as_float(word) : widen(element(word >> 16 * part));
    };
    for (int i = 0; i < 4; ++i) {
        const int row = lane() / 4, lower = i / 2, column = lane() % 4 * 2 + i % 2;
        float sum = 0.0f;
        for (int k = 0; k < 8; ++k)
            for (int part = 0; part < in_word; ++part)
                sum += value(all[row * 4 + k % 4][lower + k / 4 * 2], part) *
                       value(all[column * 4 + k % 4][4 + k / 4], part);
        d[i] += sum;
    }
    warp().barrier.arrive_and_wait();
}

// Runs the grid, and returns how many of its thread blocks wrote past their shared memory; -1 if an address was
// misaligned. The last `missing` blocks never start.
extern "C" __attribute__((visibility("default"))) int run(const PARAMETERS* parameters, int grid, int missing,
                                                          int cluster_size, int threads, int shared_bytes) {
    std::deque<Block> blocks;
    std::deque<Cluster> clusters;
    for (int b = 0; b < grid; ++b) {
        if (b % cluster_size == 0) clusters.emplace_back(cluster_size * threads);
        clusters.back().blocks.push_back(&blocks.emplace_back(threads, shared_bytes));
    }
    std::deque<Lane> lanes;
    static const PARAMETERS* given;
    given = parameters;
    for (int b = 0; b < grid - missing; ++b)
        for (int t = 0; t < threads; ++t) {
            Lane& lane = lanes.emplace_back(
                Lane{{unsigned(t)}, {unsigned(b)}, &blocks[b], &clusters[b / cluster_size]});
            getcontext(&lane.context);
            lane.context.uc_stack.ss_sp = lane.stack.get();
            lane.context.uc_stack.ss_size = STACK_BYTES;
            lane.context.uc_link = &scheduler;
            makecontext(&lane.context, [] { KERNEL(*given); }, 0);
            ready.push_back(&lane);
        }
    run_all();
    if (std::exchange(misaligned, false)) return -1;
    return std::count_if(blocks.begin(), blocks.end(), [](const Block& one) { return one.overran(); });
}
