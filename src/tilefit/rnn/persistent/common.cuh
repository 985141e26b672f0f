// What the forward and the backward kernel share: element types, the exchange between thread blocks, the product
// with the weights that stay on chip, and the reduction of its partial sums.
//
// One launch runs every time step. A *group* of thread blocks holds one copy of the recurrent weights and advances
// its own rows of the mini-batch; groups never talk to each other. Inside a group every block owns UNITS hidden
// units with all their gates, so a step needs one exchange: each block publishes what it computed, each block reads
// all of it. What is published goes where a bit pattern lies that no rounded result has (all ones: a NaN that
// conversions never produce). A word that no longer holds the pattern *is* the message: one store and one load carry
// it, with no flag, no fence and no barrier.
//
// MAIL 0: through the L2 cache. The exchange buffer is the output tensor itself, filled with the pattern before the
// launch; each place is written once, so nothing has to be cleared. With AHEAD pieces are copied to shared memory
// before they are needed; only what had not been published by then is waited for.
// MAIL 1: a group is one cluster, and each block writes its results into the shared memory of all the others. There
// are two mailboxes, for even and odd steps. The thread that has read a piece puts the pattern back; the piece is
// written again two steps later, by a block that has by then received what this block published after reading.
//
// A block that asks again and again for what is not there yet keeps the L2 cache busy and with it what it waits for.
// Where a round is all of a step, it asks no sooner than some clocks after it has published its own results.
//
// SPLIT > 1 (with MAIL 0): the blocks of a cluster share the rows of the product and split its depth among them, and
// add their partial sums through distributed shared memory: each then reads only 1/SPLIT of the exchange buffer.
// (Here a barrier of the cluster was measured to be faster than waiting for the words themselves.)
//
// Constants given by the compiler's command line:
//   CELL       0 tanh, 1 ReLU, 2 LSTM, 3 GRU          ELEMENT   0 bfloat16, 1 float16, 2 float32 as TF32
//   HIDDEN     hidden size (a multiple of 16 bytes)    UNITS     hidden units of one block
//   BLOCKS     thread blocks of one group              SPLIT     blocks that split the depth of the product
//   TILES      tiles of 8 mini-batch rows in a round   ROUNDS    rounds of a step, each with its own rows: the rows
//              of the others are exchanged meanwhile   WARPS     warps of one block, which split the depth
//   HELD       weight fragments each warp keeps in registers; the rest stay in shared memory
//   WINDOW     16-byte pieces of the exchanged vector each thread keeps in flight
//   AHEAD      1 or 2 (ROUNDS > 1, no MAIL): the next round's pieces come into shared memory while one is finished,
//              asked for when this warp's partial sums have been handed over (1) or when all have been (2): later, more
//              will have been published; 0: they are read when the round begins
//   STRICT     0 or 1: float32 is multiplied as three TF32 products, which keep its precision
//   LENGTHS, RESETS, JITTER                             0 or 1: ragged rows, mid-sequence resets, random delays

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned char u8;
typedef unsigned short u16;

constexpr int GATES = CELL == 2 ? 4 : CELL == 3 ? 3 : 1;
constexpr int THREADS = WARPS * 32;
constexpr int BATCH = TILES * 8;            // mini-batch rows of one round
constexpr int GROUP_BATCH = ROUNDS * BATCH;  // and of one group
constexpr int LANES_K = ELEMENT == 2 ? 4 : 8;  // elements of one 16-byte piece
constexpr int SLAB = 4 * LANES_K;              // depth that one weight fragment covers
constexpr u32 UNWRITTEN = 0xFFFFFFFFu;
constexpr bool CLUSTERED = SPLIT > 1 || MAIL;

typedef u64 tile_bits;  // one for each tile of a group
static_assert(ROUNDS * TILES <= 8 * sizeof(tile_bits), "every tile has a bit");

#if ELEMENT == 2
typedef float element;
#else
typedef u16 element;
#endif

struct __align__(16) piece {
    u32 x, y, z, w;
};

__device__ __forceinline__ float widen(element v) {
#if ELEMENT == 0
    return __uint_as_float(u32(v) << 16);
#elif ELEMENT == 1
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
    return f;
#else
    return v;
#endif
}

__device__ __forceinline__ element narrow(float v) {
#if ELEMENT == 0
    element r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
    return r;
#elif ELEMENT == 1
    element r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v));
    return r;
#else
    // A NaN whose bits are the pattern of an unwritten word would never arrive.
    return v == v ? v : __uint_as_float(0x7FC00000u);
#endif
}

__device__ __forceinline__ float tanh_approximate(float v) {
    float r;
    asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

// bfloat16 keeps 8 bits, the hardware's tanh 11 (PTX ISA: relative error 2^-11). The others need more.
__device__ __forceinline__ float sigmoid(float v) {
#if ELEMENT == 0
    return fmaf(tanh_approximate(0.5f * v), 0.5f, 0.5f);
#else
    return __fdividef(1.0f, 1.0f + __expf(-v));
#endif
}

__device__ __forceinline__ float tanh_(float v) {
#if ELEMENT == 0
    return tanh_approximate(v);
#else
    return fmaf(2.0f, __fdividef(1.0f, 1.0f + __expf(-2.0f * v)), -1.0f);
#endif
}

// Loads 16 bytes that other multiprocessors may be writing, past the first-level cache; `p` keeps its value where
// `wanted` is false.
__device__ __forceinline__ void load_shared_device(piece& p, const void* address, bool wanted) {
    asm volatile(
        "{\n\t.reg .pred wanted;\n\tsetp.ne.u32 wanted, %5, 0;\n\t"
        "@wanted ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
        : "+r"(p.x), "+r"(p.y), "+r"(p.z), "+r"(p.w)
        : "l"(address), "r"(u32(wanted))
        : "memory");
}

// Copies to shared memory 16 bytes that other multiprocessors may be writing; zeros where `wanted` is false.
// await_copies() waits for them: no register is taken meanwhile.
__device__ __forceinline__ void copy_early(u32 to, const void* address, bool wanted) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(address), "r"(wanted ? 16u : 0u) : "memory");
}

// Copies 4 bytes to shared memory, which await_copies() waits for.
__device__ __forceinline__ void copy_word(u32 to, const void* address) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(address) : "memory");
}

// Makes a group of the copies since the last one.
__device__ __forceinline__ void group_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups of this thread's copies but the last few.
template <int LAST>
__device__ __forceinline__ void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LAST) : "memory");
}

__device__ __forceinline__ void store_shared_device(void* address, u32 word) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(word) : "memory");
}

// Writes one result of each thread. 16-bit results go in words of two: the threads of an even number and the next
// have neighbouring addresses. All threads of a warp take part.
__device__ __forceinline__ void publish(element* address, element value, int number, bool valid) {
#if ELEMENT == 2
    if (valid) store_shared_device(address, __float_as_uint(value));
#else
    u32 neighbour = __shfl_down_sync(0xFFFFFFFFu, u32(value), 1);
    if (valid && number % 2 == 0) store_shared_device(address, u32(value) | neighbour << 16);
#endif
}

// Loads that must be issued where they stand, ahead of the wait that hides them. Nothing may look at the value
// before it is needed, not even to convert it: that would wait for it.
__device__ __forceinline__ element load_early(const element* address) {
    element v;
#if ELEMENT == 2
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(address));
#else
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(address));
#endif
    return v;
}

__device__ __forceinline__ float load_early_float(const float* address) {
    float v;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(address));
    return v;
}

__device__ __forceinline__ bool unwritten(const piece& p) {
    return p.x == UNWRITTEN || p.y == UNWRITTEN || p.z == UNWRITTEN || p.w == UNWRITTEN;
}

__device__ __forceinline__ u32 to_tf32(u32 v) {
    u32 r;
#if STRICT
    // Volatile: kept out of the loop over the steps, the weights' remainders would take as many registers again.
    asm volatile("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(__uint_as_float(v)));
#else
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(__uint_as_float(v)));
#endif
    return r;
}

__device__ __forceinline__ void round_piece(piece& p) {
#if ELEMENT == 2 && !STRICT
    p = {to_tf32(p.x), to_tf32(p.y), to_tf32(p.z), to_tf32(p.w)};
#endif
}

// What TF32 leaves of a float32 number, as the next TF32 number.
__device__ __forceinline__ u32 remainder(u32 v, u32 rounded) {
    return to_tf32(__float_as_uint(__uint_as_float(v) - __uint_as_float(rounded)));
}

// A warp's tile of 16 rows of weights, SLAB deep, as two products take it: their left operands, of which a thread has
// rows r and r + 8 in turn, with r = lane / 4. In this order each is one load from shared memory.
struct Fragment {
    piece first, second;

    __device__ __forceinline__ void set(const piece& low, const piece& high) {
        first = {low.x, high.x, low.y, high.y};
        second = {low.z, high.z, low.w, high.w};
    }
};

__device__ __forceinline__ void mma(float (&d)[4], const piece& a, u32 b0, u32 b1) {
#if ELEMENT == 0
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#elif ELEMENT == 1
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

#if ELEMENT == 2 && STRICT
__device__ __forceinline__ void strict_mma(float (&d)[4], const piece& a, u32 b0, u32 b1) {
    const piece rounded = {to_tf32(a.x), to_tf32(a.y), to_tf32(a.z), to_tf32(a.w)};
    const piece rest = {remainder(a.x, rounded.x), remainder(a.y, rounded.y), remainder(a.z, rounded.z),
                        remainder(a.w, rounded.w)};
    const u32 v0 = to_tf32(b0), v1 = to_tf32(b1);
    // The product of both remainders is below float32's precision.
    mma(d, rest, v0, v1);
    mma(d, rounded, remainder(b0, v0), remainder(b1, v1));
    mma(d, rounded, v0, v1);
}
#endif

// The product of one fragment of weights with one piece of the exchanged vector, added to two sums, or twice to one.
__device__ __forceinline__ void multiply_add(float (&even)[4], float (&odd)[4], const Fragment& weights, const piece& b) {
#if ELEMENT == 2 && STRICT
    strict_mma(even, weights.first, b.x, b.y);
    strict_mma(odd, weights.second, b.z, b.w);
#else
    mma(even, weights.first, b.x, b.y);
    mma(odd, weights.second, b.z, b.w);
#endif
}

// The same number. What is derived from it is computed where it stands: addresses that the compiler keeps for a later
// round or step take registers that hold weights.
__device__ __forceinline__ int afresh(int v) {
    asm volatile("" : "+r"(v));
    return v;
}

// The same address. What is added to it stays an addition, which costs nothing in a load or store: the compiler would
// compute each address anew where it finds bits that it knows.
__device__ __forceinline__ const element* as_given(const element* address) {
    asm volatile("" : "+l"(address));
    return address;
}

// The address, in the whole cluster's shared memory, of the place in block `owner` that `mine` is in this block.
__device__ __forceinline__ u32 remote_address(u32 mine, u32 owner) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(mine), "r"(owner));
    return address;
}

__device__ __forceinline__ void store_remote(u32 address, float v) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}

__device__ __forceinline__ void store_remote_piece(u32 address, const piece& p) {
    asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(p.x), "r"(p.y), "r"(p.z), "r"(p.w)
                 : "memory");
}

__device__ __forceinline__ void load_mail(piece& p, u32 address, bool wanted) {
    asm volatile(
        "{\n\t.reg .pred wanted;\n\tsetp.ne.u32 wanted, %5, 0;\n\t"
        "@wanted ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
        : "+r"(p.x), "+r"(p.y), "+r"(p.z), "+r"(p.w)
        : "r"(address), "r"(u32(wanted))
        : "memory");
}

__device__ __forceinline__ element load_element(u32 address) {
    element v;
#if ELEMENT == 2
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address));
#else
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
#endif
    return v;
}

__device__ __forceinline__ float load_float(u32 address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address));
    return v;
}

__device__ __forceinline__ void clear_mail(u32 address, bool wanted) {
    asm volatile(
        "{\n\t.reg .pred wanted;\n\tsetp.ne.u32 wanted, %2, 0;\n\t"
        "@wanted st.volatile.shared.v4.u32 [%0], {%1, %1, %1, %1};\n\t}" ::"r"(address),
        "r"(UNWRITTEN), "r"(u32(wanted))
        : "memory");
}

__device__ __forceinline__ u32 local_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// This block's part of the depth.
__device__ __forceinline__ u32 split_rank() {
    u32 rank = 0;
#if SPLIT > 1
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}

__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Waits until every partial sum of this block's rows has arrived.
__device__ __forceinline__ void reduction_barrier() {
#if SPLIT > 1
    cluster_barrier();
#else
    __syncthreads();
#endif
}

__device__ __forceinline__ void stagger(u32& state) {
#if JITTER
    // Random delays per block and step, to bring out races.
    state = state * 1664525u + 1013904223u;
    if ((state >> 28) < 4) __nanosleep((state >> 16) & 0x7FF);
#endif
}

__device__ __forceinline__ u32 clocks() {
    u32 now;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");
    return now;
}

// Waits until so many clocks after a time.
__device__ __forceinline__ void pause(u32 since, u32 length) {
    while (clocks() - since < length) {
    }
}

// The product of this block's rows with an exchanged vector.
//   ROWS_PER_UNIT  rows of the product that belong to one hidden unit (its gates, or 1)
//   DEPTH          elements of the exchanged vector
template <int ROWS_PER_UNIT, int DEPTH>
struct Product {
    static constexpr int OWN_ROWS = UNITS * ROWS_PER_UNIT;   // rows this block finishes
    static constexpr int ROWS = SPLIT * OWN_ROWS;          // rows it multiplies
    static constexpr int ROW_TILES = (ROWS + 15) / 16;
    static constexpr int SLABS = (DEPTH + SLAB - 1) / SLAB;
    static constexpr int SLABS_PER_WARP = (SLABS + SPLIT * WARPS - 1) / (SPLIT * WARPS);
    static constexpr int FRAGMENTS = SLABS_PER_WARP * ROW_TILES;
    static constexpr int IN_REGISTERS = HELD < FRAGMENTS ? HELD : FRAGMENTS;
    static constexpr int IN_SHARED = FRAGMENTS - IN_REGISTERS;
    static constexpr int PIECES = SLABS_PER_WARP * TILES;
    static constexpr int CHUNK = WINDOW < PIECES ? WINDOW : PIECES;
    static constexpr int CHUNKS = (PIECES + CHUNK - 1) / CHUNK;
    // Row stride of the partial sums, in floats: 4 modulo 16 spreads a warp's stores over all banks.
    static constexpr int STRIDE = OWN_ROWS + (20 - OWN_ROWS % 16) % 16;
    static constexpr int SUMS = SPLIT * WARPS * BATCH * STRIDE;  // floats of one of the two buffers
    static_assert(SPLIT == 1 || OWN_ROWS % 8 == 0, "rows of one owner must fill half-tiles");

    Fragment held[IN_REGISTERS > 0 ? IN_REGISTERS : 1];
    piece flight[2][CHUNK];  // of the exchanged vector: what is multiplied, and what is on its way
    // Few sums would have each product wait for the one before: then even and odd products have sums of their own.
    static constexpr int CHAINS = ROW_TILES * TILES < 4 ? 2 : 1;
    float sums[CHAINS][ROW_TILES][TILES][4];
    piece* kept;  // shared memory of this warp's other fragments
    float* partial;
    u32 mail;   // address of the first mailbox in this block's shared memory; AHEAD: of this thread's first copy
    u32 peers[(BLOCKS + LANES_K - 1) / LANES_K];  // MAIL: of the mailboxes in the blocks this thread writes to
    u32 end;  // where the product's shared memory ends

    // Bytes between the rows of a mailbox: 64 modulo 128, so that two rows never meet in a bank.
    static constexpr int MAIL_STRIDE = (DEPTH * int(sizeof(element)) + 127) / 128 * 128 + 64;
    static constexpr int MAIL_BYTES = GROUP_BATCH * MAIL_STRIDE;

    __device__ __forceinline__ int first_slab(int warp, u32 rank) const {
        return (int(rank) * WARPS + warp) * SLABS_PER_WARP;
    }

    // weights: row (gate, unit) of the product begins at weights + (gate * HIDDEN + unit) * DEPTH.
    __device__ __forceinline__ void load(const element* weights, int first_unit, u32 rank, unsigned char* shared) {
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        kept = reinterpret_cast<piece*>(shared) + warp * IN_SHARED * 64;
        partial = reinterpret_cast<float*>(shared + WARPS * IN_SHARED * 1024);
        mail = local_address(partial + 2 * SUMS);
        end = mail + (MAIL ? 2 * MAIL_BYTES : AHEAD ? PIECES * THREADS * 16 : 0);
        if (AHEAD) mail += threadIdx.x * 16;
#if MAIL
        for (int i = threadIdx.x; i < 2 * MAIL_BYTES / 16; i += THREADS) clear_mail(mail + i * 16, true);
#pragma unroll
        for (int i = 0; i < (BLOCKS + LANES_K - 1) / LANES_K; ++i) {
            int block = lane % LANES_K + i * LANES_K;
            peers[i] = remote_address(mail, block < BLOCKS ? block : 0);
        }
#endif
        int base_unit = first_unit - int(rank) * UNITS;
#pragma unroll
        for (int s = 0; s < SLABS_PER_WARP; ++s) {
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; ++tile) {
                piece rows[2];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    int row = tile * 16 + half * 8 + lane / 4;
                    int unit = base_unit + row / ROWS_PER_UNIT, gate = row % ROWS_PER_UNIT;
                    int depth = (first_slab(warp, rank) + s) * SLAB + (lane % 4) * LANES_K;
                    piece& p = rows[half] = {0, 0, 0, 0};
                    if (row < ROWS && unit < HIDDEN && depth < DEPTH) {
                        p = *reinterpret_cast<const piece*>(weights + i64(gate * HIDDEN + unit) * DEPTH + depth);
                        round_piece(p);
                    }
                }
                const int f = s * ROW_TILES + tile;
                Fragment fragment;
                fragment.set(rows[0], rows[1]);
                if (f < IN_REGISTERS) {
                    held[f < IN_REGISTERS ? f : 0] = fragment;
                } else {
                    kept[(f - IN_REGISTERS) * 64 + lane] = fragment.first;
                    kept[(f - IN_REGISTERS) * 64 + 32 + lane] = fragment.second;
                }
            }
        }
    }

    // Which vector to multiply by, for each tile n of 8 mini-batch rows, as seen by this thread's row of the tile.
    struct Source {
        const element* rows[TILES];  // where the row begins in global memory
        u32 reads = 0;               // bit n: there is something at rows[n]; otherwise the row is zero
        u32 waits = 0;               // bit n: the row comes from other blocks and may not have arrived
        u32 uses = 0;                // bit n (MAIL): what arrives is the row; otherwise it is only taken off
        u32 mailbox = 0;             // MAIL: this thread's row of the first tile, in this round's mailbox
    };

    // Asks for the first pieces of the vector, with AHEAD for all; multiply() with the same source comes next.
    __device__ __forceinline__ void begin(const Source& source, u32 rank) {
#if AHEAD
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            const element* first = as_given(source.rows[n] + start(rank));
#pragma unroll
            for (int slab = 0; slab < SLABS_PER_WARP; ++slab) {
                const bool wanted = inside(start(rank) + slab * SLAB) && (source.reads >> n & 1);
                copy_early(copied(slab * TILES + n), first + slab * SLAB, wanted);
            }
        }
        group_copies();
#else
        fetch<0>(source, start(rank));
#endif
    }

    // Leaves the product in `sums`.
    __device__ __forceinline__ void multiply(const Source& source, u32 rank, u32 spin_limit, bool& dead, int* error) {
#pragma unroll
        for (int i = 0; i < CHAINS * ROW_TILES * TILES * 4; ++i) (&sums[0][0][0][0])[i] = 0.0f;
#if AHEAD
        await_copies<1>();  // all but the last group, which is of the next step's needs
        fetch<0>(source, start(rank));
#endif
        sweep<0>(source, start(rank), spin_limit, dead, error);
    }

    // Where this thread's first piece begins in the vector.
    __device__ __forceinline__ int start(u32 rank) const {
        return first_slab(threadIdx.x / 32, rank) * SLAB + (threadIdx.x % 4) * LANES_K;
    }

    // Whether every warp's share of the depth is full; else the last slabs are cut.
    static constexpr bool FULL = DEPTH % (SLAB * SPLIT * WARPS) == 0;

    static __device__ __forceinline__ bool inside(int depth) { return FULL || depth < DEPTH; }

    static __device__ __forceinline__ u32 place(const Source& source, int n, int depth) {
        return source.mailbox + n * 8 * MAIL_STRIDE + depth * int(sizeof(element));
    }

    __device__ __forceinline__ u32 copied(int index) const { return mail + index * THREADS * 16; }

    template <int C>
    __device__ __forceinline__ void fetch(const Source& source, int start) {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            const int index = C * CHUNK + i, n = index % TILES, depth = start + index / TILES * SLAB;
            piece& p = flight[C % 2][i];
            p = piece{0, 0, 0, 0};
            if (AHEAD) {
                load_mail(p, copied(index), index < PIECES);
            } else if (index < PIECES) {
                bool waits = source.waits >> n & 1;
                bool reads = inside(depth) && (source.reads >> n & 1);
                if (MAIL) load_mail(p, place(source, n, depth), waits && inside(depth));
                load_shared_device(p, source.rows[n] + depth, reads && !(MAIL && waits));
            }
        }
    }

    template <int C>
    __device__ __forceinline__ void sweep(const Source& source, int start, u32 spin_limit, bool& dead, int* error) {
        if constexpr (C < CHUNKS) {
            piece(&now)[CHUNK] = flight[C % 2];
            if constexpr (C + 1 < CHUNKS) fetch<C + 1>(source, start);
            // Whether a piece of this chunk has not arrived. First asked ahead of the loop, where the compiler does it
            // while it waits for the products of the chunk before.
            auto missing = [&] {
                bool any = false;
#pragma unroll
                for (int i = 0; i < CHUNK; ++i) {
                    const int index = C * CHUNK + i;
                    if (index < PIECES) any |= (source.waits >> (index % TILES) & 1) && unwritten(now[i]);
                }
                return __any_sync(0xFFFFFFFFu, any && !dead);
            };
            u32 spins = 0;
            for (bool waiting = missing(); waiting; waiting = missing()) {
                if (++spins > spin_limit) {
                    dead = true;
                    *error = 1;
                }
#pragma unroll
                for (int i = 0; i < CHUNK; ++i) {
                    int index = C * CHUNK + i, n = index % TILES, depth = start + index / TILES * SLAB;
                    if (index < PIECES) {
                        bool again = (source.waits >> n & 1) && unwritten(now[i]);
                        if (MAIL) load_mail(now[i], place(source, n, depth), again);
                        else load_shared_device(now[i], source.rows[n] + depth, again);
                    }
                }
            }
#if MAIL && (LENGTHS || RESETS)
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) {
                int index = C * CHUNK + i, n = index % TILES, depth = start + index / TILES * SLAB;
                if (index < PIECES && (source.waits >> n & 1) && !(source.uses >> n & 1)) {
                    clear_mail(place(source, n, depth), inside(depth));
                    now[i] = piece{0, 0, 0, 0};
                    load_shared_device(now[i], source.rows[n] + depth, inside(depth) && (source.reads >> n & 1));
                }
            }
#endif
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) {
                int index = C * CHUNK + i;
                if (index < PIECES) {
                    int slab = index / TILES, n = index % TILES, lane = threadIdx.x % 32;
                    round_piece(now[i]);
#pragma unroll
                    for (int m = 0; m < ROW_TILES; ++m) {
                        int f = slab * ROW_TILES + m;
                        Fragment weights;
                        if (f < IN_REGISTERS) {
                            weights = held[f < IN_REGISTERS ? f : 0];
                        } else {
                            weights.first = kept[(f - IN_REGISTERS) * 64 + lane];
                            weights.second = kept[(f - IN_REGISTERS) * 64 + 32 + lane];
                        }
                        multiply_add(sums[0][m][n], sums[CHAINS - 1][m][n], weights, now[i]);
                    }
                }
            }
#if MAIL
            // Puts the pattern back, behind the products that nothing must delay.
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) {
                int index = C * CHUNK + i, n = index % TILES, depth = start + index / TILES * SLAB;
                if (index < PIECES) clear_mail(place(source, n, depth), (source.waits >> n & 1) && inside(depth));
            }
#endif
            sweep<C + 1>(source, start, spin_limit, dead, error);
        }
    }

    // Hands the partial sums to the blocks that own the rows; follow it by reduction_barrier().
    __device__ __forceinline__ void share(int buffer, u32 rank) {
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        float* mine = partial + buffer * SUMS + (int(rank) * WARPS + warp) * BATCH * STRIDE +
                      lane % 4 * 2 * STRIDE + lane / 4;
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int first = m * 16 + half * 8;
                if (first >= ROWS || (ROWS % 8 && first + lane / 4 >= ROWS)) continue;
#if SPLIT > 1
                const int owner = first / OWN_ROWS;
                const u32 to = remote_address(local_address(mine), owner) + (first - owner * OWN_ROWS) * 4;
#endif
#pragma unroll
                for (int n = 0; n < TILES; ++n)
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        float v = sums[0][m][n][half * 2 + j];
                        if (CHAINS > 1) v += sums[CHAINS - 1][m][n][half * 2 + j];
#if SPLIT > 1
                        store_remote(to + (n * 8 + j) * STRIDE * 4, v);
#else
                        mine[(n * 8 + j) * STRIDE + first] = v;
#endif
                    }
            }
    }

    // Writes one result of each thread, for element `column` of mini-batch row `row` of the group, into a mailbox of
    // every block. Threads of consecutive columns are neighbours; all threads of a warp take part.
    __device__ __forceinline__ void post(element value, int parity, int row, int column, bool valid) {
#if MAIL
        int lane = threadIdx.x % 32, base = lane / LANES_K * LANES_K;
        piece p;
#if ELEMENT == 2
        u32 word = __float_as_uint(value);
        p.x = __shfl_sync(0xFFFFFFFFu, word, base);
        p.y = __shfl_sync(0xFFFFFFFFu, word, base + 1);
        p.z = __shfl_sync(0xFFFFFFFFu, word, base + 2);
        p.w = __shfl_sync(0xFFFFFFFFu, word, base + 3);
#else
        u32 word = u32(value) | __shfl_down_sync(0xFFFFFFFFu, u32(value), 1) << 16;
        p.x = __shfl_sync(0xFFFFFFFFu, word, base);
        p.y = __shfl_sync(0xFFFFFFFFu, word, base + 2);
        p.z = __shfl_sync(0xFFFFFFFFu, word, base + 4);
        p.w = __shfl_sync(0xFFFFFFFFu, word, base + 6);
#endif
        if (!valid) return;
        // Each of the threads that hold the same piece sends it to other blocks.
        u32 to = parity * MAIL_BYTES + row * MAIL_STRIDE + column / LANES_K * 16;
#pragma unroll
        for (int i = 0; i < (BLOCKS + LANES_K - 1) / LANES_K; ++i)
            if (lane % LANES_K + i * LANES_K < BLOCKS) store_remote_piece(peers[i] + to, p);
#endif
    }

    // The finished sums of one unit and mini-batch row, one per row of the unit; added in a fixed order.
    __device__ __forceinline__ void total(int buffer, int unit, int n, float (&result)[ROWS_PER_UNIT]) const {
        const float* from = partial + buffer * SUMS + n * STRIDE + unit * ROWS_PER_UNIT;
#pragma unroll
        for (int g = 0; g < ROWS_PER_UNIT; ++g) result[g] = 0.0f;
#pragma unroll
        for (int source = 0; source < SPLIT * WARPS; ++source) {
            const float* p = from + source * BATCH * STRIDE;
            if constexpr (ROWS_PER_UNIT == 4) {
                const float4 v = *reinterpret_cast<const float4*>(p);
                result[0] += v.x;
                result[1] += v.y;
                result[2] += v.z;
                result[3] += v.w;
            } else {
#pragma unroll
                for (int g = 0; g < ROWS_PER_UNIT; ++g) result[g] += p[g];
            }
        }
    }
};

// The mini-batch rows of a group: all groups have as many, but for the last.
struct Rows {
    int first, end;

    __device__ __forceinline__ Rows(int group, int groups, int batch) {
        const int each = (batch + groups - 1) / groups;
        first = group * each;
        end = first + each < batch ? first + each : batch;
    }
};

// What a thread finishes in a round: element e is unit e % UNITS of mini-batch row e / UNITS.
constexpr int FINISHED = (UNITS * BATCH + THREADS - 1) / THREADS;
constexpr int STATES = ROUNDS * FINISHED;

// The unit and the row of one of a thread's results. A thread with nothing to finish repeats another's work on
// valid addresses and stores nothing, which costs less than asking before each access.
struct Result {
    int unit;     // of the layer
    int row;      // of the mini-batch
    int element;  // of the round's sums
    bool mine;    // whether this thread stores it

    __device__ __forceinline__ Result(int index, int first_unit, const Rows& rows) {
        int e = (ROUNDS > 1 ? afresh(threadIdx.x) : threadIdx.x) + index % FINISHED * THREADS;
        mine = e < UNITS * BATCH;
        element = mine ? e : 0;
        unit = first_unit + element % UNITS;
        row = rows.first + index / FINISHED * BATCH + element / UNITS;
        mine = mine && unit < HIDDEN && row < rows.end;
        unit = unit < HIDDEN ? unit : HIDDEN - 1;
        row = row < rows.end ? row : rows.end - 1;
    }
};

// What the results of a step need beside the product, asked for a step before.
//   ELEMENTS, FLOATS  numbers of either type for each result
//   REGISTERS         they come into registers, which is the faster way where a round is all of a step; else into
//                     shared memory: the places of one step are written while those of the step before are read. With
//                     several rounds registers have weights to hold, and loads into them would share the wait for the
//                     other blocks' results
template <int ELEMENTS, int FLOATS, bool REGISTERS>
struct Needed {
    static constexpr int STEP_BYTES = STATES * THREADS * (ELEMENTS * int(sizeof(element)) + FLOATS * 4);

    element coming[REGISTERS ? STATES : 1][ELEMENTS], now[REGISTERS ? STATES : 1][ELEMENTS];
    float coming_floats[REGISTERS ? STATES : 1][FLOATS + 1], now_floats[REGISTERS ? STATES : 1][FLOATS + 1];
    u32 place;  // address of this thread's first element

    __device__ __forceinline__ Needed(u32 memory) : place(memory + threadIdx.x * int(sizeof(element))) {}

    // Ends a step: what was asked for is now there.
    __device__ __forceinline__ void advance() {
#pragma unroll
        for (int state = 0; state < STATES && REGISTERS; ++state) {
#pragma unroll
            for (int i = 0; i < ELEMENTS; ++i) now[state][i] = coming[state][i];
#pragma unroll
            for (int i = 0; i < FLOATS; ++i) now_floats[state][i] = coming_floats[state][i];
        }
    }

    // Words of two 16-bit elements are copied by the threads of an even number, for the next one too: a barrier must
    // come between their wait and the next one's reading. What is not `mine` is not copied: it reads as anything.
    __device__ __forceinline__ void ask(int step, int state, int index, const element* from, bool mine) {
        if (REGISTERS) coming[state][index] = load_early(from);
        else if (mine && (sizeof(element) == 4 || threadIdx.x % 2 == 0)) copy_word(address(step, state, index), from);
    }

    __device__ __forceinline__ void ask_float(int step, int state, int index, const float* from, bool mine) {
        if (REGISTERS) coming_floats[state][index] = load_early_float(from);
        else if (mine) copy_word(float_address(step, state, index), from);
    }

    __device__ __forceinline__ float get(int step, int state, int index) const {
        return widen(REGISTERS ? now[state][index] : load_element(address(step, state, index)));
    }

    __device__ __forceinline__ float get_float(int step, int state, int index) const {
        return REGISTERS ? now_floats[state][index] : load_float(float_address(step, state, index));
    }

  private:
    __device__ __forceinline__ u32 address(int step, int state, int index) const {
        return place + (step & 1) * STEP_BYTES + (state * ELEMENTS + index) * (THREADS * int(sizeof(element)));
    }

    __device__ __forceinline__ u32 float_address(int step, int state, int index) const {
        const u32 first = STATES * ELEMENTS * THREADS * int(sizeof(element)) + threadIdx.x * (4 - int(sizeof(element)));
        return place + (step & 1) * STEP_BYTES + first + (state * FLOATS + index) * (THREADS * 4);
    }
};
