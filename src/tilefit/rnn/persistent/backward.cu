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
    u32 spin_limit, pause;
};

constexpr int PUBLISHED = CELL == 3 ? 4 : GATES;  // GRU: (dn r, dr, dz, dn); others: torch's order
constexpr int SAVED = CELL == 2 || CELL == 3 ? 4 : 0;
constexpr int WIDTH = GATES * HIDDEN;
typedef Product<1, WIDTH> Recurrent;
// Of the coming step: its gates, the gradient of its output, and the state before it (GRU), after it (RNN), or both: an
// LSTM's cell states are kept in float32.
constexpr bool IN_REGISTERS = ROUNDS == 1;
typedef Needed<SAVED + (CELL == 2 ? 1 : 2), CELL == 2 ? 2 : 0, IN_REGISTERS> Kept;
constexpr int GRAD = SAVED, STATE = SAVED + 1, BEFORE = 0, AFTER = 1;

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward(const __grid_constant__ Backward p) {
    extern __shared__ __align__(16) unsigned char shared[];
    const int lane = threadIdx.x % 32;
    const u32 rank = split_rank();
    const int group = blockIdx.x / BLOCKS, direction = group / p.batch_groups;
    const Rows rows(group % p.batch_groups, p.batch_groups, p.batch);
    const int first_unit = int(blockIdx.x % BLOCKS) * UNITS;
    Recurrent product;
    product.load(p.weights + i64(direction) * WIDTH * HIDDEN, first_unit, rank, shared);

    int read_row[ROUNDS * TILES], row_length[ROUNDS * TILES];  // of the rows whose gradients this thread reads
    tile_bits present = 0;
#pragma unroll
    for (int n = 0; n < ROUNDS * TILES; ++n) {
        int b = rows.first + n * 8 + lane / 4;
        present |= tile_bits(b < rows.end) << n;
        read_row[n] = b < rows.end ? b : rows.end - 1;
        row_length[n] = LENGTHS ? p.lengths[read_row[n]] : p.steps;
    }

    float carry_h[STATES], carry_c[STATES];
    int length[STATES];
#pragma unroll
    for (int i = 0; i < STATES; ++i) {
        const Result r(i, first_unit, rows);
        int at = (direction * p.batch + r.row) * HIDDEN + r.unit;
        length[i] = LENGTHS ? p.lengths[r.row] : p.steps;
        carry_h[i] = p.grad_last_h ? widen(p.grad_last_h[at]) : 0.0f;
        carry_c[i] = CELL == 2 && p.grad_last_c ? widen(p.grad_last_c[at]) : 0.0f;
    }
    // Which row of a tensor [T, B, D, ...] is that of a step and a mini-batch row: 32 bits can number them, or the
    // layer is refused.
    const int step_rows = p.batch * p.directions;
    auto place = [&](int t, int row) { return i64(t * step_rows + row * p.directions + direction); };
    const int last = direction == 0 ? p.steps - 1 : 0, stride = direction == 0 ? 1 : -1;
    Kept kept(product.end);
    auto ask = [&](int s, int round) {  // for what step s needs
        const int t = last - s * stride, before = t - stride;
        if (s < p.steps) {
#pragma unroll
            for (int i = round * FINISHED; i < (round + 1) * FINISHED; ++i) {
                const Result r(i, first_unit, rows);
                const int initial = (direction * p.batch + r.row) * HIDDEN + r.unit;
                const bool inside = before >= 0 && before < length[i];
                const i64 at = place(t, r.row) * HIDDEN + r.unit, at_before = place(before, r.row) * HIDDEN + r.unit;
                if (p.grad_out) kept.ask(s, i, GRAD, p.grad_out + at, r.mine);
                const element* gates = p.gates + place(t, r.row) * (SAVED * HIDDEN) + r.unit;
#pragma unroll
                for (int g = 0; g < SAVED; ++g) kept.ask(s, i, g, gates + g * HIDDEN, r.mine);
#if CELL == 2
                const float* cell = inside ? p.cells + at_before : p.first_cell + initial;
                if (inside || p.first_cell) kept.ask_float(s, i, BEFORE, cell, r.mine);
                kept.ask_float(s, i, AFTER, p.cells + at, r.mine);
#elif CELL == 3
                const element* state = inside ? p.out + at_before : p.h0 + initial;
                if (inside || p.h0) kept.ask(s, i, STATE, state, r.mine);
#else
                kept.ask(s, i, STATE, p.out + at, r.mine);
#endif
            }
        }
        if (!IN_REGISTERS) group_copies();
    };
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) ask(0, round);
    if (CLUSTERED) cluster_barrier();
    bool dead = false;
    u32 delays = blockIdx.x * 7919u + 17u;

    // Whose gradients of the gates a round of a step multiplies: nobody's after the last step.
    auto source_of = [&](int s, int round) {
        const int after = last - (s - 1) * stride;  // the step whose gradients were published last
        Recurrent::Source source;
        source.mailbox = product.mail + (s & 1) * Recurrent::MAIL_BYTES + (round * BATCH + lane / 4) * Recurrent::MAIL_STRIDE;
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            const int index = round * TILES + n;
            bool read = s > 0 && s <= p.steps && (present >> index & 1);
            if (LENGTHS) read = read && after < row_length[index];
            if (RESETS) read = read && p.resets[i64(after) * p.batch + read_row[index]] == 0;
            source.rows[n] = p.grad_gates + place(after, read_row[index]) * (PUBLISHED * HIDDEN);
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
    u32 published = clocks();

    // One turn more than there are steps: the last one only finds the gradient of the initial state.
    for (int s = 0; s <= p.steps; ++s) {
        const int t = last - s * stride;
        if (IN_REGISTERS) {
            kept.advance();
            ask(s + 1, 0);
            // The product's wait is one for these loads too: they must not be issued after its own.
            __syncwarp();
        }

#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            if (ROUNDS == 1 && s > 0) pause(published, p.pause);
            if (!AHEAD) product.begin(source = source_of(s, round), rank);
            if (!IN_REGISTERS) ask(s + 1, round);
            product.multiply(source, rank, p.spin_limit, dead, p.error);
            if (!IN_REGISTERS && !AHEAD) await_copies<ROUNDS>();  // those of this step and round
            // The next round's rows were published a round ago or earlier: they come while this one is finished.
            auto begin_next = [&] {
                source = round + 1 < ROUNDS ? source_of(s, round + 1) : source_of(s + 1, 0);
                product.begin(source, rank);
            };
            const int buffer = (s * ROUNDS + round) & 1;
            product.share(buffer, rank);
            if (AHEAD == 1) begin_next();
            stagger(delays);
            reduction_barrier();
            if (AHEAD == 2) begin_next();

#pragma unroll
            for (int i = round * FINISHED; i < (round + 1) * FINISHED; ++i) {
                const Result r(i, first_unit, rows);
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
                    if (p.grad_out) dh += kept.get(s, i, GRAD);
                    const bool started = t - stride >= 0 && t - stride < length[i];  // else the state before is the initial one
                    carry_h[i] = 0.0f;
                    if constexpr (CELL == 0) {
                        const float h = kept.get(s, i, STATE);
                        result[0] = dh * (1.0f - h * h);
                    } else if constexpr (CELL == 1) {
                        result[0] = kept.get(s, i, STATE) > 0.0f ? dh : 0.0f;
                    } else if constexpr (CELL == 2) {
                        float in = kept.get(s, i, 0), forget = kept.get(s, i, 1), fresh = kept.get(s, i, 2), open = kept.get(s, i, 3);
                        float before = !reset && (started || p.first_cell) ? kept.get_float(s, i, BEFORE) : 0.0f;
                        float squashed = tanh_(kept.get_float(s, i, AFTER));
                        float dc = carry_c[i] + dh * open * (1.0f - squashed * squashed);
                        result[0] = dc * fresh * in * (1.0f - in);
                        result[1] = dc * before * forget * (1.0f - forget);
                        result[2] = dc * in * (1.0f - fresh * fresh);
                        result[3] = dh * squashed * open * (1.0f - open);
                        carry_c[i] = reset ? 0.0f : dc * forget;
                    } else {
                        float r_ = kept.get(s, i, 0), z = kept.get(s, i, 1), fresh = kept.get(s, i, 2), hidden = kept.get(s, i, 3);
                        float before = !reset && (started || p.h0) ? kept.get(s, i, STATE) : 0.0f;
                        float dn = dh * (1.0f - z) * (1.0f - fresh * fresh);
                        result[0] = dn * r_;
                        result[1] = dn * hidden * r_ * (1.0f - r_);
                        result[2] = dh * (before - fresh) * z * (1.0f - z);
                        result[3] = dn;
                        carry_h[i] = reset ? 0.0f : dh * z;
                    }
                }
                element* to = p.grad_gates + place(t, r.row) * (PUBLISHED * HIDDEN) + r.unit;
#pragma unroll
                for (int g = 0; g < PUBLISHED; ++g) {
                    const element rounded = narrow(result[g]);
                    if (g < GATES)
                        product.post(rounded, (s + 1) & 1, round * BATCH + r.element / UNITS, g * HIDDEN + r.unit, inside && r.mine);
                    publish(to + g * HIDDEN, rounded, r.element, inside && r.mine);
                }
            }
        }
        if (ROUNDS == 1) published = clocks();
    }
#pragma unroll
    for (int i = 0; i < STATES; ++i) {
        const Result r(i, first_unit, rows);
        const int at = (direction * p.batch + r.row) * HIDDEN + r.unit;
        if (r.mine) {
            p.grad_h0[at] = narrow(carry_h[i]);
            if (CELL == 2) p.grad_c0[at] = narrow(carry_c[i]);
        }
    }
    if (CLUSTERED) cluster_barrier();
}
