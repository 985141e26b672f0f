// Every time step of one layer, forward. See common.cuh for the exchange.

struct Forward {
    const element* projected;  // [T, B, D, GATES, H]: W_ih x + the biases
    const element* weights;    // [D, GATES, H, H]
    const element* bias_n;     // [D, H] or null: GRU's hidden bias of the new gate
    const element* h0;         // [D, B, H]; null: zeros
    const element* c0;         // [D, B, H], LSTM; null: zeros
    const int* lengths;        // [B], with LENGTHS
    const u8* resets;          // [T, B], with RESETS
    element* out;              // [T, B, D, H], filled with UNWRITTEN
    element* gates;            // [T, B, D, SAVED, H] or null
    float* cells;              // [T, B, D, H] or null, LSTM
    element* last_hidden;      // [D, B, H]
    element* last_cell;        // [D, B, H], LSTM
    int* error;
    int steps, batch, directions, batch_groups;
    u32 spin_limit, pause;
};

typedef Product<GATES, HIDDEN> Recurrent;
constexpr bool IN_REGISTERS = ROUNDS == 1 && !MAIL;
typedef Needed<GATES, 0, IN_REGISTERS> Input;  // projected
constexpr int SAVED = CELL == 2 || CELL == 3 ? 4 : 0;

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ Forward p) {
    extern __shared__ __align__(16) unsigned char shared[];
    const int lane = threadIdx.x % 32;
    const u32 rank = split_rank();
    const int group = blockIdx.x / BLOCKS, direction = group / p.batch_groups;
    const Rows rows(group % p.batch_groups, p.batch_groups, p.batch);
    const int first_unit = int(blockIdx.x % BLOCKS) * UNITS;

    Recurrent product;
    product.load(p.weights + i64(direction) * GATES * HIDDEN * HIDDEN, first_unit, rank, shared);

    // The rows whose hidden state this thread reads.
    int read_row[ROUNDS * TILES], row_length[ROUNDS * TILES];
    tile_bits present = 0;
#pragma unroll
    for (int n = 0; n < ROUNDS * TILES; ++n) {
        int b = rows.first + n * 8 + lane / 4;
        present |= tile_bits(b < rows.end) << n;
        read_row[n] = b < rows.end ? b : rows.end - 1;
        row_length[n] = LENGTHS ? p.lengths[read_row[n]] : p.steps;
    }

    // What this thread finishes.
    float cell[STATES], previous[STATES], bias[STATES];
    int length[STATES];
#pragma unroll
    for (int i = 0; i < STATES; ++i) {
        Result r(i, first_unit, rows);
        int at = (direction * p.batch + r.row) * HIDDEN + r.unit;
        length[i] = LENGTHS ? p.lengths[r.row] : p.steps;
        previous[i] = p.h0 ? widen(p.h0[at]) : 0.0f;
        cell[i] = CELL == 2 && p.c0 ? widen(p.c0[at]) : 0.0f;
        bias[i] = CELL == 3 && p.bias_n ? widen(p.bias_n[direction * HIDDEN + r.unit]) : 0.0f;
    }
    // Which row of a tensor [T, B, D, ...] is that of a step and a mini-batch row: 32 bits can number them, or the
    // layer is refused.
    const int step_rows = p.batch * p.directions;
    auto place = [&](int t, int row) { return i64(t * step_rows + row * p.directions + direction); };
    const int first = direction == 0 ? 0 : p.steps - 1, stride = direction == 0 ? 1 : -1;
    Input input(product.end);
    auto ask = [&](int s, int round) {  // for the input of step s
        const int t = first + s * stride;
        if (s < p.steps) {
#pragma unroll
            for (int i = round * FINISHED; i < (round + 1) * FINISHED; ++i) {
                const Result r(i, first_unit, rows);
                const element* x = p.projected + place(t, r.row) * (GATES * HIDDEN) + r.unit;
#pragma unroll
                for (int g = 0; g < GATES; ++g) input.ask(s, i, g, x + g * HIDDEN, r.mine);
            }
        }
        if (!IN_REGISTERS) group_copies();
    };
    // What the backward pass needs of a step. With one round it is stored in the pause before the next step asks for its
    // states, which stores would hold up.
    float saved[STATES][SAVED + 1];
    auto save = [&](int t, int round) {
#pragma unroll
        for (int i = round * FINISHED; i < (round + 1) * FINISHED; ++i) {
            const Result r(i, first_unit, rows);
            if ((LENGTHS && t >= length[i]) || !r.mine) continue;
            if (SAVED && p.gates) {
                element* gate = p.gates + place(t, r.row) * (SAVED * HIDDEN) + r.unit;
#pragma unroll
                for (int g = 0; g < SAVED; ++g) gate[g * HIDDEN] = narrow(saved[i][g]);
            }
            if (CELL == 2 && p.cells) p.cells[place(t, r.row) * HIDDEN + r.unit] = cell[i];
        }
    };
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) ask(0, round);
    if (CLUSTERED) cluster_barrier();  // no block may write into a neighbour that has not started
    bool dead = false;
    u32 delays = blockIdx.x * 7919u + 17u;

    // Whose hidden states a round of a step multiplies: nobody's after the last step.
    auto source_of = [&](int s, int round) {
        const int t = first + s * stride, before = t - stride;
        Recurrent::Source source;
        source.mailbox = product.mail + (s & 1) * Recurrent::MAIL_BYTES + (round * BATCH + lane / 4) * Recurrent::MAIL_STRIDE;
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            const int index = round * TILES + n;
            const element* sent = p.out + place(before, read_row[index]) * HIDDEN;
            const element* initial = p.h0 + (direction * p.batch + read_row[index]) * HIDDEN;
            bool from_others = s > 0, read = s < p.steps && (present >> index & 1);
            if (LENGTHS) from_others = before >= 0 && before < row_length[index];
            if (LENGTHS) read = read && t < row_length[index];
            if (RESETS) read = read && p.resets[i64(t) * p.batch + read_row[index]] == 0;
            read = read && (from_others || p.h0 != nullptr);
            source.rows[n] = from_others ? sent : initial;
            if (MAIL) {
                source.reads |= u32(read && !from_others) << n;
                source.waits |= u32(s > 0 && (present >> index & 1)) << n;
                source.uses |= u32(read && from_others) << n;
            } else {
                source.reads |= u32(read) << n;
                source.waits |= u32(read && from_others) << n;
            }
        }
        return source;
    };
    Recurrent::Source source;
    if (AHEAD) product.begin(source = source_of(0, 0), rank);
    u32 published = clocks();

    for (int s = 0; s < p.steps; ++s) {
        const int t = first + s * stride;
        if (IN_REGISTERS) {
            input.advance();
            ask(s + 1, 0);
        }

#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            if (ROUNDS == 1 && s > 0) {
                save(t - stride, 0);
                pause(published, p.pause);
            }
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
                const bool active = !LENGTHS || t < length[i];
                if (RESETS && active && p.resets[i64(t) * p.batch + r.row]) cell[i] = previous[i] = 0.0f;
                float sum[GATES], gate[4], h, cell_after = 0.0f;
                product.total(buffer, r.element % UNITS, r.element / UNITS, sum);
                if constexpr (CELL == 0) {
                    h = tanh_(sum[0] + input.get(s, i, 0));
                } else if constexpr (CELL == 1) {
                    h = sum[0] + input.get(s, i, 0);
                    h = h < 0.0f ? 0.0f : h;  // and NaN stays NaN
                } else if constexpr (CELL == 2) {
                    gate[0] = sigmoid(sum[0] + input.get(s, i, 0));
                    gate[1] = sigmoid(sum[1] + input.get(s, i, 1));
                    gate[2] = tanh_(sum[2] + input.get(s, i, 2));
                    gate[3] = sigmoid(sum[3] + input.get(s, i, 3));
                    cell_after = gate[1] * cell[i] + gate[0] * gate[2];
                    h = gate[3] * tanh_(cell_after);
                } else {
                    gate[0] = sigmoid(sum[0] + input.get(s, i, 0));
                    gate[1] = sigmoid(sum[1] + input.get(s, i, 1));
                    gate[3] = sum[2] + bias[i];
                    gate[2] = tanh_(input.get(s, i, 2) + gate[0] * gate[3]);
                    h = gate[2] + gate[1] * (previous[i] - gate[2]);
                }
                const element rounded = narrow(active ? h : 0.0f);
                if (active) {
                    previous[i] = widen(rounded);
                    cell[i] = cell_after;
                }
                product.post(rounded, (s + 1) & 1, round * BATCH + r.element / UNITS, r.unit, r.mine);
                publish(p.out + place(t, r.row) * HIDDEN + r.unit, rounded, r.element, r.mine);
#pragma unroll
                for (int g = 0; g < SAVED; ++g) saved[i][g] = gate[g];
            }
            if (ROUNDS > 1) save(t, round);
        }
        if (ROUNDS == 1) published = clocks();
    }
    if (ROUNDS == 1 && p.steps > 0) save(first + (p.steps - 1) * stride, 0);
#pragma unroll
    for (int i = 0; i < STATES; ++i) {
        const Result r(i, first_unit, rows);
        const int at = (direction * p.batch + r.row) * HIDDEN + r.unit;
        if (r.mine) {
            p.last_hidden[at] = narrow(previous[i]);
            if (CELL == 2) p.last_cell[at] = narrow(cell[i]);
        }
    }
    if (CLUSTERED) cluster_barrier();  // a block must not leave while a neighbour still writes into it
}
