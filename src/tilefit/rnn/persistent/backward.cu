// Every time step of one layer, backward: the gradients of the gates before their activations. The gradients of the
// weights and of the input follow as large products over all time steps. See common.cuh for the exchange.

struct Backward {
    const element* grad_out;     // [T, B, D, H]; null here and below: zeros
    const element* grad_last_h;  // [D, B, H] or null
    const element* grad_last_c;  // [D, B, H] or null, LSTM
    const element* weights;      // [D, H, GATES, H]: transposed; GRU's gates in the order (n, r, z)
    const element* out;          // [T, B, D, H]
    const element* gates;        // [T, B, D, SAVED, H]
    const float* cells;          // [T, B, D, H], LSTM
    const element* h0;           // [D, B, H] or null
    const float* first_cell;     // [D, B, H] or null, LSTM: the initial state in float32
    const int* lengths;          // [B], with LENGTHS
    const u8* resets;            // [T, B], with RESETS
    element* grad_gates;         // [T, B, D, PUBLISHED, H], filled with UNWRITTEN
    element* grad_h0;            // [D, B, H]
    element* grad_c0;            // [D, B, H], LSTM
    int* error;
    int steps, batch, directions, batch_groups;
    u32 spin_limit;
};

constexpr int PUBLISHED = CELL == 3 ? 4 : GATES;  // GRU: (dn r, dr, dz, dn); others: torch's order
constexpr int SAVED = CELL == 2 || CELL == 3 ? 4 : 0;
// What the forward pass kept of the states: an LSTM's cell states in float32, the outputs of the others.
#if CELL == 2
typedef float Kept;
__device__ __forceinline__ Kept load_kept(const float* address) { return load_early_float(address); }
__device__ __forceinline__ float widen_kept(Kept v) { return v; }
#else
typedef element Kept;
__device__ __forceinline__ Kept load_kept(const element* address) { return load_early(address); }
__device__ __forceinline__ float widen_kept(Kept v) { return widen(v); }
#endif
constexpr int WIDTH = GATES * HIDDEN;
typedef Product<1, WIDTH> Recurrent;

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward(const __grid_constant__ Backward p) {
    extern __shared__ __align__(16) unsigned char shared[];
    const int lane = threadIdx.x % 32;
    const u32 rank = split_rank();
    const int group = blockIdx.x / BLOCKS, direction = group / p.batch_groups;
    const int first_row = (group % p.batch_groups) * GROUP_BATCH;
    const int first_unit = int(blockIdx.x % BLOCKS) * UNITS;
    Recurrent product;
    product.load(p.weights + i64(direction) * WIDTH * HIDDEN, first_unit, rank, shared);

    int read_row[ROUNDS * TILES], row_length[ROUNDS * TILES];  // of the rows whose gradients this thread reads
    u32 present = 0;
#pragma unroll
    for (int n = 0; n < ROUNDS * TILES; ++n) {
        int b = first_row + n * 8 + lane / 4;
        present |= u32(b < p.batch) << n;
        read_row[n] = b < p.batch ? b : p.batch - 1;
        row_length[n] = LENGTHS ? p.lengths[read_row[n]] : p.steps;
    }

    float carry_h[STATES], carry_c[STATES];
    // Of the coming step: its gates, the state before it and after it, the gradient of its output.
    element gate[STATES][4], grad[STATES];
    Kept old[STATES], state[STATES];
    int length[STATES];
#pragma unroll
    for (int i = 0; i < STATES; ++i) {
        const Result r(i, first_unit, first_row, p.batch);
        int at = (direction * p.batch + r.row) * HIDDEN + r.unit;
        length[i] = LENGTHS ? p.lengths[r.row] : p.steps;
        carry_h[i] = p.grad_last_h ? widen(p.grad_last_h[at]) : 0.0f;
        carry_c[i] = CELL == 2 && p.grad_last_c ? widen(p.grad_last_c[at]) : 0.0f;
    }
    const i64 row_count = i64(p.batch) * p.directions;  // rows of one step in the [T, B, D, ...] tensors
    const int last = direction == 0 ? p.steps - 1 : 0, stride = direction == 0 ? 1 : -1;
    auto look_ahead = [&](int t) {
        if (t < 0 || t >= p.steps) return;
        const int before = t - stride;
#pragma unroll
        for (int i = 0; i < STATES; ++i) {
            const Result r(i, first_unit, first_row, p.batch);
            const int place = r.row * p.directions + direction, at = place * HIDDEN + r.unit;
            const int initial = (direction * p.batch + r.row) * HIDDEN + r.unit;
            const bool inside = before >= 0 && before < length[i];
            grad[i] = element(0);
            if (p.grad_out) grad[i] = load_early(p.grad_out + t * row_count * HIDDEN + at);
#pragma unroll
            for (int g = 0; g < SAVED; ++g)
                gate[i][g] = load_early(p.gates + t * row_count * (SAVED * HIDDEN) + (place * (SAVED * HIDDEN) + g * HIDDEN + r.unit));
#if CELL == 2
            state[i] = load_kept(p.cells + t * row_count * HIDDEN + at);
            old[i] = 0.0f;
            if (inside || p.first_cell)
                old[i] = load_kept(inside ? p.cells + before * row_count * HIDDEN + at : p.first_cell + initial);
#elif CELL == 3
            old[i] = element(0);
            if (inside || p.h0)
                old[i] = load_kept(inside ? p.out + before * row_count * HIDDEN + at : p.h0 + initial);
#else
            state[i] = load_kept(p.out + t * row_count * HIDDEN + at);
#endif
        }
    };
    look_ahead(last);
    if (CLUSTERED) cluster_barrier();
    bool dead = false;
    u32 delays = blockIdx.x * 7919u + 17u;

    // Whose gradients of the gates a round of a step multiplies.
    auto source_of = [&](int s, int round) {
        const int after = last - (s - 1) * stride;  // the step whose gradients were published last
        Recurrent::Source source;
        source.mailbox = product.mail + (s & 1) * Recurrent::MAIL_BYTES + (round * BATCH + lane / 4) * Recurrent::MAIL_STRIDE;
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            const int index = round * TILES + n;
            bool read = s > 0;
            if (LENGTHS) read = read && after < row_length[index];
            if (RESETS) read = read && p.resets[i64(after) * p.batch + read_row[index]] == 0;
            source.rows[n] = p.grad_gates + after * row_count * (PUBLISHED * HIDDEN) +
                             (read_row[index] * p.directions + direction) * (PUBLISHED * HIDDEN);
            if (MAIL) {
                source.waits |= u32(s > 0 && (present >> index & 1)) << n;
                source.uses |= u32(read) << n;
            } else {
                source.reads |= u32(read) << n;
                source.waits |= u32(read) << n;
            }
        }
        return source;
    };
    Recurrent::Source source;
    if (AHEAD) product.begin(source = source_of(0, 0), rank);

    // One turn more than there are steps: the last one only finds the gradient of the initial state.
    for (int s = 0; s <= p.steps; ++s) {
        const int t = last - s * stride;

        element now_gate[STATES][4], now_grad[STATES];
        Kept now_old[STATES], now_state[STATES];
#pragma unroll
        for (int i = 0; i < STATES; ++i) {
#pragma unroll
            for (int g = 0; g < 4; ++g) now_gate[i][g] = gate[i][g];
            now_old[i] = old[i];
            now_state[i] = state[i];
            now_grad[i] = grad[i];
        }
        look_ahead(t - stride);

#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            if (!AHEAD) product.begin(source = source_of(s, round), rank);
            product.multiply(source, rank, p.spin_limit, dead, p.error);
            // The next round's rows were published a round ago or earlier: they come while this one is finished.
            if (AHEAD && round + 1 < ROUNDS) product.begin(source = source_of(s, round + 1), rank);
            else if (AHEAD && s < p.steps) product.begin(source = source_of(s + 1, 0), rank);
            const int buffer = (s * ROUNDS + round) & 1;
            product.share(buffer, rank);
            stagger(delays);
            reduction_barrier();

#pragma unroll
            for (int i = round * FINISHED; i < (round + 1) * FINISHED; ++i) {
                const Result r(i, first_unit, first_row, p.batch);
                const bool inside = t >= 0 && t < p.steps, active = inside && (!LENGTHS || t < length[i]);
                const bool reset = RESETS && active && p.resets[i64(t) * p.batch + r.row];
                float result[4] = {0.0f, 0.0f, 0.0f, 0.0f}, sum[1];
                product.total(buffer, r.element % UNITS, r.element / UNITS, sum);
                float dh = sum[0] + carry_h[i];
                if (!active) {
                    // Past a row's first step this is the gradient of its initial state; before its last, what it
                    // carries.
                    carry_h[i] = dh;
                } else {
                    dh += widen(now_grad[i]);
                    float before = reset ? 0.0f : widen_kept(now_old[i]);
                    carry_h[i] = 0.0f;
                    if constexpr (CELL == 0) {
                        const float h = widen_kept(now_state[i]);
                        result[0] = dh * (1.0f - h * h);
                    } else if constexpr (CELL == 1) {
                        result[0] = widen_kept(now_state[i]) > 0.0f ? dh : 0.0f;
                    } else if constexpr (CELL == 2) {
                        float in = widen(now_gate[i][0]), forget = widen(now_gate[i][1]), fresh = widen(now_gate[i][2]), open = widen(now_gate[i][3]);
                        float squashed = tanh_(widen_kept(now_state[i]));
                        float dc = carry_c[i] + dh * open * (1.0f - squashed * squashed);
                        result[0] = dc * fresh * in * (1.0f - in);
                        result[1] = dc * before * forget * (1.0f - forget);
                        result[2] = dc * in * (1.0f - fresh * fresh);
                        result[3] = dh * squashed * open * (1.0f - open);
                        carry_c[i] = reset ? 0.0f : dc * forget;
                    } else {
                        float r_ = widen(now_gate[i][0]), z = widen(now_gate[i][1]), fresh = widen(now_gate[i][2]), hidden = widen(now_gate[i][3]);
                        float dn = dh * (1.0f - z) * (1.0f - fresh * fresh);
                        result[0] = dn * r_;
                        result[1] = dn * hidden * r_ * (1.0f - r_);
                        result[2] = dh * (before - fresh) * z * (1.0f - z);
                        result[3] = dn;
                        carry_h[i] = reset ? 0.0f : dh * z;
                    }
                }
                element* to = p.grad_gates + t * row_count * (PUBLISHED * HIDDEN) +
                              ((r.row * p.directions + direction) * (PUBLISHED * HIDDEN) + r.unit);
#pragma unroll
                for (int g = 0; g < PUBLISHED; ++g) {
                    const element rounded = narrow(result[g]);
                    if (g < GATES)
                        product.post(rounded, (s + 1) & 1, round * BATCH + r.element / UNITS, g * HIDDEN + r.unit, inside && r.mine);
                    publish(to + g * HIDDEN, rounded, r.element, inside && r.mine);
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < STATES; ++i) {
        const Result r(i, first_unit, first_row, p.batch);
        const int at = (direction * p.batch + r.row) * HIDDEN + r.unit;
        if (r.mine) {
            p.grad_h0[at] = narrow(carry_h[i]);
            if (CELL == 2) p.grad_c0[at] = narrow(carry_c[i]);
        }
    }
    if (CLUSTERED) cluster_barrier();
}
